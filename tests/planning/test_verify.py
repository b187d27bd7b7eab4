"""Plans verified by the real TPU compiler, without a TPU. About 20 s, 40 with the slow ones; most needs libtpu."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import fields

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from inferlib.aot.verify import Check, by_compiler, candidates
from inferlib.cli import app
from inferlib.cli.output import json_line
from inferlib.deploy.plan import PlanResult
from inferlib.inspection.outcome import Outcome
from inferlib.inspection.report import ProgramReport, StepEstimate
from inferlib.models.families import config_from_hf
from inferlib.planning.costs import step_time
from inferlib.planning.planner import Option, Slo, Workload, rank
from inferlib.programs.keys import ProgramKey
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


@pytest.mark.release
@needs_libtpu
def test_the_compilers_figures_beside_the_models(model, monkeypatch):
    """Of two plans, in a table and as JSON values, from one compilation."""
    results, verify = [], PlanResult.verify
    monkeypatch.setattr(
        PlanResult, "verify", lambda *args, **named: results.append(verify(*args, **named)) or results[0]
    )
    result = plan(model, *WORDS, "--verify", "2")
    assert result.exit_code == 0, result.output
    table = result.stdout.split("by the TPU compiler", 1)[1]
    assert len(re.findall(r"GiB +compiled *\n", table)) == 4
    assert len(re.findall(r" [+-]\d+% ", table)) == 4
    assert "With the compiler's times:\nBest: --parallel" in table
    facts = json.loads(json_line(results[0].facts()))
    best, checks = facts["options"][0], facts["verified"]
    assert facts["best_verified"]["parallel"] in {check["parallel"] for check in checks}
    assert [check["program"].split()[0] for check in checks] == ["decode", "prefill"] * 2
    for check in checks[:2]:
        assert [check[key] for key in ("parallel", "weights", "batch")] == [best["parallel"], "int8", best["batch"]]
        assert check["model"]["memory"] == best["bytes"]["total"]
        assert check["compiler"]["memory"] > best["bytes"]["weights"] + best["bytes"]["cache"]
    for check in checks:
        assert check["status"] == "compiled"
        assert check["compiler"]["bytes"] > 0.9 * check["model"]["bytes"] > 0
        assert check["compiler"]["seconds"] > 0


def test_candidates_are_the_best_of_different_meshes(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ranking = rank(config_from_hf(HF), parse_target("v5e:2x2"), Workload(100, 20, 16))
    every = candidates(ranking, 99)
    meshes = [str(o.deployed.parallel) for o in every]
    assert len(set(meshes)) == len(meshes) > 2
    assert set(meshes) == {str(o.deployed.parallel) for o in ranking.options}
    assert [ranking.options.index(o) for o in every] == sorted(ranking.options.index(o) for o in every)
    assert every[0] is ranking.best
    assert candidates(ranking, 2) == every[:2]


def reported(option, key: ProgramKey, factor: float | None, status="compiled") -> Check:
    """A check whose compiler takes `factor` times as long as the model says, without kernels of ours."""
    work = option.deployed.decode(key.rows, key.limit) if key.rows else option.deployed.prefill(key.chunk, 0)
    time = step_time(work, option.deployed.network)
    price = {"name": "fusion", "how": "listing", "seconds": (factor or 0.0) * time.seconds, "nbytes": 0.0, "count": 1}
    step = {"waits": 0.0, "fetching": 0.0, "exposed": 0.0, "prices": [price], "collectives": []}
    outcome = Outcome(key, status, {"kernels": []})
    figures = dict.fromkeys(f.name for f in fields(ProgramReport))
    figures |= {"key": key, "outcome": outcome, "step": StepEstimate.of(None if factor is None else step)}
    return Check(option, work, time, ProgramReport(**figures))


def test_verified_plans_are_ranked_again():
    ranking = rank(config_from_hf(HF), parse_target("v5e:2x2"), Workload(100, 20, 16), Slo(itl=1.0))
    first, second = candidates_without_compiler(ranking)
    decode, prefill = ProgramKey("greedy", 4, 128, steps=8), ProgramKey("greedy", 0, 128, chunks=1, chunk=128)
    checks = [reported(first, decode, 1e6), reported(first, prefill, 2.0), reported(second, decode, None)]
    assert checks[0].difference == pytest.approx(1e6 - 1)
    again = by_compiler(ranking, checks)
    assert [o.deployed.parallel for o in again.options] == [second.deployed.parallel, first.deployed.parallel]
    assert again.best == second  # without an estimate, the model's times stay
    slower = again.options[1]
    assert slower.prefill == pytest.approx(2 * first.prefill)
    assert slower.decode.seconds == pytest.approx(1e6 * first.decode.seconds)
    assert not by_compiler(ranking, checks[:2]).meets
    assert by_compiler(ranking, [reported(first, decode, None, "failed")]) is None
    assert by_compiler(ranking, []) is None


def candidates_without_compiler(ranking) -> list[Option]:
    by_mesh = {}
    for option in ranking.options:
        by_mesh.setdefault(str(option.deployed.parallel), option)
    return list(by_mesh.values())[:2]


@pytest.mark.parametrize(
    ("words", "message"), [((), 'pip install "jax[tpu]"'), (("--target", "cuda:h200-4"), "is no TPU slice")]
)
def test_without_the_compiler(words, message, model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else find(name))
    result = plan(model, *WORDS, *words, "--verify", "1")
    assert result.exit_code == 2
    assert message in result.output
