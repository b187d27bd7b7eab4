"""Pages: their pool, and sequences that share one too small for all of them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib import Buckets, SamplingParams, configs
from inferlib.cache.pages import PagePool
from inferlib.cache.plan import CachePlan
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.memory import with_memory
from inferlib.engine.scheduler import LEAD, Scheduler
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.programs.program_set import ProgramSet
from tests.helpers.engines import smallest_model
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.sequences import GREEDY, LEAST, run, sequence
from tests.helpers.shared_beginnings import run_as_told


@settings(max_examples=200)
@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_the_pool_is_a_set_of_free_pages(count, calls):
    pool, free, taken = PagePool(count), set(range(count)), []
    for takes, number in calls:
        if takes and number > len(free):
            with pytest.raises(ValueError, match="are free"):
                pool.take(number)
        elif takes:
            pages = pool.take(number)
            assert len(set(pages)) == number
            assert free.issuperset(pages)
            free.difference_update(pages)
            taken += pages
        else:
            back, taken = taken[:number], taken[number:]
            pool.give_back(back)
            free.update(back)
            for page in back[:1]:
                with pytest.raises(ValueError, match=f"page {page} is free already"):
                    pool.give_back([page])
        assert pool.free == len(free)


# Around parts of pages, pages and steps of 16 tokens; together far more than the pool has.
LENGTHS = [1, 7, 8, 9, 15, 16, 17, 31, 33, 40]
COUNTS = [40, 57, 8, 9, 1, 33, 48, 30, 50, 56]
# Pages, and rings and states beside them.
KINDS = ("llama stacked", "gpt_oss", pytest.param("qwen3_5_text", marks=pytest.mark.release))


@pytest.fixture
def engine_of(tight):
    """`engine_of(kind)`: an engine that computes again what was preempted."""
    with contextlib.ExitStack() as stack:
        yield lambda kind: stack.enter_context(new_engine(tight(kind), prefix_caching=False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_are_preempted_go_on_as_if_alone(kind, engine_of):
    engine, prompts = engine_of(kind), random_prompts(LENGTHS, seed=30)
    assert engine.plan.pages == engine.plan.columns * 3 // 2
    pairs = list(zip(prompts, COUNTS, strict=True))
    alone = [run(engine, [sequence(*pair)])[0] for pair in pairs]
    assert engine.scheduler.preemptions == 0
    assert run(engine, [sequence(*pair) for pair in pairs]) == alone
    assert engine.scheduler.preemptions > 1


PENALIZED = SamplingParams(
    seed=5,
    top_p=0.9,
    frequency_penalty=0.7,
    repetition_penalty=1.3,
    bad_words=[[a, b] for a in range(30, 42) for b in range(60, 72)],
    min_tokens=10,
    logprobs=2,
    ignore_eos=True,
)


@pytest.mark.slow
def test_samples_penalties_and_log_probabilities_go_on(engine_of):
    """What is computed again of a sequence counts its tokens as generated, and draws the next one's numbers."""
    engine, prompts = engine_of("llama stacked"), random_prompts(LENGTHS[4:], seed=31)
    options = [dict(seed=i, detail="logprobs" if i % 2 else "") for i in range(6)]
    pairs = list(zip(prompts, COUNTS[4:], options, strict=True))

    def all_of(sequences: list[Sequence]) -> list:
        tokens = run(engine, sequences)
        logprobs = [[x.logprob for x in s.logprobs] for s in sequences]
        details = [sum(len(np.asarray(x.logprob)) for x in s.prompt_details) for s in sequences]
        assert [len(x) for x in logprobs] == [len(x) for x in tokens]
        assert details == [len(s.prompt) if s.seed % 2 else 0 for s in sequences]
        return [tokens, logprobs]

    alone = [all_of([sequence(p, n, PENALIZED, **o)]) for p, n, o in pairs]
    before = engine.scheduler.preemptions
    tokens, logprobs = all_of([sequence(p, n, PENALIZED, **o) for p, n, o in pairs])
    assert engine.scheduler.preemptions > before
    assert tokens == [x[0][0] for x in alone]
    for got, (_, want) in zip(logprobs, alone, strict=True):
        np.testing.assert_allclose(got, want[0], rtol=0, atol=1e-4)


JOB = st.tuples(
    st.integers(0, len(LENGTHS) - 1),
    st.integers(0, 20),  # the round of its arrival
    st.sampled_from([0, 0, 0, -1, 1.5]),  # its priority
    st.sampled_from([None, None, None, 0, 3, 9]),  # rounds until it is aborted
)


@settings(max_examples=6)
@given(st.lists(JOB, min_size=1, max_size=14))
def test_any_traffic_is_as_if_alone(tight, alone, jobs):
    """What a sequence has generated is the start of what it does alone. Cells that nobody can read hold NaN."""
    kind, prompts = "llama stacked", random_prompts(LENGTHS, seed=30)
    with new_engine(tight(kind), prefix_caching=False, in_flight=1) as engine:
        sequences = [sequence(prompts[i], COUNTS[i], priority=priority) for i, _, priority, _ in jobs]
        run_as_told(engine, sequences, [(arrival, abort) for _, arrival, _, abort in jobs], every=8)
        for s, (i, _, _, abort) in zip(sequences, jobs, strict=True):
            assert s.tokens == alone(kind, prompts[i], COUNTS[i])[: None if abort is None else len(s.tokens)]
        assert all(pages.free == pages.pool.count for pages in engine.scheduler.pages)


def test_a_higher_priority_takes_rows_and_pages(engine_of):
    engine, prompts = engine_of("llama stacked"), random_prompts([20] * 6, seed=32)
    low = [sequence(p, 40, priority=1) for p in prompts[:5]]
    for s in low:
        engine.add(s)
    for _ in range(6):
        engine.advance()
    before, high = engine.scheduler.preemptions, sequence(prompts[5], 40)
    engine.add(high)
    engine.advance()
    assert high.row >= 0
    assert engine.scheduler.preemptions > before
    run(engine, [])
    assert all(len(s.tokens) == 40 for s in [*low, high])


def test_low_priorities_do_not_starve():
    """They wait for at most LEAD later ones of the next priority."""
    config = EngineConfig(1, 40, Buckets((8,), (1,), (40,)))
    scheduler = Scheduler(config, Engine(smallest_model(), (), config).plan)
    low = sequence([8], 1, priority=1)
    scheduler.add(low)
    for _ in range(LEAD + 1):
        scheduler.add(sequence([8], 1))
    assert scheduler.waiting.index(low) == LEAD - 1


@pytest.mark.slow
# What a row has beside pages moves alike, whether it is a ring or a state.
@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("llama stacked", "qwen3_5_text"))]
)
def test_rows_move_so_that_small_programs_serve_few_rows(kind, engine_of):
    """Three short sequences end before the one in the last row, which goes on in the first; its pages, ring and state
    move with it."""
    engine, prompts = engine_of(f"{kind} moving"), random_prompts([3, 4, 5, 9], seed=33)
    sequences = [sequence(p, 4 if i < 3 else 40) for i, p in enumerate(prompts)]
    alone = run(engine, [sequence(prompts[3], 40)])[0]
    keys, ready = [], engine.programs.ready
    engine.programs.ready = lambda key: keys.append(key) or ready(key)
    try:
        assert run(engine, sequences)[3] == alone
    finally:
        del engine.programs.ready
    assert [key.rows for key in keys if not key.chunks][-1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_memory": 1000}, "cannot hold one sequence of max_len 96"),
        ({"cache_memory": "a lot"}, "a text such as '16GiB'"),
        ({"cache_memory": 0.5}, "does not tell its memory"),
        ({"page_size": 24}, "a power of two"),
    ],
)
def test_wrong_sizes(options, message, checkpoint):
    with pytest.raises(ConfigurationError, match=message):
        build_llm(checkpoint("llama"), LEAST, **options)


@pytest.mark.parametrize("priority", ["high", None, float("nan"), True, [0, 1]])
def test_wrong_priorities(priority, llama):
    with pytest.raises(ValueError, match="priorit"):
        llama.generate([[8]], GREEDY, priority=priority)


def sized(name: str, memory: float, platform: str = "gpu", **options) -> CachePlan:
    """The cache of a device with so many bytes."""
    model, device, decided = config_from_hf(configs.load(name)), DeviceKind(platform), EngineOptions(**options)
    abstract = abstract_model(model, "bfloat16", scan=platform == "tpu")
    config = with_memory(decided, lambda o: o.resolve(device, None, model), abstract, lambda config: int(memory))
    return ProgramSet.make(abstract, config).plan


@pytest.mark.slow
def test_sizes_follow_from_a_device_s_memory():
    """Of Llama-3-8B: 16 GB of weights, 131 kB a token. Gemma-3-27B's rings take 0.65 GB a row."""
    plan = sized("llama3-8b", 105e9)
    assert (plan.rows, plan.max_len) == (512, 131072)
    assert 70e9 < plan.nbytes < 84e9
    assert plan.tokens == plan.nbytes // 131072
    assert sized("llama3-8b", 105e9, cache_memory=0.25).nbytes == pytest.approx(26.25e9, rel=1e-3)
    assert sized("llama3-8b", 24e9, max_batch=8).max_len < 40_000
    with pytest.raises(ConfigurationError, match="cannot hold one sequence of max_len 131072"):
        sized("llama3-8b", 24e9, max_batch=8, max_len=131072)
    with pytest.raises(ConfigurationError, match="leave nothing of the 14"):
        sized("llama3-8b", 16e9)
    assert sized("gemma3-27b", 120e9).rows == 32
    assert sized("llama3-8b", 105e9, "tpu").rows == 64


def test_a_step_takes_the_shape_with_most_tokens_for_its_time():
    """The prompt would fit in the largest shape, of which most would be padding."""
    config = EngineConfig(4, 512, Buckets((32, 128, 512), (4,), (512,), tile=32), platform="cpu")
    model = smallest_model()
    scheduler = Scheduler(config, ProgramSet.make(model, config).plan)
    scheduler.add(sequence([1] * 140, 1))
    sizes = [scheduler.plan(1).key for _ in range(2)]
    assert [key.chunks * key.chunk for key in sizes] == [128, 32]
    assert scheduler.plan(1) is None
