"""Rows that decode have pages in the host's memory: those that queries want come, and leave unchanged. About 25 s."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.config import DeviceKind, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.host_pages import HostPages
from inferlib.engine.sequence import Status
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.poison import before_each_dispatch, poison
from tests.helpers.sequences import sequence
from tests.helpers.shared_beginnings import run_as_told

PAGE = 8
BUCKETS = Buckets((16,), (4,), (96,), tile=8)  # 12 pages
SCORED = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=0)
PROMPTS = random_prompts([40, 33, 21], seed=3)
# How a cache is stacked and stored; layers of other kinds are beside some.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama int8": {"scan": True, "kv_cache_dtype": "int8"},
    "gpt_oss": {},  # rings, and sinks
    "qwen3_5_text": {"scan": True},  # states
}
ONE = {"decode_steps": 1, "in_flight": 1}  # step after step
MOVING = {"buckets": Buckets((16,), (1, 4), (96,), tile=8), "decode_steps": 1}  # rows go to smaller batches


def kinds(*further: str) -> list[Any]:
    return ["llama", *(pytest.param(kind, marks=pytest.mark.release) for kind in further)]


@pytest.fixture(scope="module")
def build(checkpoint) -> Callable[..., LLM]:
    """`build(kind, pages)`: a shared LLM of four rows."""

    @functools.cache
    def made(kind: str, pages: str, **options: Any) -> LLM:
        sizes = {"page_size": PAGE, "decode_steps": 2, "attention_pages": pages, "buckets": BUCKETS, **KINDS[kind]}
        return build_llm(checkpoint(kind.split()[0]), **sizes | options)

    return made


@pytest.fixture(scope="module")
def tight(build) -> Callable[[str], LLM]:
    """`tight(kind)`: a shared LLM whose device has 80 positions for all rows, of up to 96 each."""

    def made(kind: str) -> LLM:
        of_page, of_rows = build(kind, "quest:3:resident=5").engine.plan.bytes_of()
        return build(kind, "quest:3:resident=5", cache_memory=of_rows + 10 * of_page)

    return made


def scored(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, float]]:
    """The tokens that follow prompts, with their log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, SCORED)]
    pairs = ((x.token_ids, x.logprobs) for x in outputs)
    return [(token, step[token].logprob) for tokens, steps in pairs for token, step in zip(tokens, steps, strict=True)]


def assert_nothing_left(engine: Engine) -> None:
    """No page is taken, and none is to be moved."""
    pages, source = engine.scheduler.pages[0], engine.source
    assert pages.pool.free == pages.pool.count
    assert isinstance(source, HostPages)
    source.settle()
    assert not source._leaving
    assert not source._restored


@pytest.mark.slow
def test_rows_whose_pages_are_all_here_are_those_of_the_selection(build):
    """Bit by bit."""
    expected = scored(build("llama", "quest:3", prefix_caching=False, **ONE), PROMPTS)
    llm = build("llama", "quest:3:resident=12", **ONE)
    assert scored(llm, PROMPTS) == expected
    assert llm.stats.wanted_reads
    assert not llm.stats.sent_pages


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds("llama int8", "gpt_oss"))
def test_pages_that_are_asked_for_a_step_ahead_are_as_if_they_had_never_left(kind, build, monkeypatch):
    """With steps that know what the next one wants, every page is there when it is read, with the cells that it had."""
    told: list[np.ndarray] = []
    learn = HostPages.learn_wanted
    with monkeypatch.context() as patch:
        patch.setattr(HostPages, "learn_wanted", lambda self, s, counts: (told.append(counts), learn(self, s, counts)))
        expected = scored(build(kind, "quest:3:resident=12", **ONE), PROMPTS[:1])
    following = iter([*told[1:], told[-1]])  # what the last step wants is not told

    def learn_the_next(self: HostPages, s: Any, counts: np.ndarray) -> None:
        learn(self, s, counts)
        s.wanted = next(following)[:-1]

    monkeypatch.setattr(HostPages, "learn_wanted", learn_the_next)
    llm = build(kind, "quest:3:resident=8", **ONE)
    assert scored(llm, PROMPTS[:1])[:-1] == expected[:-1]
    assert llm.stats.absent_reads == 0
    assert llm.stats.brought_pages > 5
    assert llm.stats.sent_pages < llm.stats.brought_pages + 5  # a page that leaves again is not copied
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("kind", kinds("qwen3_5_text"))
@pytest.mark.slow
def test_rows_are_longer_than_the_pages_on_the_device(kind, tight):
    """They are the same with NaN in all that is not valid, and nothing compiles."""
    llm = tight(kind)
    llm.warmup(["logprobs"])
    before = compilations()
    assert llm.engine.plan.pages == 10
    with before_each_dispatch(llm, lambda engine: None):
        expected = scored(llm, PROMPTS)
        assert llm.stats.brought_pages > 20
        assert llm.stats.absent_reads > 20
        assert compilations() == before
    with before_each_dispatch(llm, poison):
        assert scored(llm, PROMPTS) == expected
    with pytest.raises(ValueError, match="all its pages on the device, which hold 80 tokens: shorten the prompt"):
        llm.generate([[5] * 90], SamplingParams(max_tokens=2))
    before = compilations()
    scored(llm, PROMPTS)  # with two dispatches in flight
    assert compilations() == before
    assert not llm.engine.scheduler.preemptions
    assert_nothing_left(llm.engine)


@pytest.mark.slow
def test_pages_of_rows_that_are_aborted_preempted_or_moved(build):
    """Rows go on with as many tokens as they were to have, and no page is lost on either side."""
    with new_engine(build("llama", "quest:3:resident=5", **MOVING), pages=22) as engine:
        prompts = random_prompts([40, 9, 25, 33, 17, 40, 12, 30], seed=5)
        some = [sequence(prompt, 50, priority=-(i % 3)) for i, prompt in enumerate(prompts)]
        times = [(3 * i, 20 if i in (0, 4) else None) for i in range(len(some))]
        run_as_told(engine, some, times, 0)
        assert engine.scheduler.preemptions
        assert engine.stats.brought_pages > 50
        assert [len(s.tokens) == 50 for s in some].count(False) <= 2
        assert all(s.status is Status.FINISHED and not s.hosted and s.wanted is None for s in some)
        assert_nothing_left(engine)


@pytest.mark.slow
def test_what_is_lost_with_a_dispatch_leaves_no_page(build):
    llm = build("llama", "quest:3:resident=5", **MOVING)
    with new_engine(llm) as engine:
        lost = [sequence(prompt, 50) for prompt in PROMPTS]
        for s in lost:
            engine.add(s)
        while engine.source.counts()["brought_pages"] < 3:
            engine.advance()

        def no_program(key: ProgramKey) -> None:
            raise RuntimeError("the device is lost")

        engine._program = no_program
        with pytest.raises(RuntimeError, match="the device is lost"):
            engine.advance()
        assert_nothing_left(engine)
    assert all(s.error is not None and not s.hosted for s in lost)


@pytest.mark.slow
@pytest.mark.parametrize(("arrival", "preemptions"), [(8, 1), (27, 0)])
def test_a_row_that_could_not_return_is_not_preempted(arrival, preemptions, tight):
    """It has more tokens than pages on the device have positions, which prefilling it again would take."""
    with new_engine(tight("llama")) as engine:
        long, urgent = sequence(PROMPTS[0], 56, SCORED), sequence(random_prompts([70])[0], 5, SCORED, priority=-1)
        run_as_told(engine, [long, urgent], [(0, None), (arrival, None)], 0)
        assert engine.scheduler.preemptions == preemptions
        assert [len(s.tokens) for s in (long, urgent)] == [56, 5]


def resolve(platform: str = "cpu", parallel: str | None = None, **options: Any):
    shards = None if parallel is None else planned_shards(Parallelism.parse(parallel))
    sizes = {"max_batch": 8, "max_len": 4096, "attention_pages": "quest:8:resident=16", **options}
    return EngineOptions(**sizes).resolve(DeviceKind(platform), shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_pages": "quest:8:resident=1"}, "keeps 2 resident pages or more"),
        ({"attention_pages": "quest:8:resident=7"}, "the device has to keep 8: take resident=8 or more"),
        ({"attention_pages": "quest:64:16:resident=2"}, "the device has to keep 8: take resident=8 or more"),
        ({"attention_pages": "quest:2:resident=3", "decode_steps": 64}, "the device has to keep 4"),
        ({"parallel": "tp=2"}, "moves the pages of one device: leave parallel out"),
        ({"speculation": "ngram:3"}, "by one query of a row: leave speculation out"),
        ({"host_cache": "1GiB"}, "leave host_cache and disk_cache out"),
        ({"cache_policy": "keydiff:2048"}, "does not work with attention_pages"),
    ],
)
def test_what_cannot_have_pages_elsewhere(options, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)


def test_models_that_read_all_pages(checkpoint):
    for path, why in (
        (checkpoint("gpt_oss", sliding_window=90), "latent attention and windows of nearly max_len read them all"),
        (checkpoint("gemma3n_text"), "the cache of another layer do not tell which ones they want: leave resident out"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            build_llm(path, BUCKETS, attention_pages="quest:3:resident=12")


def test_the_plan_has_what_rows_keep_and_one_prompt(build):
    """Four rows: five pages of each of three, and twelve for a prompt. Rows have the summaries of all."""
    plan = build("llama", "quest:3:resident=5").engine.plan
    assert plan.pages == 3 * 5 + 12
    assert [x.shape[:3] for x in plan.part(plan.arrays, of_rows=True)] == [(4, 12, 1)] * 2
    with pytest.raises(ConfigurationError, match="cannot hold 5 resident pages of one sequence of max_len 96"):
        build("llama", "quest:3:resident=5", cache_memory=4 * plan.bytes_of()[0])
