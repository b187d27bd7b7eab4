"""One layer's key/value cache, as the attention layer sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from jax import lax

from inferlib.ops.cache_write import cache_write
from inferlib.sharding.stripe import Stripe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """k, v: [N, K, S, h]; in a scanned segment [L, N, K, S, h] with `layer` the current one.

    In a ring (sliding-window layers), position p lives in slot p mod S. Where positions are dealt out to several
    devices, this is one's share and p is the number among its own (see `Stripe`).
    """

    k: jax.Array
    v: jax.Array
    ring: bool = False
    layer: jax.Array | None = None

    @property
    def slots(self) -> int:
        return self.k.shape[-2]

    @property
    def rows(self) -> int:
        return self.k.shape[-4]

    def write(self, k: jax.Array, v: jax.Array, pages: jax.Array, positions: jax.Array, stripe: Stripe) -> LayerCache:
        """k, v [T, K, h] at `positions` [T] of `pages` [T]; pages >= N, negative positions and those of other devices
        are dropped."""
        slots = stripe.slots(positions, self.slots, ring=self.ring)
        new_k, new_v = cache_write(self.k, self.v, k, v, pages, slots, layer=self.layer)
        return replace(self, k=new_k, v=new_v)

    def read(self, rows: int, limit: int | None = None) -> tuple[jax.Array, jax.Array]:
        """k, v of the current layer, [N, K, S, h]; of a scanned one, only what is asked for: [rows, K, limit, h].

        XLA fuses one slice of the stacked cache with what reads it, and copies to memory a slice of a slice.
        """
        if self.layer is None:
            return self.k, self.v
        slots = self.slots if self.ring or limit is None else min(limit, self.slots)
        sizes = (1, rows, self.k.shape[2], slots, self.k.shape[4])

        def part(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice(x, (self.layer, 0, 0, 0, 0), sizes)[0]

        return part(self.k), part(self.v)
