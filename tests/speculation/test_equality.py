"""With speculation every token is what it is without, whatever is drafted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.ops.backend import Backend
from inferlib.programs import context
from inferlib.programs.counter import compilations
from inferlib.speculation.settings import Speculation
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.poison import before_each_dispatch, poison
from tests.helpers.speculation import BUCKETS as SHORT
from tests.helpers.speculation import (
    GREEDY,
    JOBS,
    LONGER,
    MIXED,
    TAILS,
    TRUNK,
    assert_nothing_compiles,
    assert_same,
    drafter_of,
    run,
    tight,
)

pytestmark = pytest.mark.usefixtures("counts")


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("llama", num_hidden_layers=1)


@pytest.mark.slow
def test_all_options_in_one_batch(path, without, expected, monkeypatch):
    """With cached prefixes, rows that lose their pages, and drafts of all kinds; the second time all is cached.

    Where branches are not cheap, all positions are sampled at once.
    """
    monkeypatch.setattr(context, "BRANCHES_ARE_CHEAP", ())
    drafter = drafter_of(expected, *MIXED)
    llm = tight(path, without.config.buckets, decode_steps=3, speculation=Speculation(drafter, tokens=3))
    for _ in range(2):
        assert_same(run(llm, JOBS), expected)
    assert_all_kinds(llm)


def assert_all_kinds(llm: LLM) -> None:
    """Prompts were cached, rows lost their pages, and some drafts stood."""
    assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert 0.2 < llm.stats.accepted_drafts / llm.stats.drafts < 0.95


@pytest.mark.slow
def test_states_have_tokens_that_stand(checkpoint, undrafted, counts):
    """Of rows that go on from snapshots, lose their pages, end within a step, and decode without drafts in between."""
    counts(3, 3, 0)
    kinds = "linear_attention", "full_attention"
    path = checkpoint("qwen3_5_text", num_hidden_layers=2, layer_types=kinds)
    expected = run(undrafted(path), LONGER)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = tight(path, SHORT, decode_steps=3, speculation=speculation)
    for _ in range(2):
        assert_same(run(llm, LONGER), expected)
    assert_all_kinds(llm)


# ---- further cases of each kind

BUCKETS = Buckets(prefill=(8,), batch=(1, 4), cache=(24, 64))
LONG_AND_SHORT = dataclasses.replace(BUCKETS, batch=(4,))  # one batch size: fewer programs


@pytest.mark.slow
def test_drafters_that_are_always_the_same(path, without):
    """Right ones take a step for each C tokens of a row; with others no draft stands."""
    jobs = [(tail, GREEDY) for tail in TAILS[:4]]
    expected = run(without, jobs)
    kinds: tuple = ("right",), ("wrong",), ("beyond", "negative"), ("none",)
    drafter = dataclasses.replace(drafter_of(expected), kinds=kinds)
    llm = build_llm(path, SHORT, decode_steps=1, speculation=Speculation(drafter, tokens=3))
    assert_same(run(llm, jobs), expected)
    for job, one, of_job in zip(jobs, expected, kinds, strict=True):
        with new_engine(llm):
            assert_same(run(llm, [job]), [one])
            assert llm.stats.drafts
            assert llm.stats.accepted_drafts == (llm.stats.drafts if of_job == ("right",) else 0)


@pytest.mark.slow
def test_bucket_edges_and_changing_counts(path, without, counts):
    """Dispatches draft another number of tokens each, and rows cross cache buckets and pages meanwhile."""
    jobs = [(TRUNK[:length], GREEDY) for length in (1, 7, 13, 22, 30)]
    expected = run(without, jobs)
    counts(3, 0, 1)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, LONG_AND_SHORT, decode_steps=2, speculation=speculation, page_size=8)
    assert_same(run(llm, jobs), expected)
    for job, wanted in zip(jobs, expected, strict=True):
        assert_same(run(llm, [job]), [wanted])


# Chunked attention; caches of other layers; windows in rings, of int8 and stacked; and states, beside latents too, and
# stacked. Experts, sinks and further latents are below, on several devices.
CHUNKED = {"num_hidden_layers": 1, "no_rope_layers": (1,), "interleave_moe_layer_step": 2}
SHARED = {"num_hidden_layers": 2, "layer_types": ("full_attention",) * 2, "num_kv_shared_layers": 1}
SMALLER: dict[str, dict[str, Any]] = {
    "llama4_text": CHUNKED,
    "gemma3n_text": SHARED | {"activation_sparsity_pattern": (0.7, 0.7)},
}
KINDS = {
    "llama4_text": {},
    "gemma3n_text": {},
    "ministral": {"kv_cache_dtype": "int8", "scan": True},
    "nemotron_h": {"scan": True},
    "kimi_linear": {},
}
FURTHER = ("gemma3n_text", "ministral", "nemotron_h", "kimi_linear")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.release] if name in FURTHER else []) for name in KINDS]
)
def test_kinds_of_layers(family, checkpoint, undrafted):
    """What is not valid holds NaN before each dispatch."""
    path, more, shares = checkpoint(family, **SMALLER.get(family, {})), KINDS[family], []
    jobs = [(TRUNK, GREEDY), (TAILS[1], GREEDY), (TAILS[2], GREEDY)]
    expected = run(undrafted(path, **more), jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, SHORT, decode_steps=1, speculation=speculation, **more)
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert_same(run(llm, jobs), expected)
        assert llm.engine.stats.accepted_drafts
    assert max(shares) > 0  # cells that stay


@pytest.mark.slow
def test_no_time_is_learnt_of_dispatches_during_which_something_compiled(path, counts, monkeypatch):
    """The host compiles the next one's program while the device has long ended, and drafts would seem to take that
    long ever after."""
    counts(3, 0)
    llm = build_llm(path, SHORT, decode_steps=1, speculation=Speculation(tokens=3))
    engine, quiet, received = llm.engine, [], [0]
    receive, profit = engine._receive, engine.scheduler.profit

    def counted():
        advanced = receive()
        received.append(compilations())
        return advanced

    monkeypatch.setattr(engine, "_receive", counted)
    monkeypatch.setattr(profit, "learn_time", lambda *_: quiet.append(received[-1] == compilations()))
    run(llm, LONGER)
    assert engine.stats.compilations
    assert quiet
    assert all(quiet)


# Sizes that kernels take.
SIZES: dict[str, dict[str, Any]] = {
    "minicpm3": dict(kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=1),
    "ministral": {"head_dim": 128, "num_hidden_layers": 1, "layer_types": ("sliding_attention",)},
    "llama": {"num_hidden_layers": 1},
}
WIDE = Buckets(prefill=(16,), batch=(2,), cache=(128,))
TPU = {"platform": "tpu", "scan": True, "free_layouts": False, "backend": Backend(decode_attention="pallas_tpu")}
GPU = {"scan": False, "backend": Backend(decode_attention="pallas_gpu", qkv_attention="pallas_gpu")}


@pytest.fixture(scope="module")
def without_kernels(checkpoint):
    return functools.cache(lambda family: build_llm(checkpoint(family, **SIZES[family]), WIDE, decode_steps=1))


@pytest.mark.release
@pytest.mark.parametrize(
    ("family", "options"),
    [("ministral", TPU | {"parallel": "cp=2"}), ("llama", GPU), ("minicpm3", GPU | {"parallel": "cp=2"})],
    ids=["tpu cp", "gpu", "gpu latents cp"],
)
def test_kernels_that_take_several_queries_of_a_row(family, options, checkpoint, without_kernels):
    """Some rows end within a step, whose other cells are not written."""
    path, jobs = checkpoint(family, **SIZES[family]), [(TRUNK[:20], replaced(max_tokens=count)) for count in (9, 11)]
    expected = run(without_kernels(family), jobs)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, WIDE, decode_steps=2, speculation=speculation, **options)
    assert llm.engine.programs.config.backend == options["backend"]
    assert_same(run(llm, jobs), expected)
    assert llm.engine.stats.accepted_drafts


def replaced(**more) -> SamplingParams:
    return dataclasses.replace(GREEDY, **more)


MESH_JOBS = [(TRUNK, GREEDY), (TRUNK[:20], GREEDY), (TAILS[1], GREEDY), (TAILS[4], replaced(max_tokens=9))]
OF_ALL_KINDS = ("mamba", "attention", "mlp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "parallel"),
    [
        # Heads, their states and the vocabulary in parts, on two replicas.
        pytest.param("nemotron_h", {"layers_block_type": OF_ALL_KINDS}, "dp=2,tp=2", marks=pytest.mark.release),
        # Positions that are split: windows that do not divide into them, with sinks, beside experts; latents.
        pytest.param("gpt_oss", {"sliding_window": 6}, "cp=2,ep=2", marks=pytest.mark.release),
        ("llama", {"num_hidden_layers": 1}, "cp=2,tp=2"),
        pytest.param("minicpm3", {}, "cp=2,tp=2,rules=tp2d", marks=pytest.mark.release),
    ],
    ids=["heads and states", "positions and experts", "positions", "positions of latents"],
)
def test_several_devices(family, sizes, parallel, checkpoint, undrafted):
    path = checkpoint(family, **sizes)
    expected = run(undrafted(path), MESH_JOBS)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    llm = build_llm(path, SHORT, parallel=parallel, decode_steps=1, speculation=speculation)
    assert_same(run(llm, MESH_JOBS), expected)
    assert llm.engine.stats.accepted_drafts


@pytest.mark.release
def test_nothing_compiles_after_the_warm_up(path, without, expected, counts):
    """All options in one batch, as above, where branches are cheap. Neither with drafts nor without, in batches of any
    size, and streams. With one size of batches a model that drafts has this too."""
    counts(0, 1, 3)
    speculation = Speculation(drafter_of(expected, *MIXED), tokens=3)
    buckets = dataclasses.replace(BUCKETS, cache=(64,))
    drafting = lambda: tight(path, buckets, decode_steps=2, speculation=speculation)  # noqa: E731
    assert_all_kinds(assert_nothing_compiles(drafting, without))
