"""Positions dealt out in turn: of n devices, device d holds the positions p with p mod n = d.

Causal attention is then the same work for every device at every length (Striped Attention, Brandon et al. 2023). Each
device numbers its positions in order: p is number p // n. With numbers for positions, its shard of a cache is a cache
like any other: lengths and windows count numbers too, and kernels see no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Stripe:
    """The positions a device owns: every `count`-th from `index` on; by default all."""

    count: int = 1
    index: jax.Array | int = 0

    def max_positions(self, positions: int) -> int:
        """The most positions that a device can own, of the first `positions`."""
        return -(-positions // self.count)

    def number(self, positions: jax.Array) -> jax.Array:
        """The number of the last owned position up to each position; negative if there is none."""
        return positions if self.count == 1 else (positions - self.index) // self.count

    def window(self, positions: jax.Array, window: int | jax.Array | None) -> int | jax.Array | None:
        """The window in owned positions: how many of them are among the last `window` positions up to each of
        `positions`. window: one for all, or one for each. An int if all results are equal."""
        if self.count == 1 or window is None:
            return window
        if isinstance(window, int) and window % self.count == 0:
            return window // self.count
        return self.number(positions) - self.number(positions - window)

    def owns(self, positions: jax.Array) -> jax.Array:
        """Whether the device owns each position; nobody owns negative ones."""
        there = positions >= 0
        return there if self.count == 1 else there & (positions % self.count == self.index)

    def slots(self, positions: jax.Array, slots: int, *, ring: bool) -> jax.Array:
        """The slot of each position in a cache of `slots`; out of range if the position is negative or another
        device's.

        Distinct positions of a page have distinct slots, also out of range.
        """
        number = self.number(positions)
        slot = number % slots if ring else number
        if self.count == 1:
            return jnp.where(positions >= 0, slot, slots)
        return jnp.where(self.owns(positions), slot, slots + jnp.maximum(positions, 0))

    def take(self, x: jax.Array, dim: int) -> jax.Array:
        """The owned entries of x along dimension `dim`."""
        if self.count == 1:
            return x
        dealt = x.reshape(*x.shape[:dim], -1, self.count, *x.shape[dim + 1 :])
        return jax.lax.dynamic_index_in_dim(dealt, self.index, dim + 1, keepdims=False)
