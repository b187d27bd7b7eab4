"""Models whose rows have rings and states: snapshots that the devices have no room for go to the tiers with the pages
that they end in, and come back. Every token is what it is alone and without any cache."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.cache.host_tier import page_keys
from inferlib.cache.prefix_tree import encoded
from inferlib.engine.places import places_of
from inferlib.engine.tiers import Tiers
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.poison import poison
from tests.helpers.sequences import LEAST, run, sequence
from tests.helpers.shared_beginnings import (
    FAST,
    JOB,
    PAGE,
    UNIT,
    assert_as_if_alone,
    crowd,
    crowd_out,
    poisoned,
    prompt_of,
)

MUCH = 1 << 26
pytestmark = pytest.mark.usefixtures("always_fetched")


FURTHER = [pytest.param(kind, marks=pytest.mark.release) for kind in ("ministral", "kimi_linear")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FAST, *FURTHER])
def test_what_was_evicted_comes_back_from_the_host(kind, tight, alone):
    """Within a page and at the end of one, for the same prompt and for one that goes on."""
    with new_engine(tight(kind), host_cache=MUCH, in_flight=1) as engine:
        for length in (41, 33):
            prompt, longer = prompt_of(length, 0, 0), prompt_of(length, 0, 9)
            poisoned(engine, [sequence(prompt, 5)])
            crowd_out(engine)
            before = engine.source.hit_tokens["host"]
            for s in (sequence(prompt, 9), sequence(longer, 9)):
                assert poisoned(engine, [s])[0] == alone(kind, s.prompt, 9)
                assert s.cached == length - 1
            assert engine.source.hit_tokens["host"] > before


def test_prompts_of_one_moment_fetch_a_page_once(tight, alone):
    """The second one waits until the pages of the first one are written, and fetches the rest of its place."""
    kind = "gpt_oss"
    with new_engine(tight(kind), host_cache=MUCH, in_flight=1) as engine:
        run(engine, [sequence(prompt_of(41, 0, 0), 2)])
        crowd_out(engine)
        poison(engine)
        first, second = (sequence(prompt_of(41, 0, length), 9) for length in (1, 2))
        engine.add(first)
        engine.add(second)
        engine.advance()
        assert engine.scheduler.waiting == [second]
        run(engine, [])
        for s in (first, second):
            assert (s.tokens, s.cached) == (alone(kind, s.prompt, 9), 40)
        assert engine.source.hit_tokens["host"] == 40 + 40 % PAGE


@pytest.mark.slow
def test_a_snapshot_comes_back_for_pages_that_stayed(tight, alone):
    """Others needed its place, and nobody its pages."""
    kind = "qwen3_5_text"
    with new_engine(tight(kind), host_cache=MUCH) as engine:
        prompt = prompt_of(24, 0, 1)
        run(engine, [sequence(prompt, 2)])
        for i in range(1, 4):
            run(engine, [sequence(prompt_of(0, i, 9), 2)])
        pages = engine.scheduler.pages[0]
        assert pages.tree.match(None, encoded(prompt), 24).tokens == 24
        engine.source.settle()
        s = sequence(prompt, 9)
        assert run(engine, [s])[0] == alone(kind, prompt, 9)
        assert s.cached == 24
        assert engine.source.hit_tokens["host"] == 24 - PAGE


def test_what_was_evicted_comes_back_from_disk(tight, alone, tmp_path):
    """Also in another engine. Files of states are below."""
    kind = "gpt_oss"
    for hits in (0, 40):
        with new_engine(tight(kind), disk_cache=tmp_path / "pages") as engine:
            s = sequence(prompt_of(41, 0, 0), 9)
            assert run(engine, [s])[0] == alone(kind, s.prompt, 9)
            assert (s.cached, engine.source.hit_tokens["disk"]) == (hits, hits)
            crowd_out(engine)


@pytest.mark.slow
def test_a_damaged_file_is_computed_again(tight, alone, tmp_path):
    """Of a snapshot, and of a page before it."""
    kind, s = "qwen3_5_text", sequence(prompt_of(41, 0, 0), 9)
    s.encoded = encoded(s.prompt)
    place = next(iter(places_of(s, PAGE, UNIT, 0)))
    assert place.keys == list(page_keys(None, s.encoded, PAGE * 4))
    for key in (place.key, place.keys[1]):
        with new_engine(tight(kind), disk_cache=tmp_path) as engine:
            run(engine, [sequence(s.prompt, 9)])
            crowd_out(engine)
            path = tmp_path / engine.source.disk.model.hex() / f"{key.hex()}.page"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            again = sequence(s.prompt, 9)
            assert run(engine, [again])[0] == alone(kind, s.prompt, 9)
            assert again.cached == 0
            crowd_out(engine)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.sampled_from(FAST), st.lists(JOB, min_size=4, max_size=14), st.sampled_from([0, 1, 4, 40]), st.booleans())
def test_any_traffic_is_as_if_alone(tight, alone, tmp_path_factory, kind, jobs, host, disk):
    """Whatever is evicted, preempted and aborted, without tiers or with a host that has room for a place, for some or
    for all. What nobody can read holds NaN."""
    llm, folder = tight(kind), tmp_path_factory.mktemp("pages") if disk and host else None
    most = host * Tiers([], (), llm.engine.plan, llm.engine.config).places.nbytes or None
    with new_engine(llm, in_flight=1, host_cache=most, disk_cache=folder) as engine:
        assert_as_if_alone(engine, functools.partial(alone, kind), jobs, every=2 if host else 1)
        if most is None:
            return
        assert engine.source.host.nbytes <= most
        assert engine.source.host.nbytes == sum(x.nbytes for page in engine.source.host._pages.values() for x in page)


@pytest.mark.slow
def test_nothing_compiles_after_warmup(tight, tmp_path):
    """Nor what saves snapshots and restores them: states here, and rings by the same programs."""
    llm = tight("qwen3_5_text")
    with new_engine(llm, host_cache=MUCH, disk_cache=tmp_path) as engine:
        llm.warmup(["greedy"])
        before = compilations(), engine.programs.misses
        run(engine, crowd())
        assert engine.stats.cached_tokens > 50
        for _ in range(2):
            crowd_out(engine)
            run(engine, crowd())
        assert engine.source.hit_tokens["host"]
        assert (compilations(), engine.programs.misses) == before


def test_tiers_that_cannot_be(checkpoint):
    states = checkpoint("qwen3_5_text", num_hidden_layers=2, layer_types=("linear_attention",) * 2)
    with pytest.raises(ConfigurationError, match=r"and all layers keep rings or states: leave host_cache out"):
        build_llm(states, LEAST, host_cache=MUCH)
    with pytest.raises(ConfigurationError, match="holds no page with a snapshot, which has"):
        build_llm(checkpoint("gpt_oss"), LEAST, host_cache=1000)
    with pytest.raises(ConfigurationError, match=r"host_cache .* and snapshots is 0: leave host_cache out"):
        build_llm(checkpoint("gpt_oss"), LEAST, host_cache=MUCH, snapshots=0)
