"""Weights as TPU kernels read them: how they are stored, and how quantised ones are unpacked in registers.

The MXU multiplies bfloat16 rows by weights of 8-bit floats, so elements are unpacked to these. MXFP4 elements (4 bits,
a power of two for each 32) become e5m2 with their scale in the exponent, four at a time in a 32-bit word, relative to
the largest scale of their column: elements of 2^-26 of that or less vanish, as they do in a float32 sum. Chips that
convert float4 to e5m2 in hardware read one form (`pack_float4`), others another (`pack_mxfp4`). Scales of other formats
multiply partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div
from inferlib.pallas_kernels.generations_tpu import FLOAT4, generation

LANES = 128
DEPTH = 128  # inputs that are unpacked together
BLOCK = 32  # elements that share a scale of MXFP8 and MXFP4
FLOAT4_DEPTH = 8 * BLOCK  # inputs that are unpacked together on chips in FLOAT4
TALL = 256  # with more rows, iterations are shorter
REPEATED = 32  # most rows repeated for groups shorter than DEPTH; with more, weights are scaled before the product
# Most rows whose sums are multiplied by scales of DEPTH inputs, where the matrix unit sums over twice as many: with
# more, weights are scaled before the product. Other generations sum over DEPTH.
SUMMED = {"v6e": 128, "v7x": 64}
SUMMED_FLOAT8 = SUMMED | {"v6e": 384}  # which converts 8-bit floats slowly
# Inputs of one iteration: fewer for many rows, and half as many for int4, which take longer to compile.
STEP, TALL_STEP = 4096, 2048
ELEMENTS = 1 << 22  # most elements unpacked in one iteration
PERMUTED = 512  # rows that are permuted in one iteration
UNPACKED = LANES  # columns that are unpacked together if products come later
_TOP = 27  # exponent (5 bits) of a column's largest scale, chosen so that 6.0 times it is finite
_MIDDLE = 14  # the exponent of 0.5 in e5m2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight:
    """Weights [..., K, N] as kernels read them, K a multiple of 128.

    values: bfloat16 without scales; int8, int4 or e4m3 [..., K, N], scales float32 [..., K / g, N], or e8m0 codes as
    uint8 for g = 32; or of MXFP4 what `pack_mxfp4` or `pack_float4` returns, tops included. on_chip: they are in
    on-chip memory already.
    """

    values: jax.Array
    scales: jax.Array | None = None
    tops: jax.Array | None = None
    on_chip: bool = field(default=False, metadata={"static": True})

    @property
    def packed(self) -> bool:
        return self.tops is not None

    @property
    def float4(self) -> bool:
        """True if the arrays are those of `pack_float4`."""
        return self.packed and self.scales is not None and self.scales.dtype == jnp.int8

    @property
    def ordered(self) -> bool:
        """True if x is multiplied in the order that `permute` gives it."""
        return self.packed and not self.float4

    @property
    def depth(self) -> int:
        """Number of inputs that are unpacked together; K is a multiple of it."""
        return FLOAT4_DEPTH if self.float4 else DEPTH

    @property
    def inputs(self) -> int:
        """K, padding included."""
        return self.values.shape[-2] * (8 if self.packed else 1)

    @property
    def group(self) -> int:
        """Number of inputs that share a scale; K if there are no scales."""
        return BLOCK if self.packed else self.inputs // (1 if self.scales is None else self.scales.shape[-2])

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.packed else jax.dtypes.itemsize_bits(self.values.dtype)

    @property
    def element(self) -> jnp.dtype:
        """Dtype of an unpacked element, if it is quantised by group."""
        return jnp.float8_e5m2 if self.packed else jnp.bfloat16

    @property
    def operand(self) -> jnp.dtype:
        """The dtype furthest from bfloat16 among those that the matrix unit multiplies by."""
        return self.element if self.packed else self.values.dtype

    @property
    def unpacked(self) -> list[tuple[int, jnp.dtype]]:
        """Rows and dtype of each buffer that `unpack_scales` needs for N columns of a matrix."""
        if self.scales is None:
            return []
        if self.packed:
            return [(self.scales.shape[-2], jnp.int32)] * 2
        return [(self.inputs // BLOCK, jnp.float32)] if self.group == BLOCK else []

    @property
    def nbytes(self) -> int:
        """Bytes of one of its matrices."""
        return self.whole_bytes // math.prod(self.values.shape[:-2])

    @property
    def whole_bytes(self) -> int:
        """Bytes of all of its matrices."""
        return sum(a.size * jax.dtypes.itemsize_bits(a.dtype) // 8 for a in jax.tree.leaves(self))


# ---- storage


def pack_mxfp4(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """e2m1 codes uint8 [..., K, N] and e8m0 codes uint8 [..., K / 32, N] as the kernel reads them; traceable.

    K, a multiple of 32, is padded to one of 128. Returns words int32 [..., K / 8, N], exponents int32
    [..., K / 128, N] and tops float32 [..., 1, N].

    Of each 128 inputs, byte b of word r holds inputs 32 b + r and 32 b + 16 + r: so it is of block b, as is byte b of
    the exponents. Three bits of an input are its exponent (0.5 is 0) and its mantissa inverted, less 1; all ones are
    zero, for which the addition of that 1 carries into what then takes the rest away. They are bits 1 to 3 of the
    first, whose sign is bit 7, and 4 to 6 of the second, whose sign is bit 0.
    """
    inputs = codes.shape[-2]
    pad = [(0, 0)] * (codes.ndim - 2)
    codes = jnp.pad(codes, [*pad, (0, -inputs % DEPTH), (0, 0)])
    scales = jnp.pad(scales, [*pad, (0, codes.shape[-2] // BLOCK - scales.shape[-2]), (0, 0)])
    float_ = jnp.maximum(codes & 7, 1) - (codes & 7 == 1)  # exponent and mantissa of 0.5, 1, 1.5, ...
    nibbles = jnp.where(codes & 7 == 0, 7, (float_ ^ 1) - 1 | codes & 8).astype(jnp.uint32)
    nibbles = rearrange(nibbles, "... (group block half r) n -> ... group block half r n", block=4, half=2, r=16)
    starts = jnp.arange(0, 32, 8, dtype=jnp.uint32)[:, None]
    magnitude_at, sign_at = ((starts + jnp.array(x, jnp.uint32))[..., None, None] for x in ((1, 4), (7, 0)))
    bits = (nibbles & 7) << magnitude_at | nibbles >> 3 << sign_at
    words = rearrange(jnp.sum(bits, axis=(-4, -3), dtype=jnp.uint32), "... group r n -> ... (group r) n")
    exponents, tops = _exponents(scales)
    exponents = rearrange(exponents.astype(jnp.uint32), "... (group block) n -> ... group block n", block=4)
    exponents = jnp.sum(exponents << jnp.arange(0, 32, 8, dtype=jnp.uint32)[:, None], axis=-2, dtype=jnp.uint32)
    as_int = lambda x: lax.bitcast_convert_type(x, jnp.int32)  # noqa: E731
    return as_int(words), as_int(exponents), tops


def pack_float4(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `pack_mxfp4`, for chips in FLOAT4. K is padded to a multiple of 256. Returns words int32 [..., K / 8, N],
    shifts int8 [..., K / 32, N] and tops float32 [..., 1, N].

    A word is eight codes, unchanged and in order: a converted block is a register. A shift is subtracted from a byte to
    put the scale in its exponent; it is 0 if all codes are zero.
    """
    inputs = codes.shape[-2]
    pad = [(0, 0)] * (codes.ndim - 2)
    codes = jnp.pad(codes, [*pad, (0, -inputs % FLOAT4_DEPTH), (0, 0)])
    scales = jnp.pad(scales, [*pad, (0, codes.shape[-2] // BLOCK - scales.shape[-2]), (0, 0)])
    codes = rearrange(jnp.where(codes & 7 == 0, 0, codes), "... (word code) n -> ... word code n", code=8)
    starts = jnp.arange(0, 32, 4, dtype=jnp.uint32)[:, None]
    words = jnp.sum(codes.astype(jnp.uint32) << starts, axis=-2, dtype=jnp.uint32)
    exponents, tops = _exponents(scales)
    shifts = (4 * (_MIDDLE - exponents)).astype(jnp.int8)
    return lax.bitcast_convert_type(words, jnp.int32), shifts, tops


def _exponents(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponents int32 [..., B, N] of e8m0 codes, the largest of a column shifted to _TOP, and the factors float32
    [..., 1, N] that undo the shift. Where a factor would not be a normal number, the largest exponent is less."""
    top = jnp.max(scales, axis=-2, keepdims=True).astype(jnp.int32)
    most = jnp.minimum(_TOP, top + _MIDDLE - 1)
    tops = jnp.where(top == 255, 255, top - most + _MIDDLE)
    return jnp.maximum(most + scales.astype(jnp.int32) - top, 0), power_of_two(tops)


def power_of_two(code: jax.Array) -> jax.Array:
    """An e8m0 code, int32, as float32; 2^-127 becomes zero, as devices flush it."""
    bits = lax.bitcast_convert_type(code << 23, jnp.float32)
    return jnp.where(code == 255, jnp.nan, bits)


# ---- in kernels


@dataclass(frozen=True)
class LoadedMatrix:
    """A matrix of a `weight`, or some of its inputs, on chip.

    values: ref of values [K, N], or of MXFP4's words [K / 8, N]. scales: what `unpack_scales` returns. tops: ref of
    MXFP4's tops [1, N]. start: number of the first input among those of the scales.
    """

    weight: Weight
    values: Any
    scales: Sequence
    tops: Any = None
    start: jax.Array | int = 0

    @property
    def inputs(self) -> int:
        """K"""
        return self.values.shape[0] * (8 if self.weight.packed else 1)

    @property
    def by_group(self) -> bool:
        """True if scales multiply partial sums."""
        return not self.weight.packed and self.weight.scales is not None and self.weight.group <= DEPTH

    def product(self, x_ref, into=None) -> jax.Array:
        """x [T, K] times the matrix -> float32 [T, N]. If the weight is `ordered`, x is in the order of `permute`.

        into: a ref that the unpacked elements are written to, as by `unpack`.
        """
        rows = x_ref.shape[0]
        width = DEPTH if self.by_group and into is None and not self._fills(rows) else 2 * DEPTH

        def add(start: jax.Array | int, count: int, total: jax.Array) -> jax.Array:
            scales = self._scales(start, count)
            for at in range(0, count, width):
                depth = min(width, count - at)
                inputs = pl.ds(_multiple_of(start + at, DEPTH), depth)
                per = [rows[at // unit : (at + depth) // unit] for unit, rows in scales]
                x = x_ref[:, inputs]
                if into is None:
                    total = total + self._partial(x, start + at, depth, per)
                else:
                    into[inputs] = self._elements(start + at, depth, per)
                    total = total + _dot(x, into[inputs])
            return total

        columns = self.values.shape[1]
        tall = TALL_STEP // 2 if self.weight.bits < 8 and not self.weight.packed else TALL_STEP
        step = min(STEP if rows <= TALL else tall, max(ELEMENTS // columns // 1024, 1) * 1024)
        whole, rest = divmod(self.inputs, step)
        total = jnp.zeros((rows, columns), jnp.float32)
        if whole <= 1:
            total = add(0, self.inputs, total)
        else:
            total = lax.fori_loop(0, whole, lambda i, total: add(i * step, step, total), total)
            total = add(whole * step, rest, total) if rest else total
        if self.tops is not None:
            return total * self.tops[...]
        if self.by_group or not self.scales:
            return total
        return total * self.scales[0][pl.ds(div(self.start, self.weight.group), 1)]

    def _fills(self, rows: int) -> bool:
        """True if products of so many rows fill the matrix unit, with weights of two groups scaled before."""
        summed = SUMMED_FLOAT8 if self.weight.values.dtype == jnp.float8_e4m3fn else SUMMED
        if (most := summed.get(generation() or "")) is None:
            return False
        # Weights of shorter groups are scaled before in any case.
        return rows > (most if self.weight.group == DEPTH else _most_repeated())

    def unpack(self, into) -> None:
        """Unpack all elements, without MXFP4's tops, to a ref [K, N] of `Weight.element`; groups are shorter than K."""

        def take(start: jax.Array | int, count: int) -> None:
            for column in range(0, into.shape[1], UNPACKED):  # some columns at a time, or registers spill
                columns = pl.ds(column, min(UNPACKED, into.shape[1] - column))
                part = replace(self, values=self.values.at[:, columns], scales=[x.at[:, columns] for x in self.scales])
                scales = part._scales(start, count)
                for at in range(0, count, self.weight.depth):
                    per = [rows[at // unit : (at + self.weight.depth) // unit] for unit, rows in scales]
                    inputs = pl.ds(_multiple_of(start + at, DEPTH), self.weight.depth)
                    into[inputs, columns] = part._elements(start + at, self.weight.depth, per)

        whole, rest = divmod(self.inputs, TALL_STEP)
        if whole:
            lax.fori_loop(0, whole, lambda i, _: take(i * TALL_STEP, TALL_STEP), None)
        if rest:
            take(whole * TALL_STEP, rest)

    def _scales(self, start: jax.Array | int, count: int) -> list[tuple[int, list[jax.Array]]]:
        """The scales of `count` inputs: rows [1, N], and how many inputs share each."""
        if self.weight.float4 or not (self.weight.packed or self.by_group):
            return []
        unit = DEPTH if self.weight.packed else self.weight.group
        first, rows = div(start + self.start, unit), count // unit
        if isinstance(self.start, int) and (isinstance(start, int) or rows % 8 == 0):
            # If whole tiles are loaded, one instruction spreads a row over sublanes instead of two.
            tiles = [ref[pl.ds(_multiple_of(first, 8), rows)] for ref in self.scales]
            return [(unit, [tile[n : n + 1] for n in range(rows)]) for tile in tiles]
        return [(unit, [ref[pl.ds(first + n, 1)] for n in range(rows)]) for ref in self.scales]

    def _partial(self, x: jax.Array, at: jax.Array | int, depth: int, scales: Sequence[list[jax.Array]]) -> jax.Array:
        """The product over `depth` inputs from `at` on, with these scales."""
        if self.weight.packed:
            return _dot(x, self._elements(at, depth, scales))
        w = self.values[pl.ds(_multiple_of(at, DEPTH), depth)]
        if not scales:
            return _dot(x, w)
        (of_groups,), rows = scales, x.shape[0]
        if len(of_groups) > 1 and rows > _most_repeated():
            return _dot(x, _scaled(w, of_groups))
        y = _dot(_repeated(x, len(of_groups)), w)
        total: Any = sum(y[n * rows : (n + 1) * rows] * scale for n, scale in enumerate(of_groups))
        return total

    def _elements(self, at: jax.Array | int, depth: int, scales: Sequence[list[jax.Array]]) -> jax.Array:
        """The elements of `depth` inputs from `at` on, with their scales."""
        if self.weight.float4:
            return self._float4(at, depth)
        if self.weight.packed:
            return self._words(at, depth, *scales)
        return _scaled(self.values[pl.ds(_multiple_of(at, DEPTH), depth)], *scales)

    def _words(self, at: jax.Array | int, depth: int, keeps: list[jax.Array], adds: list[jax.Array]) -> jax.Array:
        """`depth` inputs as e5m2."""
        floats = []
        for n in range(depth // DEPTH):
            word = self.values[pl.ds(_multiple_of(div(at, 8) + n * 16, 16), 16)]
            keep, add = (lax.broadcast_in_dim(rows[n], word.shape, (0, 1)) for rows in (keeps, adds))
            floats += [_floats(word, half, keep, add) for half in range(2)]
        return pltpu.bitcast(lax.concatenate(floats, 0), jnp.float8_e5m2)

    def _float4(self, at: jax.Array | int, depth: int) -> jax.Array:
        """As `_words`, for `pack_float4`."""
        words = self.values[pl.ds(_multiple_of(div(at, 8), 32), depth // 8)]
        codes = pltpu.bitcast(pltpu.bitcast(words, jnp.float4_e2m1fn).astype(jnp.float8_e5m2), jnp.int8)
        blocks = pl.ds(_multiple_of(div(at + self.start, BLOCK), 8), depth // BLOCK)
        shift, of_zero = (pltpu.bitcast(_spread(ref.at[blocks]), jnp.int8) for ref in self.scales)
        shift = jnp.where(codes != 0, shift, of_zero)
        return pltpu.bitcast(pltpu.bitcast(codes, jnp.int32) - pltpu.bitcast(shift, jnp.int32), jnp.float8_e5m2)


def _spread(ref) -> jax.Array:
    """Repeat each row of int32 [R, N] in eight rows: for 128 columns, that is how it is loaded."""
    rows, columns = ref.shape
    tiles = [
        [jnp.broadcast_to(ref[pl.ds(row, 1), pl.ds(at, width)], (8, width)) for row in range(rows)]
        for at in range(0, columns, LANES)
        for width in [min(LANES, columns - at)]
    ]
    return jnp.concatenate([jnp.concatenate(tile) for tile in tiles], axis=1)


def _scaled(w: jax.Array, scales: list[jax.Array]) -> jax.Array:
    """Groups times their scales [1, N], in bfloat16."""
    shape = w.shape[0] // len(scales), w.shape[1]
    wide = jnp.concatenate([jnp.broadcast_to(scale, shape) for scale in scales])
    return (w.astype(jnp.float32) * wide).astype(jnp.bfloat16)


def _multiple_of(x: jax.Array | int, n: int) -> jax.Array | int:
    return x if isinstance(x, int) else pl.multiple_of(x, n)


def _most_repeated() -> int:
    """Most rows that are repeated for each scale of groups shorter than DEPTH."""
    return REPEATED // 2 if generation() in FLOAT4 else REPEATED


def _repeated(x: jax.Array, count: int) -> jax.Array:
    """x [T, I] -> [count * T, I]: copy n has the inputs that scale n multiplies, and zeros."""
    if count == 1:
        return x
    group = div(lax.broadcasted_iota(jnp.int32, x.shape, 1), x.shape[1] // count)
    return jnp.concatenate([jnp.where(group == n, x, 0) for n in range(count)])


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def unpack_scales(scales_ref, refs: Sequence) -> Sequence:
    """Scales as `LoadedMatrix` takes them, from stored ones: float32 [..., K / g, N]; for MXFP4's exponents masks and
    addends [..., K / 128, N]; for its shifts the numbers subtracted from each byte of a word, and from each zero byte,
    int32 [..., K / 32, N]. refs: the buffers of `Weight.unpacked`."""
    if scales_ref.dtype == jnp.int8 and refs:
        shift_ref, of_zero_ref = refs
        shift = scales_ref[...].astype(jnp.int32) * 0x01010101
        shift_ref[...] = shift
        # To take a negative number from a word borrows from each of its bytes, and so must those of zero: of these 255
        # is taken, which leaves 0, or in the first one 2^-16.
        of_zero_ref[...] = lax.shift_right_arithmetic(shift, jnp.int32(31))
    elif len(refs) == 2:
        keep_ref, add_ref = refs
        scaled = scales_ref[...] << 2
        keep_ref[...] = scaled & _bytes(0x70) | _bytes(0x8E)
        add_ref[...] = scaled & _bytes(0x0C)
    elif refs:
        refs[0][...] = power_of_two(scales_ref[...].astype(jnp.int32))
    return refs or [scales_ref]


def permute(x_ref, xs_ref) -> None:
    """Put the inputs of x [T, W], T 8 or a multiple of 16, in the order of bytes of `pack_mxfp4` -> xs [T, K]; may be
    in place. W may be less than K, by less than DEPTH: the other inputs are zeros."""
    width = x_ref.shape[1]

    def take(start: jax.Array | int, count: int) -> None:
        rows, lane = pl.ds(_multiple_of(start, 16), count), lax.broadcasted_iota(jnp.int32, (count // 2, DEPTH), 1)
        source = BLOCK * (lane & 3) + (lane >> 2)  # at 4 r + b is 32 b + r
        for at in range(0, width, DEPTH):
            x = x_ref[rows, at : min(at + DEPTH, width)]
            if width < at + DEPTH:
                x = jnp.concatenate([x, jnp.zeros((count, at + DEPTH - width), x.dtype)], axis=1)
            pairs = jnp.take_along_axis(pltpu.bitcast(x, jnp.int32), source, axis=1)
            xs_ref[rows, at : at + DEPTH] = pltpu.bitcast(pairs, xs_ref.dtype)

    whole, rest = divmod(x_ref.shape[0], PERMUTED)
    if whole > 1:
        lax.fori_loop(0, whole, lambda i, _: take(i * PERMUTED, PERMUTED), None)
    elif whole:
        take(0, PERMUTED)
    if rest:
        take(whole * PERMUTED, rest)


def _bytes(value: int) -> np.int32:
    """A word of four equal bytes. By NumPy: a kernel has thousands, and each is an operation to JAX."""
    word = value * 0x01010101
    return np.int32(word - (1 << 32) if word >> 31 else word)


def _floats(word: jax.Array, half: int, keep: jax.Array, add: jax.Array) -> jax.Array:
    """The first or the second inputs of each byte as e5m2; see `pack_mxfp4`."""
    # lax instead of jnp: a kernel has thousands of these, and jnp takes five times as long to trace them.
    if half:
        magnitude = lax.bitwise_and(lax.shift_right_logical(word, np.int32(3)), _bytes(0x0E))
        word = lax.bitwise_or(magnitude, lax.bitwise_and(lax.shift_left(word, np.int32(7)), _bytes(0x80)))
    else:
        word = lax.bitwise_and(word, _bytes(0x8E))
    # An exponent of 28 or more, of which the scale keeps a part; of zero, a byte of nothing but the highest bit.
    exponent = lax.bitwise_and(lax.add(word, _bytes(0x72)), keep)
    return lax.add(lax.bitwise_xor(exponent, _bytes(0x02)), add)
