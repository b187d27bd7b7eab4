"""Pages that the devices have no room for come back from the host's memory and from disk: every token is what it is
alone and without any cache."""

from __future__ import annotations

import functools
import gc
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib import LLM
from inferlib.cache.host_tier import HostTier, key_of, page_keys
from inferlib.cache.prefix_tree import PrefixTree, encoded
from inferlib.engine.engine import Engine
from inferlib.engine.tiers import Tiers, check_tiers
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.sharding.shards import Shards
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.poison import poison
from tests.helpers.sequences import FOUR_ROWS, LEAST, run, sequence
from tests.helpers.shared_beginnings import (
    JOB,
    PAGE,
    STRANGERS,
    assert_as_if_alone,
    crowd,
    crowd_out,
    prompt_of,
)

pytestmark = pytest.mark.usefixtures("always_fetched")


def page_bytes(llm: LLM) -> int:
    return llm.engine.plan.nbytes // llm.engine.plan.pages


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama stacked", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("llama int8", "minicpm3"))]
)
def test_what_was_evicted_comes_back_from_the_host(kind, tight, alone):
    llm, prompt = tight(kind), prompt_of(40, 0, 8)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        run(engine, [sequence(prompt, 5)])
        crowd_out(engine)
        again, longer = sequence(prompt, 9), sequence(prompt_of(40, 0, 30), 9)
        for s in (again, longer):
            assert run(engine, [s])[0] == alone(kind, s.prompt, 9)
            assert s.cached == (32 if s is again else 48)
        assert engine.source.hit_tokens == {"host": 32, "disk": 0}
        crowd_out(engine)
        before = engine.source.hit_tokens["host"]
        assert run(engine, [sequence(longer.prompt, 9)])[0] == alone(kind, longer.prompt, 9)
        assert engine.source.hit_tokens["host"] == before + 64


def test_a_hit_goes_on_from_the_device_to_the_host(tight, alone):
    """The leaves of a prompt are evicted first, so its beginning may still be on the device."""
    kind, prompt = "llama stacked", prompt_of(48, 0, 30)
    llm = tight(kind)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        run(engine, [sequence(prompt, 2)])
        tree, before = engine.scheduler.pages[0].tree, engine.scheduler.pages[0].cached
        run(engine, [sequence(STRANGERS[0], 45)])
        assert 0 < len(tree.match(None, encoded(prompt), 77).nodes) < before
        engine.source.settle()
        s = sequence(prompt, 9)
        assert run(engine, [s])[0] == alone(kind, prompt, 9)
        assert s.cached == 64
        assert 0 < engine.source.hit_tokens["host"] < 64


def test_a_page_that_is_on_its_way_is_no_source_of_copies(tight, alone):
    """A prompt of the same moment that has a part of it waits until it is written."""
    kind = "llama stacked"
    llm = tight(kind)
    with new_engine(llm, host_cache=40 * page_bytes(llm), in_flight=1) as engine:
        run(engine, [sequence(prompt_of(48, 0, 1), 2)])
        crowd_out(engine)
        poison(engine)
        sequences = [sequence(prompt_of(shared, 1, 5), 9) for shared in (48, 40)]
        assert run(engine, sequences) == [alone(kind, s.prompt, 9) for s in sequences]
        assert [s.cached for s in sequences] == [48, 40]
        assert engine.source.hit_tokens["host"] == 48


def test_what_a_page_was_to_get_does_not_overwrite_a_copy(tight, alone):
    """Its sequence lost the page before a dispatch, and the next one copies a part of another page to it."""
    kind = "llama stacked"
    llm = tight(kind)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        run(engine, [sequence(prompt_of(24, 0, 1), 2)])
        target = engine.scheduler.pages[0].pool._free[-1]
        lost = tuple(np.full(form.shape, np.nan, form.dtype) for form in engine.source.transfer.forms)
        engine.source.restore([target], [lost])
        s = sequence(prompt_of(24, 1, 9), 9)
        assert run(engine, [s])[0] == alone(kind, s.prompt, 9)
        assert s.cached == 24


@pytest.mark.slow
def test_what_is_preempted_goes_to_the_host(tight, alone):
    """A sequence whose pages others take for long does not compute them again."""
    kind = "llama stacked"
    llm = tight(kind)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        first, *others = (sequence(STRANGERS[i], 50, priority=-(i > 0)) for i in range(4))
        engine.add(first)
        while len(first.tokens) < 10:
            engine.advance()
        assert run(engine, others) == [alone(kind, s.prompt, 50) for s in others]
        assert first.tokens == alone(kind, first.prompt, 50)
        assert engine.scheduler.preemptions
        assert engine.source.hit_tokens["host"] >= 32


@pytest.mark.slow
def test_what_was_evicted_comes_back_from_disk(tight, alone, tmp_path):
    """Also in another engine."""
    kind, prompt = "llama stacked", prompt_of(40, 0, 8)
    llm = tight(kind)
    for hits in (0, 32):
        with new_engine(llm, disk_cache=tmp_path / "pages") as engine:
            s = sequence(prompt, 9)
            assert run(engine, [s])[0] == alone(kind, prompt, 9)
            assert (s.cached, engine.source.hit_tokens["disk"]) == (hits, hits)
            crowd_out(engine)
            before = llm.stats.disk_tokens
            s = sequence(prompt_of(40, 0, 30), 9)
            assert run(engine, [s])[0] == alone(kind, s.prompt, 9)
            assert s.cached >= 32
            engine.source.settle()
            stats, files = llm.stats, [path.stat().st_size for path in tmp_path.rglob("*.page")]
            assert stats.disk_tokens - before == s.cached
            assert (stats.host_tokens, stats.disk_pages, stats.disk_bytes) == (0, len(files), sum(files))


@pytest.mark.slow
def test_cells_of_four_bits_come_back_byte_for_byte(tight, tmp_path):
    """From the host, and in another engine from disk."""
    llm, prompt = tight("llama int4"), prompt_of(40, 0, 8)

    def cells(engine: Engine) -> list[np.ndarray]:
        nodes = engine.scheduler.pages[0].tree.match(None, encoded(prompt), 33).nodes
        pages, transfer = [node.page for node in nodes], engine.source.transfer
        return [array for page in transfer.cut(transfer.read(engine.cache, pages), pages) for array in page]

    with new_engine(llm, host_cache=40 * page_bytes(llm), disk_cache=tmp_path) as engine:
        run(engine, [sequence(prompt, 5)])
        written = cells(engine)
        assert [(array.dtype, bool(array.any())) for array in written] == [(np.dtype(np.uint8), True)] * 2
        crowd_out(engine)
        assert not cells(engine)
        run(engine, [sequence(prompt, 5)])
        assert engine.source.hit_tokens == {"host": 32, "disk": 0}
        for array, before in zip(cells(engine), written, strict=True):
            np.testing.assert_array_equal(array, before)
        crowd_out(engine)
    with new_engine(llm, disk_cache=tmp_path) as engine:
        run(engine, [sequence(prompt, 5)])
        assert engine.source.hit_tokens == {"host": 0, "disk": 32}
        for array, before in zip(cells(engine), written, strict=True):
            np.testing.assert_array_equal(array, before)


def test_what_the_host_has_no_room_for_is_on_disk(tight, alone, tmp_path):
    """A page that came from disk is on the host after that."""
    kind, prompt = "llama stacked", prompt_of(40, 0, 30)
    llm = tight(kind)
    with new_engine(llm, host_cache=5 * page_bytes(llm), disk_cache=tmp_path) as engine:
        run(engine, [sequence(prompt, 5)])
        crowd_out(engine)
        assert run(engine, [sequence(prompt, 9)])[0] == alone(kind, prompt, 9)
        assert engine.source.hit_tokens == {"host": 0, "disk": 64}
        run(engine, [sequence(STRANGERS[0][:20], 70)])
        engine.source.settle()
        s = sequence(prompt, 9)
        assert run(engine, [s])[0] == alone(kind, prompt, 9)
        assert s.cached == 64
        assert engine.source.hit_tokens["host"] > 0
        stats = llm.stats
        assert (stats.host_pages, stats.host_bytes) == (5, 5 * page_bytes(llm))
        assert stats.host_evicted_pages > 0


def test_other_weights_take_no_files(checkpoint, tight, tmp_path):
    """Of the same configuration, and so names and sizes; nor does another dtype of the cache."""
    llm, prompt = tight("llama stacked"), prompt_of(40, 0, 8)
    with new_engine(llm, disk_cache=tmp_path) as engine:
        run(engine, [sequence(prompt, 5)])
        crowd_out(engine)
        of_model = engine.source.disk.model
    weights = list(llm.engine.weights)
    changed = weights[-1].ravel().at[7].add(1e-3).reshape(weights[-1].shape)
    others = [Engine(llm.engine.model, (*weights[:-1], changed), llm.engine.config, programs=llm.engine.programs)]
    others = [Tiers([e.model], e.weights, e.plan, replace(e.config, disk_cache=tmp_path)) for e in others]
    int8 = tight("llama int8").engine
    others.append(Tiers([int8.model], int8.weights, int8.plan, replace(int8.config, disk_cache=tmp_path)))
    again = Tiers([llm.engine.model], weights, llm.engine.plan, replace(llm.engine.config, disk_cache=tmp_path))
    assert again.disk.model == of_model
    assert len({of_model, *(tiers.disk.model for tiers in others)}) == 3


def test_what_the_rule_decides(tight, monkeypatch):
    """By what was measured of the link, and of prompts."""
    llm, prompt = tight("llama stacked"), prompt_of(40, 0, 8)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        rule = engine.source.rule
        assert rule.link.value > 0
        assert rule.computed.value is None
        run(engine, [sequence(prompt, 5)])
        assert rule.computed.value > 0
        crowd_out(engine)
        monkeypatch.setattr(rule, "choose", lambda *_: {"host": False, "disk": False})
        s = sequence(prompt, 5)
        run(engine, [s])
        assert (s.cached, engine.source.hit_tokens["host"]) == (0, 0)


@pytest.mark.parametrize(("kind", "hit"), [("llama stacked", 32), ("gpt_oss", 40)])
def test_a_model_that_sleeps_keeps_its_tiers(kind, hit, tight, alone):
    llm, prompt = tight(kind), prompt_of(41, 0, 0)
    with new_engine(llm, host_cache=1 << 26) as engine:
        run(engine, [sequence(prompt, 9)])
        llm.sleep()
        llm.wake()
        s = sequence(prompt, 9)
        assert run(engine, [s])[0] == alone(kind, prompt, 9)
        assert (s.cached, engine.source.hit_tokens["host"]) == (hit, hit)


def test_the_threads_end_with_the_engine(tight, tmp_path):
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("inferlib-tier")]

    llm = tight("llama stacked")
    gc.freeze()  # collections look only at what this test makes, not at the whole suite
    before = set(threads())
    with new_engine(llm, host_cache=1 << 20, disk_cache=tmp_path) as engine:
        run(engine, [sequence(STRANGERS[0], 5)])
        crowd_out(engine)
        started = set(threads()) - before
        assert len(started) == 3
    del engine
    gc.collect()
    for thread in started:
        thread.join(300)
        assert not thread.is_alive()


def test_a_damaged_file_is_computed_again(tight, alone, tmp_path):
    kind, prompt = "llama stacked", prompt_of(40, 0, 30)
    llm = tight(kind)
    with new_engine(llm, disk_cache=tmp_path) as engine:
        run(engine, [sequence(prompt, 5)])
        crowd_out(engine)
        keys = list(page_keys(None, encoded(prompt), PAGE * 4))
        path = tmp_path / engine.source.disk.model.hex() / f"{keys[2].hex()}.page"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        s = sequence(prompt, 9)
        assert run(engine, [s])[0] == alone(kind, prompt, 9)
        assert s.cached == 32


@pytest.mark.slow
@settings(max_examples=5)
@given(st.lists(JOB, min_size=4, max_size=14), st.sampled_from([0, 1, 5, 30]), st.booleans())
def test_any_traffic_is_as_if_alone(tight, alone, tmp_path_factory, jobs, host, disk):
    """Whatever is evicted, preempted and aborted, without tiers or with a host that has room for a page, for some or
    for all. Cells that nobody can read hold NaN."""
    kind, folder = "llama stacked", tmp_path_factory.mktemp("pages") if disk and host else None
    llm = tight(kind)
    with new_engine(llm, in_flight=1, host_cache=host * page_bytes(llm) or None, disk_cache=folder) as engine:
        assert_as_if_alone(engine, functools.partial(alone, kind), jobs)
        if host:
            assert len(engine.source.host) <= host


@pytest.mark.slow
def test_replicas_share_the_host(checkpoint, tight):
    """What one replica evicted serves another, whose devices split it in the same way."""
    options = {"decode_steps": 1, "parallel": "dp=2,tp=2", "page_size": PAGE, "scan": True}
    options |= {"cache_memory": 9 * page_bytes(tight("llama stacked")) // 2}
    llm = build_llm(checkpoint("llama"), FOUR_ROWS, host_cache=1 << 26, **options)
    assert llm.engine.plan.pages == 2 * 9
    prompts = [prompt_of(40, 0, 8), *STRANGERS, *random_prompts([37, 38, 39], seed=61)]
    with new_engine(llm, prefix_caching=False, host_cache=None) as engine:
        expected = [run(engine, [sequence(prompt, 20)])[0] for prompt in prompts]
    for _ in range(3):
        assert run(llm.engine, [sequence(prompt, 20) for prompt in prompts]) == expected
        llm.engine.source.settle()
    assert llm.engine.source.hit_tokens["host"] > 60


@pytest.mark.slow
def test_nothing_compiles_after_warmup(tight, tmp_path):
    """Also what copies pages of the device, and shares them."""
    llm = tight("llama stacked")
    with new_engine(llm, host_cache=5 * page_bytes(llm), disk_cache=tmp_path) as engine:
        llm.warmup(["greedy"])
        before = compilations()
        run(engine, crowd())
        assert llm.stats.cached_tokens > 100
        for _ in range(3):
            crowd_out(engine)
        assert engine.source.hit_tokens["disk"] >= 32
        assert compilations() == before


def test_forgotten_prompts_are_in_no_tier(tight):
    llm, prompt = tight("llama stacked"), prompt_of(40, 0, 8)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        run(engine, [sequence(prompt, 5)])
        crowd_out(engine)
        assert len(engine.source.host)
        llm.reset_prefix_cache()
        s = sequence(prompt, 5)
        run(engine, [s])
        assert s.cached == 0


def test_an_error_loses_no_page_of_the_host(tight, alone, monkeypatch):
    kind, prompt = "llama stacked", prompt_of(40, 0, 8)
    llm = tight(kind)
    with new_engine(llm, host_cache=40 * page_bytes(llm)) as engine:
        run(engine, [sequence(prompt, 5)])
        crowd_out(engine)
        monkeypatch.setattr(engine, "_receive", lambda: 1 / 0)
        engine.add(sequence(STRANGERS[0], 3))
        with pytest.raises(ZeroDivisionError):
            engine.advance()
        monkeypatch.undo()
        s = sequence(prompt, 9)
        assert run(engine, [s])[0] == alone(kind, prompt, 9)


def test_keys_are_of_all_tokens_and_of_the_salt():
    tree, tokens = PrefixTree(2, 1), encoded([1, 2, 3, 4, 5])
    first = tree.insert(tree.root("a"), tokens[:8], 0)
    second = tree.insert(first, tokens[8:16], 1)
    keys = list(page_keys("a", tokens, 8))
    assert [key_of(second), key_of(first)] == keys[::-1]
    others = [page_keys("b", tokens, 8), page_keys(None, tokens, 8), page_keys("None", tokens, 8)]
    others.append(page_keys("a", encoded([3, 4, 3, 4]), 8))
    assert len({*keys, *(key for of_one in others for key in of_one)}) == 10


def test_the_host_keeps_what_was_used_last():
    pages = [(np.zeros(size, np.uint8),) for size in (3, 4, 3)]
    tier = HostTier(7)
    assert [tier.put(bytes([i]), page) for i, page in enumerate(pages[:2])] == [[], []]
    assert tier.get(b"\0") is pages[0]
    assert tier.put(b"\2", pages[2]) == [(b"\1", pages[1])]
    assert (len(tier), tier.nbytes, tier.evictions, tier.get(b"\1")) == (2, 6, 1, None)
    assert tier.put(b"\3", large := (np.zeros(8, np.uint8),))[-1] == (b"\3", large)
    assert (len(tier), tier.nbytes) == (0, 0)


def test_several_processes_do_without(tight, monkeypatch):
    monkeypatch.setattr(Shards, "several_processes", True)
    engine = tight("llama stacked").engine
    with pytest.raises(ConfigurationError, match="host_cache serves the devices of one process: leave host_cache out"):
        check_tiers(engine.plan, replace(engine.config, host_cache=1 << 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache": 0.5}, "host_cache is a number of bytes, or a text such as '16GiB', got 0.5"),
        ({"host_cache": 0}, "host_cache is a number of bytes"),
        ({"host_cache": "much"}, "host_cache is a number of bytes"),
        ({"host_cache": 100}, "host_cache of 100 bytes holds no page, which has"),
        ({"host_cache": "9999999GiB"}, "host_cache of .* GiB is more than the .* GiB that this machine has"),
        ({"host_cache": "1GiB", "prefix_caching": False}, "and prefix_caching is False: leave host_cache out"),
        ({"disk_cache": ""}, "disk_cache must be the path of a file or directory, got ''"),
        ({"disk_cache": "/proc"}, "disk_cache /proc has files of something else"),
        ({"disk_cache_size": "1GiB"}, "disk_cache_size is of the files in disk_cache: give that folder too"),
        ({"disk_cache": "pages", "disk_cache_size": 100}, "disk_cache_size of 100 bytes holds no page"),
        ({"disk_cache": "pages", "disk_cache_size": "99999999GiB"}, "is more than the .* GiB of the disk that pages"),
    ],
    ids=str,
)
def test_wrong_options(options, message, checkpoint):
    with pytest.raises(ConfigurationError, match=message):
        build_llm(checkpoint("llama"), LEAST, **options)
