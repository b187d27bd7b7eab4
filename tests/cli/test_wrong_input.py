"""Wrong types and values for every public function and option: each ends in an error of ours, before device work.

An error is ours if a `raise` of the library made it, in one line; what Python or JAX say by themselves is not. Pairs of
wrong values are drawn by a fixed seed. About half a minute.
"""

from __future__ import annotations

import ast
import functools
import inspect
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import inferlib
from inferlib import LLM, Buckets, EngineOptions, Parallelism, SamplingParams
from inferlib.config import EngineSettings
from tests.helpers.cli_model import make_model

SEED = 3
OURS = str(Path(inferlib.__file__).parent)

WRONG = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 10**30, 0.0, 1.5, -0.5, float("nan"), float("inf"), 1j),
    *("", " ", "nope", "a=b", "tp=", "tp=0", "tp=99", "dp=3,dp=3", "/proc/nowhere/at/all", "\ud800", "\0", "x" * 5000),
    *(b"abc", b"", bytearray(b"a"), [], [None], [1, "a"], [1.5], [[]], [[1], None], [-1], [10**30], [True]),
    *((), ("a", 1), {}, {"a": 1}, {1: 2}, {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": None}]),
    *([[{"role": "user", "content": "hi"}], None], set(), {1}, range(3), object(), object, len, Path("/proc/nowhere")),
    *(np.array([1.5]), np.array(3), np.zeros(2, int), np.array([None]), np.float32(2), np.int64(2), iter([1])),
)


class Reached(Exception):
    """Work on the device would begin now: the input was taken."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    buckets = Buckets(prefill=(8,), batch=(1, 2), cache=(64,))
    return LLM(path, max_batch=2, max_len=64, buckets=buckets, progress=False)


@pytest.fixture(autouse=True)
def stop_at_the_device(monkeypatch, tmp_path):
    """And in a folder of its own, since some of the wrong names are names of folders to make."""
    monkeypatch.chdir(tmp_path)

    def reached(*args: Any, **options: Any) -> Any:
        raise Reached

    for name in ("engine.engine.Engine.add", "model_files.ModelFiles.load", "engine.engine.Engine.warmup"):
        monkeypatch.setattr(f"inferlib.{name}", reached)
    monkeypatch.setattr("inferlib.conversion.save_weights", reached)


@functools.cache
def lines_of_raises(file: str) -> frozenset[int]:
    """Of the `raise` statements in a source file."""
    raises = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Raise))
    return frozenset(n for node in raises for n in range(node.lineno, (node.end_lineno or 0) + 1))


def raised_by_us(error: BaseException) -> bool:
    """True if the innermost frame is the library's and stands at a `raise` statement."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    return file.startswith(OURS) and line in lines_of_raises(file)


def check(call: Any, *args: Any, **options: Any) -> str:
    """Call it; returns what was wrong with how it ended, or nothing."""
    arguments = [*map(brief, args), *(f"{name}={brief(value)}" for name, value in options.items())]
    shown = f"{call.__qualname__}({', '.join(arguments)})"
    try:
        call(*args, **options)
    except Reached:
        return ""
    except Exception as error:
        lines = str(error).splitlines()
        if isinstance(error, ValueError | TypeError | OSError) and raised_by_us(error) and len(lines) == 1:
            return ""
        return f"{shown}: {type(error).__name__}: {error} at {traceback.extract_tb(error.__traceback__)[-1]}"
    return ""


def brief(value: Any) -> str:
    return repr(value)[:60]


def variants(good: dict[str, Any], names: list[str]) -> Iterator[dict[str, Any]]:
    """The arguments with each of the named ones wrong in every way, then with two of them wrong at a time."""
    for name in names:
        for value in WRONG:
            yield good | {name: value}
    draw = random.Random(SEED)
    for _ in range(30 if len(names) > 1 else 0):
        yield good | {name: draw.choice(WRONG) for name in draw.sample(names, 2)}


def problems(call: Callable[..., Any], good: dict[str, Any], names: list[str] | None = None) -> list[str]:
    return [text for options in variants(good, names or list(good)) if (text := check(call, **options))]


def report(wrong: list[str]) -> None:
    if wrong:
        pytest.fail(f"{len(wrong)} calls end as they should not:\n" + "\n".join(wrong), pytrace=False)


def test_params():
    names = list(inspect.signature(SamplingParams).parameters)
    report(problems(SamplingParams, {}, names))


def test_sizes():
    wrong = problems(Buckets, {"prefill": (8,), "batch": (2,), "cache": (64,), "tile": None})
    wrong += problems(Parallelism, {}, list(inspect.signature(Parallelism).parameters))
    report(wrong)


def test_model(path):
    options = [
        *get_type_hints(EngineSettings),
        "dtype",
        "quantization",
        "parallel",
        "artifacts",
        "seed",
        "progress",
        "revision",
        "generation_config",
    ]
    good = {"model": path, "max_len": 64, "max_batch": 2, "progress": False}
    wrong = problems(LLM, good, ["model", "config", *options])
    options = [*get_type_hints(EngineSettings)]
    wrong += problems(lambda **options: LLM(path, EngineOptions(**options)), {"max_len": 64}, options)
    report(wrong)


def test_generation(llm):
    messages = [{"role": "user", "content": "hi"}]
    before = llm.stats.dispatches, llm.compilations

    def stream(**arguments: Any) -> None:
        next(iter(llm.stream(**arguments)))

    wrong = problems(llm.generate, {"prompts": "a", "sampling_params": None})
    options = ("chat_template", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
    wrong += problems(llm.chat, {"messages": messages, "sampling_params": None}, ["messages", "sampling_params"])
    wrong += problems(llm.chat_prompt, {"messages": messages}, ["messages", *options])
    wrong += problems(stream, {"prompt": "a", "sampling_params": None})
    wrong += problems(llm.prepare, {"prompt": "a", "params": SamplingParams(), "fit": False})
    wrong += problems(lambda **options: list(llm.run(**options)), {"requests": []})
    wrong += problems(llm.score, {"token_lists": [[1, 2]]})
    wrong += problems(llm.logits, {"token_ids": [1, 2]})
    wrong += problems(llm.warmup, {"modes": ("greedy",)})
    report(wrong)
    assert before == (llm.stats.dispatches, llm.compilations)


def test_conversion(path, tmp_path):
    good = {"model": path, "out": tmp_path / "out", "dtype": "float32", "progress": False}
    report(problems(inferlib.convert, good, [*good, "quantization", "parallel", "revision"]))
