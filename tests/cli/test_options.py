"""Wrong values for every option and argument of every command: each is one line and exit code 1 or 2, no traceback.

The options are read from the commands themselves, so new ones are tried too. Pairs of wrong values are drawn by a fixed
seed. Work that would take long ends a command where it begins. About 8 s.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner, Result

from inferlib.cli import app
from inferlib.conversion import convert
from tests.helpers.cli_model import make_model

SEED = 5
ROOT: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = ROOT.commands
NUMBERS = ("", "nope", "1.5", "-1", "0", "1e999", "nan", str(10**30), "9" * 400)
TEXTS = (
    "",
    " ",
    "nope",
    "a=b",
    "tp=",
    "tp=0",
    f"tp={10**30}",
    "ep=3,dp=-1",
    "1,x",
    "-3",
    "{}",
    "[[",
    "\udcff",
    "é" * 3000,
)


class Reached(Exception):
    """Long work would begin now: the input was taken."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def paths(folder) -> tuple[str, ...]:
    """Files and folders that are not what an option wants."""
    binary, empty = folder / "binary", folder / "empty"
    binary.write_bytes(bytes(range(256)) * 8)
    empty.write_bytes(b"")
    (folder / "a_list").write_text("[[[1]]]")
    (folder / "an_object").write_text('{"a": 1}')
    files = (binary, empty, folder / "a_list", folder / "an_object", folder / "missing" / "x", binary / "x")
    return ("", " ", str(folder), *map(str, files), "/proc/nothing", "\udcff", "x" * 5000)


@pytest.fixture(scope="module")
def good(folder) -> dict[str, dict[str, Any]]:
    """Arguments and options with which a command begins its work."""
    model, load = str(make_model(folder / "model", layers=1)), folder / "load.json"
    quantized, two_layers = str(folder / "int8"), str(make_model(folder / "two_layers", layers=2))
    convert(model, quantized, quantization="int8", progress=False)
    load.write_text('{"expert_load": [[3, 1, 2, 2]]}')
    source = folder / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    texts = folder / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "{"abc " * 20}", "split": "{split}"}}\n' for split in ("train", "held_out")))
    small = {"max_len": "64", "max_batch": "2"}
    return {
        "generate": {"prompts": "x", "model": model, **small},
        "chat": {"model": model, **small},
        "embed": {"model": model, "input_file": str(source), "output_file": str(folder / "vectors.jsonl"), **small},
        "serve": {"model": model, "port": "0", **small},
        "bench": {"url": "http://127.0.0.1:9", "requests": "1"},
        "info": {"model": model, "max_len": "64"},
        "convert": {"model": model, "out": str(folder / "converted")},
        "quantize": {
            "model": model,
            "out": str(folder / "quantized"),
            "data": str(texts),
            "tokens": "64",
            "window": "64",
        },
        "key-bases": {"model": model, "data": str(texts), "tokens": "64", "window": "64"},
        "layer-preferences": {"model": two_layers, "data": str(texts), "tokens": "64", "window": "64"},
        "calibrate-cache": {"model": model, "data": str(texts), "tokens": "64", "window": "64"},
        "export": {"model": quantized, "out": str(folder / "exported")},
        "eval": {"model": model, "data": str(texts), "tokens": "64", "window": "64"},
        "distill": {
            "method": "eagle3",
            "model": model,
            "data": str(texts),
            "out": str(folder / "head"),
            "length": "32",
        },
        "finetune": {"model": quantized, "out": str(folder / "trained"), "data": str(texts), "length": "32"},
        "plan": {"config": "smollm2-135m", "target": "v5e-1"},
        "place": {"load": str(load), "out": "placed", "devices": "2"},
        "targets": {},
        "compile": {"model": model, "target": "cpu", "cache_buckets": "64"},
        "tune": {"target": "v5e-1", "dry_run": True},
        "doctor": {"out": str(folder / "report")},
        "files": {"input_file": str(source), "output_file": str(folder / "out.jsonl"), "model": model, **small},
    }


@pytest.fixture(autouse=True)
def stop_before_long_work(monkeypatch):
    def reached(*args: Any, **options: Any) -> Any:
        raise Reached

    for name in (
        *("model_files.ModelFiles.load", "engine.engine.Engine.__init__", "conversion.save_weights"),
        *("calibration.job.Job.run", "calibration.forward.LayerwiseForward.begin"),
        *("aot.child.Child.ask", "planning.planner.rank", "tuning.tune.tune", "distributed.initialize"),
        *("aot.artifacts.Artifacts.load", "hub.HubName.download"),
        *("doctor.examine._findings", "bench.client.find_model", "bench.client.measure"),
    ):
        monkeypatch.setattr(f"inferlib.{name}", reached)
    monkeypatch.setattr("typer.testing._get_command", lambda _: ROOT)  # which takes far longer than most commands
    monkeypatch.setattr("gc.collect", lambda: 0)  # after each conversion that was stopped; it looks at the whole suite
    # A command sets these for its process, before JAX starts.
    monkeypatch.setattr("jax.config.update", lambda name, value: None)


def command_of(case: str) -> str:
    return "generate" if case == "files" else case


def words_of(command: str, values: dict[str, Any]) -> list[str]:
    """The command line with these values, by the names of the command's parameters."""
    options, arguments = [], []
    for parameter in COMMANDS[command].params:
        if (value := values.get(parameter.name)) is None or value is False:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(value)
        elif value is True:
            options.append(parameter.opts[-1])
        else:
            options.append(f"{parameter.opts[-1]}={value}")
    return [command, *options, "--", *arguments]


def wrong_values(command: str, parameter: Any, paths: tuple[str, ...]) -> tuple[Any, ...]:
    kind = hints_of(command)[parameter.name]
    if "bool" in kind:
        return (True,)
    if "int" in kind or "float" in kind:
        return NUMBERS
    return paths if "Path" in kind else (*TEXTS, *paths[2:6])


@functools.cache
def hints_of(command: str) -> dict[str, str]:
    return {name: str(hint) for name, hint in get_type_hints(COMMANDS[command].callback).items()}


def first_with(name: str, hint: str) -> str:
    """The first command with such a parameter: the same code checks it for the others."""
    return next(command for command in COMMANDS if hints_of(command).get(name) == hint)


def variants(case: str, values: dict[str, Any], paths: tuple[str, ...], most: int) -> Iterator[dict[str, Any]]:
    """All right; each parameter left out, then wrong in up to `most` ways, or in two if another case has as many; then
    two of them wrong at a time, as often."""
    yield values
    command, draw = command_of(case), random.Random(SEED)
    hints = hints_of(command)
    parameters = [p for p in COMMANDS[command].params if p.name in hints]
    for parameter in parameters:
        if parameter.name in values:
            yield {name: value for name, value in values.items() if name != parameter.name}
        ways = wrong_values(command, parameter, paths)
        count = most if first_with(parameter.name, hints[parameter.name]) == case else 2
        for wrong in draw.sample(ways, min(count, len(ways))):
            yield values | {parameter.name: wrong}
    for _ in range(most):
        pair = draw.sample(parameters, 2) if len(parameters) > 1 else parameters
        yield values | {p.name: draw.choice(wrong_values(command, p, paths)) for p in pair}


def problem(words: list[str], result: Result) -> str:
    """What is wrong with how a command ended, or nothing."""
    if isinstance(result.exception, Reached):
        return ""
    shown = " ".join(word[:60] for word in words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{shown}: {result.exception!r:.300}"
    if result.exit_code not in (0, 1, 2) or "Traceback" in result.output:
        return f"{shown}: exit code {result.exit_code}: {result.output[-300:]}"
    if result.exit_code == 2:
        lines = result.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if "Usage: " not in result.stderr and (len(errors) != 1 or lines[-1] != errors[0] or "[Errno" in errors[0]):
            return f"{shown}: {result.stderr[-300:]}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("most", [6, pytest.param(40, marks=pytest.mark.release)])
@pytest.mark.parametrize("case", [*COMMANDS, "files"])
def test_wrong_values_end_a_command_with_one_line(case, most, good, paths, tmp_path, monkeypatch):
    """A new command needs its entry in `good`."""
    monkeypatch.chdir(tmp_path)
    runner, problems, taken = CliRunner(), [], 0
    for values in variants(case, good[case], paths, most):
        words = words_of(command_of(case), values)
        result = runner.invoke(app, words, input="hi\n")
        taken += isinstance(result.exception, Reached) or result.exit_code == 0
        if text := problem(words, result):
            problems.append(text)
    if problems:
        pytest.fail(f"{len(problems)} of the commands end as they should not:\n" + "\n".join(problems), pytrace=False)
    assert taken, "no command began its work: the arguments in `good` are wrong"
