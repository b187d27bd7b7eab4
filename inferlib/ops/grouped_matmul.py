"""Matrix products of groups of rows, each group with a weight of its own: the experts of a layer.

`jax.lax.ragged_dot` is not among the forms: XLA:CPU multiplies every row by every group, and for a layer of a stack the
TPU's kernel is given a copy of all its groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.loops import expected_trips
from inferlib.ops.matmul import matmul, precision_of
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import MX_GROUP, QuantizedTensor, to_mxfp8

# Rows of one product: so few that the last of a group is seldom mostly empty, so many that it is bound by compute.
_TILE = 128


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | QuantizedTensor | PackedTensor,
    sizes: jax.Array,
    *,
    most: int,
    rows: jax.Array | None = None,
    layer: jax.Array | None = None,
    backend: str = "xla",
) -> jax.Array:
    """x [M, I], its rows sorted by group, times w [E, *P, I, O]: the first sizes[0] rows with w[0], and so on.

    Returns [M, *P, O], accumulated in float32. sizes [E] int32 sum to at most M; rows beyond are in no group and hold
    anything, in x and in the result. most (static): no group is larger. rows [M] int32: x is [T, I], and x[rows[m]] is
    the row that m stands for. layer: w is [L, E, *P, I, O], of which this one is used. Only the weights of groups that
    have rows are read. backend: "xla", or "pallas_tpu", which takes weights quantised by channel or packed, and
    "pallas_gpu", which are interpreted on CPU.

    The matrices of a group (P: an expert's gate and up) are apart in memory: merged, I would lie between them, and the
    TPU's compiler would copy all groups to have it otherwise.
    """
    parts, inner, outer = _matrices(x, w, layer, sizes.size)
    check_kernel_takes(w, backend)
    x = _inputs(x, w)
    if backend == "pallas_tpu":
        return _by_kernel(x if rows is None else x[rows], w, sizes, layer, parts)
    total = x.shape[0] if rows is None else rows.size
    first = jnp.int32(0) if layer is None else layer * sizes.size
    if backend == "pallas_gpu":
        return _by_gpu_kernel(x, w, rows, parts, inner, outer, sizes=sizes, first=first)
    count = (1 if layer is None else 2) + len(parts)
    w = jax.tree.map(lambda array: array.reshape(-1, math.prod(parts), *array.shape[count:]), w)  # [L * E, P, I, O]
    forms = {"default": partial(_by_tiles, most=most), "cuda": partial(_by_tiles, most=most, counted=True)}
    y = lax.platform_dependent(x, w, sizes, first, *(() if rows is None else (rows,)), **forms)
    return y.reshape(total, *parts, outer)


def chosen_matmul(
    x: jax.Array,
    w: jax.Array | QuantizedTensor,
    ids: jax.Array,
    *,
    turns: int = 1,
    layer: jax.Array | None = None,
    backend: str = "xla",
) -> jax.Array:
    """As `grouped_matmul`, of few rows in any order: x[m // turns] with w[ids[m]] -> [M, *P, O].

    ids [M] int32; where one is negative the result is anything. Every row reads a weight, also one that another reads.
    backend: "xla", which copies those weights, or "pallas_gpu".
    """
    lead = 0 if layer is None else 1
    parts, inner, outer = _matrices(x, w, layer, w.shape[lead])
    check_kernel_takes(w, backend)
    x = _inputs(x, w)
    if backend == "pallas_gpu":
        ids = ids if layer is None else jnp.where(ids < 0, ids, ids + layer * w.shape[lead])
        return _by_gpu_kernel(x, w, None, parts, inner, outer, turns, ids=ids)
    of_layer = w if layer is None else jax.tree.map(lambda array: array[layer], w)
    chosen = jax.tree.map(lambda array: array[jnp.maximum(ids, 0)], of_layer)
    if isinstance(chosen, QuantizedTensor):
        chosen = chosen.dequantized((1 + len(parts),), jnp.float32)
    chosen = chosen.astype(jnp.float32).reshape(ids.size, math.prod(parts), inner, outer)
    x = jnp.repeat(x, turns, axis=0)
    y = jnp.einsum("mi,mpio->mpo", x.astype(jnp.float32), chosen, precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype).reshape(-1, *parts, outer)


def _inputs(x: jax.Array, w: jax.Array | QuantizedTensor | PackedTensor) -> jax.Array:
    """x, rounded if the weight asks for it."""
    if isinstance(w, QuantizedTensor | PackedTensor) and w.round_inputs:
        return to_mxfp8(x, MX_GROUP if isinstance(w, PackedTensor) else w.shape[-2])
    return x


def unsorted_pays(w: jax.Array | QuantizedTensor, rows: int, groups: int, backend: str) -> bool:
    """Whether so few rows choose among these groups that `chosen_matmul` costs less than sorting them: weights are
    seldom read twice, or, quantised, are sooner read twice than unpacked for the tensor cores."""
    return backend == "pallas_gpu" and rows <= (groups if isinstance(w, QuantizedTensor) else groups // 4)


def check_kernel_takes(w: jax.Array | QuantizedTensor | PackedTensor, backend: str) -> None:
    """Raise ValueError for experts that an implementation does not know how to unpack."""
    if isinstance(w, PackedTensor) and backend != "pallas_tpu":
        raise ValueError(f"backend {backend!r} takes no experts that are packed for TPU kernels; use pallas_tpu")
    if backend == "xla" or not isinstance(w, QuantizedTensor):
        return
    if w.zeros is not None or (w.grouped and backend == "pallas_tpu"):
        what = "zero points" if w.zeros is not None else "groups that share a scale"
        raise ValueError(f"backend {backend!r} takes no experts with {what}; use xla")


def _matrices(
    x: jax.Array, w: jax.Array | QuantizedTensor | PackedTensor, layer: jax.Array | None, groups: int
) -> tuple[list[int], int, int]:
    """P, I and O. Raises ValueError if the shapes do not go together."""
    lead, shape = (1 if layer is None else 2), w.shape
    if isinstance(w, PackedTensor):  # its inputs may be padded
        if shape[lead - 1] != groups or len(shape) < lead + 3:
            raise ValueError(f"grouped_matmul: packed w {shape} is not of {groups} groups")
        return list(shape[lead:-3]), x.shape[1], shape[-1]
    if isinstance(w, QuantizedTensor) and w.grouped:
        shape = (*w.scales.shape[:-2], x.shape[1], shape[-1])
    *parts, inner, outer = shape[lead:]
    if x.shape[1:] != (inner,) or shape[lead - 1] != groups or math.prod(shape) != w.size:
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape} and {groups} groups do not go together")
    return parts, inner, outer


def _by_gpu_kernel(
    x: jax.Array,
    w: jax.Array | QuantizedTensor,
    rows: jax.Array | None,
    parts: Sequence[int],
    inner: int,
    outer: int,
    turns: int = 1,
    **groups: jax.Array,
) -> jax.Array:
    from inferlib.pallas_kernels import grouped_matmul_gpu, row_matmul_gpu

    values, scales = (w.values, w.scales) if isinstance(w, QuantizedTensor) else (w, None)
    values = values.reshape(-1, inner, outer)
    if scales is not None:
        scales = scales.reshape(values.shape[0], -1, outer) if w.grouped else scales.reshape(-1, outer)

    # Few rows in any order are multiplied one by one if the weight is quantised: tiles would be bound by unpacking it.
    group = inner // scales.shape[1] if scales is not None and w.grouped else None
    singly = scales is not None and "ids" in groups and row_matmul_gpu.unsupported(x.dtype, values, group) is None

    def kernel(x, values, scales, rows, groups, interpret=False):
        of = dict(parts=math.prod(parts), turns=turns, interpret=interpret)
        if singly:
            return row_matmul_gpu.row_matmul(x, values, scales, groups["ids"], dtype=x.dtype, **of)
        return grouped_matmul_gpu.grouped_matmul(x, values, scales, rows=rows, **groups, **of)

    forms = dict(cpu=partial(kernel, interpret=True), default=kernel)
    y = lax.platform_dependent(x, values, scales, rows, groups, **forms)
    return y.reshape(-1, *parts, outer)


def _by_kernel(
    x: jax.Array,
    w: jax.Array | QuantizedTensor | PackedTensor,
    sizes: jax.Array,
    layer: jax.Array | None,
    parts: Sequence[int],
) -> jax.Array:
    """By the TPU kernel, which reads the stack where it lies."""
    from inferlib.pallas_kernels import grouped_matmul_tpu

    def kernel(x, w, sizes, layer, scales, interpret=False):
        return grouped_matmul_tpu.grouped_matmul(x, w, sizes, layer=layer, scales=scales, interpret=interpret)

    scales = None
    if isinstance(w, QuantizedTensor):
        scales, w = w.scales if layer is None else w.scales[layer], w.values
        scales = scales.reshape(sizes.size, math.prod(parts), -1)
    if isinstance(w, PackedTensor):
        w = w.of_experts(layer is not None)
    else:
        w = w.reshape(-1, sizes.size, math.prod(parts), *w.shape[-2:])
    inputs = x, w, sizes, jnp.int32(0) if layer is None else layer, scales
    y = lax.platform_dependent(*inputs, cpu=partial(kernel, interpret=True), default=kernel)
    return jnp.moveaxis(y, 0, 1).reshape(x.shape[0], *parts, -1)


def _by_tiles(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    first: jax.Array,
    rows: jax.Array | None = None,
    *,
    most: int,
    counted: bool = False,
) -> jax.Array:
    """One product after the other, each of up to `_TILE` rows of a group: as many as there are. Few rows are one for
    each group that has any. Returns [M, P, O].

    counted: as many as there can be, where a device loop would wait for the host to look at its condition.
    """
    total, (_, parts, *_, outer) = x.shape[0] if rows is None else rows.size, w.shape
    height = min(most, _TILE, total)
    tiles = -(-sizes // height)  # of each group
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    count = min(total, sizes.size) + total // height  # at most
    number = jnp.minimum(jnp.arange(count, dtype=jnp.int32), ends[-1] - 1)  # those too many are the last once more
    group = _group_of(number, tiles)
    start = starts[group] + (number - (ends - tiles)[group]) * height
    at = jnp.minimum(start, total - height)
    w = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), w)

    def product(i: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile, new = lax.dynamic_slice_in_dim(x if rows is None else rows, at[i], height), []
        tile = tile if rows is None else x[tile]
        # Rows before the tile are done; what is written beyond its group the next one overwrites.
        own = (jnp.arange(height) >= start[i] - at[i])[:, None]
        for part, out in enumerate(outs):
            index = (first + group[i]) * parts + part
            weight = jax.tree.map(lambda array, index=index: lax.dynamic_index_in_dim(array, index, keepdims=False), w)
            if isinstance(weight, QuantizedTensor):
                y = matmul(tile, weight)
            else:
                y = lax.dot(tile, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)
            y = jnp.where(own, y, lax.dynamic_slice_in_dim(out, at[i], height))
            new.append(lax.dynamic_update_slice_in_dim(out, y, at[i], 0))
        return tuple(new)

    outs = tuple(jnp.zeros((total, outer), x.dtype) for _ in range(parts))
    read = sizes.size * (1 - (1 - 1 / sizes.size) ** total)  # groups that have rows, as if each row had any
    with expected_trips(read * math.ceil(total / sizes.size / height)):
        outs = lax.fori_loop(0, count if counted else ends[-1], product, outs)
    return jnp.stack(outs, axis=1)


def _group_of(number: jax.Array, sizes: jax.Array) -> jax.Array:
    """The group that each of these numbers, counted through all groups, falls into; the last, if none."""
    found = jnp.searchsorted(jnp.cumsum(sizes), number, side="right", method="compare_all")
    return jnp.minimum(found, sizes.size - 1).astype(jnp.int32)
