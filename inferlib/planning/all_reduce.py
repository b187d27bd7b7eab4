"""The algorithms by which XLA's all-reduces cross a TPU's torus.

As the compiler's listings have them (libtpu 0.0.42; 2x2 to 16x16, 8 KiB to 64 MiB): two rows of chips, such as 2x4, are
one ring around both. A small array is exchanged: everyone sends all of it to everyone else of a dimension, one
dimension after another, while parts of the array take the dimensions in different order. A larger one is scattered, so
that each device sums its part, and gathered, both ways around; a large one one way around, in two halves that go
opposite ways. Between the first two the compiler takes the faster one for links at their published rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Algorithm = Literal["exchange", "scatter and gather", "one way"]
ONE_WAY = 128 << 10  # bytes of a device's part from which on the compiler sends it one way
Dims = Sequence[tuple[int, bool]]  # size of each dimension, and whether it is a ring


@dataclass(frozen=True)
class Path:
    """What an all-reduce must pass: hops one after another, and seconds on its busiest links."""

    hops: int
    seconds: float


def as_ring(dims: Dims) -> Dims:
    """Two rows of chips as the one ring around both."""
    sizes = sorted(size for size, _ in dims)
    return ((2 * sizes[1], True),) if len(sizes) == 2 and sizes[0] == 2 else dims


def path(algorithm: Algorithm, dims: Dims, nbytes: float, bandwidth: Callable[[bool], float]) -> Path:
    """The path of an array of `nbytes` over `dims` (see `as_ring`). bandwidth: bytes/s of a line or ring, all its
    directions together."""
    if not dims:
        return Path(0, 0.0)
    farthest = sum(size // 2 if ring else size - 1 for size, ring in dims)
    if algorithm == "exchange":
        phase = max((size - 1) * nbytes / len(dims) / bandwidth(ring) for size, ring in dims)
        return Path(farthest, len(dims) * phase)
    chips = prod(size for size, _ in dims)
    seconds = 2 * nbytes * (chips - 1) / chips / sum(bandwidth(ring) for _, ring in dims)
    around = sum(size - 1 for size, _ in dims)
    return Path(2 * (around if algorithm == "one way" else farthest), seconds)


def of_sent(dims: Dims, share: float) -> Algorithm:
    """The algorithm of a program whose devices send `share` times the array, exchange or not."""
    exchanged = sum(size - 1 for size, _ in dims)
    chips = prod(size for size, _ in dims)
    scattered = 2 * (chips - 1) / chips
    return "exchange" if abs(share - exchanged) <= abs(share - scattered) else "scatter and gather"
