"""Cells of a cache in few bits: values of four and keys of six, rotated, rounded, and packed into bytes.

A Hadamard rotation of a head spreads outliers over its channels (Ashkboos et al. 2024, "QuaRot",
https://arxiv.org/abs/2404.00456). Queries are rotated as keys are, so their products stay what they were; the output of
attention is rotated back, as values were rotated. Nothing is calibrated. Keys have more bits because an error of theirs
moves a weight of the softmax by as much times a query, which in four bits loses eight times what values lose. Keys that
a calibration has turned have other cells, see `inferlib.ops.calibrated_cells`.

A cell of h numbers is bytes. First the numbers of b bits: byte i has the low halves of number i and, above them, of
number i + h / 2; if b is six, then h / 4 bytes have the two high bits of numbers i, i + h / 4, and so on. The number n
stands for n - (2^b - 1) / 2 steps. If groups have steps, then a byte c for each, whose step is c / 255 of the largest
one. At last, as bfloat16, the largest magnitude of the cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.calibrated_cells import CalibratedCells
from inferlib.ops.hadamard import factors_of

DTYPE = np.dtype(np.uint8)
_LEAST, _CODES = 8, 255  # what divides the size of a head, the largest code of a step


@dataclass(frozen=True)
class Cells:
    """How numbers are stored. bits: 4 or 6 of each. group: numbers that share a step; None: all of a cell do."""

    bits: int
    group: int | None = None

    @property
    def half(self) -> float:
        """The largest number, in steps."""
        return (2**self.bits - 1) / 2

    def nbytes(self, size: int) -> int:
        """Bytes of a cell of `size` numbers."""
        return size * self.bits // 8 + (size // self.group if self.group else 0) + 2

    def size(self, nbytes: int) -> int:
        """How many numbers a cell of `nbytes` bytes has."""
        return (nbytes - 2) * 8 // (self.bits + (8 // self.group if self.group else 0))

    def encode(self, x: jax.Array) -> jax.Array:
        """Numbers [..., h] as cells of bytes [..., n]. A NaN or an infinity spoils its cell."""
        x = x.astype(jnp.float32)
        top = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.bfloat16)
        codes = self._codes(x, top)
        numbers = jnp.floor(x / _nonzero(self._steps(codes, top, x.shape[-1]))) + 2 ** (self.bits - 1)
        numbers = jnp.clip(numbers, 0, 2**self.bits - 1).astype(jnp.uint8)
        last = lax.bitcast_convert_type(top, jnp.uint8).reshape(*x.shape[:-1], 2)
        parts = [_packed(numbers & 15, 2)] + [_packed(numbers >> 4, 4)] * (self.bits > 4)
        return jnp.concatenate([*parts, *codes, last], axis=-1)

    def decode(self, cells: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Cells of bytes [..., n] as numbers [..., h]."""
        size = self.size(cells.shape[-1])
        low, high, codes, last = jnp.split(cells, [size // 2, size * self.bits // 8, cells.shape[-1] - 2], axis=-1)
        numbers = _unpacked(low, 2)
        if self.bits > 4:
            numbers |= _unpacked(high, 4) << 4
        top = lax.bitcast_convert_type(last, jnp.bfloat16)[..., None]
        steps = self._steps([codes] if self.group else [], top, size)
        return ((numbers.astype(jnp.float32) - self.half) * steps).astype(dtype)

    def _codes(self, x: jax.Array, top: jax.Array) -> list[jax.Array]:
        """The codes [..., h / group] of the groups' steps, if groups have some."""
        if self.group is None:
            return []
        largest = jnp.max(jnp.abs(x.reshape(*x.shape[:-1], -1, self.group)), axis=-1)
        codes = jnp.ceil(largest * (_CODES / _nonzero(top.astype(jnp.float32))))
        return [jnp.clip(codes, 0, _CODES).astype(jnp.uint8)]

    def _steps(self, codes: list[jax.Array], top: jax.Array, size: int) -> jax.Array:
        """The step of each number, [..., h] or [..., 1]."""
        step = top.astype(jnp.float32) / self.half
        if not codes:
            return step
        assert self.group is not None
        shares = codes[0].astype(jnp.float32) / _CODES
        shares = jnp.broadcast_to(shares[..., None], (*shares.shape, self.group))
        return shares.reshape(*shares.shape[:-2], size) * step


KEYS, VALUES, CALIBRATED_KEYS = Cells(6), Cells(4, group=8), CalibratedCells()


def unsupported(size: int) -> str | None:
    """Why heads of `size` cannot have such cells; None if they can."""
    if size % _LEAST:
        return f"heads of {size} are not split into groups of {_LEAST}"
    try:
        factors_of(size)
    except ValueError as error:
        return str(error)
    return None


def cells_of_keys(nbytes: int) -> Cells | CalibratedCells:
    """How keys are stored in cells of `nbytes` bytes."""
    return CALIBRATED_KEYS if nbytes % 2 else KEYS


def decoded_keys(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Cells of keys as numbers of a dtype; keys that are not packed as they are."""
    return cells_of_keys(x.shape[-1]).decode(x, dtype) if x.dtype == DTYPE else x


def decoded_values(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Cells of values as numbers of a dtype; values that are not packed as they are."""
    return VALUES.decode(x, dtype) if x.dtype == DTYPE else x


def _packed(numbers: jax.Array, parts: int) -> jax.Array:
    """Numbers [..., h] of 8 / parts bits as bytes [..., h / parts], number i + n h / parts in part n of byte i."""
    total = None
    for n, part in enumerate(jnp.split(numbers, parts, axis=-1)):
        shifted = part << (n * 8 // parts)
        total = shifted if total is None else total | shifted
    assert total is not None
    return total


def _unpacked(x: jax.Array, parts: int) -> jax.Array:
    bits = 8 // parts
    return jnp.concatenate([(x >> (n * bits)) & (2**bits - 1) for n in range(parts)], axis=-1)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1.0, x)
