"""Every implementation of prefill attention against one float64 oracle. About 40 s, most of it compiling; two
minutes with the slow ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import KvCache
from inferlib.ops.prefill_attention import BlockList, _tpu_blocks
from inferlib.pallas_kernels import prefill_attention_gpu, prefill_attention_tpu
from inferlib.pallas_kernels.generations_tpu import planning_for
from inferlib.pallas_kernels.tile_stream_tpu import TileGrid
from tests.helpers.attention_calls import on_prefill_kernel, prefill_attention
from tests.helpers.kernels import copies_of, with_further
from tests.helpers.prefill_attention_cases import Case

FP8 = "float8_e4m3fn"
# Small tiles, so that chunks and ranges have several.
ON_GPU = on_prefill_kernel(
    partial(prefill_attention_gpu.prefill_attention, sizes=prefill_attention_gpu.Blocks(32, 16), interpret=True)
)
BACKENDS = {"xla": prefill_attention, "tpu": partial(prefill_attention, backend="pallas_tpu"), "gpu": ON_GPU}
CASES = {
    "starts at edges of blocks": Case((0, 1, 255, -1, 256, 257, 480)),
    "half precision, softcap, sinks": Case(
        (0, 1, 200), width=16, group=4, heads=1, dtype=jnp.bfloat16, sinks=True, options={"softcap": 20.0}
    ),
    "ring, sinks": Case((5, 1003), slots=256, group=1, ring=True, sinks=True, options={"window": 200}),
    "pages": Case((1, 16, -1, 80), slots=16, columns=7, layers=2, group=1),
    "positions dealt out": Case((0, 1, 400), stripe=4, width=64, group=1),
    "listed blocks": Case((130, 700, -1), width=128, slots=896, listed=5, group=1),
    "int8": Case((1, 310), width=64, slots=384, stored="int8", sinks=True, group=1),
    "keys are values, large logits": Case(
        (0, 130), slots=256, heads=1, one=True, size=256, loudness=1e4, sinks=True, options={"key_size": 160}
    ),
}
MORE_CASES = {
    "fp8, half precision, softcap": Case(
        (1, 270, -1), width=32, slots=384, layers=2, heads=1, dtype=jnp.bfloat16, stored=FP8, options={"softcap": 20.0}
    ),
    "two tiles, the last one not full, wide window": Case(
        (0, 130, 380), width=384, slots=768, group=1, heads=1, options={"window": 600}
    ),
    "odd groups of size 256, beyond the cache": Case((3, 130, 360, 500), size=256, slots=384, group=3, heads=1),
    "pages of blocks": Case((0, 224, 250), slots=256, columns=2),
    "ring of pages": Case((0, 17, 100, 500), slots=16, columns=7, ring=True, options={"window": 60}),
    "int8, pages, of 8 of 16 heads": Case((0, 1, 300), slots=128, columns=4, heads=16, group=1, stored="int8"),
    "fp8, listed blocks, window, sinks": Case(
        (0, 384), width=128, listed=2, sinks=True, stored=FP8, options={"window": 200}
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that chunks have several tiles and products, and rows several blocks of several parts."""

    def blocks(width, *_):
        return prefill_attention_tpu.Blocks(width if width <= 128 else 256, 256, rows=128, edge=128)

    monkeypatch.setattr(prefill_attention_tpu, "blocks", blocks)


RACES = ("ring, sinks", "pages", "listed blocks", "int8")
# Options together that other cases have one by one, and positions of any kind, which drawn examples have too.
FURTHER = {
    *(("positions dealt out", backend) for backend in ("tpu", "gpu")),
    *((name, backend) for name in ("starts at edges of blocks", "pages of blocks") for backend in BACKENDS),
    *(("ring of pages", backend) for backend in ("xla", "tpu")),
    ("two tiles, the last one not full, wide window", "gpu"),
    *(("fp8, listed blocks, window, sinks", "tpu"), ("int8, pages, of 8 of 16 heads", "xla")),
}


def of_backends(cases: dict[str, Case]) -> list:
    """Each case on each backend that takes it, but those of RACES on a TPU, where races are searched for as well."""
    gpu = lambda case: case.listed is None and case.stored is None  # noqa: E731
    takes = {"gpu": lambda name: gpu(cases[name]), "tpu": lambda name: name not in RACES, "xla": lambda name: True}
    pairs = [(name, backend) for name in cases for backend in BACKENDS if takes[backend](name)]
    return with_further(pairs, FURTHER & set(pairs))


@pytest.mark.parametrize(("name", "backend"), of_backends(CASES))
@pytest.mark.fast_cases(1)
def test_equals_the_oracle(name, backend):
    CASES[name].check(BACKENDS[backend])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), of_backends(MORE_CASES))
def test_equals_the_oracle_in_more_cases(name, backend):
    MORE_CASES[name].check(BACKENDS[backend])


@pytest.mark.parametrize(("group", "size", "keys"), [(4, 128, 1024), (16, 128, 1024), (16, 256, 512)])
def test_listed_blocks_are_computed_together_where_they_fit(group, size, keys):
    q = jax.ShapeDtypeStruct((1, 2048, 1, group, size), jnp.bfloat16)
    k, table = jax.ShapeDtypeStruct((256, 1, 128, size), q.dtype), jax.ShapeDtypeStruct((1, 256), jnp.int32)
    lists = BlockList(jax.ShapeDtypeStruct((1, 1, 16, 64), jnp.int32), 128, 128)
    assert _tpu_blocks(q, KvCache(k, k, pages=table), lists).keys == keys


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float16}, "bfloat16 or float32"),
        ({"size": 64}, "heads of size 64 are not a multiple of 128"),
        ({"slots": 100}, "100 positions do not divide into tiles of 8"),
        ({"width": 12}, "chunks of 12 tokens do not divide into tiles of 8"),
        ({"group": 64, "width": 128}, "64 heads of size 128 need [0-9]* bytes of on-chip memory"),
    ],
)
def test_what_the_tpu_kernel_cannot_run_is_refused_with_the_reason(changes, reason):
    case = Case((1, 2), **changes)
    q = jax.ShapeDtypeStruct((2, case.width, case.heads, case.group, case.size), case.dtype)
    k = jax.ShapeDtypeStruct((2, case.heads, case.slots, case.size), case.dtype)
    assert re.search(reason, prefill_attention_tpu.unsupported(q, KvCache(k)))
    rows, positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2,), (2, case.width)))
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(partial(BACKENDS["tpu"], scale=1.0), q, k, k, rows, positions)


def test_a_page_table_must_fit_scalar_memory():
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 16, 1, 4, 128), (200000, 1, 16, 128)))
    cache = lambda columns: KvCache(k, pages=jax.ShapeDtypeStruct((64, columns), jnp.int32))  # noqa: E731
    unsupported = prefill_attention_tpu.unsupported
    assert "64 chunks need 768512 bytes of scalar memory" in unsupported(q, cache(3000))
    assert "64 chunks need 768768 bytes of scalar memory" in unsupported(q, KvCache(k), visits=3000)
    assert unsupported(q, cache(1000), visits=1000) is None


def test_a_ring_needs_a_window():
    with pytest.raises(ValueError, match="window"):
        Case((1, 2), ring=True).check(BACKENDS["tpu"])


@pytest.mark.parametrize("sizes", [(192, 512), (256, 384), (256, 512, 64)])
def test_sizes_of_blocks_are_checked(sizes):
    with pytest.raises(ValueError, match="multiple"):
        prefill_attention_tpu.Blocks(*sizes)


@pytest.mark.slow
@copies_of(RACES, early=("pages",), further=[("pages", "on_wait")])
def test_the_tpu_kernel_has_no_races(name, mode, capsys):
    """Copies happen when they are started, or not before they are waited for."""
    CASES[name].check(interpreted(pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)))
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


def interpreted(params: pltpu.InterpretParams) -> Callable[..., Any]:
    """The TPU kernel as an operation."""
    real = on_prefill_kernel(prefill_attention_tpu.prefill_attention)

    def run(**inputs):
        if listed := inputs.pop("listed", None):
            blocks = prefill_attention_tpu.Blocks(128, 256, edge=128, listed=128)
            inputs |= {"visits": listed.numbers, "blocks": blocks}
        return real(**inputs, interpret=params)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("listed blocks", "two tiles, the last one not full, wide window"),
        pytest.param("half precision, softcap, sinks", marks=pytest.mark.release),
    ],
)
def test_two_cores_share_heads_or_tiles(name, capsys):
    """Two heads, two tiles of one, or one tile, which leaves the second core nothing."""
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
    with planning_for("v5p"):
        (CASES | MORE_CASES)[name].check(interpreted(params))
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.parametrize("sizes", [(2, 4, 3), (2, 1, 6), (1, 3, 2), (3, 1, 3)])
def test_cores_share_the_tiles_of_a_grid(sizes):
    """Each tile has one core. Of tiles of a head, each core sees as much if there are four or a multiple."""
    with planning_for("v5p"):
        grid = TileGrid.of(*sizes)
    of_core = [
        {tuple(int(x) for x in grid.place(core, *ids)) for ids in np.ndindex(grid.each)}
        for core in range(grid.shape[0] if grid.shared else 1)
    ]
    assert sorted(tile for tiles in of_core for tile in tiles) == sorted(np.ndindex(sizes))
    assert grid.shared == (sizes != (3, 1, 3))
    with planning_for("v5p"):
        grid = TileGrid.of(1, 1, 8)
    assert [[int(grid.place(core, 0, 0, n)[2]) for n in range(4)] for core in (0, 1)] == [[0, 3, 4, 7], [1, 2, 5, 6]]
