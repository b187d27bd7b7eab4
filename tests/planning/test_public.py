"""`inferlib.plan`, `inferlib.explain` and `inferlib.compile`: their results, and input that is wrong. About 15 s."""

from __future__ import annotations

import html.parser
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import inferlib
from inferlib import Buckets, Slo, Workload
from inferlib.cli import app
from inferlib.option_checks import ConfigurationError
from inferlib.planning.planner import PlanError
from tests.helpers.wrong_calls import Reached, problems, report

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
BUCKETS = Buckets((16,), (2,), (64,))


def command(*words: str) -> dict:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class Cells(html.parser.HTMLParser):
    """Counts the tags of a page, each of which must be closed."""

    def __init__(self, text: str):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow
def test_a_plan_is_what_the_command_prints():
    work = ("--input-len", "100", "--output-len", "20", "--concurrency", "16", "--slo", "itl=0.02")
    result = inferlib.plan("llama3-8b", "v5e-8", Workload(100, 20, 16), slo=Slo(itl=0.02))
    assert json.loads(json.dumps(result.facts())) == command(
        "plan", "--config", "llama3-8b", "--target", "v5e-8", *work
    )
    assert result.ok
    assert result.best is result.options[0]
    assert f"--parallel {result.best.deployed.parallel}" in str(result)
    tables = Cells(result._repr_html_()).counts
    assert tables["table"] == 2
    ranked = {(str(o.deployed.parallel), o.deployed.weights) for o in result.options}
    assert tables["tr"] == 2 + min(8, len(ranked)) + len(result.frontier)
    made = result.deployment()
    assert (made.target, made.max_batch) == (result.target.name, result.best.batch)


def test_an_unmet_slo_is_no_exception():
    result = inferlib.plan("llama3-8b", "v5e-8", slo="itl=0.000001")
    assert not result.meets_slo
    assert not result.ok
    assert "Nothing meets ITL 0.0 ms" in str(result)


def test_the_picture_of_a_plan(tmp_path):
    inferlib.plan(HF, "v5e-1", Workload(16, 16, 2)).plot(tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.slow
def test_an_explanation_is_what_the_command_prints():
    result = inferlib.explain("llama3-8b", "tp=4,dp=2", max_batch=4)
    facts = command("info", "--config", "llama3-8b", "--parallel", "tp=4,dp=2", "--max-batch", "4")
    assert json.loads(json.dumps(result.facts())) == facts
    assert result.weight_bytes["bfloat16"] == 2 * result.parameters
    assert result.stored_bytes is None
    tables = Cells(result._repr_html_()).counts
    assert tables["table"] == 6  # recipe, memory, arrays, two steps, implementations
    assert tables["tfoot"] == 3
    assert "all-reduce" in str(result)
    alone = inferlib.explain("llama3-8b")
    assert alone.mesh is None
    assert "parallel" not in alone.facts()


@pytest.mark.slow
def test_compiled_for_the_cpu():
    result = inferlib.compile(HF, buckets=BUCKETS, modes=("greedy",), workers=1)
    assert result.ok
    assert result.complete
    assert result.folder is None
    assert all(program.peak > 0 for program in result.programs)
    assert Cells(result._repr_html_()).counts["table"] == 2
    assert result.facts()["target"] == "cpu"
    assert "<svg" in result.html()


def test_a_deployment_says_everything():
    made = inferlib.plan(HF, "v5e-1", Workload(16, 16, 2)).deployment()
    with pytest.raises(ConfigurationError, match="give none of them beside it"):
        inferlib.compile(made, "cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'paralel'"):
        inferlib.compile(HF, paralel="tp=2")


GOOD = {
    "plan": dict(model=HF, target="v5e-1", workload=Workload(16, 16, 2), slo=None, quantization=None),
    "explain": dict(model=HF, parallel=None, max_batch=8, max_len=64, quantization=None, kv_cache_dtype=None),
    "compile": dict(model=HF, target="cpu", workers=2, progress=False, parallel=None, dtype=None, quantization=None)
    | dict(kv_cache_dtype=None, buckets=BUCKETS, modes=("greedy",), expert_placement=None, backend="auto"),
}


@pytest.mark.parametrize("name", GOOD)
def test_wrong_input_ends_in_a_line_of_ours(name, monkeypatch):
    def reached(*args, **options):
        raise Reached

    monkeypatch.setattr("inferlib.deploy.compile.compile_deployment", reached)
    report(problems(getattr(inferlib, name), GOOD[name]))


@pytest.mark.parametrize("name", ["plan", "explain", "compile"])
def test_a_revision_is_not_ignored(name):
    with pytest.raises(ConfigurationError, match="models of the hub"):
        getattr(inferlib, name)(HF, *(["v5e-1"] if name == "plan" else []), revision="main")


def test_a_workload_is_checked():
    with pytest.raises(PlanError, match="input_len must be at least 1, got 'a'"):
        Workload("a")


@pytest.mark.slow
def test_planning_starts_no_backend():
    script = (
        "import inferlib; inferlib.plan('llama3-8b', 'v5e-8'); inferlib.explain('llama3-8b', 'tp=8');"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
