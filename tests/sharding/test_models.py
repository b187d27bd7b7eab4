"""A model on a mesh of fake CPU devices does what it does on one. Nearly all of the time is compilation."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.programs.program_set import ProgramSet
from tests.helpers.hlo import assert_collectives_equal
from tests.helpers.poison import poison
from tests.sharding.conftest import (
    GREEDY,
    MIXED,
    ROWS,
    assert_same_logits,
    assert_same_logits_and_tokens,
    requests,
    run,
)

# Presets, once with a ring; the rest takes minutes. Further mixers are below, states also in `test_quantized`.
QUICK = [
    ("llama", "tp=4,rules=tp_sp"),
    ("gemma3, window 5", "cp=2,tp=2,rules=helix"),  # which does not divide
    ("deepseek", "ep=2,tp=2,rules=dp_attention"),
]
# The other presets, and states; latents are dealt out by position below. Which device has which tokens (tp_sp) is no
# mixer's matter, nor are experts. Before a release: latents with further presets, a cache that layers share.
SLOW = [
    *(("gpt2", "cp=2,tp=2,rules=tp2d"), ("qwen3_5", "tp=4,dp=2")),
]
FURTHER = [
    *(("deepseek", "cp=4,tp=2,rules=helix"), ("olmo_hybrid", "tp=4,rules=tp_sp"), ("lfm2", "tp=4,dp=2")),
    *(("deepseek", "cp=4,tp=2,rules=tp2d"), ("gemma3n", "cp=2,tp=2"), ("qwen3_5", "tp=2,dp=2,rules=dp_attention")),
    *(("kimi_linear", "ep=2,tp=4"), ("minimax", "tp=8,rules=tp_sp"), ("gemma3", "cp=2,tp=2,rules=tp2d")),
]
ONE_RUN = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
ONE_RUN += [pytest.param(*case, marks=pytest.mark.release) for case in FURTHER]


MESH = "cp=2,tp=2,rules=helix"


def poison_before_each_dispatch(engine) -> list[float]:
    """NaN in every cell and row that is not valid; the shares of cells that stay are appended to the result."""
    engine.config = dataclasses.replace(engine.config, in_flight=1)
    advance, shares = engine.advance, []

    def poisoned():
        old = (engine.cache, engine.state)
        shares.append(poison(engine))
        where = jax.tree.map(lambda x: x.sharding, old)
        engine.cache, engine.state = jax.device_put((engine.cache, engine.state), where)
        return advance()

    engine.advance = poisoned
    return shares


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "parallel"), ONE_RUN)
def test_the_same_logits_and_greedy_tokens(shape, parallel, engine_of, expected):
    """Of more prompts than there are rows, under continuous batching; whatever is not valid holds NaN. Every program
    that ran has the collectives that were promised."""
    engine = engine_of(shape, parallel)
    shares = poison_before_each_dispatch(engine)
    assert_same_logits_and_tokens(engine, shape, expected)
    assert len(shares) > 5
    assert shares[0] == 0
    assert 0 < max(shares) < 0.9
    for key in engine.programs._compiled:
        assert_collectives_equal(engine.programs, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        # Of the same rules GPT-2 above has biases and layer norms.
        pytest.param("biased", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.release),
        pytest.param("olmo2", "cp=4,tp=2,rules=helix", marks=pytest.mark.release),
        pytest.param("cohere2", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.release),
        ("gates", "cp=2,tp=2,rules=helix"),
        pytest.param("biased", "tp=4,rules=tp_sp", marks=pytest.mark.release),
        ("olmo2", "tp=8"),
        pytest.param("gpt_oss", "cp=2,tp=2,rules=helix", marks=pytest.mark.release),  # sinks of full attention
        ("llama4", "cp=2"),
        pytest.param("gemma4", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.release),
        ("mimo", "cp=2,tp=2,rules=helix"),
    ],
)
def test_the_same_logits_with_rarer_layers(shape, parallel, engine_of, expected):
    """Biases, an RMS norm over all heads of which some are copies, layer norms, parallel blocks, sinks, chunks, values
    of another size, gates on heads; several residuals, experts with norms of their own. The program has the collectives
    that were promised."""
    engine = engine_of(shape, parallel)
    assert_same_logits(engine, shape, expected)
    for key in engine.programs._compiled:
        assert_collectives_equal(engine.programs, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        ("smollm2", "cp=2,tp=2"),
        pytest.param("smollm2", "tp=2,dp=2", marks=pytest.mark.release),
        # Stacked experts are in `tests/checkpoint/test_placement.py`.
        pytest.param("experts", "ep=2,cp=2,tp=2", marks=pytest.mark.release),
    ],
)
def test_the_same_with_stacked_layers(shape, parallel, engine_of, expected):
    assert_same_logits_and_tokens(engine_of(shape, parallel, scan=True), shape, expected)


@pytest.mark.slow
def test_the_same_samples(engine_of, expected):
    """Seeded tokens under every kind of parameter; log-probabilities, ranks and alternatives; log-probabilities of
    prompts, whose tokens were dealt out, in order."""
    got, want = (run(engine_of("llama", of), requests(MIXED, seed=2, detail="logprobs")) for of in (MESH, ""))
    assert [s.tokens for s in got] == [s.tokens for s in want]
    assert len({tuple(s.tokens) for s in got}) == len(got)
    pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    assert len(pairs) > 30
    for a, b in pairs:
        assert (a.token, a.rank) == (b.token, b.rank)
        np.testing.assert_array_equal(a.top_ids, b.top_ids)
        np.testing.assert_allclose(a.logprob, b.logprob, atol=5e-5)
        np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=5e-5)
    for a, b in zip(got, want, strict=True):
        prompts = [np.concatenate([detail.logprob for detail in s.prompt_details])[:-1] for s in (a, b)]
        np.testing.assert_allclose(*prompts, atol=5e-5)


@pytest.mark.slow
def test_replicas_whose_pages_run_out_give_the_same_tokens(engine_of, programs_of):
    """Each replica has pages for one longest sequence. Sequences are preempted, and move to lower rows."""
    shape, parallel = "llama", "dp=2,tp=2"
    whole = programs_of(shape, parallel)
    plan, shards = whole.plan, whole.config.shards
    sizes = [(x.nbytes(shards), of_rows) for x, of_rows in zip(plan.arrays, plan.of_rows, strict=True)]
    of_pages, of_rows = (sum(size for size, fixed in sizes if fixed == wanted) for wanted in (False, True))
    memory = of_rows + of_pages * plan.columns * shards.replicas // plan.pages
    buckets = dataclasses.replace(whole.config.buckets, batch=(shards.replicas, ROWS))
    config = dataclasses.replace(whole.config, cache_memory=memory, buckets=buckets)
    programs = ProgramSet.make(whole.model, config)
    assert programs.plan.pages == plan.columns * shards.replicas
    engine = Engine(whole.model, engine_of(shape, parallel).weights, config, programs=programs)
    got, want = requests([GREEDY], seed=2), requests([GREEDY], seed=2, detail="logits")  # whose programs ran above
    for s in (*got, *want):
        s.max_tokens = plan.max_len - len(s.prompt)
    assert [s.tokens for s in run(engine, got)] == [s.tokens for s in run(engine_of(shape), want)]
    assert engine.scheduler.preemptions
    assert all(pages.free == pages.pool.count for pages in engine.scheduler.pages)


@pytest.mark.slow
def test_prompts_that_begin_alike_share_pages_of_a_replica(engine_of):
    """Pages, and parts of pages, are copied on each device. A replica serves what it has the beginning of, unless the
    other one has less to do. Positions in shares have this in `tests/engine/test_snapshots.py`."""
    engine, alone = engine_of("llama", "dp=2,tp=2"), engine_of("llama")
    trunk = np.random.default_rng(3).integers(3, 131, 27).tolist()
    prompts = [trunk[: 27 - 4 * (i % 3)] + s.prompt[:9] for i, s in enumerate(requests([GREEDY], seed=4))]
    shares = poison_before_each_dispatch(engine)
    for _ in range(2):
        got, want = ([Sequence(p, GREEDY, 9 + i, seed=i) for i, p in enumerate(prompts)] for _ in range(2))
        assert [s.tokens for s in run(engine, got)] == [s.tokens for s in run(alone, want)]
    assert engine.stats.cached_tokens > 7 * 16
    assert 0 < max(shares) < 1
    assert all(pages.cached for pages in engine.scheduler.pages)
