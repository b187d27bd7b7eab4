"""Weights whose inputs are recorded while a function is traced, for calibration.

`matmul` and `grouped_matmul` take an `ObservedWeight` where a matrix stands. They multiply by its values, and what they
multiply is summed up by the `Observer` that is active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.read_whole import ArrayWeight

_TILE = 128  # rows of a group that are summed at once


class InputSums(NamedTuple):
    """Sums over the inputs x [T, I] of products, for each of E groups (experts; 1 for a matrix), all float32.

    products [E, I, I]: of x x^T; magnitudes [E, I]: of |x|; largest [E, I]: the largest |x|; counts [E]: of tokens.
    """

    products: jax.Array
    magnitudes: jax.Array
    largest: jax.Array
    counts: jax.Array

    def plus(self, other: InputSums) -> InputSums:
        """The sums over both."""
        return InputSums(
            self.products + other.products,
            self.magnitudes + other.magnitudes,
            jnp.maximum(self.largest, other.largest),
            self.counts + other.counts,
        )

    def over(self, axis: str) -> InputSums:
        """The sums over all devices of a mesh axis, inside `shard_map`."""
        products, magnitudes, counts = lax.psum((self.products, self.magnitudes, self.counts), axis)
        return InputSums(products, magnitudes, lax.pmax(self.largest, axis), counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ObservedWeight(ArrayWeight):
    """A matrix whose inputs are recorded under a name."""

    values: jax.Array
    name: str = field(metadata={"static": True})

    def record(self, x: jax.Array, sizes: jax.Array | None = None) -> None:
        """Record the inputs x [T, ...] of a product; sizes [E]: the rows are sorted by group, as for
        `grouped_matmul`."""
        if not _active:
            raise RuntimeError(f"the inputs of {self.name} are recorded within `observing` only")
        _active[-1].add(self.name, x, sizes)


class Observer:
    """What was recorded: `sums` has one entry for each distinct input, by the names of the weights that it meets."""

    def __init__(self) -> None:
        self._inputs: list[tuple[jax.Array, jax.Array | None, list[str]]] = []

    def add(self, name: str, x: jax.Array, sizes: jax.Array | None) -> None:
        for other, other_sizes, names in self._inputs:
            if other is x and other_sizes is sizes:
                names.append(name)
                return
        self._inputs.append((x, sizes, [name]))

    def sums(self) -> dict[tuple[str, ...], InputSums]:
        """Call it where the observed function is traced."""
        return {tuple(sorted(names)): _sums(x, sizes) for x, sizes, names in self._inputs}


_active: list[Observer] = []


@contextmanager
def observing() -> Iterator[Observer]:
    """Record the inputs of observed weights in what is traced within."""
    _active.append(Observer())
    try:
        yield _active[-1]
    finally:
        _active.pop()


def _sums(x: jax.Array, sizes: jax.Array | None) -> InputSums:
    x = x.reshape(x.shape[0], -1).astype(jnp.float32)
    if sizes is None:
        products, magnitudes, largest = _of_rows(x)
        return InputSums(products[None], magnitudes[None], largest[None], jnp.full((1,), x.shape[0], jnp.float32))
    starts = jnp.cumsum(sizes) - sizes
    x = jnp.pad(x, ((0, _TILE), (0, 0)))

    def of_group(start_and_size: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        start, size = start_and_size

        def tile(number: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows = lax.dynamic_slice_in_dim(x, start + number * _TILE, _TILE)
            rows = jnp.where((number * _TILE + jnp.arange(_TILE) < size)[:, None], rows, 0)
            products, magnitudes, largest = _of_rows(rows)
            return totals[0] + products, totals[1] + magnitudes, jnp.maximum(totals[2], largest)

        width = x.shape[1]
        zeros = jnp.zeros((width, width)), jnp.zeros((width,)), jnp.zeros((width,))
        return lax.fori_loop(0, (size + _TILE - 1) // _TILE, tile, zeros)

    products, magnitudes, largest = lax.map(of_group, (starts, sizes))
    return InputSums(products, magnitudes, largest, sizes.astype(jnp.float32))


def _of_rows(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    products = lax.dot_general(x, x, (((0,), (0,)), ((), ())), lax.Precision.HIGHEST)
    return products, jnp.sum(jnp.abs(x), axis=0), jnp.max(jnp.abs(x), axis=0, initial=0.0)
