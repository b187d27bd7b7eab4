"""Products with quantised weights on TPUs: packed elements are read once and unpacked in registers.

What is stored is `packed_weights_tpu.Weight`. Where groups are shorter than a pass of the MXU, few rows are repeated,
each with the elements of one group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.packed_weights_tpu import (
    BLOCK,
    DEPTH,
    STEP,
    Held,
    Weight,
    permute,
    unpack_scales,
)
from inferlib.pallas_kernels.tuned_tpu import tuned

LANES, ROWS = 128, 16  # of a tile of bfloat16
VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and v7x, 128 MiB on v5e and v6e
X_ELEMENTS = 1 << 22  # of x at a time
REPEATED = 32  # rows that are repeated for their groups: more, and weights are scaled before the product


@dataclass(frozen=True)
class Blocks:
    """What a step computes: rows of x by columns of the weight, over all inputs."""

    rows: int
    columns: int

    def __post_init__(self):
        if min(self.rows, self.columns) < 1 or self.rows % ROWS or self.columns % LANES:
            raise ValueError(f"blocks are multiples of {ROWS} rows and {LANES} columns, not {self}")


@tuned("mx_matmul", Blocks)
def blocks(rows: int, parts: int, inputs: int, columns: int, bits: int, group: int) -> Blocks:
    """The default blocks of x [rows, inputs] times a weight [parts, inputs, columns] of `bits`, `group` to a scale.

    About 2 MiB of a weight come at a time, at least eight times, so that little is waited for at the start.
    """
    most = max((2 << 23) // (inputs * bits) // LANES, 2)
    most = min(most, 8, max(columns // 8 // LANES, 2))
    steps = pl.cdiv(columns, most * LANES)
    tall = max(min(X_ELEMENTS // inputs, 512) // ROWS * ROWS, ROWS)
    even = lambda size, count, tile: pl.cdiv(size, count * tile) * tile  # noqa: E731
    return Blocks(even(rows, pl.cdiv(rows, tall), ROWS), even(columns, steps, LANES))


def unsupported(rows: int, dtype, weight: Weight, chosen: Blocks | None = None) -> str | None:
    """Why the kernel cannot multiply x [rows, K] by a weight (of arrays or their shapes), or None if it can."""
    if dtype != jnp.bfloat16:
        return f"it takes activations of bfloat16, not {jnp.dtype(dtype)}"
    if weight.inputs % DEPTH:
        return f"{weight.inputs} inputs do not divide into passes of {DEPTH}"
    if weight.group not in (BLOCK, DEPTH, weight.inputs):
        return f"groups are of {BLOCK} or {DEPTH} inputs or of all, not {weight.group}"
    chosen = chosen or blocks(
        rows, weight.values.shape[1], weight.inputs, weight.values.shape[3], weight.bits, weight.group
    )
    need = _vmem_bytes(weight, chosen)
    if need > VMEM_BYTES:
        return f"{weight.inputs} inputs need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def _repeats(weight: Weight, rows: int) -> int:
    return DEPTH // BLOCK if weight.group == BLOCK and not weight.packed and rows <= REPEATED else 1


def _vmem_bytes(weight: Weight, chosen: Blocks) -> int:
    parts, rows = weight.values.shape[1], chosen.rows
    repeats = _repeats(weight, chosen.rows)
    x = rows * weight.inputs * 2 * (2 + repeats * (weight.packed or repeats > 1))
    held = parts * weight.inputs * chosen.columns * weight.bits // 8 * 2
    scales = 4 * parts * pl.cdiv(weight.inputs, weight.group) * chosen.columns * 2
    out = rows * chosen.columns * (4 * parts + 4 * parts + 4 * repeats)
    return x + held + scales + out + STEP * chosen.columns * 2 + (2 << 20)


def mx_matmul(
    x: jax.Array,
    weight: Weight,
    *,
    layer: jax.Array | int = 0,
    out_dtype=None,
    blocks_: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """x [T, K] times layer `layer` of a weight [L, P, K, N] -> [P, T, N], accumulated in float32.

    x may have fewer than K columns where K is padded. out_dtype: x's by default. Raises ValueError where `unsupported`
    says why.
    """
    if reason := unsupported(x.shape[0], x.dtype, weight, blocks_):
        raise ValueError(f"the TPU kernel does not run this product: {reason}")
    inputs, (_, parts, _, columns) = weight.inputs, weight.values.shape
    given, out_dtype = x.shape[0], out_dtype or x.dtype
    if given % ROWS or x.shape[1] < inputs:
        x = jnp.pad(x, ((0, -given % ROWS), (0, inputs - x.shape[1])))
    rows = x.shape[0]
    chosen = blocks_ or blocks(rows, parts, inputs, columns, weight.bits, weight.group)
    tall, wide = min(chosen.rows, rows), chosen.columns
    repeats = _repeats(weight, tall)

    def of_weight(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, parts, array.shape[2], wide), lambda t, n, layer: (layer[0], 0, 0, n))

    arrays = jax.tree.leaves(weight)
    if not interpret:  # or XLA would bring a small weight to VMEM whole
        arrays = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]
    scratch = []
    if weight.packed or repeats > 1:
        scratch.append(pltpu.VMEM((repeats * tall, inputs), x.dtype))
    scratch += [pltpu.VMEM((parts, depth, wide), dtype) for depth, dtype in weight.unpacked]
    y = pl.pallas_call(
        functools.partial(_kernel, packed=weight.packed, group=weight.group, repeats=repeats),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, tall), pl.cdiv(columns, wide)),
            in_specs=[pl.BlockSpec((tall, inputs), lambda t, n, *_: (t, 0)), *map(of_weight, arrays)],
            out_specs=pl.BlockSpec((parts, tall, wide), lambda t, n, *_: (0, t, n)),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((parts, rows, columns), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=max(_vmem_bytes(weight, chosen), 14 << 20)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * parts * columns,
            bytes_accessed=pl.cdiv(rows, tall) * parts * weight.nbytes
            + x.size * x.dtype.itemsize
            + parts * rows * columns * jnp.dtype(out_dtype).itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="mx_matmul",
    )(jnp.asarray(layer, jnp.int32).reshape(1), x, *arrays)
    return y[:, :given] if given < rows else y


def _kernel(_, x_ref, values_ref, scales_ref, *refs, packed, group, repeats):
    """Some columns of the weight times some rows of x [T, K].

    values [P, K, N], scales [P, K / g, N], tops [P, 1, N] and out [P, T, N] hold those columns. Scratch: x with its
    inputs in the order of the words' bytes, or repeated [4 T, K], each time with one block of each 128; of MXFP4, what
    to keep of an exponent and what to add [P, K / 128, N]; of MXFP8 scales [P, K / 32, N].
    """
    refs = list(refs)
    tops_ref = refs.pop(0) if packed else None
    out_ref = refs.pop(0)
    xs_ref = refs.pop(0) if packed or repeats > 1 else x_ref
    parts = out_ref.shape[0]

    @pl.when(pl.program_id(1) == 0)
    def _():
        if packed:
            permute(x_ref, xs_ref)
        elif repeats > 1:
            _repeat(x_ref, xs_ref, repeats)

    unpacked = unpack_scales(scales_ref, refs)
    for part in range(parts):
        tops = tops_ref.at[part] if packed else None
        held = Held(group, values_ref.at[part], [ref.at[part] for ref in unpacked], tops)
        out_ref[part] = held.product(xs_ref, repeats=repeats).astype(out_ref.dtype)


def _repeat(x_ref, xs_ref, repeats: int) -> None:
    x = x_ref[...]
    block = lax.rem(lax.div(lax.broadcasted_iota(jnp.int32, x.shape, 1), BLOCK), repeats)
    xs_ref[...] = jnp.concatenate([jnp.where(block == n, x, 0) for n in range(repeats)])
