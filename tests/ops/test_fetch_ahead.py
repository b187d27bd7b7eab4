"""Weights that are fetched ahead: which have room, and that products with them are the same. About 5 s."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.ops.backend import Backend
from inferlib.ops.fetch_ahead import arrived, fetching, fits, free_bytes
from inferlib.ops.matmul import matmul
from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.quantized import SCHEMES, quantize
from inferlib.pallas_kernels import fetch_ahead_tpu

KERNELS = Backend(matmul="pallas_tpu", fetch_ahead="pallas_tpu", generation="v6e")
LAYERS, INPUTS = 3, 256


def stack(columns: int, scheme: str | None = None) -> PackedTensor:
    """Random weights [L, INPUTS, columns]."""
    values = jax.random.normal(jax.random.key(0), (LAYERS, INPUTS, columns), jnp.float32)
    kind = SCHEMES.get(scheme or "")
    packing = Packing(kind, (LAYERS, INPUTS, columns), (None,) * 3, (1,))
    stored = [values.astype(jnp.bfloat16)] if kind is None else jax.tree.leaves(quantize(values, (1,), kind))
    return packing.tensor(*packing.pack(*stored))


def test_copies_leave_room_for_kernels():
    shape: Any = jax.ShapeDtypeStruct((80, 1, 8192, 1024), jnp.bfloat16)  # 16.8 MB a layer
    weight = PackedTensor(shape)
    for latent, experts, count in ((False, 0, 4), (True, 0, 3), (False, 64 << 20, 2), (False, 110 << 20, 0)):
        free, fetched = free_bytes(KERNELS, latent=latent, experts=experts), 0
        while fits(weight, 8, KERNELS, free):
            free, fetched = free - 2 * 8192 * 1024, fetched + 1
        assert fetched == count
    assert fits(weight, 64, KERNELS, 1 << 25)
    assert not fits(weight, 65, KERNELS, 1 << 25)
    assert free_bytes(replace(KERNELS, generation="v4"), latent=False, experts=0) == 0


@pytest.mark.parametrize(("scheme", "columns"), [(None, 256), (None, 200), ("int8", 200), ("mxfp4", 128)])
def test_products_are_the_same(scheme, columns):
    """Whether their weights have arrived long before, as a mixer's, or are awaited by the product."""
    weight, x = stack(columns, scheme), jax.random.normal(jax.random.key(1), (8, INPUTS), jnp.bfloat16)

    def awaited(x: jax.Array, weight: PackedTensor, layer: jax.Array) -> jax.Array:
        arriving, x = fetching({"w": weight}, layer, x, interpret=True)
        return matmul(x * 2, arriving["w"].of_layer(layer))

    def before(x: jax.Array, weight: PackedTensor, layer: jax.Array) -> jax.Array:
        arriving, x = fetching({"w": weight}, layer, x, interpret=True)
        there, x = arrived(arriving, x * 2)
        assert there["w"].on_chip
        return matmul(x, there["w"].of_layer(layer))

    for layer in range(LAYERS):
        expected = jax.jit(lambda x, w, layer=layer: matmul(x * 2, w.of_layer(jnp.int32(layer))))(x, weight)
        assert np.abs(np.asarray(expected, np.float32)).max() > 1
        for ahead in (awaited, before):
            np.testing.assert_array_equal(jax.jit(ahead)(x, weight, jnp.int32(layer)), expected)


def test_nothing_to_fetch_changes_nothing():
    x = jnp.ones(3)
    assert fetching({}, jnp.int32(0), x, interpret=True) == ({}, x)
    assert arrived({}, x) == ({}, x)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_have_arrived_after_the_second_kernel(waits):
    """Both kernels in one, as interpreted kernels cannot return semaphores. A copy runs when something waits for it."""
    arrays = [jnp.arange(LAYERS * 8 * 128 * n, dtype=jnp.float32).reshape(LAYERS, 8 * n, 128) for n in (1, 2)]

    def kernel(layer_ref, *refs) -> None:
        stacks, outputs, buffers, semaphores = refs[:2], refs[2:4], refs[4:6], refs[6:]
        fetch_ahead_tpu._start_kernel(layer_ref, *stacks, *buffers, *semaphores)
        if waits:
            fetch_ahead_tpu._finish_kernel(*buffers, *semaphores, *buffers)
        for buffer, output in zip(buffers, outputs, strict=True):
            output[...] = buffer[...]
        if not waits:
            fetch_ahead_tpu._finish_kernel(*buffers, *semaphores, *buffers)

    shapes = [(1, *a.shape[1:]) for a in arrays]
    results = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        scratch_shapes=[*[pltpu.VMEM(shape, jnp.float32) for shape in shapes], *[pltpu.SemaphoreType.DMA((1,))] * 2],
        interpret=pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan"),
    )(jnp.full((1,), 2, jnp.int32), *arrays)
    for array, result in zip(arrays, results, strict=True):
        assert np.array_equal(result[0], array[2]) == waits
