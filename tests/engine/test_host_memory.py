"""Pages lie in memory that devices reach themselves, where a backend has it, and in arrays of NumPy where not."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inferlib.cache import host_memory
from inferlib.cache.host_memory import HostMemory, as_numpy, reachable
from tests.helpers.llms import new_engine
from tests.helpers.sequences import run, sequence
from tests.helpers.shared_beginnings import crowd_out, prompt_of


@pytest.fixture
def pinned() -> None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip("JAX has no pinned memory here")


@pytest.mark.usefixtures("pinned")
def test_copies_are_in_pinned_memory():
    """Of arrays of devices and of the host; another device reads them through NumPy."""
    first, second = jax.devices()[:2]
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    copies = HostMemory().copies([numbers, jax.device_put(numbers, second)], [first, second])
    for x, device in zip(copies, (first, second), strict=True):
        assert isinstance(x, jax.Array)
        assert (x.sharding.memory_kind, x.devices()) == ("pinned_host", {device})
        assert reachable(x, device) is x
        np.testing.assert_array_equal(as_numpy(x), numbers)
    assert isinstance(reachable(copies[0], second), np.ndarray)


@pytest.mark.usefixtures("pinned")
def test_what_cannot_be_pinned_is_an_array_of_numpy(monkeypatch, caplog):
    """All that follows is, too, as a runtime tries for long before it says so."""
    tried: list[int] = []

    def fail(arrays, places):
        tried.append(len(arrays))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more")

    monkeypatch.setattr(jax, "device_put", fail)
    memory, numbers = HostMemory(), np.arange(6, dtype=np.float32)
    for _ in range(2):
        (x,) = memory.copies([numbers], jax.devices()[:1])
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x, numbers)
    assert tried == [1]
    assert "no more of it can be pinned: RESOURCE_EXHAUSTED" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("always_fetched")
@pytest.mark.parametrize("has", [True, False])
def test_tokens_are_the_same_from_either(has, tight, alone, monkeypatch, tmp_path):
    """Pages and places that were evicted, and in another engine those from disk."""
    kind = "gpt_oss"
    if not has:
        monkeypatch.setattr(host_memory, "_pinned_of", lambda device: None)
    prompt = prompt_of(41, 0, 0)
    for source in ("host", "disk"):
        with new_engine(tight(kind), host_cache=1 << 26, disk_cache=tmp_path, in_flight=1) as engine:
            for _ in range(2):
                assert run(engine, [sequence(prompt, 9)])[0] == alone(kind, prompt, 9)
                crowd_out(engine)
            assert engine.source.hit_tokens[source] >= 32
            pages = list(engine.source.host._pages.values())
            expected = jax.Array if has and host_memory._pinned_of(jax.devices()[0]) else np.ndarray
            assert {isinstance(x, expected) for page in pages for x in page} == {True}
