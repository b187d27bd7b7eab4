"""Products with weights on TPUs: a weight is one stream of blocks from memory, unpacked in registers if it is packed.

An RMS norm of the rows before a product, and the activation that combines gate and up after it, may be part of the
kernel. Weights are stored as `packed_weights_tpu.Weight`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.generations_tpu import by_vmem, untaken, vmem_bits, vmem_limit
from inferlib.pallas_kernels.packed_weights_tpu import (
    BLOCK,
    DEPTH,
    LANES,
    STEP,
    LoadedMatrix,
    Weight,
    permute,
    unpack_scales,
)
from inferlib.pallas_kernels.tuned_tpu import tuned

ROWS = 16  # of a tile of bfloat16
VMEM_BYTES = 48 << 20  # of 64 MiB, see `by_vmem`
X_ELEMENTS = 1 << 22  # of x at a time


@dataclass(frozen=True)
class Blocks:
    """A step multiplies `rows` rows of x by `columns` columns of the weight, over all inputs."""

    rows: int
    columns: int

    def __post_init__(self):
        if min(self.rows, self.columns) < 1 or self.rows % ROWS or self.columns % LANES:
            raise ValueError(f"blocks are multiples of {ROWS} rows and {LANES} columns, not {self}")


@tuned("mx_matmul", Blocks)
def blocks(rows: int, parts: int, inputs: int, columns: int, bits: int, group: int) -> Blocks:
    """The default blocks of x [rows, inputs] times a weight [parts, inputs, columns] of `bits`, `group` to a scale.

    About 2 MiB of a weight are copied at a time, in at least eight steps, so that the first copy is short.
    """
    most = max(by_vmem(2 << 23) // (inputs * bits) // LANES, by_vmem(2))
    most = min(most, 8, max(columns // 8 // LANES, 2))
    steps = pl.cdiv(columns, most * LANES)
    tall = max(min(by_vmem(X_ELEMENTS) // inputs, 512) // ROWS * ROWS, ROWS)
    even = lambda size, count, tile: pl.cdiv(size, count * tile) * tile  # noqa: E731
    return Blocks(even(rows, pl.cdiv(rows, tall), ROWS), even(columns, steps, LANES))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RmsNorm:
    """An RMS norm of the rows of x [T, K] before a product: x over the root of its mean square, times weight + offset.
    weight [L, K]: the norms of all layers of the product's stack."""

    weight: jax.Array
    eps: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})


def unsupported(rows: int, dtype, weight: Weight, chosen: Blocks | None = None, *, normed: bool = False) -> str | None:
    """Why the kernel cannot multiply x [rows, K], or its norm, by a weight (of arrays or shapes); None if it can."""
    if dtype != jnp.bfloat16:
        return f"it takes activations of bfloat16, not {jnp.dtype(dtype)}"
    if reason := untaken(weight.operand):
        return reason
    if weight.inputs % weight.depth:
        return f"{weight.inputs} inputs do not divide into passes of {weight.depth}"
    if weight.group not in (BLOCK, DEPTH, weight.inputs):
        return f"groups are of {BLOCK} or {DEPTH} inputs or of all, not {weight.group}"
    chosen = chosen or blocks(
        rows, weight.values.shape[1], weight.inputs, weight.values.shape[3], weight.bits, weight.group
    )
    need = _vmem_bytes(weight, chosen, normed)
    if need > (have := by_vmem(VMEM_BYTES)):
        return f"{weight.inputs} inputs need {need} bytes of on-chip memory, and there are {have}"
    return None


def _vmem_bytes(weight: Weight, chosen: Blocks, normed: bool) -> int:
    parts, rows = weight.values.shape[1], chosen.rows
    x = rows * weight.inputs * 2 * (2 + (normed or weight.ordered))
    blocks_bytes = parts * weight.inputs * chosen.columns * vmem_bits(weight.bits) // 8 * 2
    scales = 4 * parts * pl.cdiv(weight.inputs, weight.group) * chosen.columns * 2
    out = rows * chosen.columns * (4 * parts + 4 * parts + 4)
    return x + blocks_bytes + scales + out + STEP * chosen.columns * 2 + by_vmem(2 << 20)


def mx_matmul(
    x: jax.Array,
    weight: Weight,
    *,
    layer: jax.Array | int = 0,
    norm: RmsNorm | None = None,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    out_dtype=None,
    blocks_: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """x [T, K] times layer `layer` of a weight [L, P, K, N] -> [P, T, N], accumulated in float32.

    x may have fewer than K columns if K is padded. norm: x is normed first, and rounded to its dtype. activation:
    combines the float32 products with the two matrices of a weight, P = 2, into one [1, T, N]. out_dtype: x's by
    default. blocks_: the default is `blocks`. Raises ValueError with the reason of `unsupported`.
    """
    if reason := unsupported(x.shape[0], x.dtype, weight, blocks_, normed=norm is not None):
        raise ValueError(f"the TPU kernel does not run this product: {reason}")
    (total, width), (_, parts, _, columns) = x.shape, weight.values.shape
    operands, arrays = _operands(x, weight, norm, interpret)
    rows = operands["x"].shape[0]
    chosen = blocks_ or blocks(rows, parts, weight.inputs, columns, weight.bits, weight.group)
    tile = Blocks(min(chosen.rows, rows), chosen.columns)
    results = jax.ShapeDtypeStruct((parts if activation is None else 1, rows, columns), out_dtype or x.dtype)
    rewrites = norm is not None or weight.ordered
    y = pl.pallas_call(
        functools.partial(
            _kernel,
            names=(*operands, *arrays, "out", *["xs"] * rewrites),
            width=width,
            eps=norm and norm.eps,
            offset=norm and norm.offset,
            activation=activation,
            weight=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weight),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, tile.rows), pl.cdiv(columns, tile.columns)),
            in_specs=_in_specs(operands, arrays, tile),
            out_specs=pl.BlockSpec((results.shape[0], tile.rows, tile.columns), lambda t, n, *_: (0, t, n)),
            scratch_shapes=[
                *[pltpu.VMEM((tile.rows, weight.inputs), x.dtype)] * rewrites,
                *(pltpu.VMEM((parts, depth, tile.columns), dtype) for depth, dtype in weight.unpacked),
            ],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(max(_vmem_bytes(weight, chosen, norm is not None), 14 << 20)),
        ),
        cost_estimate=_cost(operands, weight, results, tile, activated=activation is not None),
        interpret=interpret,
        name="mx_matmul",
    )(jnp.asarray(layer, jnp.int32).reshape(1), *operands.values(), *arrays.values())
    return y[:, :total] if total < rows else y


def _operands(
    x: jax.Array, weight: Weight, norm: RmsNorm | None, interpret: bool | pltpu.InterpretParams
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """By name: x and the norm's weight, padded to whole tiles and to the weight's inputs; the weight's arrays."""
    pad = ((0, -x.shape[0] % ROWS), (0, weight.inputs - x.shape[1]))
    operands = {"x": jnp.pad(x, pad)}
    if norm is not None:
        operands["norm"] = jnp.pad(norm.weight, ((0, 0), pad[1]))
    arrays = {"values": weight.values, "scales": weight.scales, "tops": weight.tops}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if not interpret:  # otherwise XLA would bring a small weight to VMEM
        arrays = {name: pltpu.with_memory_space_constraint(array, pltpu.HBM) for name, array in arrays.items()}
    return operands, arrays


def _norm_rows(norm: jax.Array) -> int:
    """The rows of the norm's weight [L, K] that are copied; the layer's row is among them."""
    return min(norm.shape[0], ROWS)


def _in_specs(operands: dict[str, jax.Array], arrays: dict[str, jax.Array], tile: Blocks) -> list[pl.BlockSpec]:
    """Blocks of the operands and of the weight's arrays [L, P, ., N], whose layer is a scalar."""

    def of_weight(array: jax.Array) -> pl.BlockSpec:
        shape = (None, *array.shape[1:3], tile.columns)
        return pl.BlockSpec(shape, lambda t, n, layer: (layer[0], 0, 0, n))

    inputs = operands["x"].shape[1]
    specs = [pl.BlockSpec((tile.rows, inputs), lambda t, n, *_: (t, 0))]
    if "norm" in operands:
        rows = _norm_rows(operands["norm"])
        specs.append(pl.BlockSpec((rows, inputs), lambda t, n, layer: (lax.div(layer[0], rows), 0)))
    return [*specs, *map(of_weight, arrays.values())]


def _cost(
    operands: dict[str, jax.Array], weight: Weight, results: jax.ShapeDtypeStruct, tile: Blocks, *, activated: bool
) -> pl.CostEstimate:
    (rows, inputs), parts, columns = operands["x"].shape, weight.values.shape[1], results.shape[2]
    norm = operands.get("norm")
    return pl.CostEstimate(
        flops=2 * rows * inputs * parts * columns,
        bytes_accessed=pl.cdiv(rows, tile.rows) * parts * weight.nbytes
        + rows * inputs * operands["x"].dtype.itemsize
        + (0 if norm is None else _norm_rows(norm) * inputs * norm.dtype.itemsize)
        + results.size * results.dtype.itemsize,
        transcendentals=rows * columns if activated else 0,
    )


def _kernel(layer_ref, *refs, names, width, eps, offset, activation, weight):
    """Multiply one tile of rows of x [T, K], whose columns from `width` on are padding, by some columns of the weight.

    norm [16, K] has the layer's weight among others; values [P, K, N], scales [P, K / g, N], tops [P, 1, N] and out
    [P, T, N] hold those columns. Scratch: xs, the left operand if it is not x itself but normed, or with its inputs in
    the order of the words' bytes; and the unpacked scales.
    """
    room = refs[len(names) :]
    refs = dict(zip(names, refs, strict=False))
    x_ref, values_ref, out_ref, tops_ref = refs["x"], refs["values"], refs["out"], refs.get("tops")
    xs_ref = refs.get("xs", x_ref)

    @pl.when(pl.program_id(1) == 0)
    def _():
        source = x_ref
        if "norm" in refs:
            source = xs_ref
            layer = lax.rem(layer_ref[0], refs["norm"].shape[0])
            _normalize(x_ref, refs["norm"], layer, source, width, eps, offset)
        if weight.ordered:
            permute(source, xs_ref)

    def product(part: int) -> jax.Array:
        tops = None if tops_ref is None else tops_ref.at[part]
        scales = []
        if "scales" in refs:
            scales = unpack_scales(refs["scales"].at[part], [ref.at[part] for ref in room])
        matrix = LoadedMatrix(weight, values_ref.at[part], scales, tops)
        return matrix.product(xs_ref)

    if activation is not None:
        out_ref[0] = activation(product(0), product(1)).astype(out_ref.dtype)
        return
    for part in range(values_ref.shape[0]):
        out_ref[part] = product(part).astype(out_ref.dtype)


def _normalize(x_ref, weights_ref, layer: jax.Array, out_ref, width: int, eps: float, offset: float) -> None:
    is_layer = lax.broadcasted_iota(jnp.int32, weights_ref.shape, 0) == layer
    weight = jnp.sum(jnp.where(is_layer, weights_ref[...].astype(jnp.float32), 0), axis=0, keepdims=True) + offset

    @pl.loop(0, x_ref.shape[0], step=ROWS)
    def _(at):
        tile = pl.ds(pl.multiple_of(at, ROWS), ROWS)
        x = x_ref[tile, :].astype(jnp.float32)
        mean = jnp.sum(x * x, axis=1, keepdims=True) / width
        out_ref[tile, :] = (x * lax.rsqrt(mean + eps) * weight).astype(out_ref.dtype)
