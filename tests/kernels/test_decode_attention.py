"""Every implementation of decode attention against one float64 oracle. Most of its time is compiling."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import KvCache
from inferlib.pallas_kernels import block_stream_tpu, decode_attention_gpu, decode_attention_tpu, decode_rows_tpu
from inferlib.pallas_kernels.generations_tpu import planning_for
from tests.helpers.attention_calls import decode_attention, on_decode_kernel
from tests.helpers.decode_attention_cases import Case
from tests.helpers.kernels import copies_of, on_backends

BACKENDS = {
    "xla": decode_attention,
    "gpu": on_decode_kernel(decode_attention_gpu.decode_attention, interpret=True),
    "tpu": partial(decode_attention, backend="pallas_tpu"),
}
CASES = {
    "lengths": Case((0, 1, 127, 128, 129, 256, 0)),
    "half precision, softcap, sinks, head size 80, odd groups": Case(
        (0, 1, 33, 144),
        dtype=jnp.bfloat16,
        sinks=True,
        options={"softcap": 20.0},
        size=80,
        group=7,
        heads=3,
        slots=144,
    ),
    "window": Case((0, 1, 49, 50, 51, 178, 256), options={"window": 50}),
    "ring, large logits": Case(
        (0, 1, 128, 129, 500, 1003), slots=128, ring=True, loudness=1e4, sinks=True, options={"window": 100}
    ),
    "ring of an odd number of units": Case((300, 383, 384, 1030), slots=384, ring=True, options={"window": 300}),
}
# What the kernel for GPUs does not have.
MORE_CASES = {
    "keys that are values": Case((0, 1, 200, 256), one=True, size=128, sinks=True, options={"window": 150}),
    "a key and its value in a cell, window": Case(
        (0, 1, 49, 50, 51, 256), one=True, size=256, options={"key_size": 80, "window": 50}
    ),
    "pages": Case((0, 1, 16, 17, 100, 64), slots=16, columns=7, layers=2),
    "ring of pages": Case((0, 17, 100, 500), slots=16, columns=5, ring=True, options={"window": 60}),
    "a tree of new tokens": Case((0, 2, 5, 6, 130), queries=5, tree=True, options={"window": 100}),
    "several queries, pages": Case((2, 3, 47, 48, 49), queries=3, slots=16, columns=4, group=3),
}
# Caches of fewer bits.
QUANTISED_CASES = {
    "fp8 in half precision, softcap, sinks": Case(
        (0, 1, 200), dtype=jnp.bfloat16, sinks=True, options={"softcap": 20.0}, stored="float8_e4m3fn"
    ),
    "int8 ring": Case((0, 1, 129, 500), slots=128, ring=True, options={"window": 100}, stored="int8"),
    "fp8 pages of stacked layers, large logits": Case(
        (0, 17, 300), slots=128, columns=3, layers=2, loudness=1e4, sinks=True, stored="float8_e4m3fn"
    ),
    "int8, several queries, large logits": Case((1, 130), queries=2, loudness=1e4, sinks=True, stored="int8"),
}
# New cells are written by the operation, where lengths end in the middle of tiles and at their ends.
WRITING_CASES = {
    "written in half precision, stacked": Case((0, 1, 16, 17, 200, 256), dtype=jnp.bfloat16, layers=2, writes=True),
    "written to a full ring": Case(
        (1, 64, 128, 129, 500, 1003), slots=128, ring=True, options={"window": 128}, writes=True
    ),
    "several written to a ring of pages": Case(
        (0, 3, 63, 66, 100, 163), queries=5, slots=16, columns=5, ring=True, options={"window": 60}, writes=True
    ),
    "several written to ends of blocks of some rows": Case(
        (255, 257, 130, 511, 0), size=128, queries=2, slots=512, writes=(2, 2, 0, 1, 2)
    ),
    "a tree, keys that are values": Case((0, 2, 130), size=128, queries=5, tree=True, one=True, writes=True),
    "int8, written to some rows": Case(
        (0, 1, 127, 250, 128, 129, 256), heads=1, stored="int8", writes=(1, 1, 1, 0, 1, 1, 1)
    ),
    "int8, several written to pages": Case(
        (2, 129, 131, 300), heads=1, queries=3, slots=128, columns=3, layers=2, stored="int8", writes=(2, 3, 1, 2)
    ),
    "fp8, written to a ring": Case(
        (0, 1, 129, 500), heads=1, slots=256, ring=True, options={"window": 100}, stored="float8_e4m3fn", writes=True
    ),
}
# Rows that the kernel for TPUs takes several at a time: their number is a multiple of four.
SHORT_CASES = {
    "short rows": Case(
        (0, 1, 15, 16, 17, 48, 0, 33), slots=48, dtype=jnp.bfloat16, sinks=True, options={"softcap": 20.0}, layers=2
    ),
    "short rows of six steps": Case((1, 16, 0, 9, 31, 32, 17, 8) * 3, heads=1, slots=16, columns=2, writes=True),
    "short rows in pages, window, softcap": Case(
        (0, 49, 51, 128), options={"window": 50, "softcap": 20.0}, slots=32, columns=4, layers=2
    ),
    "short rows, full rings": Case(
        (0, 1, 64, 65, 300, 503, 79, 80),
        heads=1,
        slots=64,
        ring=True,
        dtype=jnp.bfloat16,
        sinks=True,
        options={"window": 64},
        writes=True,
    ),
    "short rows, groups alike": Case(
        (*(9, 9, 12, 16, 10, 11, 13, 14), *(0, 0, 0, 0, 33, 40, 34, 36), *(31, 32, 25, 26, 0, 1, 2, 40)),
        slots=48,
        writes=True,
    ),
    "short rows, rings alike": Case(
        (*(300, 300, 301, 302), *(64, 64, 63, 60), *(0, 0, 0, 0), *(75, 90, 0, 3), *(90, 90, 95, 95)),
        slots=64,
        ring=True,
        dtype=jnp.bfloat16,
        sinks=True,
        options={"window": 48},
        writes=True,
    ),
    "short rows, rings of pages, several written": Case(
        (3, 40, 63, 66, 100, 163, 0, 80),
        heads=1,
        queries=2,
        slots=16,
        columns=5,
        ring=True,
        options={"window": 60},
        writes=True,
    ),
    "short rows in a ring of pages, a tree, keys that are values": Case(
        (0, 2, 5, 300),
        size=128,
        queries=3,
        tree=True,
        one=True,
        options={"window": 100},
        slots=40,
        columns=4,
        ring=True,
        writes=True,
    ),
    "short rows, a key and its value in a cell, written": Case(
        (0, 1, 40, 200), heads=1, one=True, size=256, dtype=jnp.bfloat16, writes=True, options={"key_size": 96}
    ),
    "short rows, rings, several written to some": Case(
        (0, 1, 16, 63, 64, 65, 100, 131),
        heads=1,
        queries=3,
        slots=80,
        ring=True,
        options={"window": 62},
        writes=(0, 1, 0, 3, 2, 0, 0, 3),
    ),
    "short rows, int8 rings": Case(
        (0, 1, 127, 150, 128, 300, 511, 900), heads=1, slots=256, ring=True, options={"window": 100}, stored="int8"
    ),
    "short rows, int8, written to some": Case(
        (0, 1, 127, 250, 128, 129, 0, 256), heads=1, slots=256, stored="int8", writes=(1, 1, 1, 0, 1, 1, 1, 0)
    ),
    "short rows, fp8 in half precision, written": Case(
        (0, 1, 40, 200), heads=1, dtype=jnp.bfloat16, stored="float8_e4m3fn", sinks=True, writes=True
    ),
}


SIDE_BY_EIGHT = ("short rows",)
RACES = (
    *("ring of an odd number of units", "pages", "several written to a ring of pages"),
    *("several written to ends of blocks of some rows", "int8, written to some rows"),
    *("short rows of six steps", "short rows, full rings", "short rows, rings of pages, several written"),
    *("short rows in a ring of pages, a tree, keys that are values", "short rows, int8, written to some"),
    *("short rows, groups alike", "short rows, rings alike"),
)
EARLY = (
    *("pages", "several written to a ring of pages", "short rows of six steps"),
    "short rows, rings of pages, several written",
)
# Options together that other cases have one by one.
FURTHER_RACES = [
    *((name, mode) for name in EARLY[1:2] for mode in ("on_wait", "eager")),
    *((name, "on_wait") for name in ("pages", "short rows of six steps", "short rows, full rings")),
    *(("short rows, rings of pages, several written", mode) for mode in ("on_wait", "eager")),
]
# With two cores, each of which takes a head.
SHARED = ("ring, large logits", "a tree of new tokens", "several written to a ring of pages")
# The search for races compares what these compute with products of two rows.
RACED_SIDE_BY_SIDE = (
    *("short rows of six steps", "short rows in a ring of pages, a tree, keys that are values"),
    *("short rows, int8, written to some", "short rows, groups alike", "short rows, rings alike"),
)
FURTHER = [
    *(("ring of an odd number of units", backend) for backend in ("xla", "gpu")),
    # Drawn lengths are in `test_attention_properties`, within a window too; on TPUs cells of keys and values have one.
    *((name, backend) for name in ("lengths", "window") for backend in BACKENDS),
    ("ring, large logits", "tpu"),
]
MORE_FURTHER = ("keys that are values", "ring of pages", "a tree of new tokens", "several queries, pages")
FURTHER_SHORT = [
    *((f"short rows{rest}", "tpu") for rest in (" in pages, window, softcap", ", fp8 in half precision, written")),
    ("short rows, rings, several written to some", "tpu"),
]
FURTHER_QUANTISED = ("fp8 in half precision, softcap, sinks", "int8 ring", "int8, several queries, large logits")
FURTHER_WRITING = [
    # XLA writes cells apart from attention: to pages, to rings and to some rows in other cases.
    *((name, "xla") for name in ("written to a full ring", "several written to ends of blocks of some rows")),
    *(("a tree, keys that are values", "xla"), ("written to a full ring", "tpu")),
    *(("int8, several written to pages", backend) for backend in ("xla", "tpu")),
    ("fp8, written to a ring", "tpu"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that rows have several, and their ends several parts; some have more pages than are started one by one. Rows
    run one after the other."""
    monkeypatch.setattr(decode_rows_tpu, "TOGETHER", ())
    monkeypatch.setattr(decode_attention_tpu, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(decode_attention_tpu, "PART", 256)
    monkeypatch.setattr(block_stream_tpu, "UNROLL", 2)
    monkeypatch.setattr(block_stream_tpu, "MOST_COMPARED", 2)


def check(case: Case, backend: str) -> None:
    if backend == "tpu":
        check_on_tpu(case, pltpu.InterpretParams())
    else:
        case.check(BACKENDS[backend])


def check_on_tpu(case: Case, params: pltpu.InterpretParams) -> None:
    """The kernel as a machine with its memories interprets it, which compiles in less time than the operation does."""
    case = dataclasses.replace(case, queries=case.queries or 1)
    case.check(on_decode_kernel(decode_attention_tpu.decode_attention, interpret=params))


@on_backends(CASES, BACKENDS, RACES, further=FURTHER)
@pytest.mark.fast_cases(4)
def test_equals_the_oracle(name, backend):
    check(CASES[name], backend)


@on_backends(MORE_CASES, ("xla", "tpu"), RACES, further=[(name, "tpu") for name in MORE_FURTHER])
@pytest.mark.fast_cases(2)
def test_pages_layers_and_several_queries(name, backend):
    check(MORE_CASES[name], backend)


@on_backends(QUANTISED_CASES, ("xla", "tpu"), RACES, further=[(name, "tpu") for name in FURTHER_QUANTISED])
@pytest.mark.fast_cases(2)
def test_quantised_caches(name, backend):
    check(QUANTISED_CASES[name], backend)


@pytest.mark.slow
@on_backends(WRITING_CASES, ("xla", "tpu"), RACES, further=FURTHER_WRITING)
def test_new_cells_are_written(name, backend):
    """And no other bit of the cache changes."""
    check(WRITING_CASES[name], backend)


@pytest.mark.slow
@on_backends(SHORT_CASES, ("tpu",), RACES, further=FURTHER_SHORT)
def test_short_rows(name, backend, monkeypatch):
    """Eight at a time, or four, so that eight are two groups."""
    monkeypatch.setattr(decode_rows_tpu, "TOGETHER", (8,) if name == "short rows" else (4,))
    check(SHORT_CASES[name], backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHORT_CASES if name not in RACED_SIDE_BY_SIDE])
def test_short_rows_side_by_side(name, monkeypatch):
    """Products of two rows are one, as when there are many. Lengths differ, and what no query sees is NaN."""
    monkeypatch.setattr(decode_rows_tpu, "TOGETHER", (8,) if name in SIDE_BY_EIGHT else (4,))
    monkeypatch.setattr(decode_rows_tpu, "MANY", 4)
    check(SHORT_CASES[name], "tpu")


@pytest.mark.slow
def test_written_blocks_that_are_one_part(monkeypatch):
    """As 8-bit caches have them where memory waits for computation (`decode_attention_tpu.FAST`)."""
    monkeypatch.setattr(decode_attention_tpu, "BLOCK_BYTES", 1 << 15)
    case = Case((0, 256, 257, 768), heads=1, size=128, slots=768, stored="float8_e4m3fn", writes=True)
    check(case, "tpu")


def test_kernels_without_scales_or_a_mask_say_so():
    for backend in ("pallas_gpu", "nki"):
        with pytest.raises(ValueError, match=f"'{backend}' takes no scales"):
            decode_attention(**QUANTISED_CASES["int8 ring"].inputs(0), scale=1.0, backend=backend)
        with pytest.raises(ValueError, match=f"'{backend}' takes no mask"):
            decode_attention(**MORE_CASES["a tree of new tokens"].inputs(0), scale=1.0, backend=backend)


@pytest.mark.slow
@copies_of(RACES, EARLY, FURTHER_RACES)
def test_the_tpu_kernel_has_no_races(name, mode, capsys, monkeypatch):
    """Copies happen when they are started, or not before they are waited for. Results are compared as above, where
    products of two short rows are one."""
    monkeypatch.setattr(decode_rows_tpu, "TOGETHER", (4,) if name in SHORT_CASES else ())
    # Where rows are alike, as where more are taken together, whose new cells are copied at the end of a step.
    monkeypatch.setattr(decode_rows_tpu, "MANY", 2 if "alike" in name else 4)
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    case = (CASES | MORE_CASES | QUANTISED_CASES | WRITING_CASES | SHORT_CASES)[name]
    check_on_tpu(case, params)
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_two_cores_share_the_heads(name, capsys):
    """Sinks, masks and new cells are those of a core's heads."""
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
    with planning_for("v5p"):
        check_on_tpu((CASES | MORE_CASES | WRITING_CASES)[name], params)
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float16}, "bfloat16 or float32"),
        ({"values": 32}, "values of size 32 are apart from keys of size 64"),
        ({"slots": 100}, "100 positions do not divide into tiles of 8"),
        ({"heads": 64, "size": 256, "slots": 512}, "on-chip memory"),
        ({"group": 40, "queries": 4}, "4 x 40 queries of a KV head exceed 128"),
    ],
)
def test_what_the_tpu_kernel_cannot_run_is_refused_with_the_reason(changes, reason):
    values = changes.pop("values", None)
    case = Case((1, 2), **changes)
    q = jax.ShapeDtypeStruct((2, case.queries or 1, case.heads, case.group, case.size), case.dtype)
    k = jax.ShapeDtypeStruct((2, case.heads, case.slots, case.size), case.dtype)
    v = jax.ShapeDtypeStruct((*k.shape[:-1], values or case.size), case.dtype)
    assert reason in decode_attention_tpu.unsupported(q, KvCache(k, v))
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(partial(BACKENDS["tpu"], scale=1.0), q, k, v, jax.ShapeDtypeStruct((2,), jnp.int32))


def test_a_page_table_must_fit_scalar_memory():
    q = jax.ShapeDtypeStruct((300, 1, 1, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((300 * 500, 1, 128, 128), jnp.bfloat16)
    cache = lambda columns: KvCache(k, pages=jax.ShapeDtypeStruct((300, columns), jnp.int32))  # noqa: E731
    assert "300 x 500 pages needs 600000 bytes of scalar memory" in decode_attention_tpu.unsupported(q, cache(500))
    assert decode_attention_tpu.unsupported(q, cache(300)) is None


def test_a_ring_needs_a_window():
    with pytest.raises(ValueError, match="window"):
        Case((1, 2), ring=True).check(BACKENDS["tpu"])
