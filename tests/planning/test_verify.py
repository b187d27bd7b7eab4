"""Plans verified by the real TPU compiler, without a TPU. About 20 s, 40 with the slow ones; most needs libtpu."""

from __future__ import annotations

import importlib.util
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from inferlib.aot.verify import candidates
from inferlib.cli import app
from inferlib.models.families import config_from_hf
from inferlib.planning.planner import Workload, rank
from inferlib.targets import parse_target

libtpu = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not libtpu, reason='needs pip install "jax[tpu]"')
WORDS = ("--target", "v5e:2x2", "--input-len", "100", "--output-len", "20", "--concurrency", "16")


HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def model(tmp_path):
    """What `plan` reads of a model: its configuration, none of its tensors."""
    (tmp_path / "config.json").write_text(json.dumps(HF))
    save_file({"unread": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def plan(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


@needs_libtpu
def test_the_compilers_figures_beside_the_models(model):
    result = plan(model, *WORDS, "--verify", "1", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    best = facts["options"][0]
    checks = facts["verified"]
    assert [c["program"].split()[0] for c in checks] == ["decode", "prefill"]
    for check in checks:
        assert [check[key] for key in ("parallel", "weights", "batch")] == [best["parallel"], "int8", best["batch"]]
        assert check["status"] == "compiled"
        assert check["model"]["memory"] == best["bytes"]["total"]
        assert check["compiler"]["memory"] > best["bytes"]["weights"] + best["bytes"]["cache"]
        assert check["compiler"]["bytes"] > 0.9 * check["model"]["bytes"] > 0
        assert check["compiler"]["seconds"] > 0


@needs_libtpu
@pytest.mark.slow
def test_several_plans_in_a_table(model):
    result = plan(model, *WORDS, "--verify", "2")
    assert result.exit_code == 0, result.output
    table = result.stdout.split("by the TPU compiler", 1)[1]
    assert len(re.findall(r"GiB +compiled *\n", table)) == 4


def test_candidates_are_the_best_of_their_frontier(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    hf = config_from_hf(HF)
    ranking = rank(hf, parse_target("v5e:2x2"), Workload(100, 20, 16))
    every = candidates(ranking, 99)
    assert [ranking.options.index(o) for o in every] == sorted(ranking.options.index(o) for o in every)
    assert candidates(ranking, 1) == every[:1]
    for option in every:
        assert not any(o.itl < 0.99 * option.itl and o.throughput > 1.01 * option.throughput for o in ranking.options)


@pytest.mark.parametrize(
    ("words", "message"), [((), 'pip install "jax[tpu]"'), (("--target", "cuda:h200-4"), "is no TPU slice")]
)
def test_without_the_compiler(words, message, model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else find(name))
    result = plan(model, *WORDS, *words, "--verify", "1")
    assert result.exit_code == 2
    assert message in result.output
