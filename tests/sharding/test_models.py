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
from tests.sharding.conftest import GREEDY, LENGTHS, MIXED, ROWS, assert_same_logits, requests, run

# Separate runs for logits and for tokens, whose programs return no logits. gemma3 has a ring, which wraps.
SEPARATE_RUNS = [("gemma3", "cp=2,tp=2,rules=helix")]
# One family for each other preset, and other families and meshes, in one run; the rest takes minutes.
QUICK = [
    ("llama", "tp=4,rules=tp_sp"),
    ("gemma3", "cp=2,tp=2,rules=tp2d"),
    ("gemma3, window 5", "cp=4"),  # which does not divide
    ("deepseek", "ep=2,tp=2,rules=dp_attention"),
    ("minicpm3", "tp=4"),
    ("qwen3_5", "tp=4,dp=2"),
]
# Each preset with a ring (gemma3), and with latents and experts (deepseek), and those that states run on with states,
# unless it stands above; each mesh with one of them at least. Heads of gemma3 are copied and padded, those of smollm2
# divide by no even number; its 7 experts do not either. Which device has which tokens (tp_sp) is no mixer's matter, so
# that three of them run on it.
SLOW = {
    "gemma3": "tp=4,rules=tp_sp cp=8 cp=2,tp=4 dp=2,cp=2,tp=2,rules=helix cp=4,tp=2,rules=tp2d tp=4,rules=dp_attention",
    "smollm2": "tp=4,rules=tp_sp cp=4,tp=2,rules=tp2d cp=4,tp=2,rules=helix",
    "experts": "ep=4 ep=2,tp=2,dp=2",
    "deepseek": "ep=2,cp=2,tp=2 tp=4,rules=tp_sp cp=4,tp=2,rules=helix cp=4,tp=2,rules=tp2d",
    "gemma3n": "cp=2,tp=2 tp=2,rules=tp_sp",
    "qwen3_5": "tp=2,rules=tp_sp tp=2,dp=2,rules=dp_attention",
    "olmo_hybrid": "tp=4,rules=tp_sp",
    "kimi_linear": "ep=2,tp=4 ep=2,tp=2,rules=dp_attention",
    "minimax": "tp=8,rules=tp_sp ep=2,tp=4",
    "lfm2": "tp=4,dp=2",
    "nemotron_h": "tp=8,rules=tp_sp tp=2,dp=2,rules=dp_attention ep=2,tp=4",
    "gemma4": "ep=2,tp=2,rules=dp_attention",
    "gemma3, window 5": "cp=2,tp=2,rules=helix",
}
ONE_RUN = [*QUICK, *(pytest.param(f, mesh, marks=pytest.mark.slow) for f in SLOW for mesh in SLOW[f].split())]


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


@pytest.mark.parametrize(("shape", "parallel"), SEPARATE_RUNS)
def test_the_same_logits_and_greedy_tokens(shape, parallel, engine_of, expected):
    """Of more prompts than there are rows, under continuous batching; whatever is not valid holds NaN. Every program
    that ran has the collectives that were promised."""
    assert_same_logits(engine_of(shape, parallel), shape, expected)
    engine = engine_of(shape, parallel)
    shares = poison_before_each_dispatch(engine)
    got = run(engine, requests([GREEDY], seed=2))
    assert [s.tokens for s in got] == [s.tokens for s in expected("greedy", shape)]
    assert [len(s.tokens) for s in got] == [8 + i for i in range(len(LENGTHS))]
    assert len(shares) > 5
    assert shares[0] == 0
    assert 0 < max(shares) < 0.9
    for key in engine.programs._compiled:
        assert_collectives_equal(engine.programs, key)


@pytest.mark.parametrize(("shape", "parallel"), ONE_RUN)
def test_the_same_logits_and_greedy_tokens_in_one_run(shape, parallel, engine_of, expected):
    """As above, but the run that generates also returns the logits of its prompts: two programs instead of four."""
    engine = engine_of(shape, parallel)
    shares = poison_before_each_dispatch(engine)
    assert_same_logits_and_tokens(engine, shape, expected)
    assert shares[0] == 0
    assert 0 < max(shares) < 0.9
    for key in engine.programs._compiled:
        assert_collectives_equal(engine.programs, key)


def assert_same_logits_and_tokens(engine: Engine, shape: str, expected) -> None:
    got, want = run(engine, requests([GREEDY], seed=2, detail="logits")), expected("greedy with logits", shape)
    assert [s.tokens for s in got] == [s.tokens for s in want]
    prompts, wanted = (np.concatenate([np.concatenate(s.prompt_details) for s in each]) for each in (got, want))
    vocab = engine.model.config.vocab
    assert np.abs(prompts[:, :vocab] - wanted[:, :vocab]).max() < 2e-5 * np.abs(wanted[:, :vocab]).max()


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        pytest.param("biased", "tp=4,rules=tp_sp", marks=pytest.mark.slow),
        ("biased", "cp=2,tp=2,rules=tp2d"),
        pytest.param("olmo2", "tp=8", marks=pytest.mark.slow),
        pytest.param("olmo2", "tp=2,rules=tp_sp", marks=pytest.mark.slow),
        ("olmo2", "cp=4,tp=2,rules=helix"),
        pytest.param("cohere2", "tp=4,rules=dp_attention", marks=pytest.mark.slow),
        ("cohere2", "cp=2,tp=2,rules=tp2d"),
        pytest.param("cohere2", "cp=2,tp=2,rules=helix", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "cp=2,tp=2,rules=helix", marks=pytest.mark.slow),
        pytest.param("llama4", "cp=2", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp=4,rules=tp_sp", marks=pytest.mark.slow),
        pytest.param("gpt2", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.slow),
        ("gates", "cp=2,tp=2,rules=helix"),
        pytest.param("gates", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.slow),
        pytest.param("gemma3n", "cp=2,tp=2,rules=helix", marks=pytest.mark.slow),
        pytest.param("gemma3n", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.slow),
        pytest.param("gemma4", "ep=2,tp=2,rules=tp_sp", marks=pytest.mark.slow),
        pytest.param("gemma4", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.slow),
        pytest.param("mimo", "cp=2,tp=2,rules=helix", marks=pytest.mark.slow),
        pytest.param("mimo", "cp=2,tp=2,rules=tp2d", marks=pytest.mark.slow),
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


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        ("smollm2", "tp=2,dp=2"),
        pytest.param("smollm2", "cp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("experts", "ep=2,tp=2", marks=pytest.mark.slow),
    ],
)
def test_the_same_with_stacked_layers(shape, parallel, engine_of, expected):
    assert_same_logits_and_tokens(engine_of(shape, parallel, scan=True), shape, expected)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        ("llama", "cp=4,tp=2,rules=helix"),
        pytest.param("smollm2", "tp=8", marks=pytest.mark.slow),
        pytest.param("llama", "dp=2,cp=2,tp=2,rules=tp2d", marks=pytest.mark.slow),
    ],
)
def test_the_same_samples(shape, parallel, engine_of, expected):
    """Seeded tokens under every kind of parameter; log-probabilities, ranks and alternatives."""
    got, want = run(engine_of(shape, parallel), requests(MIXED, seed=2)), expected("mixed", shape)
    assert [s.tokens for s in got] == [s.tokens for s in want]
    assert len({tuple(s.tokens) for s in got}) == len(got)
    pairs = [pair for a, b in zip(got, want, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    assert len(pairs) > 30
    for a, b in pairs:
        assert (a.token, a.rank) == (b.token, b.rank)
        np.testing.assert_array_equal(a.top_ids, b.top_ids)
        np.testing.assert_allclose(a.logprob, b.logprob, atol=5e-5)
        np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=5e-5)


def test_prompt_log_probabilities_are_put_in_order(engine_of):
    """Those of a chunk whose tokens were dealt out."""
    prompt = np.random.default_rng(3).integers(3, 131, 21).tolist()
    scored = []
    for parallel in ("", "cp=4"):
        params = dataclasses.replace(GREEDY, logprobs=1)
        (s,) = run(engine_of("llama", parallel), [Sequence(prompt, params, 0, 0, detail="logprobs")])
        scored.append(np.concatenate([detail.logprob for detail in s.prompt_details]))
    assert scored[0].shape == (21,)
    np.testing.assert_allclose(*(x[:20] for x in scored), atol=5e-5)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [("gemma3", "dp=2,cp=2,tp=2"), pytest.param("qwen3_5", "ep=2,tp=2", marks=pytest.mark.slow)],
)
def test_replicas_whose_pages_run_out_give_the_same_tokens(shape, parallel, engine_of, programs_of):
    """Each replica has pages for one longest sequence. Sequences are preempted, and move to lower rows."""
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
    got, want = requests([GREEDY], seed=2), requests([GREEDY], seed=2)
    for s in (*got, *want):
        s.max_tokens = plan.max_len - len(s.prompt)
    assert [s.tokens for s in run(engine, got)] == [s.tokens for s in run(engine_of(shape), want)]
    assert engine.scheduler.preemptions
    assert all(pages.free == pages.pool.count for pages in engine.scheduler.pages)


@pytest.mark.parametrize(("shape", "parallel"), [("smollm2", "dp=2,tp=2"), ("minicpm3", "cp=2,tp=2")])
def test_prompts_that_begin_alike_share_pages_of_a_replica(shape, parallel, engine_of):
    """Pages, and parts of pages, are copied on each device. A replica serves what it has the beginning of, unless the
    other one has less to do."""
    engine, alone = engine_of(shape, parallel), engine_of(shape)
    trunk = np.random.default_rng(3).integers(3, 131, 27).tolist()
    prompts = [trunk[: 27 - 4 * (i % 3)] + s.prompt[:9] for i, s in enumerate(requests([GREEDY], seed=4))]
    shares = poison_before_each_dispatch(engine)
    for _ in range(2):
        got, want = ([Sequence(p, GREEDY, 9 + i, seed=i) for i, p in enumerate(prompts)] for _ in range(2))
        assert [s.tokens for s in run(engine, got)] == [s.tokens for s in run(alone, want)]
    assert engine.stats.cached_tokens > 7 * 16
    assert 0 < max(shares) < 1
    assert all(pages.cached for pages in engine.scheduler.pages)
