"""Cells of keys that a calibration has turned: 16 bits for each four numbers, most of them for what matters most.

Keys are turned such that their first channels vary most, and queries with them (see `inferlib.models.key_turns`). So a
number of the first quarter has six bits, of the second four, and of the others three, as in transform coding (Goyal
2001) and in ResQ (Saxena et al. 2024, https://arxiv.org/abs/2412.14363). A quarter's step may be less than its largest
number asks for: of three, the one is taken whose squared error is least.

A cell of h numbers is h / 2 + 5 bytes. First the low halves of h / 4 words of 16 bits, then their high halves: word i
has number i of each quarter, the first one lowest. A number n of b bits stands for n - (2^b - 1) / 2 steps. Then a byte
c for each quarter but the first, whose largest number is c / 255 of the cell's. At last, as bfloat16, that. Other cells
of keys have even numbers of bytes, which tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

QUARTERS = 4
BITS = (6, 4, 3, 3)
_PLACES = (0, 6, 10, 13)  # of the quarters' bits in a word
_HALVES = tuple((2**bits - 1) / 2 for bits in BITS)  # the largest numbers, in steps
_CODES = 255  # the largest code of a step
_SHARES = (0.85, 0.7)  # of a quarter's largest number, that its steps may cover in place of all of it


@dataclass(frozen=True)
class CalibratedCells:
    """How turned keys are stored."""

    def nbytes(self, size: int) -> int:
        """Bytes of a cell of `size` numbers."""
        return size // 2 + 5

    def size(self, nbytes: int) -> int:
        """How many numbers a cell of `nbytes` bytes has."""
        return (nbytes - 5) * 2

    def encode(self, x: jax.Array) -> jax.Array:
        """Numbers [..., h] as cells of bytes [..., n]. A NaN or an infinity spoils its cell."""
        x = x.astype(jnp.float32)
        top = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.bfloat16)
        quarters = x.reshape(*x.shape[:-1], QUARTERS, -1)
        codes, numbers, least = _tried(quarters, top, 1.0)
        for share in _SHARES:
            other, rounded, error = _tried(quarters, top, share)
            better = error < least
            codes, numbers = jnp.where(better, other, codes), jnp.where(better, rounded, numbers)
            least = jnp.minimum(error, least)
        words = jnp.sum(numbers.astype(jnp.uint32) << _column(_PLACES, jnp.uint32), axis=-2)
        halves = [(words & 255).astype(jnp.uint8), (words >> 8).astype(jnp.uint8)]
        last = lax.bitcast_convert_type(top, jnp.uint8).reshape(*x.shape[:-1], 2)
        return jnp.concatenate([*halves, codes[..., 1:, 0].astype(jnp.uint8), last], axis=-1)

    def decode(self, cells: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Cells of bytes [..., n] as numbers [..., h]."""
        count = self.size(cells.shape[-1]) // QUARTERS
        low, high, codes, last = jnp.split(cells, [count, 2 * count, cells.shape[-1] - 2], axis=-1)
        words = low.astype(jnp.uint32) | (high.astype(jnp.uint32) << 8)
        masks = _column([2**bits - 1 for bits in BITS], jnp.uint32)
        numbers = ((words[..., None, :] >> _column(_PLACES, jnp.uint32)) & masks).astype(jnp.float32)
        codes = jnp.concatenate([jnp.full_like(codes[..., :1], _CODES), codes], axis=-1)[..., None]
        top = lax.bitcast_convert_type(last, jnp.bfloat16)[..., None]
        values = _values(numbers, codes.astype(jnp.float32), top)
        return values.reshape(*values.shape[:-2], -1).astype(dtype)


def _tried(quarters: jax.Array, top: jax.Array, share: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The codes of steps that cover a share of each quarter's largest number, the numbers, and the squared errors."""
    codes = _codes(quarters, top, share)
    numbers = _rounded(quarters, codes, top)
    return codes, numbers, jnp.sum((_values(numbers, codes, top) - quarters) ** 2, axis=-1, keepdims=True)


def _codes(quarters: jax.Array, top: jax.Array, share: float) -> jax.Array:
    """The codes [..., 4, 1] of the quarters' steps, if these cover a share of the largest number."""
    largest = jnp.max(jnp.abs(quarters), axis=-1, keepdims=True)
    codes = jnp.ceil(largest * share * (_CODES / _nonzero(top.astype(jnp.float32))[..., None]))
    first = np.arange(QUARTERS)[:, None] == 0
    return jnp.where(first, float(_CODES), jnp.clip(codes, 0, _CODES))


def _rounded(quarters: jax.Array, codes: jax.Array, top: jax.Array) -> jax.Array:
    """The numbers [..., 4, h / 4] that are stored of quarters."""
    middles = _column([2 ** (bits - 1) for bits in BITS], jnp.float32)
    numbers = jnp.floor(quarters / _nonzero(_steps(codes, top))) + middles
    return jnp.clip(numbers, 0, 2 * middles - 1)


def _values(numbers: jax.Array, codes: jax.Array, top: jax.Array) -> jax.Array:
    return (numbers - _column(_HALVES, jnp.float32)) * _steps(codes, top)


def _steps(codes: jax.Array, top: jax.Array) -> jax.Array:
    """[..., 4, 1]"""
    return codes / _CODES * top.astype(jnp.float32)[..., None] / _column(_HALVES, jnp.float32)


def _column(values, dtype) -> np.ndarray:
    return np.asarray(values, dtype)[:, None]


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1.0, x)
