"""Prompts that other devices prefill: every token is what it is where the same devices do both."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib import LLM
from inferlib.engine import transit
from inferlib.engine.engine import Engine
from inferlib.engine.prefiller import Prefiller, check_prefilling, prefiller_of
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.sharding.mesh import Parallelism
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, random_prompts
from tests.helpers.poison import poison
from tests.helpers.sequences import FOUR_ROWS, GREEDY, run, sequence
from tests.helpers.shared_beginnings import BESIDE, JOB, PAGE, SAMPLED, assert_as_if_alone, prompt_of

KIND = "llama stacked"
ATTENTION_APART = {"parallel": "tp=2,rules=dp_attention", "speculation": "ngram:3", "kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def apart(tight):
    """`apart(kind)`: an engine of `tight(kind)` for which another device prefills, and what does."""
    of_kind = functools.cache(
        lambda kind: prefiller_of(tight(kind).engine.programs, tight(kind).engine.weights, [jax.devices()[1]])
    )

    @contextlib.contextmanager
    def build(kind: str, **options: Any) -> Iterator[tuple[Engine, Prefiller]]:
        llm, first = tight(kind), of_kind(kind).engine
        config = replace(llm.engine.config, **options)
        other = Engine(first.model, first.weights, first.config, programs=first.programs)
        source = Prefiller(other, llm.engine.plan, llm.engine.config.shards)
        engine = Engine(llm.engine.model, llm.engine.weights, config, programs=llm.engine.programs, source=source)
        yield engine, source
        source.settle()
        source._thread.run(lambda: True)  # what was posted
        source.engine.scheduler.pages[0].forget()
        assert_accounted(source.engine)
        assert not source._handed
        assert not source._waiting

    return build


def jobs(*, samples: bool) -> list[tuple[list[int], int, Any]]:
    """Prompts that end before, at and behind a page's end, two that begin alike, and one shorter than a page."""
    beginnings = [prompt_of(40, 0, 3), prompt_of(40, 1, 7)]
    return [
        (prompt, 9, SAMPLED if i % 2 and samples else GREEDY)
        for i, prompt in enumerate([*random_prompts([32, 33, 48, 15, 17], seed=8), *beginnings])
    ]


# Pages alone and beside rings; beside rings of integers, and latents beside states. States have a test of an LLM.
KINDS = [KIND, "gpt_oss", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("ministral", "kimi_linear"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_engine(kind, apart, alone, monkeypatch, caplog):
    """With NaN in all free pages, and room for one sequence under way or for all; a second time the pages are in the
    cache of the engine that decodes. What is sampled takes further programs: of one kind."""
    told = jobs(samples=kind == KIND)
    expected = [alone(kind, prompt, count, params) for prompt, count, params in told]
    for room in (1, 1 << 30):
        monkeypatch.setattr(transit, "MOST_BYTES", room)
        with apart(kind) as (engine, source):
            poison(engine)
            poison(source.engine)
            for _ in range(2):
                sequences = [sequence(prompt, count, params) for prompt, count, params in told]
                assert run(engine, sequences) == expected
            assert engine.source.hit_tokens["prefill"] >= 6 * 16
            assert not caplog.records


def test_what_was_computed_for_others_counts_as_cached(apart):
    with apart(KIND) as (engine, source):
        first, again, longer = (sequence(prompt_of(40, 0, length), 2) for length in (3, 3, 30))
        run(engine, [first])
        assert (first.cached, source.hit_tokens["prefill"]) == (0, 32)
        engine._forget_pages()
        run(engine, [again])  # of the second page's last 8 tokens, the engine that prefills computed the last one again
        assert (again.cached, source.hit_tokens["prefill"]) == (24, 64)
        run(engine, [longer])
        assert longer.cached == 40
        engine.count_pages()
        assert engine.stats.handed_tokens == source.hit_tokens["prefill"]


def test_what_fails_is_prefilled_beside_decoding(apart, alone, monkeypatch, caplog):
    with apart(KIND) as (engine, source):

        def fail(*_, **__):
            raise ValueError("broken")

        monkeypatch.setattr(source.engine, "_send", fail)
        prompts = random_prompts([40, 50], seed=9)
        assert run(engine, [sequence(p, 5) for p in prompts]) == [alone(KIND, p, 5) for p in prompts]
        assert "the devices that prefill failed: broken" in caplog.text
        monkeypatch.undo()
        assert run(engine, [sequence(prompts[0] + [5] * 16, 5)]) == [alone(KIND, prompts[0] + [5] * 16, 5)]
        assert source.hit_tokens["prefill"]


def test_pages_that_wait_are_lost_with_the_engine(apart, alone, monkeypatch, caplog):
    """Another prompt fails while there is no room for the first one's pages, which its cache has no more then."""
    with apart(KIND) as (engine, source):
        monkeypatch.setattr(source, "_handed", 1 << 40)
        first, second = (sequence(p, 5) for p in random_prompts([40, 50], seed=12))
        engine.add(first)
        while not source._waiting:
            engine.advance()

        def fail(*_, **__):
            raise ValueError("broken")

        monkeypatch.setattr(source.engine, "_send", fail)
        assert run(engine, [second]) == [alone(KIND, second.prompt, 5)]
        assert first.tokens == alone(KIND, first.prompt, 5)
        assert "the devices that prefill failed: broken" in caplog.text
        assert source.hit_tokens["prefill"] == 0
        monkeypatch.undo()


@pytest.mark.slow
def test_a_snapshot_that_is_lost_is_computed_beside_decoding(apart, alone, monkeypatch):
    """Another one takes its place, while there is no room for it on the devices that decode."""
    with apart("gpt_oss") as (engine, source):
        monkeypatch.setattr(source, "_handed", 1 << 40)
        s = sequence(random_prompts([40], seed=12)[0], 5)
        engine.add(s)
        while not source._waiting:
            engine.advance()
        snapshots, lost = source.engine.scheduler.pages[0].snapshots, source._waiting[0][1].snapshot
        source._thread.run(lambda: (snapshots.drop(lost),))
        monkeypatch.undo()
        source._thread.run(lambda: (source._hand_over(),))
        assert run(engine, []) == []
        assert s.tokens == alone("gpt_oss", s.prompt, 5)
        assert source.hit_tokens["prefill"] == 0


@settings(max_examples=3)
@given(st.lists(JOB, min_size=4, max_size=10))
@pytest.mark.slow
def test_any_traffic_is_as_if_alone(apart, alone, jobs):
    """Whatever is evicted, preempted and aborted on either side, with NaN where nobody may read."""
    kind = "gpt_oss"
    with apart(kind, in_flight=1) as (engine, _):
        assert_as_if_alone(engine, functools.partial(alone, kind), jobs, every=2)


def test_pages_that_cannot_be_sent_are_computed_beside_decoding(apart, alone, monkeypatch, caplog):
    with apart(KIND) as (engine, source):

        def fail(cache, pages):
            raise ValueError("no memory")

        monkeypatch.setattr(source._handover, "send", fail)
        s = sequence(random_prompts([40], seed=13)[0], 5)
        assert run(engine, [s]) == [alone(KIND, s.prompt, 5)]
        assert "its pages were not sent: no memory" in caplog.text


def test_sequences_that_are_cancelled_leave_nothing(apart, alone):
    with apart(KIND) as (engine, source):
        *others, last = (sequence(p, 5) for p in random_prompts([60] * 5, seed=10))
        for s in (*others, last):
            engine.add(s)
        engine.advance()
        for s in others:
            engine.cancel(s)
        assert run(engine, []) == []
        assert last.tokens == alone(KIND, last.prompt, 5)
        assert source.hit_tokens["prefill"] < 5 * 48


@pytest.mark.slow
def test_an_llm_warms_up_sleeps_and_forgets(checkpoint, alone):
    """One whose prompts come with their states."""
    kind, prompts = "qwen3_5_text", random_prompts([40, 20, 70], seed=11)
    expected = [alone(kind, prompt, 9) for prompt in prompts]
    params = replace(GREEDY, max_tokens=9)
    llm = build_llm(checkpoint(kind), FOUR_ROWS, decode_steps=1, prefill_devices=[3], **BESIDE[kind])
    count = llm.warmup(["greedy"])
    assert count > len(llm.engine.source.keys) > 0
    before = compilations()
    for change in (lambda: None, llm.reset_prefix_cache, lambda: (llm.sleep(), llm.wake())):
        change()
        assert [x.outputs[0].token_ids for x in llm.generate(prompts, params)] == expected
    assert compilations() == before
    assert llm.stats.handed_tokens == 3 * (32 + 16 + 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("llama", {"parallel": "dp=2", "scan": True}, marks=pytest.mark.release),
        # That pages go from mesh to mesh is in `tests/programs/test_page_transfer.py` too.
        pytest.param("llama", {"parallel": "tp=2,rules=dp_attention"}, marks=pytest.mark.release),
        pytest.param("llama", ATTENTION_APART, marks=pytest.mark.release),
        pytest.param("gpt_oss", {"parallel": "ep=2,tp=2"}, marks=pytest.mark.release),
    ],
    ids=str,
)
def test_kinds_of_engines(kind, options, checkpoint):
    """A second time all devices have the prompts, on any replica."""
    path, prompts = checkpoint(kind), random_prompts([40, 20, 70], seed=11)
    prompts += [prompt_of(40, tail, 9) for tail in range(4)]
    count = Parallelism.parse(options.get("parallel", "")).devices
    devices = jax.devices()[4 : 4 + count]
    outputs = []
    for more in ({}, {"prefill_devices": devices}):
        llm = build_llm(path, FOUR_ROWS, page_size=PAGE, decode_steps=1, **options, **more)
        outputs.append([x.outputs[0].token_ids for _ in range(2) for x in llm.generate(prompts, GREEDY)])
    assert outputs[0] == outputs[1]
    assert llm.stats.handed_tokens >= 32 + 16 + 64


def test_what_is_refused(llama, llm_of):
    def check(llm: LLM, devices: Any, **options: Any) -> None:
        check_prefilling(devices, llm.engine.programs, llm.config, compiled=False, **options)

    for devices, message in (
        ([], r"are devices, such as jax.devices\(\)\[4:\], or their numbers, got \[\]"),
        (4, "or their numbers, got 4"),
        ([8], "has 8, and JAX has devices 0 to 7"),
        ([0], "which decodes: give other devices"),
        ([1, 2], "as many as those that decode, 1, all different, got 2"),
    ):
        with pytest.raises(ConfigurationError, match=f"prefill_devices.*{message}"):
            check(llama, devices)
    with pytest.raises(ConfigurationError, match="leave artifacts out"):
        check_prefilling([1], llama.engine.programs, llama.config, compiled=True)
    for options, message in (
        ({"prefix_caching": False}, "prompts share, and prefix_caching is False"),
        ({"host_cache": "1GiB"}, "leave host_cache and disk_cache out"),
        ({"expert_load": True}, "leave expert_load out"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_prefilling([1], llama.engine.programs, replace(llama.config, **options), compiled=False)
