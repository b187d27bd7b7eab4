"""The values that attention's operations and kernels take: options, caches, new cells and projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def shape_of(x: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer's queries weigh the keys they see: softmax of softcap * tanh(scale * q . k / softcap).

    window: a query sees the last `window` positions up to its own; an array gives each query or row its own window.
    softcap None: logits are not capped. sinks [K, G]: a learned logit that joins the softmax's denominator. key_size:
    of cells that are keys and values at once, how many numbers the keys have. Queries are zero from this number on, and
    outputs before it may be anything finite. None: keys and values are apart.
    """

    scale: float
    window: int | jax.Array | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    key_size: int | None = None

    @property
    def shared_window(self) -> int | None:
        """The window that all queries share. Raises ValueError if each query or row has its own."""
        if isinstance(self.window, jax.Array):
            raise ValueError("the kernels take one window for all queries")
        return self.window


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KvCache:
    """Keys and values of one layer.

    k, v: [N, K, S, h]: N pages of S slots for K KV heads; or [L, N, K, S, h], a stack of layers of which `layer` is
    read. v None: a cell is key and value at once, for queries and outputs of the cell's size. k_scales, v_scales [N, K,
    S] or [L, N, K, S] float32, both or neither: they multiply k and v, which are int8 or float8_e4m3fn. k and v of
    uint8 are bytes of packed cells, see `inferlib.ops.int4_cells`. pages [B, M] int32: position p of row b is in page
    pages[b, p // S]; without, row b's cache is page b. ring: position p lives in slot p mod S of its one page, or of
    all its pages. limit (static): no position reaches it, so the slots beyond are not read.
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
        """The arrays that are not None, in the order k, v, k_scales, v_scales."""
        return tuple(x for x in (self.k, self.v, self.k_scales, self.v_scales) if x is not None)

    def with_arrays(self, arrays: Sequence[jax.Array]) -> KvCache:
        """This cache with other contents, in the order of `arrays`."""
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
    def packed(self) -> bool:
        return self.k.dtype == jnp.uint8

    @property
    def slots(self) -> int:
        """How many slots of a row may be read."""
        slots = self.k.shape[-2] * (1 if self.pages is None else self.pages.shape[1])
        return slots if self.ring or self.limit is None else min(self.limit, slots)

    @property
    def columns(self) -> int | None:
        """Columns of the page table; None if row b's cache is page b."""
        return None if self.pages is None else self.pages.shape[1]

    @property
    def layer_or_first(self) -> jax.Array | int:
        return 0 if self.layer is None else self.layer

    def of_layer(self, x: jax.Array) -> jax.Array:
        """The layer's part [N, ...] of one of the arrays."""
        return x if self.layer is None else x[self.layer]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """Latents and rotary keys of one layer of latent attention (MLA).

    latents [N, 1, S, R] and rotary keys [N, 1, S, r], or folded [N, 1, S / f, f * r] (see `inferlib.ops.cache_write`);
    or [L, N, ...], a stack of layers of which `layer` is read. A latent with its rotary key is a key of all heads, and
    alone a value. scales [N, 1, S] or [L, N, 1, S] float32 multiply latents and rotary keys of int8 or
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

    @property
    def columns(self) -> int | None:
        """Columns of the page table; None if row b's cache is page b."""
        return None if self.pages is None else self.pages.shape[1]

    @property
    def layer_or_first(self) -> jax.Array | int:
        return 0 if self.layer is None else self.layer

    def fold(self, rotary: int) -> int:
        """How many positions one row of the rotary keys holds, for keys of `rotary` numbers."""
        return self.keys.shape[-1] // rotary


@dataclass(frozen=True)
class NewCells:
    """The cells that new tokens add to a cache.

    cells: for each of the cache's arrays of cells, [B, K, h], or [B, C, K, h] if rows have C new tokens, of any float
    type; they are rounded to the cache's. written [B] int32: how many of a row's cells are written, the last of the C;
    None: all. Cells of inactive rows are never written. No two rows share a page that one of them writes to.
    """

    cells: Sequence[jax.Array]
    written: jax.Array | None = None


# Most queries of a KV head that are stacked: the sums of more would not fit in the registers of a GPU's program.
MOST_STACKED = 64


class SharedPrefixes(NamedTuple):
    """Which rows share the pages of a prefix, in T tiles of up to m rows; a prefix may have several tiles.

    members [T, m] int32: the rows, from the front; beyond the last row: none. pages [T] int32: how many of their first
    pages the rows of a tile have in common; 0 in a tile without rows.
    """

    members: jax.Array
    pages: jax.Array

    def cut(self, most: int, rows: int) -> SharedPrefixes:
        """The prefixes of `rows` rows in tiles of at most `most`; a tile without rows has no page."""
        width = self.cut_width(most)
        members = self.members.reshape(-1, width)
        pages = jnp.repeat(self.pages, self.members.shape[1] // width)
        return SharedPrefixes(members, jnp.where(members[:, 0] < rows, pages, 0))

    def cut_width(self, most: int) -> int:
        """Rows of a tile that is cut to at most `most`. The arrays may be shapes."""
        return math.gcd(self.members.shape[1], 1 << (most.bit_length() - 1))

    def tables(self, pages: jax.Array) -> jax.Array:
        """The page tables [T, M] of the tiles' prefixes, from those of the B rows."""
        return pages[jnp.minimum(self.members[:, 0], pages.shape[0] - 1)]

    def stacked(self, q: jax.Array) -> jax.Array:
        """The queries [T, K, m * G, h] of the tiles' rows, as if they were heads of one row; q [B, K, G, h]."""
        rows, kv_heads, _, size = q.shape
        of_members = jnp.moveaxis(q[jnp.minimum(self.members, rows - 1)], 1, 2)
        return of_members.reshape(len(self.pages), kv_heads, -1, size)

    def places(self, active: jax.Array) -> jax.Array:
        """Which of the T * m members each row is, for B rows, `active` [B] bool; int32 [B].

        T * m: a row that is none of them, or is not active.
        """
        count = self.members.size
        places = jnp.full(active.shape, count, jnp.int32)
        places = places.at[self.members.reshape(-1)].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        return jnp.where(active, places, count)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Expansion:
    """The weights that expand a latent [R] to a key without positions and a value for each of H heads.

    keys [H, n, R], values [H, R, v]; or [W, H, ...], stacks of which `layer` is read.
    """

    keys: jax.Array
    values: jax.Array
    layer: jax.Array | int | None = None

    def of_layer(self) -> tuple[jax.Array, jax.Array]:
        """[H, n, R] and [H, R, v]."""
        if self.keys.ndim == 3:
            return self.keys, self.values
        at = partial(lax.dynamic_index_in_dim, index=self.layer, keepdims=False)
        return at(self.keys), at(self.values)


@dataclass(frozen=True)
class QkvPartials:
    """Partial sums of a projection that are not summed yet.

    partials [S, T, K, G + 2, h] float32: their sum over S, rounded to dtype, is the projection. squares [T, n] float32:
    given if the projected rows are an RMS norm without its factor; they sum to a row's sum of squares before the norm,
    `inputs` is the number of a row's inputs, and `eps` belongs to the norm. addend [T, K, G + 2, h]: added to the sum.
    """

    partials: jax.Array
    dtype: jax.typing.DTypeLike
    squares: jax.Array | None = None
    inputs: int | None = None
    eps: float = 0.0
    addend: jax.Array | None = None


@dataclass(frozen=True)
class HeadTransforms:
    """The steps that turn projections into queries, keys and values, in this order.

    bias [K, G + 2, h] is added. norms: the weights [h] of the RMS norms over a query's head and over a key's head; the
    norms use eps, and offset is added to both weights. rope: cos and sin [T, r / 2] float32 rotate the pairs
    (i, i + r / 2) of the first r numbers of queries and keys.
    """

    bias: jax.Array | None = None
    norms: tuple[jax.Array, jax.Array] | None = None
    rope: tuple[jax.Array, jax.Array] | None = None
    eps: float = 1e-6
    offset: float = 0.0
