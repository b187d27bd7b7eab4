"""Blocks of experts' weights in a TPU's on-chip memory, in any stored format: buffers, copies, products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div, rem
from inferlib.pallas_kernels.generations_tpu import untaken, vmem_bits
from inferlib.pallas_kernels.packed_weights_tpu import BLOCK, DEPTH, LANES, LoadedMatrix, Weight, unpack_scales

SCALED = 1024  # inputs whose scales are rows of whole tiles

Stored = jax.Array | jax.ShapeDtypeStruct | Weight


def shape_of(w: Stored) -> tuple[int, ...]:
    """The shape [..., K, N] of weights, also of packed ones."""
    return (*w.values.shape[:-2], w.inputs, w.values.shape[-1]) if isinstance(w, Weight) else w.shape


def matrix_bytes(w: Stored) -> int:
    """Bytes of one stored matrix [K, N]."""
    arrays = jax.tree.leaves(w)
    return sum(math.prod(a.shape[-2:]) * jax.dtypes.itemsize_bits(a.dtype) // 8 for a in arrays)


def unfit(x_dtype, w: Stored) -> str | None:
    """Why the kernels cannot multiply rows of a dtype by experts' weights; None if they can.

    Weights with scales by channel are int8 or float8_e4m3fn; those with scales by group are a `Weight`.
    """
    if isinstance(w, Weight):
        if x_dtype != jnp.bfloat16:
            return f"it multiplies packed weights by rows of bfloat16, not {jnp.dtype(x_dtype)}"
        if w.inputs % w.depth or w.group not in (BLOCK, DEPTH):
            return f"it takes groups of {BLOCK} or {DEPTH} of a multiple of {w.depth}, not of {w.group} of {w.inputs}"
        return untaken(w.operand)
    if reason := untaken(w.dtype):
        return reason
    alike = jnp.bfloat16 if w.dtype in (jnp.int8, jnp.float8_e4m3fn) else w.dtype
    if x_dtype == alike and alike in (jnp.bfloat16, jnp.float32):
        return None
    return (
        "it takes rows of bfloat16 and weights of bfloat16, int8 or float8_e4m3fn, or both of float32, not "
        f"{jnp.dtype(x_dtype)} and {w.dtype}"
    )


def in_hbm(w: jax.Array | Weight | list[jax.Array], interpret) -> list[jax.Array]:
    """The arrays of weights, or others, pinned to HBM: XLA would bring small ones to VMEM whole."""
    arrays = jax.tree.leaves(w)
    return arrays if interpret else [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]


@dataclass(frozen=True)
class ExpertBlocks:
    """Blocks of weights [L, E, P, K, N]: `depth` inputs by `columns` columns of an expert's matrices; one of the two is
    the whole dimension. buffers: number of blocks on chip. once: a quantised block is unpacked once for several
    products, not in each. together: if so, this many columns of one matrix are unpacked together; None: all of the
    block. Make them with `of`."""

    weight: jax.ShapeDtypeStruct | Weight
    depth: int
    columns: int
    buffers: int
    once: bool = False
    together: int | None = None

    @staticmethod
    def of(
        w: Stored, depth: int, columns: int, buffers: int, *, once: bool = False, together: int | None = None
    ) -> ExpertBlocks:
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), w)
        return ExpertBlocks(shapes, depth, columns, buffers, once, together)

    @property
    def turns(self) -> list[tuple[range, slice]]:
        """Which matrices of a block are multiplied together, and which columns of them."""
        parts = shape_of(self.weight)[-3]
        if self.together is None:
            return [(range(parts), slice(0, self.columns))]
        starts = range(0, self.columns, self.together)
        return [
            (range(part, part + 1), slice(start, min(start + self.together, self.columns)))
            for part in range(parts)
            for start in starts
        ]

    @property
    def ordered(self) -> bool:
        """True if x is multiplied in the order of MXFP4's bytes (see `packed_weights_tpu.permute`)."""
        return isinstance(self.weight, Weight) and self.weight.ordered

    @property
    def orders_late(self) -> bool:
        """True if x is put in that order for each product, which takes no longer, instead of once before them."""
        return self.ordered and self.once and self.together is None

    @property
    def lacks(self) -> str | None:
        """Why there cannot be such blocks; None if there can."""
        *_, inputs, columns = shape_of(self.weight)
        deep = self.weight.depth if isinstance(self.weight, Weight) else LANES
        for what, size, block, tile in (
            ("columns", columns, self.columns, LANES),
            ("inputs", inputs, self.depth, deep),
        ):
            if size % block or (block != size and block % tile):
                return f"{size} {what} do not divide into blocks of {block}, in tiles of {tile}"
        return None

    @property
    def scaled(self) -> int:
        """Number of inputs whose scales are copied with a block: whole tiles of scales, used all at once or in turn, or
        all scales of an expert."""
        inputs = shape_of(self.weight)[-2]
        if inputs % SCALED or (SCALED % self.depth and self.depth % SCALED):
            return inputs
        return max(self.depth, SCALED)

    @property
    def room(self) -> list[Any]:
        """Buffers [n, P, rows, columns] for each array of the weight."""
        return [
            pltpu.VMEM((self.buffers, a.shape[2], self._rows(n, a.shape[-2]), self.columns), a.dtype)
            for n, a in enumerate(jax.tree.leaves(self.weight))
        ]

    @property
    def unpacked(self) -> list[Any]:
        """Buffers for the unpacked elements and the unpacked scales of the block in use."""
        if not isinstance(self.weight, Weight):
            return []
        parts = self.weight.values.shape[2]
        together = len(self.turns[0][0])
        whole = [pltpu.VMEM((together, self.depth, width), self.weight.element) for width in self._widths]
        scales = [(self._rows(1, rows), dtype) for rows, dtype in self.weight.unpacked]
        return [*whole, *[pltpu.VMEM((parts, rows, self.columns), dtype) for rows, dtype in scales]]

    @property
    def _widths(self) -> list[int]:
        """Widths of the columns unpacked together: each has a buffer, as only whole tiles of one can be cut off."""
        return sorted({columns.stop - columns.start for _, columns in self.turns}) if self.once else []

    @property
    def nbytes(self) -> int:
        """Bytes of `room` and `unpacked`."""
        total = 0
        for ref in self.room + self.unpacked:
            (*lead, rows, columns), bits = ref.shape, vmem_bits(jax.dtypes.itemsize_bits(ref.dtype))
            total += math.prod(lead) * pl.cdiv(rows, 256 // bits) * 32 * pl.cdiv(columns, LANES) * LANES
        return total

    def copies(self, arrays: Sequence, room: Sequence, semaphores, layer, expert, piece, buffer) -> Iterator:
        """The copies of a piece of an expert to a buffer. semaphores [arrays, n]."""
        inputs = shape_of(self.weight)[-2]
        for n, (array, into) in enumerate(zip(arrays, room, strict=True)):
            source, rows = array.at[layer, expert], into.shape[2]
            if self.columns < array.shape[-1]:
                source = source.at[:, :, pl.ds(pl.multiple_of(piece * self.columns, LANES), self.columns)]
            elif rows < array.shape[3]:
                start = div(piece, rows * inputs // array.shape[3] // self.depth) * rows  # the latter a power of two
                source = source.at[:, pl.ds(pl.multiple_of(start, rows), rows)]
            yield pltpu.make_async_copy(source, into.at[buffer], semaphores.at[n, buffer])

    def unpack(self, room: Sequence, unpacked: Sequence, piece, buffer, turn: tuple[range, slice]) -> None:
        """Unpack the matrices and columns in turn of a block that is unpacked `once`, if no product does it."""
        for part in turn[0]:
            self._matrix(room, unpacked, piece, buffer, part, turn).unpack(self._into(unpacked, part, turn))

    def product(
        self,
        x_ref,
        room: Sequence,
        unpacked: Sequence,
        piece,
        buffer,
        part: int,
        turn: tuple[range, slice] | None = None,
        *,
        unpacks: bool = False,
    ) -> jax.Array:
        """x [T, depth] times the columns in turn, or all, of a matrix of a block -> float32 [T, columns], before scales
        by channel. unpacks: this product does the unpacking of a block that is unpacked `once`."""
        turn = turn or self.turns[0]
        if isinstance(self.weight, Weight) and (unpacks or not self.once):
            matrix = self._matrix(room, unpacked, piece, buffer, part, turn)
            return matrix.product(x_ref, self._into(unpacked, part, turn) if unpacks else None)
        exact = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
        w = self._into(unpacked, part, turn)[...] if self.once else room[0][buffer, part]
        y = jnp.dot(x_ref[...], w, precision=exact, preferred_element_type=jnp.float32)
        packed = isinstance(self.weight, Weight) and self.weight.packed
        return y * room[2][buffer, part, :, turn[1]] if self.once and packed else y

    def _into(self, unpacked: Sequence, part: int, turn: tuple[range, slice]):
        """The ref that the columns in turn of a matrix are unpacked to."""
        parts, columns = turn
        return unpacked[self._widths.index(columns.stop - columns.start)].at[part - parts.start]

    def _matrix(
        self, room: Sequence, unpacked: Sequence, piece, buffer, part: int, turn: tuple[range, slice]
    ) -> LoadedMatrix:
        """The matrix with its scales unpacked, as late as possible, for each part: stores take most of the time."""
        weight: Any = self.weight
        columns = turn[1]
        into = [ref.at[part, :, columns] for ref in unpacked[len(self._widths) :]]
        scales = unpack_scales(room[1].at[buffer, part, :, columns], into)
        inputs = shape_of(self.weight)[-2]
        among = piece if self.scaled == inputs else rem(piece, self.scaled // self.depth)
        start = 0 if self.depth == inputs else among * self.depth
        tops = room[2].at[buffer, part, :, columns] if weight.packed else None
        return LoadedMatrix(weight, room[0].at[buffer, part, :, columns], scales, tops, start)

    def _rows(self, number: int, whole: int) -> int:
        """How many of the `whole` rows of values, scales or tops belong to a block."""
        return whole if number == 2 else whole * (self.scaled if number else self.depth) // shape_of(self.weight)[-2]
