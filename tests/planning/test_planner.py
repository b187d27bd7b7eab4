"""Plans: ranking for a workload, what does not fit, the command, and deployment plans as data. About 15 s."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.compile import CASES as DEPLOYMENTS
from inferlib import configs
from inferlib.aot.compile import CompileError
from inferlib.aot.verify import candidates, deployment
from inferlib.checkpoint.load import described_quantization
from inferlib.cli import app
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.ops.cache_policy import CachePolicy
from inferlib.option_checks import ConfigurationError
from inferlib.planning.costs import step_time
from inferlib.planning.draft_layers import drafting_seconds
from inferlib.planning.drafts import Drafts
from inferlib.planning.planner import USUAL, PlanError, Slo, Workload, formats, rank
from inferlib.planning.plans import Plan, load_plan
from inferlib.speculation.settings import Speculation
from inferlib.targets import TargetError, parse_target


def ranking(name: str, target: str, workload=None, slo="", **options):
    workload = workload or Workload(1024, 256, 32)
    return rank(config_from_hf(configs.load(name)), parse_target(target), workload, Slo.parse(slo), **options)


@cache
def of_8b_on_v5e():
    return ranking("llama3-8b", "v5e-8")


# ---- ranking


def test_options_fit_and_the_best_comes_first():
    result = of_8b_on_v5e()
    assert all(o.over <= 0 and o.memory.total <= 15.75 * 1024**3 for o in result.options)
    assert result.best.throughput == pytest.approx(max(o.throughput for o in result.options), rel=0.01)
    assert {o.deployed.parallel.tensor for o in result.options} == {1, 2, 4, 8}
    # Replicas of one chip have room for more rows when the weights are smaller.
    rows = {
        w: max(o.batch for o in result.options if o.deployed.parallel.data == 8 and o.deployed.weights == w)
        for w in ("bfloat16", "int8")
    }
    assert rows["bfloat16"] < rows["int8"]
    assert all(o.batch % o.deployed.parallel.data == 0 for o in result.options)


@pytest.mark.slow
def test_slo_comes_before_throughput():
    dense = {"quantizations": (None,)}
    free = ranking("llama3-70b", "v6e-8", **dense)
    assert free.meets
    limit = (free.best.itl + min(o.itl for o in free.options)) / 2
    bound = ranking("llama3-70b", "v6e-8", slo=f"itl={limit}", **dense)
    assert bound.meets
    assert bound.best.itl <= limit < free.best.itl
    assert bound.best.throughput <= free.best.throughput
    assert bound.best.batch < free.best.batch
    hopeless = ranking("llama3-70b", "v6e-8", slo="itl=0.001", **dense)
    assert not hopeless.meets
    assert hopeless.best.itl == pytest.approx(min(o.itl for o in hopeless.options), rel=0.01)


@pytest.mark.slow
def test_replicas_share_experts_or_have_their_own():
    """A mixture of experts fits more rows where replicas share one set; a dense model has nothing to share."""
    options = ranking("qwen3-30b-a3b", "v6e-8", quantizations=(None,)).options
    meshes = {(o.deployed.parallel.expert, o.deployed.parallel.data) for o in options}
    assert {(8, 1), (4, 1), (1, 4), (1, 1)} <= meshes
    assert max(o.batch for o in options if o.deployed.parallel.expert == 8) == 32
    assert (1, 8) not in meshes  # 61 GB do not fit a chip of 32
    dense = ranking("llama3-8b", "v6e-8").options
    assert {o.deployed.parallel.expert for o in dense} == {1}


def test_frontier_trades_one_for_the_other():
    front = of_8b_on_v5e().frontier
    assert len(front) > 3
    for faster, fuller in pairwise(front):
        assert faster.itl < fuller.itl
        assert faster.throughput < fuller.throughput


def test_every_preset_is_ranked_where_it_makes_a_difference():
    options = ranking("llama3-70b", "v6e-16", quantizations=(None,)).options
    ranked = {str(o.deployed.parallel) for o in options}
    assert {"tp=16", "tp=16,rules=tp_sp", "tp=8,cp=2", "tp=8,cp=2,rules=helix", "tp=8,cp=2,rules=tp2d"} <= ranked
    assert [mesh for mesh in ranked if "helix" in mesh] == ["tp=8,cp=2,rules=helix"]  # 8 KV heads
    assert all(o.deployed.parallel.devices == 16 for o in options)


def test_times_add_up():
    """All requests start at once in a batch that holds half of them: the second half waits for the first."""
    options = ranking("llama3-8b", "v6e-1", Workload(512, 128, 8), quantizations=(None,)).options
    half = next(o for o in options if o.batch == 4)
    cycle = 128 * half.decode.seconds + 4 * half.prefill
    assert half.itl == pytest.approx(cycle / 128)
    assert half.throughput == pytest.approx(4 * 128 / cycle)
    assert half.ttft == pytest.approx(cycle + half.decode.seconds + half.prefill)


@pytest.mark.slow
def test_what_does_not_fit_says_what_would():
    workload = Workload(1024, 256, 8)
    with pytest.raises(PlanError, match=r"needs [\d.]+ GiB on each device, [\d.]+ GiB more than its 15.8") as error:
        ranking("llama3-70b", "v5e-8", workload, quantizations=(None,))
    able = re.findall(r"(\S+) with (\w+) weights", str(error.value).split("what would do: ")[1])
    assert ("v5e:2x4", "int8") in able
    assert {name.split("-")[0].split(":")[0] for name, _ in able} >= {"v5e", "v5p", "v6e", "v7x"}
    for name, weights in able:
        quantization = None if weights == "bfloat16" else Quantization.named(weights)
        assert ranking("llama3-70b", name, workload, quantizations=(quantization,)).options


def test_errors():
    with pytest.raises(PlanError, match="exceed the model's context of 131072"):
        ranking("llama3-8b", "v5e-8", Workload(131072, 1, 1))
    with pytest.raises(TargetError, match="cuda:h200"):
        ranking("llama3-8b", "cpu")
    with pytest.raises(PlanError, match="concurrency must be at least 1"):
        Workload(1, 1, 0)
    for text in ("ttft", "itl=-1", "itl=nan", "tpot=1", "itl=1,itl=2"):
        with pytest.raises(PlanError, match=r"ttft=0\.5,itl=0\.02"):
            Slo.parse(text)


# ---- drafts


def drafts(tokens: int, acceptance: float, model: str | None = None) -> Drafts:
    if model is None:
        return Drafts(Speculation(tokens=tokens), acceptance)
    return Drafts(Speculation("draft", tokens, model), acceptance, config_from_hf(configs.load(model)))


def test_as_many_drafts_as_pay():
    """Many for one request, none where each token takes its time, and none that never stand."""
    without, drafted, never = (
        ranking("llama3-8b", "cuda:h200", Workload(1024, 256, 1), quantizations=(None,), drafts=it).best
        for it in (None, drafts(7, 0.8), drafts(7, 0.0))
    )
    assert (without.drafts, drafted.drafts, never.drafts) == (0, 7, 0)
    assert drafted.tokens == pytest.approx((1 - 0.8**8) / 0.2)
    assert without.decode.seconds < drafted.decode.seconds < 1.1 * without.decode.seconds
    assert drafted.itl == pytest.approx(drafted.step / drafted.tokens + drafted.prefill / 256)
    assert never == without
    full = [ranking("llama3-8b", "cuda:h200", Workload(128, 256, 512), drafts=it) for it in (None, drafts(7, 0.5))]
    assert full[1].best.drafts == 0
    assert full[1].best.throughput == full[0].best.throughput


@pytest.mark.slow
def test_a_recurrent_draft_takes_its_states():
    """Those of its rows and snapshots, whose number is what memory is left for; and a draft's first step runs what it
    has yet to run, and leaves that in the states."""
    hf = configs.load("qwen3-next-80b-a3b")
    small = config_from_hf(hf | {"num_hidden_layers": 4, "num_experts": 16})
    work, settings = Workload(1024, 256, 16), Speculation("draft", 3, "small")
    drafted = Drafts(settings, 0.9, small)
    best = ranking("qwen3-next-80b-a3b", "v6e-8", work, quantizations=(None,), drafts=drafted).best
    plan = best.deployed.plan(best.batch, work.max_len, work.chunk, best.drafter.model)
    alone = best.deployed.plan(best.batch, work.max_len, work.chunk)
    sizes = [[(x.nbytes(), of_row) for x, of_row in zip(it.arrays, it.of_rows, strict=True)] for it in (alone, plan)]
    pages, rows = ([sum(n for n, of_row in it if of_row == kind) for it in sizes] for kind in (False, True))
    assert pages[1] * 12 == pages[0] * 13  # of every four layers one has pages
    assert rows[1] * 12 == rows[0] * 13
    without = replace(best, drafter=None)
    assert best.pool_tokens < without.pool_tokens
    each = [best.drafter.decode(16, work.middle, drafts=n) for n in (0, 3)]
    first, other = (step_time(x, best.drafter.network).seconds for x in reversed(each))
    assert drafting_seconds(best.drafter, 16, work.middle, 3) == pytest.approx(first + 2 * other)
    assert first > other


@pytest.mark.slow
def test_a_draft_model_takes_time_and_memory():
    free, model = (
        ranking("llama3-70b", "v6e-8", Workload(1024, 256, 1), quantizations=(None,), drafts=drafts(3, 0.9, name)).best
        for name in (None, "llama3-1b")
    )
    assert free.drafting == 0.0
    assert 0 < model.drafting < model.decode.seconds
    assert model.memory.weights > free.memory.weights
    assert model.memory.cache > free.memory.cache
    assert model.prefill > free.prefill
    assert model.throughput < free.throughput
    # Its cells are in the pages of the other one's.
    cells = [layers * heads * size * 2 * 2 for layers, heads, size in ((80, 8, 128), (16, 8, 64))]
    room = model.memory.cache - model.over
    assert room - model.pool_tokens * sum(cells) // 8 == pytest.approx(0, abs=128 * sum(cells))
    # A chip that has room for the model alone drafts nothing.
    assert ranking("llama3-8b", "v6e-1", Workload(1024, 256, 1), drafts=drafts(3, 0.9, "llama3-8b")).best.drafts == 0


# ---- the command


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.slow
def test_bounded_caches_take_less_and_are_read_faster():
    """A row of 8,192 positions keeps 2,048, and while its prompt is prefilled 1,024 more."""
    work, policies = Workload(7168, 1024, 64), ("keydiff:2048", "h2o:2048", "snapkv:2048", "pyramidkv:2048")
    results = {None: ranking("llama3-8b", "v5p:2x2x1", work, quantizations=(None,))}
    for name in policies:
        options = dict(quantizations=(None,), cache_policy=CachePolicy.read(name))
        results[name] = ranking("llama3-8b", "v5p:2x2x1", work, **options)
    best = {name: next(o for o in result.options if o.batch == 64) for name, result in results.items()}
    full, keydiff = best[None], best["keydiff:2048"]
    assert keydiff.memory.cache * 8192 == full.memory.cache * (2048 + 1024)
    assert keydiff.decode.seconds < full.decode.seconds / 2
    assert keydiff.itl < full.itl
    assert 0 < keydiff.compaction < 0.05 * keydiff.decode.seconds
    assert full.compaction == 0
    assert best["h2o:2048"].decode.seconds > keydiff.decode.seconds  # keys are read twice
    assert best["snapkv:2048"].memory.cache - keydiff.memory.cache == 64 * 32 * 32 * 4096 * 2 // 4  # queries
    snapkv, pyramid = best["snapkv:2048"], best["pyramidkv:2048"]
    assert pyramid.memory.cache == snapkv.memory.cache
    assert pyramid.decode.seconds == pytest.approx(snapkv.decode.seconds)
    assert pyramid.compaction == pytest.approx(snapkv.compaction)
    assert [pyramid.facts()["layer_budgets"][layer] for layer in (0, 8, 16, 24)] == [3584, 2560, 1536, 512]
    levels = deployment(configs.load("llama3-8b"), pyramid).planned().plan
    assert levels.bounds == (1536, 2560, 3584, 4608)
    assert levels.arrays[0].shape[1] == levels.pages * 3  # of the lowest layers
    made = deployment(configs.load("llama3-8b"), keydiff)
    assert made.cache_policy == "keydiff:2048"
    assert made.planned().plan.bounds == (2048 + 1024,)
    assert {o.deployed.parallel.sequence for o in results["keydiff:2048"].options} == {1}
    assert {o.deployed.parallel.sequence for o in results[None].options} > {1}


def test_bounded_caches_that_cannot_be_planned():
    def planned(target="v6e-8", policy="keydiff:1024", shape="llama3-8b", **options):
        return ranking(shape, target, Workload(3072, 1024, 8), cache_policy=CachePolicy.read(policy), **options)

    for message, options in {
        "keeps a multiple of 128 positions": dict(policy="keydiff:1000"),
        "does not work with kv_cache_dtype yet": dict(kv_cache_dtype="int8"),
        "does not work with speculation yet": dict(drafts=Drafts(Speculation("ngram", 3), 0.7)),
        "does not run on Trainium": dict(target="trn2-16"),
        "layer 0 of this one has latents": dict(shape="deepseek-v3", target="v6e-64"),
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            planned(**options)
    copies = planned("v6e-16", "keydiff:1024")
    counted = planned("v6e-16", "h2o:1024")
    assert "tp=16" in {str(o.deployed.parallel) for o in copies.options}
    assert "tp=16" not in {str(o.deployed.parallel) for o in counted.options}  # two devices share a KV head
    with pytest.raises(CompileError, match="plans with cache_policy are not verified"):
        candidates(copies, 1)


@pytest.mark.slow
def test_command(tmp_path):
    arguments = ("--config", "llama3-8b", "--target", "v5e-4", "--input-len", "512", "--concurrency", "16")
    picture = tmp_path / "frontier.svg"
    screen = run(*arguments, "--slo", "itl=0.02", "--plot", str(picture))
    assert screen.exit_code == 0, screen.output
    assert "Best: --parallel" in screen.output
    assert "tokens/s per chip" in picture.read_text()
    assert run(*arguments, "--slo", "itl=0.000001").exit_code == 1
    facts = json.loads(run(*arguments, "--quantization", "none", "--json").output)
    assert {o["weights"] for o in facts["options"]} == {"bfloat16"}
    assert facts["best"] == facts["options"][0]
    assert facts["workload"] == {"input_len": 512, "output_len": 256, "concurrency": 16}
    assert facts["best"]["bytes"]["total"] < 15.75 * 1024**3
    screen = run(*arguments, "--speculation", "ngram:3", "--acceptance", "0.8")
    assert "80% of the drafts stand" in screen.output
    assert "--speculation ngram:3" in screen.output
    screen = run(*arguments, "--speculation", "draft:llama3-1b:3", "--acceptance", "0.9")
    assert "--speculation draft:llama3-1b:3" in screen.output


@pytest.mark.parametrize(
    ("name", "target", "weights"),
    [("gpt-oss-120b", "cuda:h100", "mxfp4"), ("deepseek-v3", "v6e-64", "fp8_block"), ("llama3-8b", "v5e-8", None)],
)
@pytest.mark.fast_cases(1)
def test_plans_start_from_how_a_model_is_shipped(name, target, weights):
    hf = configs.load(name)
    config = config_from_hf(hf)
    shipped = described_quantization(hf, config)
    assert (shipped and shipped.name) == weights
    assert formats(shipped, None) == (USUAL if shipped is None else (shipped,))
    assert formats(shipped, f"{weights or 'none'},int8") == (shipped, Quantization.named("int8"))
    best = rank(config, parse_target(target), Workload(1024, 256, 1), quantizations=formats(shipped, None)).best
    assert best.deployed.quantization in formats(shipped, None)
    if weights == "mxfp4":  # of gpt-oss the experts alone
        quantized = {w.part for w in best.deployed.model.weights if w.scheme}
        assert quantized == {"mlp.experts.gate_up", "mlp.experts.down"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "v5e-8"), "give either a model or the name of a shape"),
        (("--config", "llama3-8b", "--target", "v5-8"), "v5e-8"),
        (("--config", "llama3-9b", "--target", "v5e-8"), "llama3-8b"),
        (("--config", "llama3-8b", "--target", "v5e-8", "--quantization", "fp4"), "known: int8, int4"),
        (("--config", "llama3-8b", "--target", "v5e-8", "--slo", "fast"), "ttft=0.5"),
        (("--config", "llama3-405b", "--target", "v5e-8"), "what would do: v5e-64"),
        (("--config", "llama3-8b", "--target", "v5e-8", "--plot", "nowhere/x.png"), "nowhere/x.png"),
        (("--config", "llama3-8b", "--target", "v5e-8", "--plot", "x.doc"), "doc"),
        (("--config", "llama3-8b", "--target", "v5e-8", "--speculation", "ngram:3"), "needs acceptance"),
        (("--config", "llama3-8b", "--target", "v5e-8", "--acceptance", "0.5"), "give speculation too"),
        (
            ("--config", "llama3-8b", "--target", "v5e-8", "--speculation", "ngram:3", "--acceptance", "1.5"),
            "a share of drafts from 0 to 1",
        ),
        (
            ("--config", "llama3-8b", "--target", "v5e-8", "--speculation", "draft:qwen3-0.6b:3", "--acceptance", "1"),
            "a vocabulary of 151936 tokens, and this model one of 128256",
        ),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


# ---- data


PARAMETERS = {  # billions, as published
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "llama4-scout": 107.8,  # of the text model
    "gemma3-1b": 1.0,
    "gemma3-4b": 3.88,
    "gemma3-12b": 11.8,
    "gemma3-27b": 27.0,
    # Of the text models; with those that see and hear, 7.9, 5.1 and 8.0.
    "gemma3n-e4b": 6.84,
    "gemma4-e2b": 4.63,
    "gemma4-e4b": 7.46,
    "gemma4-26b-a4b": 25.2,
    "glm-4.5": 355,
    "huginn-3.5b": 3.56,
    "parcae-370m": 0.388,  # with value embeddings
    "llama3-1b": 1.24,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 406,
    "mistral-7b": 7.25,
    "mistral-nemo-12b": 12.2,
    "mistral-small-24b": 23.6,
    "mistral-large-123b": 123,
    "mixtral-8x7b": 46.7,
    "phi3-mini": 3.82,
    "phi3-medium": 14.0,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-next-80b-a3b": 79.7,
    "nemotron-h-8b": 8.1,
    "smollm2-135m": 0.1345,
}


# Likewise, for a token; some do not count the embedding.
ACTIVE = {
    "deepseek-v3": 37,
    "gemma4-26b-a4b": 3.8,
    "glm-4.5": 32,
    "kimi-k2": 32,
    "llama4-scout": 17,
    "mixtral-8x7b": 12.9,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "qwen3-next-80b-a3b": 3.9,
}


@pytest.mark.parametrize("name", configs.names())
def test_shapes_have_their_published_size(name):
    model = abstract_model(config_from_hf(configs.load(name)), "bfloat16", scan=True)
    assert model.parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    if name in ACTIVE:
        assert model.active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.06)
    else:
        assert model.active_parameters <= model.parameters


@pytest.mark.parametrize("name", configs.plan_names())
def test_plans_parse_and_fit(name):
    plan = load_plan(name)
    mesh = plan.engine.shards.mesh
    assert plan.slice.devices == (1 if mesh is None else mesh.size)
    assert plan.memory.total <= 0.9 * plan.slice.hbm_bytes
    assert name.startswith(plan.model)


@pytest.mark.slow
def test_each_deployment_of_the_benchmark_is_one_and_has_a_name():
    assert len({str(case) for case in DEPLOYMENTS}) == len(DEPLOYMENTS)
    assert all(case.deployment("auto").max_batch == case.rows for case in DEPLOYMENTS)


GOOD = yaml.safe_load(configs.plan_text("llama3-8b-v5e-8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama9"}, "known: .*llama3-8b"),
        ({"target": "v5e-9"}, "v5e-8"),
        ({"parallel": "tp=4"}, "tensor 4 is not v5e:2x4, which has 8 devices"),
        ({"parallel": "tp=1"}, "one device is not v5e:2x4, which has 8 devices"),
        ({"parallel": "tq=8"}, "tp=4,dp=2"),
        ({"parallel": "tp=8,rules=none"}, "tp_sp"),
        ({"batch": [1, 3], "parallel": "tp=4,dp=2"}, "max_batch 3 does not divide over 2"),
        ({"cache": [2048]}, "largest cache bucket"),
        ({"batch": [8, 1]}, "ascending"),
        ({"batch": 8}, "batch"),
        ({"max_len": 262144, "cache": [262144]}, "context of 131072"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"quantization": "int7"}, "known: int8"),
        ({"batches": [1]}, "a plan has the fields model, target"),
        ({"model": None}, "llama3-8b"),
    ],
)
def test_wrong_plans_say_what_is_wrong(change, message, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(GOOD | change))
    with pytest.raises(ConfigurationError, match=message):
        load_plan(path)


def test_plans_by_path_and_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert load_plan(path) == load_plan("llama3-8b-v5e-8") == Plan.parse(GOOD)
    for text, message in (("[1, 2", "plan"), ("just text", "has the fields"), ("model: llama3-8b", "lacks target")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            load_plan(path)
    with pytest.raises(ConfigurationError, match="llama3-8b-v5e-8"):
        load_plan("llama3-8b-v5e-9")
