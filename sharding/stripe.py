"""Positions dealt out in turn: of n devices, device d holds the positions p with p mod n = d.

So causal attention is the same work for every device at every length (Striped Attention, Brandon et al. 2023). The
d-th device's positions are numbered in order, p being number p // n. In these numbers its share of a cache is a
cache like any other: what holds of positions, lengths and windows holds of numbers, and kernels see no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Stripe:
    """Every `count`-th position from `index` on; by default all."""

    count: int = 1
    index: jax.Array | int = 0

    def most(self, positions: int) -> int:
        """How many of the first `positions` a device holds at most."""
        return -(-positions // self.count)

    def number(self, positions: jax.Array) -> jax.Array:
        """The number of the last own position up to each of these; negative if there is none."""
        return positions if self.count == 1 else (positions - self.index) // self.count

    def window(self, positions: jax.Array, window: int | jax.Array | None) -> int | jax.Array | None:
        """How many own positions are among the last `window` (of all, or of each) up to each of `positions`; a number
        if all agree."""
        if self.count == 1 or window is None:
            return window
        if isinstance(window, int) and window % self.count == 0:
            return window // self.count
        return self.number(positions) - self.number(positions - window)

    def owns(self, positions: jax.Array) -> jax.Array:
        """Whether each of these is an own position; negative ones are nobody's."""
        return (positions >= 0) & (positions % self.count == self.index)

    def slots(self, positions: jax.Array, slots: int, *, ring: bool) -> jax.Array:
        """Where each position is held in a cache of `slots`; what is another device's, or negative, is out of range.

        A page's positions are distinct, and so are the places of those out of range.
        """
        number = self.number(positions)
        slot = number % slots if ring else number
        if self.count == 1:
            return jnp.where(positions >= 0, slot, slots)
        return jnp.where(self.owns(positions), slot, slots + jnp.maximum(positions, 0))

    def take(self, x: jax.Array, dim: int) -> jax.Array:
        """The own entries of x along a dimension of n times as many."""
        if self.count == 1:
            return x
        dealt = x.reshape(*x.shape[:dim], -1, self.count, *x.shape[dim + 1 :])
        return jax.lax.dynamic_index_in_dim(dealt, self.index, dim + 1, keepdims=False)
