"""A model that sleeps frees its devices, and wakes as it was."""

from __future__ import annotations

import asyncio
import gc

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from inferlib import AsyncLLM, Buckets, SamplingParams
from inferlib.engine.host_weights import HostArray
from inferlib.programs.counter import compilations
from inferlib.programs.memory import OutOfMemoryError
from tests.helpers.llms import build_llm, random_prompts, stopped_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = random_prompts([9, 3, 14], seed=51)


def device_bytes() -> int:
    """Of all arrays that live. Shards are arrays too, which share their memory."""
    gc.collect()
    shards = [shard.data for x in jax.live_arrays() for shard in x.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


def tokens_of(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_layouts_come_back():
    """Of an array that the compiler laid out column by column, on one device and on two."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for sharding in (SingleDeviceSharding(jax.devices()[0]), NamedSharding(mesh, PartitionSpec("x"))):
        place = Format(Layout((1, 0)), sharding)
        x = jax.jit(lambda y: y + 0, out_shardings=place)(values)
        stored = HostArray.of(x, place)
        compiled = compilations()
        again = stored.to_devices()
        np.testing.assert_array_equal(again, values)
        assert again.format == x.format
        assert again.format.layout.major_to_minor == (1, 0)
        assert compilations() == compiled


@pytest.mark.slow
def test_sleep_and_wake(checkpoint):
    """Weights, cache and state leave the devices, weights of replicas once; tokens stay and nothing compiles."""
    gc.freeze()  # collections look only at what this test makes, not at the whole suite
    path, before = checkpoint("llama", num_hidden_layers=1), device_bytes()
    llm = build_llm(path, Buckets(prefill=(8,), batch=(2,), cache=(64,)), decode_steps=1, parallel="dp=2,tp=2")
    expected, logits = tokens_of(llm), llm.logits(PROMPTS[0])
    weights = [np.array(x) for x in llm.engine.weights]
    stream = iter(llm.stream(PROMPTS[1], GREEDY))
    next(stream)
    with pytest.raises(RuntimeError, match="1 sequences wait or run: sleep once their requests have ended"):
        llm.sleep()
    del stream  # a dispatch of it is still in flight
    awake = device_bytes()
    llm.sleep()
    assert llm.engine.asleep
    assert device_bytes() <= before < awake
    on_host = {id(part): part.nbytes for x in llm.engine._asleep for _, part in x.shards}
    assert sum(on_host.values()) == sum(x.nbytes for x in weights)
    prepared = llm.prepare(PROMPTS[0], GREEDY)
    for call in (lambda: tokens_of(llm), lambda: llm.logits([5]), lambda: list(llm.run([prepared]))):
        with pytest.raises(RuntimeError, match=r"the model sleeps: call wake\(\) first"):
            call()
    llm.sleep()
    compiled = llm.compilations
    llm.wake()
    assert device_bytes() <= awake
    for x, w in zip(llm.engine.weights, weights, strict=True):
        np.testing.assert_array_equal(x, w)
    assert tokens_of(llm) == expected
    np.testing.assert_array_equal(llm.logits(PROMPTS[0]), logits)
    llm.wake()
    assert llm.compilations == compiled


def test_a_wake_that_fails_can_be_repeated(small, monkeypatch):
    expected = tokens_of(small)

    def allocate(*_):
        raise MemoryError("none")

    small.sleep()
    with monkeypatch.context() as patch:
        patch.setattr("inferlib.cache.plan.CachePlan.allocate", allocate)
        with pytest.raises(OutOfMemoryError, match="waking up"):
            small.wake()
    assert small.engine.asleep
    small.wake()
    assert tokens_of(small) == expected


def test_sleep_in_asyncio(small):
    expected = tokens_of(small)

    async def main():
        async with AsyncLLM(small) as llm:
            stream = llm.generate(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
            with stopped_engine(3) as event:
                await anext(stream)
                refused = asyncio.create_task(llm.sleep())
                while small._runner.thread._calls.empty() and not refused.done():  # until it waits for the engine
                    await asyncio.sleep(0.01)
                event.set()
                with pytest.raises(RuntimeError, match="wait or run"):
                    await refused
            await stream.aclose()
            late = llm.generate(PROMPTS[0], GREEDY)
            await llm.sleep()
            with pytest.raises(RuntimeError, match=r"call wake\(\) first"):
                llm.generate(PROMPTS[0], GREEDY)
            with pytest.raises(RuntimeError, match=r"call wake\(\) first"):
                await anext(late)
            await llm.wake()
            assert [o.outputs[0].token_ids async for o in llm.generate(PROMPTS[0], GREEDY) if o.finished] == expected[
                :1
            ]

    asyncio.run(main())
