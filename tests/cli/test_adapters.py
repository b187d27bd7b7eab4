"""Adapters from the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from inferlib import LLM, SamplingParams
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from tests.helpers.adapters import write_for
from tests.helpers.cli_model import Commands, error_of, make_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def inferlib(tmp_path_factory) -> Commands:
    return Commands(make_model(tmp_path_factory.mktemp("model"), layers=1))


@pytest.fixture(scope="module")
def adapters(inferlib, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for rank, name in enumerate(("a", "b"), 2):
        write_for(inferlib.model, folder / name, ("q_proj", "o_proj", "down_proj"), rank)
    return {name: folder / name for name in ("a", "b")}


@pytest.fixture(scope="module")
def texts(inferlib, adapters) -> dict[str | None, str]:
    """What each adapter answers."""
    llm = LLM(inferlib.model, max_batch=2, adapters=adapters, progress=False)
    return {name: llm.generate("hello", GREEDY, adapter=name)[0].outputs[0].text for name in ("a", "b", None)}


def option(adapters: dict[str, Path]) -> tuple[str, ...]:
    return "--adapters", ",".join(f"{name}={path}" for name, path in adapters.items())


@pytest.mark.slow
def test_texts_and_lines(inferlib, adapters, texts, tmp_path):
    """One adapter for all prompts, and one for each line: null is none, and an unknown name fails its line alone."""
    assert len(set(texts.values())) == 3
    result = inferlib.generate("hello", "--json", "--adapter", "b", *option(adapters))
    assert json.loads(result.stdout)["outputs"][0]["text"] == texts["b"], result.output
    lines = [{"prompt": "hello", "adapter": name} for name in ("a", "b", None, "x")]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "hello"}]))
    files = "--input", tmp_path / "in", "--output", tmp_path / "out"
    result = inferlib.generate(*files, "--adapter", "b", *option(adapters), "--max-adapters", "1")
    assert result.exit_code == 1, result.output
    made = {record["line"]: record for record in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    written = [made[line]["outputs"][0]["text"] for line in (1, 2, 3, 5)]
    assert written == [texts["a"], texts["b"], texts[None], texts["b"]]
    assert "no adapter is called 'x'; those that are loaded: 'a', 'b'" in made[4]["error"]


@pytest.mark.slow
def test_chats_and_vectors(inferlib, adapters, tmp_path):
    options = ("--max-batch", "2", *option(adapters))
    answers = {}
    for name in ("a", "b"):
        more = "--adapter", name, "--max-tokens", "4", "--temperature", "0"
        answers[name] = inferlib("chat", inferlib.model, *options, *more, stdin="hi\n").stdout
    assert answers["a"] != answers["b"]
    (tmp_path / "in").write_text('{"prompt": "hello"}\n')
    files = "--input", tmp_path / "in", "--output", tmp_path / "out"
    vectors = []
    for more in ((), ("--adapter", "a")):
        result = inferlib("embed", inferlib.model, *files, "--overwrite", *options, *more)
        assert result.exit_code == 0, result.output
        vectors.append(json.loads((tmp_path / "out").read_text())["embedding"])
    assert vectors[0] != vectors[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--adapters", "a"), "--adapters must be NAME=DIR,NAME=DIR, got 'a'"),
        (("--adapters", "a=,b=x"), "--adapters must be NAME=DIR"),
        (("--adapters", "a=x,a=y"), "--adapters has a name twice: a, a"),
        (("--adapters", "a=x", "--adapters", "b=x", "--adapter", "c"), "none of --adapters, which are a, b"),
        (("--adapter", "a"), "--adapter 'a' is none of --adapters, which are not given"),
        (("--adapters", "a=x", "--adapter", "b"), "--adapter 'b' is none of --adapters, which are a"),
        (("--adapters", "a=nowhere"), "nowhere has no adapter_config.json: an adapter is a directory that PEFT wrote"),
        (("--max-adapter-rank", "8"), "max_adapter_rank is of adapters: give adapters or max_adapters too"),
        (("--adapter-parts", "attn"), "adapter_parts is of adapters: give adapters or max_adapters too"),
        (
            ("--max-adapters", "1", "--adapter-parts", "attn.qkv,conv"),
            "adapter_parts has 'conv', which names no weight",
        ),
    ],
)
def test_wrong_options(inferlib, options, message):
    assert message in error_of(inferlib.generate("hello", *options))


def test_what_they_take(inferlib):
    """A and B of four projections of one layer, and of two halves of the feed-forward, for each slot."""
    words = "info", inferlib.model, "--max-adapters", "3", "--max-adapter-rank", "5"
    facts = json.loads(inferlib(*words, "--json").stdout)
    model = abstract_model(ModelFiles.open(inferlib.model).config, "float32")
    ranks = {"attn.qkv": 3 * 5, "attn.o": 5, "mlp.gate_up": 5, "mlp.down": 5}
    numbers = 0
    for weight in model.weights:
        if rank := ranks.get(weight.part):
            inputs = math.prod(weight.shape[i] for i in weight.contracting)
            parts = 2 if weight.part == "mlp.gate_up" else 1
            numbers += 3 * rank * (parts * inputs + math.prod(weight.shape) // inputs)
    sizes = {dtype: (4 if dtype == "float32" else 2) * numbers for dtype in facts["weight_bytes"]}
    assert facts["adapters"] == {"count": 3, "rank": 5, "parts": [], "bytes": sizes}
    assert "3 of rank 5 beside the weights" in " ".join(inferlib(*words).stdout.split())
    assert "max_adapter_rank is of adapters" in error_of(inferlib("info", inferlib.model, "--max-adapter-rank", "5"))
