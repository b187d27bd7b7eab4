"""Models whose rows have rings and states: prompts that begin alike go on from snapshots of these, and every token is
what it is alone."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.config import EngineConfig
from inferlib.option_checks import ConfigurationError
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.poison import tokens_of
from tests.helpers.sequences import FOUR_ROWS, GREEDY, LEAST, run, sequence
from tests.helpers.shared_beginnings import (
    BESIDE,
    FAST,
    JOB,
    PAGE,
    SAMPLED,
    TAILS,
    TRUNK,
    UNIT,
    assert_as_if_alone,
    poisoned,
    prompt_of,
)

STATES = ("qwen3_5_text", "kimi_linear")
KINDS = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.release) for kind in BESIDE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_on_where_an_earlier_one_ended(kind, tight, alone):
    """The same prompt again, one that is longer, and one whose last token is another. Rings serve any place where they
    still have the window, states that behind the last unit. What is not valid holds NaN, so that a row which reads
    what was not restored shows it."""
    for length in (9, 16, 17, 33, 40) if kind in FAST else (16, 33):
        with new_engine(tight(kind), in_flight=1) as engine:
            prompt, longer, other = prompt_of(length, 0, 0), prompt_of(length, 0, 9), prompt_of(length - 1, 1, 1)
            for i, s in enumerate([sequence(prompt, 5), sequence(prompt, 5), sequence(longer, 9), sequence(other, 3)]):
                assert poisoned(engine, [s])[0] == alone(kind, s.prompt, s.max_tokens)
                common = length if s.prompt is longer and kind not in STATES else length - 1
                assert s.cached == (common // UNIT * UNIT if i else 0)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.fast_cases(1)
def test_requests_of_one_moment_wait_for_a_snapshot(kind, tight, alone):
    with new_engine(tight(kind)) as engine:
        sequences = [sequence(prompt_of(33, 0, 4), 6) for _ in range(6)]
        expected = alone(kind, sequences[0].prompt, 6)
        assert run(engine, sequences) == [expected] * 6
        assert [s.cached for s in sequences] == [0] + [32] * 5


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", FAST)
def test_a_snapshot_is_saved_where_prompts_part(kind, tight, alone):
    """A state does not go back to where the second leaves the first: it computes all of it again, for the third. What
    the second has behind that is there for the fourth."""
    with new_engine(tight(kind), in_flight=1) as engine:
        prompts = [prompt_of(24, 0, 25), prompt_of(24, 1, 25), prompt_of(24, 2, 25), prompt_of(24, 1, 28)]
        for prompt, cached in zip(prompts, (0, 0, 24, 48), strict=True):
            s = sequence(prompt, 3)
            assert poisoned(engine, [s])[0] == alone(kind, prompt, 3)
            assert s.cached == cached


@pytest.mark.parametrize("kind", FAST)
def test_the_first_of_a_moment_saves_what_the_others_share(kind, tight, alone):
    """And these wait for it, though they are longer than what a ring goes back."""
    with new_engine(tight(kind)) as engine:
        sequences = [sequence(prompt_of(24, i % 3, 25 + i // 3), 3) for i in range(4)]
        expected = [alone(kind, s.prompt, 3) for s in sequences]
        assert run(engine, sequences) == expected
        assert [s.cached for s in sequences] == [0, 24, 24, 48]


@settings(max_examples=6)
@given(st.sampled_from(FAST), st.lists(JOB, min_size=1, max_size=14))
@pytest.mark.release
def test_any_traffic_is_as_if_alone(tight, alone, kind, jobs):
    """Also in `test_places.py`, with tiers and without."""
    with new_engine(tight(kind), in_flight=1) as engine:
        assert_as_if_alone(engine, functools.partial(alone, kind), jobs, every=1)


@pytest.mark.parametrize("kind", FAST)
def test_the_least_recently_used_snapshot_makes_room(kind, tight, alone):
    """There are three. That of the trunk is used again and again."""
    with new_engine(tight(kind)) as engine:
        trunk = sequence(prompt_of(33, 0, 0), 1)
        run(engine, [trunk])
        for i in range(5):
            s = sequence(prompt_of(33, i, 1 + i), 2)
            assert run(engine, [s])[0] == alone(kind, s.prompt, 2)
            assert s.cached == 32
            run(engine, [sequence(TAILS[i], 2)])
        engine.count_pages()
        assert engine.stats.evicted_snapshots > 1
        assert engine.stats.saved_snapshots <= 3
        engine.forget_prefixes()
        assert (engine.stats.saved_snapshots, engine.stats.cached_pages) == (0, 0)


@pytest.mark.release
@pytest.mark.parametrize(
    ("family", "parallel"), [("gemma2", "dp=2,cp=2"), ("gpt_oss", "dp=2,cp=2"), ("gpt_oss", "dp=2,cp=2,tp=2")]
)
def test_devices_save_their_parts(family, parallel, checkpoint, llm_of):
    """Each replica has snapshots of its rows, and each device its part of them."""
    options = {"page_size": PAGE, "decode_steps": 1, "snapshots": 2}
    llm = build_llm(checkpoint(family), FOUR_ROWS, parallel=parallel, **options)
    prompts = [prompt_of(8 * i % 48, i % 3, 5 + i) for i in range(14)]
    expected = tokens_of(llm_of(family), prompts, dataclasses.replace(GREEDY, max_tokens=20))
    for _ in range(2):
        sequences = [sequence(prompt, 20) for prompt in prompts]
        assert run(llm.engine, sequences) == expected
    assert llm.stats.cached_tokens > 100
    assert all(pages.snapshots.saved == 2 for pages in llm.engine.scheduler.pages)


@pytest.mark.release
def test_outputs_of_one_prompt_go_on_from_its_snapshot(tight):
    """Sampled; greedy ones of one moment are above."""
    llm, prompt = tight("qwen3_5_text"), prompt_of(33, 2, 0)
    params = dataclasses.replace(SAMPLED, n=4, max_tokens=12)

    def outputs(**options) -> list[list[int]]:
        with new_engine(llm, **options):
            (result,) = llm.generate([prompt], params)
            assert llm.stats.cached_tokens == (0 if options else 3 * 32)
            return [output.token_ids for output in result.outputs]

    assert outputs() == outputs(prefix_caching=False)


@pytest.mark.slow
def test_memory_bounds_snapshots(checkpoint):
    """By default they take a quarter of what rows and one sequence leave. Without any, nothing is shared."""
    path = checkpoint("gpt_oss")
    plan = build_llm(path, LEAST).engine.plan
    assert plan.snapshots == plan.rows == 4
    assert sum(x.nbytes() for x in plan.snapshot_arrays) == plan.bytes_of()[1] // 2
    of_page, of_both = plan.bytes_of()
    of_rows, least = of_both // 2, of_both // 2 + plan.columns * of_page
    for memory, count in ((least, 0), (least + of_rows, 1), (least + 9 * of_rows, 4)):
        sized = build_llm(path, LEAST, cache_memory=memory)
        assert sized.engine.plan.snapshots == count
        assert sum(sized.engine.plan.bytes_of()) <= memory
        assert ("no room for snapshots" in (sized.no_prefix_caching or "")) == (not count)
    none = build_llm(path, LEAST, snapshots=0)
    assert "have a ring of each row" in none.no_prefix_caching
    assert "snapshots is 0" in none.no_prefix_caching
    assert none.engine.snapshots == ()
    results = [none.generate([TRUNK[:40]], dataclasses.replace(GREEDY, max_tokens=8))[0] for _ in range(2)]
    assert [result.num_cached_tokens for result in results] == [0, 0]


@pytest.mark.parametrize("count", [-1, 1.5, "4", True])
def test_wrong_numbers_of_snapshots(count):
    with pytest.raises(ConfigurationError, match="snapshots is how many"):
        EngineConfig(4, 96, LEAST, snapshots=count)
