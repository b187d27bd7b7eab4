"""Prompts that begin alike share pages: every token is what it is alone and without a cache of prefixes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.aot.compile import environment
from inferlib.buckets import Buckets
from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.replica_pages import ReplicaPages
from inferlib.engine.scheduler import Scheduler
from inferlib.engine.sequence import Status
from inferlib.option_checks import ConfigurationError
from inferlib.programs.row_changes import Changes, _at_once, _one_by_one
from inferlib.targets import parse_target
from tests.helpers.engines import Replicas, assert_accounted, smallest_model
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.sequences import GREEDY, LEAST, run, sequence
from tests.helpers.shared_beginnings import (
    JOB,
    PENALIZED,
    SAMPLED,
    TAILS,
    TRUNK,
    UNIT,
    assert_as_if_alone,
    crowd,
    prompt_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama stacked", pytest.param("llama int8", marks=pytest.mark.release), "minicpm3"])
def test_edges_of_pages_and_of_their_parts(kind, tight, alone):
    """The same prompt again, one that is longer by a token, and one whose last token is another."""
    lengths = [7, 8, 9, 15, 16, 17, 24, 25, 32, 33] if kind == "llama stacked" else [16, 25]
    for length in lengths:
        with new_engine(tight(kind)) as engine:
            prompt, longer, other = prompt_of(length, 0, 0), prompt_of(length, 0, 1), prompt_of(length - 1, 1, 1)
            for s in (sequence(prompt, 5), sequence(prompt, 5), sequence(longer, 9), sequence(other, 3)):
                hit = engine.scheduler.pages[0].cached > 0
                assert run(engine, [s])[0] == alone(kind, s.prompt, s.max_tokens)
                common = length - (s.prompt is not longer)
                assert s.cached == (common // UNIT * UNIT if hit else 0)


def test_requests_of_one_moment_prefill_what_they_share_once(tight, alone):
    """The others wait, and let one pass that begins otherwise."""
    with new_engine(tight("llama stacked")) as engine:
        prompts = [prompt_of(40, i % 6, 3 + i) for i in range(8)]
        stranger = random_prompts([9], seed=52)[0]
        sequences = [sequence(prompt, 6) for prompt in [*prompts, stranger]]
        expected = [alone("llama stacked", s.prompt, 6) for s in sequences]
        for s in sequences:
            engine.add(s)
        engine.scheduler.plan(1)
        assert [s.row >= 0 for s in sequences] == [True] + [False] * 7 + [True]
    with new_engine(tight("llama stacked")) as engine:
        sequences = [sequence(s.prompt, 6) for s in sequences]
        assert run(engine, sequences) == expected
        assert [s.cached for s in sequences[:8]] == [0] + [40] * 7
        assert engine.stats.cached_tokens == 7 * 40


@pytest.mark.slow
def test_outputs_of_one_prompt_share_it(tight):
    llm, prompt = tight("llama stacked"), prompt_of(33, 2, 0)
    params = dataclasses.replace(SAMPLED, n=4, max_tokens=12)

    def outputs(**options) -> list[list[int]]:
        with new_engine(llm, **options):
            (result,) = llm.generate([prompt], params)
            assert result.num_cached_tokens == 0
            assert llm.stats.cached_tokens == (0 if options else 3 * 32)
            return [output.token_ids for output in result.outputs]

    assert outputs() == outputs(prefix_caching=False)


def test_the_next_turn_of_a_chat_reuses_what_was_generated(tight, alone):
    llm = tight("llama stacked")
    with new_engine(llm):
        first = llm.generate([TRUNK[:20]], dataclasses.replace(GREEDY, max_tokens=21))[0]
        written = 20 + 21 - 1  # the last token has no cell
        prompt = [*TRUNK[:20], *first.outputs[0].token_ids, *TAILS[0][:9]]
        second = llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=8))[0]
        assert second.num_cached_tokens == written
        assert second.outputs[0].token_ids == alone("llama stacked", prompt, 8)
        llm.reset_prefix_cache()
        assert llm.stats.cached_pages == 0
        assert llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=1))[0].num_cached_tokens == 0


def test_only_prompts_of_one_salt_share(tight):
    llm, ids = tight("llama stacked"), prompt_of(33, 0, 0)
    with new_engine(llm):
        prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in "aba"] + [ids, ids]
        results = [llm.generate(prompt, dataclasses.replace(GREEDY, max_tokens=4))[0] for prompt in prompts]
        assert [result.num_cached_tokens for result in results] == [0, 0, 32, 0, 32]
        assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [pytest.param(SAMPLED, id="sampled", marks=pytest.mark.release), pytest.param(PENALIZED, id="penalized")]
)
def test_samples_and_penalties_count_tokens_that_are_cached(params, tight, alone):
    """Of prompts, and of sequences that come back."""
    with new_engine(tight("llama stacked")) as engine:
        prompts = [prompt_of(33, i, 4) for i in range(5)]
        sequences = [sequence(prompt, 40, params, seed=i) for i, prompt in enumerate(prompts)]
        expected = [alone("llama stacked", s.prompt, 40, params, s.seed) for s in sequences]
        assert run(engine, sequences) == expected
        assert engine.scheduler.preemptions
        assert engine.stats.cached_tokens > 4 * 32  # what was preempted came back


def test_details_of_a_prompt_are_computed_for_all_of_it(tight):
    llm, prompt = tight("llama stacked"), prompt_of(33, 0, 0)
    with new_engine(llm, prefix_caching=False):
        expected = llm.logits(prompt)
    with new_engine(llm):
        for hits in (0, 32):  # its pages are cached, and it finds others' there
            np.testing.assert_array_equal(llm.logits(prompt), expected)
            assert llm.stats.cached_tokens == hits
            result = llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=3))[0]
            assert result.num_cached_tokens == 32


@pytest.mark.parametrize(("shape", "dim"), [((7, 2, 4), 0), ((3, 7, 2, 4), 1)])
def test_both_forms_copy_pages(shape, dim):
    """Copies to page 7, which does not exist, are padding."""
    array, source, target = (
        np.arange(np.prod(shape)).reshape(shape),
        np.array([1, 2, 5, 0, 0]),
        np.array([3, 1, 6, 7, 7]),
    )
    expected, pages = array.copy(), (slice(None),) * dim
    expected[(*pages, target[:3])] = array[(*pages, source[:3])]
    for form in (_one_by_one, _at_once):
        np.testing.assert_array_equal(form(dim, *map(jnp.asarray, (array, source, target))), expected)


ON_TPU = """
import jax, jax.numpy as jnp, sys
from functools import partial
from jax.experimental import topologies
from inferlib.programs.row_changes import _at_once
device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices[0]
make = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
keys, latents, scales = (4, 64, 8, 128, 128), (4, 64, 1, 128, 512), (4, 64, 8, 128)
for shape, dtype in ((keys, "bfloat16"), (latents, "bfloat16"), (scales, "float32")):
    numbers = make((16,), jnp.int32)
    copy = jax.jit(partial(_at_once, 1), donate_argnums=0).lower(make(shape, dtype), numbers, numbers).compile()
    print(copy.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.release
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")
def test_the_tpu_compiler_copies_no_more_than_pages():
    """Of stacked arrays of 67, 34 and 1 MB."""
    environ = environment(parse_target("v6e-8")) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.run([sys.executable, "-c", ON_TPU], env=environ, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    assert all(int(size) < 1 << 18 for size in child.stdout.split())
    assert len(child.stdout.split()) == 3


@settings(max_examples=8)
@given(st.lists(JOB, min_size=1, max_size=14))
@pytest.mark.release
def test_any_traffic_is_as_if_alone(tight, alone, jobs):
    """Also in `test_tiers.py`, with tiers and without."""
    kind = "llama stacked"
    with new_engine(tight(kind), in_flight=1) as engine:
        assert_as_if_alone(engine, functools.partial(alone, kind), jobs)


def test_a_replica_serves_what_it_has_the_beginning_of():
    """Unless its rows are taken, or it has much more to do."""
    shards = Replicas(2)
    config = EngineConfig(6, 64, Buckets((64,), (6,), (64,), tile=4), shards=shards, page_size=4, cache_memory=1 << 14)
    scheduler = Scheduler(config, Engine(smallest_model(), (), config).plan)

    def replica_of(prompt: list[int]) -> int:
        s = sequence(prompt, 1)
        scheduler.add(s)
        scheduler.plan(1)
        return s.row // config.rows

    trunk, other = TRUNK[:20], TAILS[0][:20]
    assert [replica_of([*trunk, i]) for i in range(3)] == [0, 0, 0]
    assert replica_of([*trunk, 3]) == 1
    assert [replica_of(other), replica_of([*trunk, 4])] == [1, 1]

    scheduler = Scheduler(config, Engine(smallest_model(), (), config).plan)
    assert replica_of(TRUNK + TAILS[1][:12]) == 0  # fifteen pages in use
    assert replica_of(TRUNK[:4] + other) == 1  # and not one page less to prefill


def test_a_copy_that_is_not_made_yet_is_no_source():
    """A sequence gets a row and loses it before it runs, its copy's source evicted."""
    pages = ReplicaPages(3, 4, 2)
    first, second = sequence(TRUNK[:4], 1), sequence([*TRUNK[:2], *TAILS[0][:9]], 1)
    pages.start(first, pages.find(first))
    first.begin(0)
    first.prefilled = 4
    pages.written(first, 0)
    pages.give_back(first)
    match = pages.find(second)
    second.begin(match.tokens)
    assert pages.start(second, match) is not None
    assert (match.tokens, pages.evictions) == (2, 1)
    pages.give_back(second)
    assert (pages.cached, pages.free) == (0, 3)


def test_a_row_that_is_lost_before_a_dispatch_gets_nothing():
    """Grants and counts of its next sequence would be mixed with those of the one that lost it."""
    config = EngineConfig(1, 64, Buckets((8,), (1,), (64,), tile=4), page_size=4)
    scheduler = Scheduler(config, Engine(smallest_model(), (), config).plan)
    for number, params in enumerate([PENALIZED] * 3):
        scheduler.add(s := sequence([*TRUNK[:12], number], 1, params))
        while s.status is not Status.DECODE:
            scheduler.plan(1)
        changes, scheduler.changes = scheduler.changes, Changes()
        assert {grant.row for grant in changes.grants} == {0}
        assert {count.token for count in changes.counts} == ({-1, *TRUNK[:12]} if number else set())
        if number < 2:
            scheduler.release(s)
    scheduler.changes = changes
    scheduler._preempt(s)
    assert not scheduler.changes


@pytest.mark.slow
def test_the_least_recently_used_pages_make_room(tight, alone):
    with new_engine(tight("llama stacked")) as engine:
        for _ in range(2):
            sequences = crowd(salts=True)
            assert run(engine, sequences) == [alone("llama stacked", s.prompt, 20) for s in sequences]
        stats = engine.stats
        assert stats.evicted_pages > 10
        assert stats.cached_tokens > 100
        assert 0 < stats.cached_pages <= engine.plan.pages


@pytest.mark.parametrize("kind", ["llama stacked", "gpt_oss"])
def test_what_an_error_lost_is_not_cached(kind, tight, alone, monkeypatch):
    """Neither a page nor a snapshot."""
    with new_engine(tight(kind)) as engine:
        prompt = prompt_of(33, 0, 0)
        run(engine, [sequence(prompt, 3)])
        monkeypatch.setattr(engine, "_receive", lambda: 1 / 0)
        engine.add(sequence(prompt_of(33, 1, 4), 3))
        with pytest.raises(ZeroDivisionError):
            engine.advance()
        monkeypatch.undo()
        assert_accounted(engine)
        s = sequence(prompt, 3)
        assert run(engine, [s])[0] == alone(kind, prompt, 3)
        assert s.cached == 0


@pytest.mark.slow
def test_the_option(checkpoint):
    path = checkpoint("llama", num_hidden_layers=1)
    llm = build_llm(path, Buckets((8,), (1, 2), (64,)), decode_steps=2, prefix_caching=False)  # the programs of `small`
    assert llm.no_prefix_caching == "prefix_caching is False"
    for _ in range(2):
        assert llm.generate([TRUNK[:40]], dataclasses.replace(GREEDY, max_tokens=2))[0].num_cached_tokens == 0
    with pytest.raises(ConfigurationError, match="prefix_caching must be True or False"):
        build_llm(path, LEAST, prefix_caching=None)
    with pytest.raises(TypeError, match="here it is prefix_caching"):
        build_llm(path, LEAST, enable_prefix_caching=True)


@pytest.mark.parametrize("salt", ["", 3, None])
def test_wrong_salts(salt, llama):
    with pytest.raises(ValueError, match="cache_salt is a text that is not empty"):
        llama.generate([{"prompt_token_ids": [8], "cache_salt": salt}], GREEDY)
