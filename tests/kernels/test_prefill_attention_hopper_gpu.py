"""Prefill attention on Hopper GPUs: its lowering anywhere, its numbers where there is such a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.pallas_kernels.prefill_attention_hopper_gpu import ListShape, is_hopper, prefill_attention, unsupported
from tests.helpers.attention_calls import on_prefill_kernel
from tests.helpers.attention_calls import prefill_attention as by_xla
from tests.helpers.prefill_attention_cases import Case

needs_hopper = pytest.mark.skipif(not is_hopper(), reason="needs Hopper GPUs")
# Chunks at the edges of blocks, one that is absent, and one far behind; each at pages of its own.
STARTS = (0, 32, 90, 96, 97, 127, 128, 300, -1, 5, 600, 64, 224, 256, 33, 511)
PAGED = Case(STARTS, width=32, heads=8, group=4, slots=128, columns=6, dtype=jnp.bfloat16)
CASES = {
    "pages": PAGED,
    "pages of 256 in stacked layers": replace(PAGED, slots=256, columns=3, layers=2),
    "float16": replace(PAGED, dtype=jnp.float16),
    "heads of 64": replace(PAGED, size=64),
    "a window": replace(PAGED, options={"window": 100}),
    "a ring": replace(PAGED, slots=256, columns=1, ring=True, options={"window": 200}),
    "rows as pages": replace(PAGED, slots=768, columns=None),
    "three heads": replace(PAGED, group=3),
    "chunks of 128": replace(PAGED, width=128, group=2),
    "chunks of 8": replace(PAGED, width=8, group=16),
    "ranges that programs share": replace(PAGED, starts=(0, 600, 127, -1, 90, 1000), columns=9),
}
LISTS = {
    "lists": replace(PAGED, width=128, starts=(0, 128, 640, -1, 257, 1000), columns=9, listed=4),
    "lists of small tiles": replace(PAGED, listed=3),
    "lists for stacked layers and pages of 256": replace(PAGED, width=128, slots=256, columns=3, layers=2, listed=3),
    "lists for one head": replace(PAGED, width=128, group=1, size=64, listed=5),
    "lists for a window in a ring": replace(
        PAGED, width=64, slots=384, columns=1, ring=True, listed=2, options={"window": 200}
    ),
}


def with_lists(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the kernel: those of the operation, with the list of blocks as an array and its sizes."""
    if (listed := inputs.pop("listed", None)) is None:
        return inputs
    shape = ListShape(listed.queries, listed.keys, listed.numbers.shape[-1])
    return inputs | {"visits": listed.numbers, "lists": shape}


def hold(got: tuple[jax.Array, jax.Array], want: tuple[jax.Array, jax.Array], case: Case, rtol: float) -> None:
    """Outputs and log-sum-exps of chunks that are there, and their norms. The latter are -inf where nothing is seen."""
    there = np.array(case.starts) >= 0
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(v, np.float32)[there] for v in (x, y))
        nothing = np.isneginf(y)
        np.testing.assert_array_equal(np.isneginf(x), nothing)
        x, y = x[~nothing], y[~nothing]
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)
        assert np.linalg.norm(x - y) <= 4e-3 * np.linalg.norm(y)


def shapes_of(case: Case, **changes) -> tuple[jax.ShapeDtypeStruct, KvCache, jax.ShapeDtypeStruct]:
    """The queries, the cache and the positions of a case of one layer, whose numbers would take time to draw."""
    chunks, columns, shape = len(case.starts), case.columns or 1, jax.ShapeDtypeStruct
    cells = shape((chunks * columns + 2, case.heads, case.slots, case.size), case.dtype)
    pages = shape((chunks, columns), jnp.int32) if case.columns else None
    cache = KvCache(**{"k": cells, "v": cells, "pages": pages, "ring": case.ring} | changes)
    q = shape((chunks, case.width, case.heads, case.group, case.size), case.dtype)
    return q, cache, shape((chunks, case.width), jnp.int32)


@needs_hopper
@pytest.mark.parametrize("name", CASES | LISTS)
def test_equals_attention_by_xla(name):
    """Slots that no query sees hold NaN and infinities."""
    case = (CASES | LISTS)[name]
    inputs, static = case.inputs(3), case.static()
    want = by_xla(**inputs, **static)
    got = on_prefill_kernel(prefill_attention)(**with_lists(inputs), **static)
    hold(got, want, case, rtol=2e-2)


@needs_hopper
@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("case", [PAGED, LISTS["lists"]], ids=["ranges", "lists"])
def test_shares_of_ranges_merge_to_the_whole(splits, case):
    inputs, kernel = with_lists(case.inputs(4)), on_prefill_kernel(prefill_attention)
    got, want = (kernel(**inputs, **case.static(), splits=n) for n in (splits, 1))
    hold(got, want, case, rtol=2e-2)


@needs_hopper
def test_a_list_of_all_blocks_is_no_list():
    """Bit by bit: a program reads the same blocks in the same order."""
    case = replace(LISTS["lists"], listed=9)
    inputs, static, kernel = with_lists(case.inputs(5)), case.static(), on_prefill_kernel(prefill_attention)
    inputs["visits"] = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[::-1], inputs["visits"].shape)
    got = kernel(**inputs, **static, splits=1)
    want = kernel(**{name: x for name, x in inputs.items() if name not in ("visits", "lists")}, **static, splits=1)
    there = np.array(case.starts) >= 0
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(v, np.float32)[there] for v in (x, y))
        assert np.isfinite(y).all()
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a ring", "lists"])
def test_lowers_anywhere(name):
    case = (CASES | LISTS)[name]
    q, cache, positions = shapes_of(case)
    rows, lists = jax.ShapeDtypeStruct(positions.shape[:1], jnp.int32), {}
    if case.listed:
        numbers = jnp.zeros((len(case.starts), case.heads, 1, case.listed), jnp.int32)
        lists = {"visits": numbers, "lists": ListShape(128, 128, case.listed)}
    run = jax.jit(partial(prefill_attention, options=AttentionOptions(0.1, case.options.get("window")), **lists))
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(q, cache, rows, positions).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_lists_run_where_programs_are_few():
    """As no other kernel for GPUs takes lists; their blocks have the kernel's size."""
    q, cache, _ = shapes_of(replace(PAGED, starts=(0,), width=128, group=1))
    options, lists = AttentionOptions(0.1), ListShape(128, 128, 3)
    assert unsupported(q, cache, options)
    assert unsupported(q, cache, options, lists=lists) is None
    assert "blocks of 64" in (unsupported(q, cache, options, lists=replace(lists, keys=64)) or "")
    assert "sinks" in (unsupported(q, cache, replace(options, sinks=jnp.zeros((8, 1))), lists=lists) or "")


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        (replace(PAGED, dtype=jnp.float32), {}, "float32"),
        (replace(PAGED, size=80), {}, "size 80"),
        (PAGED, {"softcap": 30.0}, "capped"),
        (PAGED, {"sinks": jnp.zeros((8, 4))}, "sinks"),
        (replace(PAGED, slots=64, columns=12), {}, "pages"),
        (replace(PAGED, width=48), {}, "48 tokens"),
        (replace(PAGED, group=1), {}, "1 query heads"),
        (replace(PAGED, starts=(0, 32)), {}, "16 programs"),
    ],
)
@pytest.mark.fast_cases(2)
def test_says_what_it_does_not_take(case, options, reason):
    q, cache, positions = shapes_of(case)
    options = AttentionOptions(0.1, **options)
    said = unsupported(q, cache, options)
    assert reason in (said or "")
    rows = jax.ShapeDtypeStruct(positions.shape[:1], jnp.int32)
    with pytest.raises(ValueError, match="pallas_gpu"):
        jax.eval_shape(partial(prefill_attention, options=options), q, cache, rows, positions)
