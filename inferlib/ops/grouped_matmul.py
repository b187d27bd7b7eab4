"""Matrix products of groups of rows, each group with a weight of its own: the experts of a layer.

`jax.lax.ragged_dot` is not used: XLA:CPU multiplies every row by every group, and for a layer of a stack the TPU's
kernel is given a copy of all its groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.by_platform import by_platform
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.loops import expected_trips
from inferlib.ops.matmul import matmul
from inferlib.ops.observed import ObservedWeight
from inferlib.ops.packed import PackedTensor
from inferlib.ops.precision import precision_of
from inferlib.ops.quantized import MX_GROUP, QuantizedTensor, to_mxfp8

if TYPE_CHECKING:
    from inferlib.pallas_kernels.packed_weights_tpu import Weight as StoredWeight

UNSORTED = "pallas_gpu_unsorted"  # the implementation that takes rows in any order, see `choose`
# Rows of one product: few enough that the last tile of a group is seldom almost empty, and enough to be bound by
# compute.
_TILE = 128

Weight = jax.Array | QuantizedTensor | PackedTensor


def choose(rows: int, w: Weight, dtype, backend: str, *, stacked: bool = False) -> Choice:
    """The implementation that multiplies `rows` rows of a dtype by w, of arrays or of their shapes.

    w: [E, *P, I, O], or a stack [L, ...] of these. "pallas_gpu_unsorted" is `chosen_matmul` by the GPU kernels, for so
    few rows that it costs less than sorting them: weights are seldom read twice, and quantised ones are read twice in
    less time than it takes to unpack them for the tensor cores.
    """
    if backend == "pallas_tpu":
        return Choice.of(backend, _tpu_kernel_lacks(rows, w, dtype, stacked))
    if backend != "pallas_gpu":
        return Choice("xla")
    if reason := _gpu_kernel_lacks(w, stacked):
        return Choice("xla", reason)
    groups = w.shape[stacked]
    unsorted = rows <= (groups if isinstance(w, QuantizedTensor) else groups // 4)
    return Choice(UNSORTED if unsorted else "pallas_gpu")


def _tpu_kernel_lacks(rows: int, w: Weight, dtype, stacked: bool) -> str | None:
    from inferlib.pallas_kernels.expert_weights_tpu import shape_of
    from inferlib.pallas_kernels.grouped_matmul_tpu import unsupported

    if isinstance(w, QuantizedTensor) and (w.grouped or w.zeros is not None):
        return "it takes weights quantised in groups only if they are packed, and none with zero points"
    stored = jax.eval_shape(lambda w: _for_tpu(w, stacked), w)
    return unsupported(jax.ShapeDtypeStruct((rows, shape_of(stored)[-2]), dtype), stored)


def _gpu_kernel_lacks(w: Weight, stacked: bool) -> str | None:
    from inferlib.pallas_kernels.grouped_matmul_gpu import unsupported

    if isinstance(w, PackedTensor):
        return "it takes no weights that are packed for TPU kernels"
    if isinstance(w, QuantizedTensor) and w.scales.dtype == jnp.bfloat16:
        return "it takes no scales of bfloat16"
    values, scales = jax.eval_shape(_for_gpu, w)
    group = values.shape[1] // scales.shape[1] if scales is not None and scales.ndim == 3 else None
    return unsupported(values, group, isinstance(w, QuantizedTensor) and w.zeros is not None)


def grouped_matmul(
    x: jax.Array,
    w: Weight | ObservedWeight,
    sizes: jax.Array,
    *,
    most: int,
    rows: jax.Array | None = None,
    layer: jax.Array | None = None,
    backend: str = "xla",
) -> jax.Array:
    """x [M, I], its rows sorted by group, times w [E, *P, I, O]: the first sizes[0] rows with w[0], and so on.

    Returns [M, *P, O], accumulated in float32. sizes [E] int32 sum to at most M; the rows beyond belong to no group and
    may hold anything, in x and in the result. most (static): no group is larger. rows [M] int32: x is [T, I], and row m
    stands for x[rows[m]]. layer: w is a stack [L, E, *P, I, O] of which this layer is used. Only the weights of groups
    with rows are read. backend: preferred, see `choose`; CPUs interpret the kernels. Raises ValueError for shapes that
    do not go together, and for packed weights without the kernel that reads them.

    The matrices of a group (P: an expert's gate and up) stay separate in memory. In a merged matrix I would lie between
    them, and the TPU's compiler would copy all groups into another layout.
    """
    if isinstance(w, ObservedWeight):
        w.record(x if rows is None else x[rows], sizes)
        w = w.values
    parts, _, outer = _matrices(x, w, layer, sizes.size)
    total = x.shape[0] if rows is None else rows.size
    choice = choose(total, w, x.dtype, backend, stacked=layer is not None)
    x = _inputs(x, w)
    if choice.name == "pallas_tpu":
        return _by_tpu_kernel(x if rows is None else x[rows], w, sizes, layer, parts)
    if isinstance(w, PackedTensor):
        raise ValueError(f"weights packed for the TPU kernel are read by pallas_tpu only, not by {choice.name}")
    first = jnp.int32(0) if layer is None else layer * sizes.size
    if choice.name != "xla":
        return _by_gpu_kernel(x, w, rows, parts, sizes=sizes, first=first)
    count = (1 if layer is None else 2) + len(parts)
    w = jax.tree.map(lambda array: array.reshape(-1, math.prod(parts), *array.shape[count:]), w)  # [L * E, P, I, O]
    forms = {"default": partial(_by_tiles, most=most), "cuda": partial(_by_tiles, most=most, counted=True)}
    y = by_platform(x, w, sizes, first, *(() if rows is None else (rows,)), **forms)
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
    """Like `grouped_matmul`, for few rows in any order: x[m // turns] times w[ids[m]] -> [M, *P, O].

    ids [M] int32; the results of negative ids may be anything. Every row reads a weight, even if another row reads the
    same one. backend: "xla", which copies those weights, or "pallas_gpu".
    """
    lead = 0 if layer is None else 1
    parts, inner, outer = _matrices(x, w, layer, w.shape[lead])
    x = _inputs(x, w)
    if choose(ids.size, w, x.dtype, backend, stacked=bool(lead)).name.startswith("pallas_gpu"):
        ids = ids if layer is None else jnp.where(ids < 0, ids, ids + layer * w.shape[lead])
        return _by_gpu_kernel(x, w, None, parts, ids=ids)
    layer_w = w if layer is None else jax.tree.map(lambda array: array[layer], w)
    chosen = jax.tree.map(lambda array: array[jnp.maximum(ids, 0)], layer_w)
    if isinstance(chosen, QuantizedTensor):
        chosen = chosen.dequantized((1 + len(parts),), jnp.float32)
    chosen = chosen.astype(jnp.float32).reshape(ids.size, math.prod(parts), inner, outer)
    x = jnp.repeat(x, turns, axis=0)
    y = jnp.einsum("mi,mpio->mpo", x.astype(jnp.float32), chosen, precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype).reshape(-1, *parts, outer)


def _inputs(x: jax.Array, w: Weight) -> jax.Array:
    """x, rounded to MXFP8 if the weight's scheme says so."""
    if isinstance(w, QuantizedTensor | PackedTensor) and w.round_inputs:
        return to_mxfp8(x, MX_GROUP if isinstance(w, PackedTensor) else w.shape[-2])
    return x


def _matrices(x: jax.Array, w: Weight, layer: jax.Array | None, groups: int) -> tuple[list[int], int, int]:
    """P, I and O. Raises ValueError if the shapes do not match."""
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


def _for_gpu(w: jax.Array | QuantizedTensor) -> tuple[jax.Array, jax.Array | None]:
    """Values [N, I, O] and scales as GPU kernels take them: [N, O] for columns, or [N, I / g, O] for groups of g
    inputs. N counts all matrices of all layers."""
    values, scales = (w.values, w.scales) if isinstance(w, QuantizedTensor) else (w, None)
    grouped = isinstance(w, QuantizedTensor) and w.grouped
    inner = values.shape[-3] * values.shape[-2] if grouped else values.shape[-2]
    values = values.reshape(-1, inner, values.shape[-1])
    if scales is not None:
        shape = (values.shape[0], -1, values.shape[-1]) if grouped else (-1, values.shape[-1])
        scales = scales.reshape(shape)
    return values, scales


def _by_gpu_kernel(
    x: jax.Array,
    w: jax.Array | QuantizedTensor,
    rows: jax.Array | None,
    parts: Sequence[int],
    **groups: jax.Array,
) -> jax.Array:
    from inferlib.pallas_kernels import grouped_matmul_gpu, row_matmul_gpu

    values, scales = _for_gpu(w)
    # Few unsorted rows are multiplied one by one if the weight is quantised: unpacking would bound the kernel of tiles.
    group = values.shape[1] // scales.shape[1] if scales is not None and scales.ndim == 3 else None
    singly = scales is not None and "ids" in groups and row_matmul_gpu.unsupported(x.dtype, values, group) is None

    def kernel(x, values, scales, rows, groups, interpret=False):
        options: dict[str, Any] = dict(parts=math.prod(parts), interpret=interpret)
        if singly:
            epilogue = row_matmul_gpu.Epilogue(dtype=x.dtype)
            return row_matmul_gpu.row_matmul(x, values, scales, groups["ids"], epilogue=epilogue, **options)
        of_rows = groups["ids"] if "ids" in groups else grouped_matmul_gpu.Sorted(**groups, rows=rows)
        return grouped_matmul_gpu.grouped_matmul(x, values, scales, of_rows, **options)

    y = run_kernel(kernel, x, values, scales, rows, groups)
    return y.reshape(-1, *parts, values.shape[-1])


def _for_tpu(w: Weight, stacked: bool) -> jax.Array | StoredWeight:
    """Values [L, E, P, I, O] as TPU kernels take them; packed weights come with their scales."""
    if isinstance(w, PackedTensor):
        return w.of_experts(stacked)
    values = w.values if isinstance(w, QuantizedTensor) else w
    groups, parts = values.shape[stacked], math.prod(values.shape[1 + stacked : -2])
    return values.reshape(-1, groups, parts, *values.shape[-2:])


def _by_tpu_kernel(
    x: jax.Array, w: Weight, sizes: jax.Array, layer: jax.Array | None, parts: Sequence[int]
) -> jax.Array:
    """The TPU kernel, which reads the stack in place."""
    from inferlib.pallas_kernels import grouped_matmul_tpu

    def kernel(x, w, sizes, layer, scales, interpret=False):
        return grouped_matmul_tpu.grouped_matmul(x, w, sizes, layer=layer, scales=scales, interpret=interpret)

    scales = None
    if isinstance(w, QuantizedTensor):
        scales = w.scales if layer is None else w.scales[layer]
        scales = scales.reshape(sizes.size, math.prod(parts), -1)
    inputs = x, _for_tpu(w, layer is not None), sizes, jnp.int32(0) if layer is None else layer, scales
    y = run_kernel(kernel, *inputs)
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
    """XLA: a loop of products, each of up to `_TILE` rows of one group. Returns [M, P, O].

    counted: always run the largest number of products, on devices whose loops wait for the host to check a condition.
    """
    total, (_, parts, *_, outer) = x.shape[0] if rows is None else rows.size, w.shape
    tiles = tiles_of(sizes, total, min(most, _TILE, total))
    group, start, at, height = tiles.group, tiles.start, tiles.at, tiles.height
    w = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), w)

    def product(i: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile, new = lax.dynamic_slice_in_dim(x if rows is None else rows, at[i], height), []
        tile = tile if rows is None else x[tile]
        # Rows before the tile are done; the next tile overwrites what is written beyond the group.
        in_tile = (jnp.arange(height) >= start[i] - at[i])[:, None]
        for part, out in enumerate(outs):
            index = (first + group[i]) * parts + part
            weight = jax.tree.map(lambda array, index=index: lax.dynamic_index_in_dim(array, index, keepdims=False), w)
            if isinstance(weight, QuantizedTensor):
                y = matmul(tile, weight)
            else:
                y = lax.dot(tile, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)
            y = jnp.where(in_tile, y, lax.dynamic_slice_in_dim(out, at[i], height))
            new.append(lax.dynamic_update_slice_in_dim(out, y, at[i], 0))
        return tuple(new)

    outs = tuple(jnp.zeros((total, outer), x.dtype) for _ in range(parts))
    read = sizes.size * (1 - (1 - 1 / sizes.size) ** total)  # groups with rows, if all are equally likely
    with expected_trips(read * math.ceil(total / sizes.size / height)):
        outs = lax.fori_loop(0, tiles.most if counted else tiles.used, product, outs)
    return jnp.stack(outs, axis=1)


class Tiles(NamedTuple):
    """Tiles of `height` rows, each of one group, that cover all rows which are sorted by group.

    used: how many there are, int32; most: how many there can be. group, start, at [most] int32: the group of each, its
    first row, and the row from which `height` rows are read, which is less where rows end. Surplus tiles repeat the
    last.
    """

    height: int
    most: int
    used: jax.Array
    group: jax.Array
    start: jax.Array
    at: jax.Array


def tiles_of(sizes: jax.Array, total: int, height: int) -> Tiles:
    """The tiles of `total` rows, of which groups have sizes [E]."""
    tiles = -(-sizes // height)  # tiles of each group
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    count = min(total, sizes.size) + total // height
    number = jnp.minimum(jnp.arange(count, dtype=jnp.int32), ends[-1] - 1)
    group = _group_of(number, tiles)
    start = starts[group] + (number - (ends - tiles)[group]) * height
    return Tiles(height, count, ends[-1], group, start, jnp.minimum(start, total - height))


def _group_of(number: jax.Array, sizes: jax.Array) -> jax.Array:
    """The group of each element, whose number counts through all groups; the last group for numbers beyond."""
    group = jnp.searchsorted(jnp.cumsum(sizes), number, side="right", method="compare_all")
    return jnp.minimum(group, sizes.size - 1).astype(jnp.int32)
