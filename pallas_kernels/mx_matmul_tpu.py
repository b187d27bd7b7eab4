"""Products with weights on TPUs: a weight is one stream of blocks from memory, unpacked in registers if it is packed.

An RMS norm of the rows before a product, and the activation that combines gate and up after it, may be part of the
kernel. Weights are stored as `packed_weights_tpu.Weight`. Where a device has two cores, each takes half of the columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.generations_tpu import by_vmem, cores, untaken, vmem_bits, vmem_limit
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

ROWS, HALF_ROWS = 16, 8  # rows of a tile of bfloat16; half as many or fewer take half a tile
VMEM_BYTES = 48 << 20  # of 64 MiB, see `by_vmem`
SCRATCH_BYTES = 14 << 20  # on-chip memory that every call may use
X_ELEMENTS = 1 << 22  # most elements of x on chip at a time
MOST_ROWS = 1024  # of a tile: each tile unpacks the weight again
STEP_BYTES = 768 << 10  # read in about twice the time that a step adds, on v5e, v6e and v7x
STEP_COLUMNS = 16  # about as many take a core that shares the memory as long as a step adds
NORMED = 32  # rows that are normed together: sums over lanes take long, and overlap
RESULTS = 1 << 18  # of a step, if it has more than eight tiles of columns


@dataclass(frozen=True)
class Blocks:
    """A step multiplies `rows` rows of x by `columns` columns of the weight, over all inputs."""

    rows: int
    columns: int

    def __post_init__(self):
        are_tiles = self.rows > 0 and (self.rows % ROWS == 0 or self.rows == HALF_ROWS)
        if not are_tiles or self.columns < 1 or self.columns % LANES:
            blocks = f"multiples of {ROWS} rows and {LANES} columns, or {HALF_ROWS} rows and such columns"
            raise ValueError(f"blocks are {blocks}, not {self}")


@tuned("mx_matmul", Blocks)
def blocks(rows: int, parts: int, inputs: int, columns: int, bits: int, group: int) -> Blocks:
    """The default blocks of x [rows, inputs] times a weight [parts, inputs, columns] of `bits`, `group` to a scale.

    About 2 MiB of a matrix are copied at a time. A small weight takes as many steps as balance what each adds, some
    400 cycles, with what cannot overlap, the first copy and the last step. Cores take equally many steps: their copies
    share the memory, and take as long as one core's would of the whole weight.
    """
    even = lambda size, count, tile: pl.cdiv(size, count * tile) * tile  # noqa: E731
    most = max(by_vmem(2 << 23) // (inputs * bits) // LANES, by_vmem(2))
    balanced = max(round((parts * inputs * columns * bits / 8 / STEP_BYTES) ** 0.5), 1)
    tallest = max(min(by_vmem(X_ELEMENTS) // inputs, MOST_ROWS) // ROWS * ROWS, ROWS)
    tall = even(rows, pl.cdiv(rows, tallest), ROWS)
    share = pl.cdiv(columns, cores())  # of a core
    most = min(most, max(by_vmem(RESULTS) // (tall * LANES), 8), pl.cdiv(share, balanced * LANES))
    steps = pl.cdiv(share, most * LANES)
    if cores() > 1:

        def longest(steps: int) -> int:
            """The columns of the core that has most, and as many more as take the time that its steps add."""
            wide = even(share, steps, LANES)
            return pl.cdiv(pl.cdiv(columns, wide), cores()) * wide + STEP_COLUMNS * steps

        steps = min(range(steps, 2 * steps + 1), key=longest)
    return Blocks(tall, even(share, steps, LANES))


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
    if weight.on_chip and weight.values.shape[0] > 1:
        return f"a weight on chip is of one layer, not of {weight.values.shape[0]}"
    chosen = chosen or _default(rows, weight, normed)
    need = _vmem_bytes(weight, chosen, normed)
    if need > (have := by_vmem(VMEM_BYTES)):
        return f"{weight.inputs} inputs need {need} bytes of on-chip memory, and there are {have}"
    return None


def _default(rows: int, weight: Weight, normed: bool) -> Blocks:
    """The default blocks, of half the rows if that many do not fit with a copy of x in another order. Those of a weight
    on chip, of which nothing is copied, divide its columns into the fewest steps that scratch memory allows."""
    parts, columns = weight.values.shape[1::2]
    chosen = blocks(rows, parts, weight.inputs, columns, weight.bits, weight.group)
    if not weight.on_chip:
        fits = chosen.rows <= ROWS or _vmem_bytes(weight, chosen, normed) <= by_vmem(VMEM_BYTES)
        return chosen if fits else replace(chosen, rows=pl.cdiv(chosen.rows, 2 * ROWS) * ROWS)
    if columns % LANES:  # no step may end within a tile, unless it is the last one
        return replace(chosen, columns=pl.cdiv(columns, LANES) * LANES)
    tiles = columns // LANES
    wider = (replace(chosen, columns=columns // steps) for steps in range(1, tiles + 1) if tiles % steps == 0)
    narrow = replace(chosen, columns=LANES)
    return next((some for some in wider if _vmem_bytes(weight, some, normed=True) <= SCRATCH_BYTES), narrow)


def _vmem_bytes(weight: Weight, chosen: Blocks, normed: bool) -> int:
    parts, rows = weight.values.shape[1], chosen.rows
    x = rows * weight.inputs * 2 * (2 + (normed or weight.ordered))
    copied = 0 if weight.on_chip else 2
    blocks_bytes = parts * weight.inputs * chosen.columns * vmem_bits(weight.bits) // 8 * copied
    scales = 4 * parts * pl.cdiv(weight.inputs, weight.group) * chosen.columns * 2
    out = rows * chosen.columns * (4 * parts + 4 * parts + 4)
    return x + blocks_bytes + scales + out + min(STEP, weight.inputs) * chosen.columns * 2 + by_vmem(2 << 20)


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
    total, (_, parts, _, columns) = x.shape[0], weight.values.shape
    rewrites = norm is not None or weight.ordered
    inputs = _operands(x, weight, norm, x.shape[1] if rewrites else weight.inputs, interpret)
    rows = inputs.x.shape[0]
    chosen = blocks_ or _default(rows, weight, norm is not None)
    tile = Blocks(min(chosen.rows, rows), chosen.columns)
    wide = min(tile.columns, columns) if weight.on_chip else tile.columns
    grid = _Grid(pl.cdiv(rows, tile.rows), pl.cdiv(columns, tile.columns), 1 if weight.on_chip else cores())
    results = jax.ShapeDtypeStruct((parts if activation is None else 1, rows, columns), out_dtype or x.dtype)
    y = pl.pallas_call(
        functools.partial(
            _kernel,
            eps=norm and norm.eps,
            offset=norm and norm.offset,
            activation=activation,
            weight=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weight),
            step=grid.dimension,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.shape,
            in_specs=(_specs(inputs, tile, grid, weight.on_chip),),
            out_specs=grid.spec((results.shape[0], tile.rows, wide), lambda t, n, _: (0, t, n)),
            scratch_shapes=[
                _Scratch(
                    pltpu.VMEM((tile.rows, weight.inputs), x.dtype) if rewrites else None,
                    [pltpu.VMEM((parts, depth, wide), dtype) for depth, dtype in weight.unpacked],
                )
            ],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=grid.semantics,
            vmem_limit_bytes=vmem_limit(max(_vmem_bytes(weight, chosen, norm is not None), SCRATCH_BYTES)),
        ),
        cost_estimate=_cost(inputs, weight, results, tile, activated=activation is not None),
        interpret=interpret,
        name="mx_matmul",
    )(jnp.asarray(layer, jnp.int32).reshape(1), inputs)
    return y[:, :total] if total < rows else y


@dataclass(frozen=True)
class _Grid:
    """The grid of `rows` tiles of rows and `steps` steps of columns, which `cores` cores share."""

    rows: int
    steps: int
    cores: int

    @property
    def _shared(self) -> bool:
        return self.cores > 1 and self.steps > 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The last dimension is the steps, of a core if the first one is the cores."""
        return (self.cores, self.rows, pl.cdiv(self.steps, self.cores)) if self._shared else (self.rows, self.steps)

    @property
    def dimension(self) -> int:
        """The dimension of the steps."""
        return len(self.shape) - 1

    @property
    def semantics(self) -> tuple[Literal["parallel", "arbitrary"], ...]:
        return ("parallel",) * self._shared + ("arbitrary", "arbitrary")

    def spec(self, block: tuple[int | None, ...], place: Callable[..., tuple]) -> pl.BlockSpec:
        """The block at `place` of the tile of rows, the step among all, and the layer's reference. A core that has run
        out of steps repeats its last one."""

        def at(*ids):
            if not self._shared:
                return place(*ids)
            core, row, step, layer = ids
            return place(row, jnp.minimum(core * self.shape[2] + step, self.steps - 1), layer)

        return pl.BlockSpec(block, at)


class _Inputs(NamedTuple):
    """x [T, W] and norm [16, W], the layer's weight among others: W is K, or less if the kernel rewrites x and K is
    padded. The weight's values [P, K, N], scales [P, K / g, N] and tops [P, 1, N]. What a product lacks is None."""

    x: Any
    norm: Any
    values: Any
    scales: Any
    tops: Any


class _Scratch(NamedTuple):
    """x [T, K]: the left operand, if it is not x itself but normed, or has its inputs in the order of the words' bytes.
    scales: the unpacked scales."""

    x: Any
    scales: Sequence[Any]


def _operands(
    x: jax.Array, weight: Weight, norm: RmsNorm | None, width: int, interpret: bool | pltpu.InterpretParams
) -> _Inputs:
    """The inputs: x padded to whole tiles of rows, and to `width` columns."""
    pad = ((0, -x.shape[0] % (ROWS if x.shape[0] > HALF_ROWS else HALF_ROWS)), (0, width - x.shape[1]))
    arrays = weight.values, weight.scales, weight.tops
    if not interpret and not weight.on_chip:  # otherwise XLA would bring a small weight to VMEM
        arrays = jax.tree.map(lambda array: pltpu.with_memory_space_constraint(array, pltpu.HBM), arrays)
    return _Inputs(jnp.pad(x, pad), None if norm is None else norm.weight, *arrays)


def _norm_rows(norm: jax.Array) -> int:
    """The rows of the norm's weight [L, K] that are copied; the layer's row is among them."""
    return min(norm.shape[0], ROWS)


def _specs(inputs: _Inputs, tile: Blocks, grid: _Grid, on_chip: bool) -> _Inputs:
    """Blocks of the inputs. The layer of the weight's arrays [L, P, ., N] is a scalar. on_chip: the kernel takes them
    whole, as they lie."""

    def of_weight(array: jax.Array) -> pl.BlockSpec:
        if on_chip:
            return pl.BlockSpec(memory_space=pltpu.VMEM)
        shape = (None, *array.shape[1:3], tile.columns)
        return grid.spec(shape, lambda t, n, layer: (layer[0], 0, 0, n))

    columns, norm = inputs.x.shape[1], None
    if inputs.norm is not None:
        rows = _norm_rows(inputs.norm)
        norm = grid.spec((rows, columns), lambda t, n, layer: (lax.div(layer[0], rows), 0))
    x = grid.spec((tile.rows, columns), lambda t, n, _: (t, 0))
    return _Inputs(x, norm, *jax.tree.map(of_weight, tuple(inputs[2:])))


def _cost(
    inputs: _Inputs, weight: Weight, results: jax.ShapeDtypeStruct, tile: Blocks, *, activated: bool
) -> pl.CostEstimate:
    (rows, depth), parts, columns = inputs.x.shape, weight.values.shape[1], results.shape[2]
    norm = inputs.norm
    return pl.CostEstimate(
        flops=2 * rows * depth * parts * columns,
        bytes_accessed=pl.cdiv(rows, tile.rows) * parts * weight.nbytes
        + rows * depth * inputs.x.dtype.itemsize
        + (0 if norm is None else _norm_rows(norm) * depth * norm.dtype.itemsize)
        + results.size * results.dtype.itemsize,
        transcendentals=rows * columns if activated else 0,
    )


def _kernel(layer_ref, inputs: _Inputs, out_ref, scratch: _Scratch, *, eps, offset, activation, weight, step):
    """Multiply one tile of rows of x by some columns of the weight. out [P, T, N] has those columns. step: the grid's
    dimension of columns."""
    if weight.on_chip:
        inputs = _some_columns(inputs, pl.program_id(step), out_ref.shape[2])
    x_ref = inputs.x
    xs_ref = x_ref if scratch.x is None else scratch.x

    @pl.when(pl.program_id(step) == 0)
    def _():
        source = x_ref
        if inputs.norm is not None:
            source = xs_ref
            layer = lax.rem(layer_ref[0], inputs.norm.shape[0])
            _normalize(x_ref, inputs.norm, layer, source, eps, offset)
        if weight.ordered:
            permute(source, xs_ref)

    def product(part: int) -> jax.Array:
        tops = None if inputs.tops is None else inputs.tops.at[part]
        scales = []
        if inputs.scales is not None:
            scales = unpack_scales(inputs.scales.at[part], [ref.at[part] for ref in scratch.scales])
        matrix = LoadedMatrix(weight, inputs.values.at[part], scales, tops)
        return matrix.product(xs_ref)

    if activation is not None:
        out_ref[0] = activation(product(0), product(1)).astype(out_ref.dtype)
        return
    for part in range(inputs.values.shape[0]):
        out_ref[part] = product(part).astype(out_ref.dtype)


def _some_columns(inputs: _Inputs, step: jax.Array, count: int) -> _Inputs:
    """The inputs with one step's columns of the only layer of the weight's arrays [1, P, ., N]."""
    columns = pl.ds(pl.multiple_of(step * count, LANES), count) if count % LANES == 0 else slice(None)
    return _Inputs(*inputs[:2], *jax.tree.map(lambda ref: ref.at[0, :, :, columns], tuple(inputs[2:])))


def _normalize(x_ref, weights_ref, layer: jax.Array, out_ref, eps: float, offset: float) -> None:
    """Norm the rows of x [T, W] -> out [T, K], zero from column W on."""
    is_layer = lax.broadcasted_iota(jnp.int32, weights_ref.shape, 0) == layer
    weight = jnp.sum(jnp.where(is_layer, weights_ref[...].astype(jnp.float32), 0), axis=0, keepdims=True) + offset

    width, rows = x_ref.shape[1], math.gcd(x_ref.shape[0], NORMED)
    if width < out_ref.shape[1]:
        whole = width // LANES * LANES  # whole tiles are written, the first of them twice
        out_ref[:, whole:] = jnp.zeros_like(out_ref[:, whole:])

    @pl.loop(0, x_ref.shape[0], step=rows)
    def _(at):
        tile = pl.ds(pl.multiple_of(at, rows), rows)
        x = x_ref[tile, :].astype(jnp.float32)
        mean = jnp.sum(x * x, axis=1, keepdims=True) / width
        out_ref[tile, :width] = (x * lax.rsqrt(mean + eps) * weight).astype(out_ref.dtype)
