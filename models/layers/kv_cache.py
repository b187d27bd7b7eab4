"""One layer's cache, as the attention layer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.cache_write import cache_write, chunk_write, folded_rows, rounded
from inferlib.sharding.stripe import Stripe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """arrays: keys and values, or latents and rotary keys, each [N, K, S, h]; in a scanned segment [L, N, K, S, h] with
    `layer` the current one. Rotary keys may be folded, [..., S / f, f * h] (see `inferlib.ops.cache_write`). Where keys
    and values are one array, a cell holds a key, its value behind it, and padding. They may be quantised; then their
    scales follow, each [N, K, S] or [L, N, K, S].

    Of a layer that shares another's, the arrays of that one.

    In a ring (sliding-window layers), position p lives in slot p mod S. Where positions are dealt out to several
    devices, this is one's share and p is the number among its own (see `Stripe`).
    """

    arrays: tuple[jax.Array, ...]
    ring: bool = False
    layer: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.arrays[0].shape[-2]

    @property
    def folds(self) -> tuple[int, ...]:
        """How many positions a row of each array holds."""
        return tuple(self.slots // x.shape[-2] if x.ndim == self.arrays[0].ndim else 1 for x in self.arrays)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of a position and head in each array but those of scales."""
        pairs = zip(self.arrays, self.folds, strict=True)
        return tuple(x.shape[-1] // fold for x, fold in pairs if x.ndim == self.arrays[0].ndim)

    @property
    def rows(self) -> int:
        return self.arrays[0].shape[-4]

    @property
    def scaled(self) -> bool:
        return self.arrays[-1].ndim < self.arrays[0].ndim

    def write(
        self, new: Sequence[jax.Array], pages: jax.Array, positions: jax.Array, stripe: Stripe, run: int = 1
    ) -> LayerCache:
        """new: [T, K, h] for each array, or for cells side by side of one, at `positions` [T] of `pages` [T]; pages
        >= N, negative positions and those of other devices are dropped. run: so many tokens in turn are of one page."""
        new = self.cells(new)
        slots = stripe.slots(positions, self.slots, ring=self.ring)
        pairs = zip(self.arrays, rounded(new, self.arrays[0].dtype, scaled=self.scaled), strict=True)
        write = partial(cache_write, pages=pages, slots=slots, layer=self.layer, run=run)
        return replace(self, arrays=tuple(write(old, x) for old, x in pairs))

    def takes_chunks(self, width: int) -> bool:
        """Whether `write_chunks` takes chunks of so many tokens."""
        from inferlib.pallas_kernels.chunk_write_tpu import unsupported

        return unsupported(self.arrays, width, ring=self.ring) is None

    def write_chunks(self, new: Sequence[jax.Array], pages: jax.Array, starts: jax.Array) -> LayerCache:
        """The same by a TPU kernel, of chunks of consecutive positions from `starts` [P] on; new: [P, C, K, h]."""
        slots = starts % self.slots if self.ring else starts
        arrays = chunk_write(
            self.arrays, self.cells(new), pages, slots, layer=self.layer, ring=self.ring, backend="pallas_tpu"
        )
        return replace(self, arrays=arrays)

    def cells(self, new: Sequence[jax.Array]) -> list[jax.Array]:
        """What is cached of tokens, as `write` takes it, in the shape of cells, before it is rounded."""
        if len(self.sizes) == 1:
            new = (jnp.concatenate(new, axis=-1),)
        return list(map(widened, new, self.sizes))

    def read(self, rows: int, limit: int | None = None, first: jax.Array | int = 0) -> tuple[jax.Array, ...]:
        """The arrays of the current layer, [N, K, S, ...]; of a scanned one, only what is asked for: [rows, K, limit,
        ...], the first that of page `first`. What is folded stays so.

        XLA fuses one slice of the stacked cache with what reads it, and copies to memory a slice of a slice.
        """
        if self.layer is None:
            return self.arrays
        slots = self.slots if self.ring or limit is None else min(limit, self.slots)

        def part(x: jax.Array, fold: int) -> jax.Array:
            sizes = (1, rows, x.shape[2], folded_rows(slots, fold), *x.shape[4:])
            return lax.dynamic_slice(x, (self.layer, first, *[0] * (x.ndim - 2)), sizes)[0]

        return tuple(map(part, self.arrays, self.folds))


def widened(x: jax.Array, size: int) -> jax.Array:
    """x [..., n] with zeros up to [..., size]."""
    short = size - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, short),)) if short else x
