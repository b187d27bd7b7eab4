"""Queries, keys and values from the projection of a row's tokens, within a kernel for NVIDIA GPUs (Triton).

Heads are loaded first and finished later: loads do not move across a reduction, see `partial_sums_gpu`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels.partial_sums_gpu import load_squares, norm_factor


class Heads(NamedTuple):
    """Some heads [..., C] as loaded.

    products: their numbers, summed over shares, and their bias or None. partners: as products, of the numbers that
    these are rotated with; None: nothing is rotated. angles: cosines and sines by which the two are multiplied.
    squares: of the norm before the projection, see `load_squares`.
    """

    products: tuple[jax.Array, jax.Array | None]
    partners: tuple[jax.Array, jax.Array | None] | None
    angles: tuple[jax.Array, jax.Array] | None
    squares: jax.Array | None


@dataclass(frozen=True)
class ProjectedHeads:
    """The heads of a row's C tokens and one KV head: G queries, a key and a value of each token, of h numbers.

    Refs: made [C, G + 2, h], or partial sums [P, C, G + 2, h]; addend [C, G + 2, h]; squares [T, n], those of the row
    from `first` on; bias [G + 2, h]; cos and sin [C, r / 2]. All but `made` may be None. columns: those of a tile, a
    power of two. norm: eps and offset of the norms of heads, or None. inputs_norm: the number of inputs and eps of the
    norm before the projection. stored: the dtype that each result is rounded to.

    Methods take tokens and slots (a query's number, G of the key, G + 1 of the value): an int, or [R] one for each row
    of a tile.
    """

    made: Any
    addend: Any
    squares: Any
    bias: Any
    cos: Any
    sin: Any
    first: jax.Array
    columns: int
    norm: tuple[float, float] | None
    inputs_norm: tuple[int | None, float]
    stored: Any

    @property
    def size(self) -> int:
        return self.made.shape[-1]

    @property
    def half(self) -> int:
        """How many pairs of numbers of a head are rotated."""
        return 0 if self.cos is None else self.cos.shape[-1]

    def load(self, token: jax.Array | int, slot: jax.Array | int, rotated: bool = True) -> Heads:
        """Queries or keys; or values, which are not `rotated`."""
        columns = jnp.arange(self.columns)
        squares = load_squares(self.squares, self.first + token)
        products = self._products(token, slot, columns)
        if not (self.half and rotated):
            return Heads(products, None, None, squares)
        partners = self._products(token, slot, _partners(columns, self.half))
        return Heads(products, partners, self._angles(token, slot, columns), squares)

    def load_weights(self, weight_ref: Any) -> list[jax.Array] | None:
        """The weights [h] of a norm of heads: for a head's numbers, and for those that these are rotated with."""
        if self.norm is None:
            return None
        columns, offset = jnp.arange(self.columns), self.norm[1]
        return [_load(weight_ref, (at,), at < self.size) + offset for at in (columns, _partners(columns, self.half))]

    def finished(self, heads: Heads, weights: list[jax.Array] | None = None) -> jax.Array:
        """Heads [..., C] float32, rounded, after the norm with `weights`, if any, and their rotation."""
        inputs, eps = self.inputs_norm
        factor: Any = norm_factor(heads.squares, inputs or 0, eps)
        factor = factor[:, None] if jnp.ndim(factor) else factor
        x = self._rounded_product(heads.products, factor)
        across = x if heads.partners is None else self._rounded_product(heads.partners, factor)
        if weights is not None and self.norm is not None:
            of_head = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / self.size + self.norm[0])
            x, across = (self._rounded(y * of_head * weight) for y, weight in zip((x, across), weights, strict=True))
        if heads.angles is None:
            return x
        cos, sin = heads.angles
        return self._rounded(x * cos + across * sin)

    def _products(
        self, token: jax.Array | int, slot: jax.Array | int, column: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """The sum over shares of the heads' numbers at these columns [C], and their bias."""
        token, slot, column = _tile(token, slot, column)
        real = column < self.size
        real = real if isinstance(slot, int) else real & (slot < self.made.shape[-2])
        shares = [()] if self.made.ndim == 3 else [(n,) for n in range(self.made.shape[0])]
        parts = [_load(self.made, (*share, token, slot, column), real) for share in shares]
        total = reduce(operator.add, parts)
        total = total if self.addend is None else total + _load(self.addend, (token, slot, column), real)
        return total, None if self.bias is None else _load(self.bias, (slot, column), real)

    def _angles(self, token: jax.Array | int, slot: jax.Array | int, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of tokens, with the sines' signs; 1 and 0 where nothing is rotated."""
        sign = jnp.where(columns < self.half, -1.0, 1.0)
        token, _, columns = _tile(token, token, columns)
        place, real = (token, lax.rem(columns, self.half)), columns < 2 * self.half
        return _load(self.cos, place, real, 1.0), sign * _load(self.sin, place, real)

    def _rounded_product(self, loaded: tuple[jax.Array, jax.Array | None], factor: jax.Array | float) -> jax.Array:
        total, bias = loaded
        x = self._rounded(total * factor)
        return x if bias is None else self._rounded(x + bias)

    def _rounded(self, x: jax.Array) -> jax.Array:
        return x.astype(self.stored).astype(jnp.float32)


def _tile(token: jax.Array | int, slot: jax.Array | int, columns: jax.Array) -> tuple[Any, Any, jax.Array]:
    """Places of a tile [R, C], or of a row [C] if all are of one token and slot; ints remain."""
    rows = jnp.broadcast_shapes(jnp.shape(token), jnp.shape(slot))
    shape = *rows, columns.size
    token, slot = (x if isinstance(x, int) else jnp.broadcast_to(x[:, None], shape) for x in (token, slot))
    return token, slot, jnp.broadcast_to(columns, shape)


def _partners(columns: jax.Array, half: int) -> jax.Array:
    """The number that each of a head's is rotated with; itself, if it is not rotated."""
    return jnp.where(columns < 2 * half, jnp.where(columns < half, columns + half, columns - half), columns)


def _load(ref: Any, at: tuple, real: jax.Array, other: float = 0.0) -> jax.Array:
    return plgpu.load(ref.at[at], mask=real, other=other).astype(jnp.float32)
