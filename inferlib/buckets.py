"""The static sizes that programs are compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inferlib.option_checks import ConfigurationError, brief


@dataclass(frozen=True)
class Buckets:
    """The static sizes that programs are compiled for; each tuple is ascending.

    prefill: prompt tokens of a step; a longer prompt takes several steps.
    batch: rows that decode together.
    cache: positions that attention reads; the last one is the longest sequence.
    tile: a step's prompt tokens are tiles of this size, each of one prompt, so prompts of any lengths share a step.
        None: a step prefills one chunk of a bucket's size, or several that are as large as the largest together.
    """

    prefill: tuple[int, ...]
    batch: tuple[int, ...]
    cache: tuple[int, ...]
    tile: int | None = None

    def __post_init__(self):
        for name in ("prefill", "batch", "cache"):
            sizes = getattr(self, name)
            ints = isinstance(sizes, tuple | list) and all(type(size) is int for size in sizes)
            if not ints or not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigurationError(f"{name} buckets must be ascending positive sizes, got {brief(sizes)}")
            object.__setattr__(self, name, tuple(sizes))
        if self.tile is not None:
            self._check_tile(self.tile)

    def _check_tile(self, tile: int) -> None:
        if type(tile) is not int or tile < 1:
            raise ConfigurationError(f"a tile has a positive number of tokens, got {tile!r}")
        if odd := [size for size in self.prefill if size > tile and size % tile]:
            multiples = sorted({rounded_up(size, tile) for size in odd})
            raise ConfigurationError(
                f"prefill buckets beyond a tile of {tile} tokens are multiples of it, not {odd}: take {multiples}"
            )

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """(P, C) for each prefill bucket: P tiles of C tokens."""
        tile = self.tile or self.prefill[-1]
        return tuple((max(1, size // tile), min(size, tile)) for size in self.prefill)

    @staticmethod
    def default(
        max_batch: int,
        max_len: int,
        *,
        ragged: bool = False,
        fine: bool = False,
        multiple: int = 1,
        tile: int | None = None,
        most: int | None = None,
        narrowest: int | None = None,
    ) -> Buckets:
        """Powers of four up to the limits.

        fine: each row of a decode step takes its time: batch buckets are 1, 8, 16, 32, 64, and half as many more again.
        ragged: attention reads only the positions that a row has, so one cache bucket is enough.
        multiple: prefill buckets are multiples of it.
        tile: of prompts that share a step. most: prompt tokens of a step; by default 512, or max_len if that is less.
        narrowest: tokens of the smallest prefill bucket; by default a tile.
        """
        if max_batch < 1 or max_len < 2:
            raise ConfigurationError(f"max_batch must be at least 1 and max_len at least 2, got {max_batch}, {max_len}")
        tile = tile and min(tile, max_len)
        first, most = tile or 32, most or min(512, max_len)
        multiple = math.lcm(multiple, tile or 1)
        prefill = {rounded_up(size, multiple) for size in _powers(first, max(first, most))}
        prefill |= {size for size in _powers(narrowest, first) if size < first} if narrowest else set()
        return Buckets(
            prefill=tuple(sorted(prefill)),
            batch=_fine(max_batch) if fine else _powers(1, max_batch),
            cache=(max_len,) if ragged else _powers(256, max_len),
            tile=tile and rounded_up(tile, multiple),
        )


def _powers(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 4
    return (*sizes, last)


def _fine(last: int) -> tuple[int, ...]:
    sizes, size = {1, 8, 16, 32}, 64
    while size < last:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return (*sorted(size for size in sizes if size < last), last)


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pick(sizes: tuple[int, ...], need: int) -> int:
    """The smallest bucket that holds `need`; `need` must not exceed the largest."""
    return next(size for size in sizes if size >= need)
