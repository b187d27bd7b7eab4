"""Writes of chunks to the cache against NumPy. 20 s, most of it compiling."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.ops.cache_write import chunk_write, rounded
from inferlib.pallas_kernels import chunk_write_tpu
from tests.helpers.kernels import copies_of, on_backends

BACKENDS = {"xla": chunk_write, "tpu": partial(chunk_write, backend="pallas_tpu")}
PAGES = 4
# dtype of the cache, tokens, slots of a page, heads, page and slot of each chunk, whether it is a ring.
CASES = {
    "float32": ("float32", 32, 128, 2, ((0, 0), (3, 8), (1, 100), (9, 5)), False),
    "bfloat16, ring": ("bfloat16", 64, 256, 9, ((0, 17), (3, 230), (1, 250)), True),
    "bfloat16, head size 256": ("bfloat16", 64, 256, 2, ((0, 17), (3, 200), (1, 250), (2, 256)), False, 256),
    "int8, ring": ("int8", 256, 512, 2, ((0, 0), (3, 300), (1, 500)), True),
    "int8, one tile of scales": ("int8", 16, 128, 2, ((0, 7), (3, 120)), False),
    "int8, odd tiles": ("int8", 192, 512, 1, ((2, 33), (0, 400)), False),
    "fp8": ("float8_e4m3fn", 128, 384, 1, ((0, 0), (3, 3), (1, 257), (2, 383)), False),
}
RACES = ("bfloat16, ring", "int8, odd tiles")
FURTHER = [("int8, one tile of scales", "xla"), ("int8, ring", "xla"), ("int8, ring", "tpu")]


def check(run, dtype, width, slots, heads, places, ring, size=128):
    """Cells of the last of two layers, one array of them or two, are what is new, rounded; others keep every bit."""
    rng, scaled = np.random.default_rng(0), dtype in ("int8", "float8_e4m3fn")
    count = 1 + (heads > 1)
    new = [rng.normal(size=(len(places), width, heads, size)).astype(np.float32) for _ in range(count)]
    shape = 2, PAGES, heads, slots
    cache = [np.clip(50 * rng.normal(size=(*shape, size)), -120, 120).astype(jnp.dtype(dtype)) for _ in range(count)]
    cache += [rng.normal(size=shape).astype(np.float32)] * (count * scaled)
    expected = [np.array(x) for x in cache]
    flat = jax.jit(partial(rounded, stored=cache[0], scaled=scaled))([x.reshape(-1, heads, size) for x in new])
    for want, x in zip(expected, flat, strict=True):
        x = np.asarray(x).astype(want.dtype).reshape(len(places), width, heads, *want.shape[4:])
        for chunk, (page, slot) in enumerate(places):
            at = slot + np.arange(width)
            valid = at < (10 * slots if ring else slots)
            if page < PAGES:
                want[1, page][:, at[valid] % slots] = np.moveaxis(x[chunk, valid], 0, 1)
    pages, starts = (np.array(x, np.int32) for x in zip(*places, strict=True))
    result = jax.jit(partial(run, layer=1, ring=ring))(cache, new, pages, starts)
    for x, want in zip(result, expected, strict=True):
        bits = f"u{want.itemsize}"
        np.testing.assert_array_equal(np.asarray(x).view(bits), want.view(bits))


@on_backends(CASES, BACKENDS, RACES, further=FURTHER)
@pytest.mark.fast_cases(3)
def test_chunks_are_written(name, backend):
    check(BACKENDS[backend], *CASES[name])


@pytest.mark.slow
@copies_of(RACES, early=("int8, odd tiles",), further=[("int8, odd tiles", "on_wait")])
def test_the_kernel_has_no_races(name, mode, capsys):
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    check(partial(chunk_write_tpu.chunk_write, interpret=params), *CASES[name])
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


def test_what_it_cannot_write_is_refused_with_the_reason():
    def cache(slots, size=128, dtype=jnp.int8):
        cells, scales = ((2, 1, slots, *tail) for tail in ((size,), ()))
        return [jax.ShapeDtypeStruct(cells, dtype), jax.ShapeDtypeStruct(scales, jnp.float32)]

    unsupported = chunk_write_tpu.unsupported
    assert unsupported(cache(256), 128, ring=True) is None
    assert unsupported(cache(128), 128, ring=False) is None
    assert "rings of 128 positions are too small" in unsupported(cache(128), 16, ring=True)
    assert "pages of 200 positions do not divide into tiles of 128" in unsupported(cache(200), 16, ring=False)
    assert "chunks of 12 tokens are not a multiple of 8" in unsupported(cache(256), 12, ring=False)
    assert "cells of 64 numbers" in unsupported(cache(256, 64), 16, ring=False)
    arrays = [jnp.zeros(x.shape, x.dtype) for x in cache(200)]
    with pytest.raises(ValueError, match="does not write these chunks: pages of 200"):
        chunk_write_tpu.chunk_write(arrays, [jnp.zeros((1, 16, 1, 128))], jnp.zeros(1, int), jnp.zeros(1, int))
