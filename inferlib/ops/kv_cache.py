"""The caches that attention reads: one layer's arrays and where the positions of a row lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def shape_of(x: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KvCache:
    """Keys and values of one layer.

    k, v: [N, K, S, h]: N pages of S slots for K KV heads; or [L, N, K, S, h], a stack of layers of which `layer` is
    read. v None: a cell is key and value at once, for queries and outputs of the cell's size. k_scales, v_scales
    [N, K, S] or [L, N, K, S] float32, both or neither: k and v, int8 or float8_e4m3fn, are multiplied by them.
    pages [B, M] int32: position p of row b is in page pages[b, p // S]; without, row b's cache is page b. ring:
    position p lives in slot p mod S of its one page, or of all its pages. limit (static): no position reaches it, so
    the slots beyond are not read.
    """

    k: jax.Array
    v: jax.Array | None = None
    k_scales: jax.Array | None = None
    v_scales: jax.Array | None = None
    layer: jax.Array | int | None = None
    pages: jax.Array | None = None
    ring: bool = field(default=False, metadata={"static": True})
    limit: int | None = field(default=None, metadata={"static": True})

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays that there are, in the order k, v, k_scales, v_scales."""
        return tuple(x for x in (self.k, self.v, self.k_scales, self.v_scales) if x is not None)

    def with_arrays(self, arrays: Sequence[jax.Array]) -> KvCache:
        """The same cache with other contents, in the order of `arrays`."""
        names = [name for name in ("k", "v", "k_scales", "v_scales") if getattr(self, name) is not None]
        return replace(self, **dict(zip(names, arrays, strict=True)))

    @property
    def values(self) -> jax.Array:
        return self.k if self.v is None else self.v

    @property
    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        return None if self.k_scales is None or self.v_scales is None else (self.k_scales, self.v_scales)

    @property
    def scaled(self) -> bool:
        return self.k_scales is not None

    @property
    def slots(self) -> int:
        """Slots of a row that may be read."""
        slots = self.k.shape[-2] * (1 if self.pages is None else self.pages.shape[1])
        return slots if self.ring or self.limit is None else min(self.limit, slots)

    def of_layer(self, x: jax.Array) -> jax.Array:
        """One of the arrays, [N, ...]."""
        return x if self.layer is None else x[self.layer]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """Latents and rotary keys of one layer of latent attention (MLA).

    latents [N, 1, S, R] and rotary keys [N, 1, S, r], or folded [N, 1, S / f, f * r] (see `inferlib.ops.cache_write`);
    or [L, N, ...], a stack of layers of which `layer` is read. A latent with its rotary key is a key of all heads, and
    alone a value. scales [N, 1, S] or [L, N, 1, S] float32: of latents and of rotary keys that are int8 or
    float8_e4m3fn. pages, limit: as in `KvCache`.
    """

    latents: jax.Array
    keys: jax.Array
    scales: tuple[jax.Array, jax.Array] | None = None
    layer: jax.Array | int | None = None
    pages: jax.Array | None = None
    limit: int | None = field(default=None, metadata={"static": True})

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return (self.latents, self.keys, *(self.scales or ()))

    def with_arrays(self, arrays: Sequence[jax.Array]) -> LatentCache:
        latents, keys, *scales = arrays
        return replace(self, latents=latents, keys=keys, scales=tuple(scales) or None)

    def fold(self, rotary: int) -> int:
        """How many positions one row of the rotary keys holds, for keys of `rotary` numbers."""
        return self.keys.shape[-1] // rotary


def gather_pages(x: jax.Array, pages: jax.Array) -> jax.Array:
    """The cells [B, K, M * S, ...] of rows whose pages of x [N, K, S, ...] are pages [B, M]."""
    x = jnp.moveaxis(x[pages], 2, 1)
    return x.reshape(pages.shape[0], x.shape[1], -1, *x.shape[4:])


@dataclass(frozen=True)
class NewCells:
    """What new tokens add to a cache: for each of its arrays of cells [B, K, h], or [B, C, K, h] if rows have C new
    tokens, of any float type; they are rounded to the cache's.

    written [B] bool: the rows whose cells are written; None: all. Cells of inactive rows are never written. No other
    row has a page that a row writes to.
    """

    cells: Sequence[jax.Array]
    written: jax.Array | None = None
