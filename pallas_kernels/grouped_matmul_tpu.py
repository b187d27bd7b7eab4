"""Matrix products of groups of rows on TPUs, each group with its own weight: the experts of a layer.

The weights of the groups that have rows are one stream of blocks, copied from HBM ahead of the computation and across
tiles of rows. Rows stay in place: a product takes whole sublanes from the start of its group, and does not change the
results of other groups' rows. Quantised weights are copied as they are stored, and unpacked in registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import Shaped
from inferlib.pallas_kernels.arithmetic_tpu import first_nonzero
from inferlib.pallas_kernels.expert_weights_tpu import ExpertBlocks, Stored, in_hbm, matrix_bytes, shape_of, unfit
from inferlib.pallas_kernels.generations_tpu import FLOAT4, by_vmem, generation, on_chip_bytes, vmem_limit
from inferlib.pallas_kernels.packed_weights_tpu import BLOCK, Weight, permute
from inferlib.pallas_kernels.tuned_tpu import tuned

LANES, SUBLANES = 128, 16
# Chosen by `benchmarks/kernels.py` on v5e, v5p, v6e and v7x.
VMEM_BYTES = 48 << 20  # of 64 MiB, see `by_vmem`
MARGIN_BYTES = 8 << 20  # of VMEM, left to the compiler
SPARE_BYTES = 8 << 20  # of VMEM, left to XLA beside rows and results
WEIGHT_BYTES = 8 << 20  # largest block of weights: the larger it is, the fewer times x is read
ROWS = 1024
FAST_ROWS = 1536  # of a tile, with fast memory and tall products: more rows let fewer groups continue in the next tile
SMALL_HEIGHT = 32  # rows of a product of small groups
HIGH = 128  # rows of a product of other groups
TALL = 288  # most rows of a product with blocks of up to TALL_ELEMENTS; higher ones take the compiler longer
TALL_ELEMENTS = 1 << 22
WIDEST = 2048  # columns of high products that unpack: with more, fewer inputs are unpacked in a straight line of code
TOGETHER = (1536, 1024)  # columns that are unpacked together where a whole block has no room
LOW = 32  # rows of a group's last products: with fewer, loading the weight into the matrix unit takes as long
NARROW = ("v4", "v5e", "v5p")  # generations whose matrix unit is 128 wide; others need twice as many rows


@dataclass(frozen=True)
class Blocks:
    """Sizes of the arrays in VMEM.

    rows: rows of x and of the result. columns: columns of a group's weight that are copied together. height: rows of a
    product; the last products of a group have `tail` rows, or `tail` doubled, once or more. rows, height and tail are
    multiples of 16. buffers: number of blocks of weights. once: a quantised block is unpacked in the first product of a
    group, not in each. together: if `once`, this many columns of one matrix are unpacked and multiplied by all of the
    group's rows in a tile before the next columns are; 0: all columns of the block.
    """

    rows: int
    columns: int
    height: int
    tail: int
    buffers: int = 2
    once: bool = False
    together: int = 0

    def __post_init__(self):
        sizes = self.rows, self.height, self.tail
        if any(size % SUBLANES for size in sizes) or not self.tail <= self.height <= self.rows:
            raise ValueError(f"not rows above height above tail, multiples of {SUBLANES}: {self}")
        if self.buffers < 2:
            raise ValueError("copies run ahead of the computation: there are at least two buffers")
        if self.together and (self.together % LANES or not self.once):
            raise ValueError(f"columns that are unpacked together are a multiple of {LANES}, and once: {self}")

    @property
    def heights(self) -> list[int]:
        """Rows of products, in descending order."""
        lower = [self.tail << n for n in range(8) if self.tail << n < self.height]
        return [self.height, *reversed(lower)]

    def of(self, w: Stored) -> ExpertBlocks:
        return ExpertBlocks.of(
            w, shape_of(w)[-2], self.columns, self.buffers, once=self.once, together=self.together or None
        )

    def vmem_bytes(self, x: Shaped, w: Stored) -> int:
        """Bytes of VMEM that x [M, I] times weights [L, E, P, I, O] needs."""
        stream, (groups, parts) = self.of(w), shape_of(w)[1:3]
        wide, inner = _rounded_up(self.columns, LANES), _rounded_up(x.shape[1], LANES)
        rows = 2 * self.rows * (inner + parts * wide) * x.dtype.itemsize
        if stream.ordered:
            rows += (self.height if stream.orders_late else self.rows) * inner * x.dtype.itemsize
        scales = 0 if isinstance(w, Weight) or w.dtype == x.dtype else 2 * groups * parts * wide * 4
        # Of those that unpack, a product and the results before it do not fit into the margin.
        products = 2 * 4 * self.height * (self.together or wide) if isinstance(w, Weight) else 0
        return stream.nbytes + rows + scales + products + by_vmem(MARGIN_BYTES)


@tuned("grouped_matmul", Blocks)
def default_blocks(x: Shaped, w: Stored) -> Blocks:
    """Products as high as groups, and weights in as few pieces as fit, for x [M, I] and weights [L, E, P, I, O]."""
    rows, (groups, parts, inner, outer) = x.shape[0], shape_of(w)[1:]
    quantised = isinstance(w, Weight)
    height, tail = _heights(rows, groups, quantised)
    columns = _columns(w, WIDEST if quantised and height > SMALL_HEIGHT else outer)
    # Generations without float4 convert 8-bit floats so slowly that scales of 128 inputs multiply sums instead.
    once = quantised and (w.group == BLOCK or generation() in FLOAT4) and height > SMALL_HEIGHT
    if once and generation() not in NARROW and height == HIGH and parts * inner * columns <= TALL_ELEMENTS:
        # Most groups of random size, with the rows before them in their first sublanes, then fit one product.
        most = rows // groups + 1.5 * (rows / groups) ** 0.5 + SUBLANES // 2
        height = min(max(_rounded_up(math.ceil(most), 2 * SUBLANES), HIGH), TALL)
    limit = FAST_ROWS if height > HIGH and generation() in FLOAT4 else ROWS
    rows = min(limit, max(_rounded_up(rows, SUBLANES), height))
    least = min(height, SMALL_HEIGHT)  # the least height that is tried
    choices = [Blocks(rows, columns, height, tail, 3, once), Blocks(rows, columns, height, tail, 2)]
    if once and generation() in FLOAT4:
        choices[1:1] = [replace(choices[0], buffers=2)]
    if once and generation() not in (*NARROW, *FLOAT4):  # others gain little by it, or compile it slowly
        choices[1:1] = [replace(choices[0], buffers=2, together=n) for n in TOGETHER if n < columns]
    chosen = _first_that_fits((*choices, Blocks(rows, columns, least, least, 2)), x, w)
    # If rows and results fit on chip beside the kernel, they are neither written to memory nor read. That is worth more
    # than a third buffer and high tiles, without which the kernel takes 2 to 6 % longer on v5p.
    beside = on_chip_bytes() - SPARE_BYTES - (inner + parts * outer) * x.shape[0] * x.dtype.itemsize
    lower = max(_rounded_up(chosen.rows // 2, SUBLANES), chosen.height)
    smaller = replace(chosen, rows=lower, buffers=2)
    return smaller if chosen.vmem_bytes(x, w) > beside >= smaller.vmem_bytes(x, w) else chosen


def _columns(w: Stored, most: int) -> int:
    """Columns of a piece of the weights, of the fewest pieces that fit and have at most so many."""
    parts, _, outer = shape_of(w)[2:]
    tiles = outer // LANES if outer % LANES == 0 else 1
    pieces = [n for n in range(1, tiles + 1) if tiles % n == 0]
    fit = [n for n in pieces if parts * matrix_bytes(w) <= n * by_vmem(WEIGHT_BYTES) and outer <= n * most]
    return outer // (fit or pieces[-1:])[0]


def _heights(rows: int, groups: int, quantised: bool) -> tuple[int, int]:
    """The highest and the lowest products, of at most HIGH rows."""
    high, small_groups = _rounded_up(rows, SUBLANES), rows <= 16 * groups
    lowest = SMALL_HEIGHT if small_groups else LOW // (1 + quantised) if generation() in NARROW else 2 * LOW
    height = tail = min(high, lowest)
    while 2 * height <= min(high, SMALL_HEIGHT if small_groups else HIGH):
        height *= 2
    return height, tail


def _first_that_fits(choices: Sequence[Blocks], x: Shaped, w: Stored) -> Blocks:
    """The first choice that fits on chip, with fewer rows if need be; the last one if none does.

    A tile has the rows of two products at least: most groups would go on in the next tile if it had those of one.
    """
    for chosen in choices:
        least = min(chosen.rows, 2 * chosen.height)
        while chosen.rows > least and chosen.vmem_bytes(x, w) > by_vmem(VMEM_BYTES):
            chosen = replace(chosen, rows=max(_rounded_up(chosen.rows // 2, SUBLANES), least))
        if chosen.vmem_bytes(x, w) <= by_vmem(VMEM_BYTES):
            break
    return chosen


def unsupported(x: Shaped, w: Stored, *, blocks: Blocks | None = None) -> str | None:
    """Why the kernel cannot multiply x [M, I] by w [L, E, P, I, O], or None if it can."""
    if reason := unfit(x.dtype, w):
        return reason
    blocks, (parts, inner, outer) = blocks or default_blocks(x, w), shape_of(w)[2:]
    if reason := blocks.of(w).lacks:
        return reason
    if (need := blocks.vmem_bytes(x, w)) > (have := by_vmem(VMEM_BYTES)):
        return f"weights {parts} x {inner} x {outer} need {need} bytes of on-chip memory, and there are {have}"
    return None


def grouped_matmul(
    x: jax.Array,
    w: jax.Array | Weight,
    sizes: jax.Array,
    *,
    layer: jax.Array | int = 0,
    scales: jax.Array | None = None,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """x [M, I], its rows sorted by group, times a layer of w [L, E, P, I, O] -> [P, M, O] in x's dtype.

    sizes [E] int32 sum to at most M: the first sizes[0] rows belong to group 0, and so on. Rows beyond them are in no
    group and hold anything, in x and in the result. Sums are float32. scales [E, P, O] float32: the scales of this
    layer's columns, if w is quantised by channel. A `Weight` has its own, and may have more inputs than x if they are
    padded. Only weights of groups that have rows are read, each once, `blocks.columns` columns at a time. Raises
    ValueError with the reason of `unsupported`.
    """
    _check(x, w, scales, blocks)
    blocks, (_, groups, parts, inner, outer) = blocks or default_blocks(x, w), shape_of(w)
    total, stream = x.shape[0], blocks.of(w)
    height = max(_rounded_up(total, SUBLANES), blocks.height)
    x = jnp.pad(x, ((0, height - total), (0, inner - x.shape[1])))
    rows, stored = x.shape[0], tuple(in_hbm(w, interpret))
    tile, in_place = min(blocks.rows, rows), (pl.BlockSpec(memory_space=pl.ANY),) * len(stored)
    inputs = _Inputs(x, None, stored)
    specs = _Inputs(pl.BlockSpec((tile, inner), lambda c, t, *_: (t, 0)), None, in_place)
    if scales is not None:
        inputs = inputs._replace(scales=scales.reshape(groups * parts, outer))
        specs = specs._replace(scales=pl.BlockSpec((groups * parts, blocks.columns), lambda c, t, *_: (0, c)))
    out = pl.pallas_call(
        functools.partial(_kernel, heights=blocks.heights, weights=stream),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(outer // blocks.columns, pl.cdiv(rows, tile)),
            in_specs=(specs,),
            out_specs=pl.BlockSpec((parts, tile, blocks.columns), lambda c, t, *_: (0, t, c)),
            scratch_shapes=[_scratch(x, blocks, stream, len(stored))],
        ),
        out_shape=jax.ShapeDtypeStruct((parts, rows, outer), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit(blocks.vmem_bytes(x, w)),
        ),
        cost_estimate=_cost(total, x.dtype, w, blocks),
        interpret=interpret,
        name="grouped_matmul",
    )(jnp.asarray(layer, jnp.int32).reshape(1), sizes.astype(jnp.int32), inputs)
    return out[:, :total]


def _check(x: jax.Array, w: Stored, scales: jax.Array | None, blocks: Blocks | None) -> None:
    """Raise ValueError for a product that the kernel cannot compute."""
    if reason := unsupported(x, w, blocks=blocks):
        raise ValueError(f"the TPU kernel does not run this grouped product: {reason}")
    if (not isinstance(w, Weight) and w.dtype != x.dtype) != (scales is not None):
        raise ValueError("weights quantised by channel need scales, and others have none")


class _Inputs(NamedTuple):
    """x [T, I]; scales [E * P, C] of columns, if there are any; HBM: the arrays of w [L, E, P, I, O]."""

    x: Any
    scales: Any
    weights: tuple[Any, ...]


class _Scratch(NamedTuple):
    """in_buffer: the group and the piece in each buffer. state: the group and the piece to copy next, the first group
    that has rows, the buffer to read next, and the row where its group starts. room: buffers of blocks. unpacked: see
    `ExpertBlocks`. ordered: x in the order of the weight's bytes, if that differs."""

    in_buffer: Any
    state: Any
    semaphores: Any
    room: Sequence[Any]
    unpacked: Sequence[Any]
    ordered: Any = None


def _scratch(x: jax.Array, blocks: Blocks, stream: ExpertBlocks, count: int) -> _Scratch:
    """The kernel's scratch for padded x and a weight of `count` arrays."""
    scratch = _Scratch(
        pltpu.SMEM((blocks.buffers, 2), jnp.int32),
        pltpu.SMEM((5,), jnp.int32),
        pltpu.SemaphoreType.DMA((count, blocks.buffers)),
        stream.room,
        stream.unpacked,
    )
    if not stream.ordered:
        return scratch
    height = blocks.height if stream.orders_late else min(blocks.rows, x.shape[0])
    return scratch._replace(ordered=pltpu.VMEM((height, x.shape[1]), x.dtype))


def _cost(rows: int, dtype: jax.typing.DTypeLike, w: Stored, blocks: Blocks) -> pl.CostEstimate:
    """The cost of `rows` rows that choose their groups at random."""
    groups, parts, inner, outer = shape_of(w)[1:]
    read = groups * (1 - (1 - 1 / groups) ** rows)
    moved = rows * (inner * (outer // blocks.columns) + parts * outer) * jnp.dtype(dtype).itemsize
    return pl.CostEstimate(
        flops=2 * rows * inner * parts * outer,
        bytes_accessed=int(read * parts * matrix_bytes(w)) + moved,
        transcendentals=0,
    )


def _kernel(layer_ref, sizes_ref, inputs: _Inputs, out_ref, scratch: _Scratch, *, heights, weights):
    """Multiply one tile of rows by one piece of the columns -> out [P, T, C]. Grid: pieces, tiles. Scalars: layer [1],
    sizes [E]."""
    x_ref, scales_ref = inputs.x, inputs.scales
    in_buffer, state, room, unpacked = scratch.in_buffer, scratch.state, scratch.room, scratch.unpacked
    xs_ref = scratch.ordered if weights.ordered else x_ref
    piece, tile = pl.program_id(0), pl.program_id(1)
    rows, (groups,), buffers = x_ref.shape[0], sizes_ref.shape, room[0].shape[0]
    pieces, base = pl.num_programs(0), tile * rows
    if weights.ordered and not weights.orders_late:
        permute(x_ref, xs_ref)

    # ---- copies

    def copies(group, piece, buf):
        return weights.copies(inputs.weights, room, scratch.semaphores, layer_ref[0], group, piece, buf)

    def start_next(buf):
        """Start the copy of the block whose turn it is, if any is left."""
        group, piece = state[0], state[1]
        in_buffer[buf, 0], in_buffer[buf, 1] = group, piece

        @pl.when(piece < pieces)
        def _():
            for copy in copies(group, piece, buf):
                copy.start()
            after = first_nonzero(sizes_ref, group + 1, groups)
            ends = after == groups
            state[0] = jnp.where(ends, state[2], after)
            state[1] = piece + ends.astype(jnp.int32)

    @pl.when((piece == 0) & (tile == 0))
    def _():
        first = first_nonzero(sizes_ref, 0, groups)
        state[0] = state[2] = first
        state[1] = jnp.where(first == groups, pieces, 0)
        state[3] = 0
        lax.fori_loop(0, buffers - 1, lambda buf, _: start_next(buf), None)

    @pl.when(tile == 0)
    def _():
        state[4] = 0

    # ---- computation

    def product(group, buf, first, stop, turn, at, height, *, unpacks=False):
        """Multiply `height` rows from `at` on; store the results of rows first <= row < stop."""
        parts, taken = turn
        at = pl.multiple_of(jnp.minimum(at, rows - height), SUBLANES)
        row = at + lax.broadcasted_iota(jnp.int32, (height, taken.stop - taken.start), 0)
        in_group, at = (row >= first) & (row < stop), pl.ds(at, height)
        xs = xs_ref.at[:height] if weights.orders_late else xs_ref.at[at]
        if weights.orders_late:
            permute(x_ref.at[at], xs)
        for part in parts:
            y = weights.product(xs, room, unpacked, piece, buf, part, turn, unpacks=unpacks)
            if scales_ref is not None:
                y = y * scales_ref[pl.ds(group * len(parts) + part, 1)]
            before = out_ref[part, at, taken].astype(jnp.float32)
            out_ref[part, at, taken] = jnp.where(in_group, y, before).astype(out_ref.dtype)

    def multiply(group, buf, first, stop, begins):
        """Multiply the tile's rows first <= row < stop. begins: the group's first row is among them."""
        for turn in weights.turns:
            multiply_turn(group, buf, first, stop, begins | (weights.together is not None), turn)

    def multiply_turn(group, buf, first, stop, begins, turn):
        take = functools.partial(product, group, buf, first, stop, turn)

        def products(at, high, done, count):
            lax.fori_loop(done, count, lambda n, _: take(at + n * high, high), None)

        at, height, waits = first & -SUBLANES, heights[0], begins
        for high, lower in zip(heights, [*heights[1:], 0], strict=True):
            rest = max(high - heights[-1], lower)  # rows that lower products can take
            count, done = lax.div(jnp.maximum(stop - at - rest, 0) + high - 1, high), 0
            if weights.once and 2 * high > height:
                now = waits & (count > 0)
                pl.when(now)(functools.partial(take, at, high, unpacks=True))
                waits, done = waits & (count == 0), now.astype(jnp.int32)
                if 2 * lower <= height:
                    pl.when(waits)(lambda: weights.unpack(room, unpacked, piece, buf, turn))
            products(at, high, done, count)
            at += count * high

    def take_group(carry):
        """Multiply the group's rows in this tile. A group that goes on in the next tile keeps its buffer."""
        start, buf, _ = carry
        group = in_buffer[buf, 0]
        stop = start + sizes_ref[group]

        @pl.when(start >= base)
        def _():
            start_next(jnp.where(buf == 0, buffers - 1, buf - 1))
            for copy in copies(group, piece, buf):
                copy.wait()

        multiply(group, buf, jnp.maximum(start - base, 0), jnp.minimum(stop - base, rows), start >= base)
        ends = stop <= base + rows
        start = jnp.where(ends, stop, start)
        buf = jnp.where(ends, jnp.where(buf == buffers - 1, 0, buf + 1), buf)
        return start, buf, ends & starts_here(start, buf)

    def starts_here(start, buf):
        return (start < base + rows) & (in_buffer[buf, 1] == piece)

    start, buf = state[4], state[3]
    state[4], state[3], _ = lax.while_loop(lambda carry: carry[2], take_group, (start, buf, starts_here(start, buf)))


def _rounded_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple
