"""With speculation every token is what it is without, whatever is drafted."""

from __future__ import annotations

import dataclasses

import pytest

from inferlib import Buckets
from inferlib.ops.backend import Backend
from inferlib.programs import program
from inferlib.programs.counter import compilations
from inferlib.speculation.settings import Speculation
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm
from tests.helpers.poison import before_each_dispatch, poison
from tests.helpers.speculation import BUCKETS as SHORT
from tests.helpers.speculation import (
    GREEDY,
    JOBS,
    MIXED,
    TAILS,
    TRUNK,
    assert_same,
    drafter_of,
    options,
    run,
    tight,
)

pytestmark = pytest.mark.usefixtures("counts")


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


@pytest.mark.parametrize(
    "platforms", [pytest.param(("cpu",), marks=pytest.mark.slow), ()], ids=["branches", "no branches"]
)
def test_all_options_in_one_batch(platforms, path, without, expected, monkeypatch):
    """With cached prefixes, rows that lose their pages, and drafts of all kinds; the second time all is cached.

    Where branches are not cheap, all positions are sampled at once.
    """
    monkeypatch.setattr(program, "BRANCHES_ARE_CHEAP", platforms)
    drafter = drafter_of(expected, *MIXED)
    llm = tight(path, without.config.buckets, decode_steps=3, speculation=Speculation(drafter, tokens=3))
    for _ in range(2):
        assert_same(run(llm, JOBS), expected)
        assert_accounted(llm.engine)
    stats, scheduler = llm.engine.stats, llm.engine.scheduler
    assert scheduler.preemptions
    assert stats.cached_tokens
    assert 0.2 < stats.accepted_drafts / stats.drafts < 0.95


def test_states_have_tokens_that_stand(checkpoint, counts):
    """Of rows that go on from snapshots, lose their pages, end within a step, and decode without drafts in between."""
    counts(3, 3, 0)
    path, jobs = checkpoint("olmo_hybrid"), JOBS[1:7]
    expected = run(build_llm(path, SHORT, decode_steps=3), jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = tight(path, SHORT, decode_steps=3, speculation=speculation)
    for _ in range(2):
        assert_same(run(llm, jobs), expected)
        assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert 0.2 < llm.stats.accepted_drafts / llm.stats.drafts < 0.95


# ---- further cases of each kind

BUCKETS = Buckets(prefill=(8,), batch=(1, 4), cache=(24, 64))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("right",), ("wrong",), ("beyond", "negative"), ("none",)], ids=str)
def test_drafters_that_are_always_the_same(kinds, path, without):
    """Right ones take a step for each C tokens of a row; with others no draft stands."""
    jobs = [(tail, GREEDY) for tail in TAILS[:3]]
    expected = run(without, jobs)
    speculation = Speculation(drafter_of(expected, *kinds), tokens=3)
    llm = build_llm(path, without.config.buckets, decode_steps=3, speculation=speculation)
    assert_same(run(llm, jobs), expected)
    stats = llm.engine.stats
    assert stats.accepted_drafts == (stats.drafts if kinds == ("right",) else 0)
    assert stats.drafts


@pytest.mark.slow
def test_bucket_edges_and_changing_counts(path, without, counts):
    """Dispatches draft another number of tokens each, and rows cross cache buckets and pages meanwhile."""
    jobs = [(TRUNK[:length], GREEDY) for length in (1, 7, 13, 22, 30)]
    expected = run(without, jobs)
    counts(3, 0, 1)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, BUCKETS, decode_steps=2, speculation=speculation, page_size=8)
    assert_same(run(llm, jobs), expected)
    for job, wanted in zip(jobs, expected, strict=True):
        assert_same(run(llm, [job]), [wanted])


# Windows in rings, with sinks; latents; experts; chunked attention; caches of other layers; int8; stacked layers; and
# states of each kind.
KINDS = {
    "gpt_oss": {},
    "minicpm3": {},
    "qwen3_moe": {},
    "llama4_text": {},
    "gemma3n_text": {},
    "llama": {"kv_cache_dtype": "int8", "scan": True},
    "ministral": {"scan": True},
    "qwen3_5_text": {"scan": True},
    "nemotron_h": {"scan": True},
    "kimi_linear": {},
    "minimax": {"scan": True},
    "lfm2": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_kinds_of_layers(family, checkpoint):
    """What is not valid holds NaN before each dispatch."""
    buckets, more = Buckets(prefill=(8,), batch=(4,), cache=(64,)), KINDS[family]
    jobs = [(TRUNK, GREEDY), (TAILS[1], GREEDY), (TAILS[2], GREEDY)]
    expected = run(build_llm(checkpoint(family), buckets, **more), jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm, shares = build_llm(checkpoint(family), buckets, decode_steps=2, speculation=speculation, **more), []
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert_same(run(llm, jobs), expected)
        assert llm.engine.stats.accepted_drafts
    assert max(shares) > 0  # cells that stay


LATENTS = dict(kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=1)
WINDOWS = {"head_dim": 128, "num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")}
TPU = {"platform": "tpu", "scan": True, "free_layouts": False, "backend": Backend(decode_attention="pallas_tpu")}
GPU = {"scan": False, "backend": Backend(decode_attention="pallas_gpu", qkv_attention="pallas_gpu")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("ministral", WINDOWS, TPU),
        ("ministral", WINDOWS, TPU | {"parallel": "cp=2"}),
        ("minicpm3", LATENTS, GPU),
        ("llama", {"num_hidden_layers": 1}, GPU),
        ("minicpm3", LATENTS, GPU | {"parallel": "cp=2"}),
    ],
    ids=["tpu", "tpu cp", "gpu latents", "gpu", "gpu latents cp"],
)
def test_kernels_that_take_several_queries_of_a_row(family, sizes, options, checkpoint):
    """Some rows end within a step, whose other cells are not written."""
    path, buckets = checkpoint(family, **sizes), Buckets(prefill=(16,), batch=(2,), cache=(128,))
    jobs = [(TRUNK[:20], dataclasses.replace(GREEDY, max_tokens=count)) for count in (9, 11)]
    expected = run(build_llm(path, buckets, **options), jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, buckets, decode_steps=2, speculation=speculation, **options)
    assert llm.engine.programs.config.backend == options["backend"]
    assert_same(run(llm, jobs), expected)
    assert llm.engine.stats.accepted_drafts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", "dp=2,tp=4"),
        ("qwen3_moe", "dp=4,ep=2"),
        ("nemotron_h", "dp=2,tp=4"),
        # Positions that are split: windows that do not divide into them, with sinks; latents.
        ("gpt_oss", "cp=4,dp=2"),
        ("minicpm3", "cp=2,tp=2,rules=tp2d"),
    ],
)
def test_eight_devices(family, parallel, checkpoint):
    buckets = Buckets(prefill=(8,), batch=(8,), cache=(64,))
    jobs = [(prompt, params) for prompt, params in JOBS if params.logprobs is None and params.n == 1]
    path = checkpoint(family, **{"sliding_window": 6} if family == "gpt_oss" else {})
    expected = run(build_llm(path, buckets), jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, buckets, parallel=parallel, decode_steps=2, speculation=speculation)
    assert_same(run(llm, jobs), expected)
    assert llm.engine.stats.accepted_drafts


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up(path, without, counts):
    """Neither with drafts nor without, in batches of any size, and streams."""
    counts(0, 1, 3)
    jobs = [(prompt, dataclasses.replace(params, logprobs=1)) for prompt, params in JOBS]
    expected, text = run(without, jobs), "".join(without.stream(*jobs[6]))
    llm = tight(path, dataclasses.replace(BUCKETS, cache=(64,)), decode_steps=2, speculation="ngram:3")
    llm.engine.warmup(("logprobs",))
    before = compilations()
    for _ in range(2):
        assert_same(run(llm, jobs), expected)
    assert "".join(llm.stream(*jobs[6])) == text
    stats = llm.engine.stats
    assert stats.cached_tokens
    assert stats.drafts
    assert compilations() == before


@pytest.mark.slow
def test_beside_functions_that_change_logits(path, without):
    """Dispatches with such rows draft nothing, and others do."""
    jobs = [(TAILS[0], options(logits_processors=[lambda tokens, logits: logits], max_tokens=8)), (TAILS[2], GREEDY)]
    expected = run(without, jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, without.config.buckets, decode_steps=3, speculation=speculation)
    assert_same(run(llm, jobs), expected)
    assert llm.engine.stats.accepted_drafts
