"""Pages of layers that keep more of a row than those of level 0 (see `inferlib.models.cache_levels`).

Each level has a pool of its own. A sequence takes all pages that it will need when it starts, as it does in level 0,
and gives those back that only its prompt needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inferlib.cache.pages import PagePool
from inferlib.engine.bounded import BoundedCache
from inferlib.engine.sequence import Sequence


class LevelPages:
    """The pages of one replica in the levels above 0.

    counts: of each level, how many there are. columns: how many columns of a row's table are of each level, those of
    level 0 first. page: positions of a page. bounded: how many cells a sequence has.
    """

    def __init__(self, counts: tuple[int, ...], columns: tuple[int, ...], page: int, bounded: BoundedCache):
        self.pools = tuple(PagePool(count) for count in counts)
        self.page, self.bounded = page, bounded
        self._first = tuple(sum(columns[:level]) for level in range(1, len(columns)))

    def has_room(self, s: Sequence) -> bool:
        """True if there are pages for a sequence that starts."""
        needed = zip(self.pools, self._needed(s, self.bounded.cells), strict=True)
        return all(pool.free >= count for pool, count in needed)

    def start(self, s: Sequence) -> Iterator[tuple[int, int]]:
        """Give a sequence its pages: the column of its row's table and the page, of each."""
        needed = zip(self.pools, self._needed(s, self.bounded.cells), strict=True)
        s.level_pages = [pool.take(count) for pool, count in needed]
        for first, pages in zip(self._first, s.level_pages, strict=True):
            yield from enumerate(pages, first)

    def keep_decoding(self, s: Sequence) -> None:
        """Take the pages of a sequence that decodes but for those that it may still need."""
        needed = self._needed(s, self.bounded.decoding_cells)
        for pool, pages, count in zip(self.pools, s.level_pages, needed, strict=True):
            pool.give_back(pages[count:])
            del pages[count:]

    def give_back(self, s: Sequence) -> None:
        """Take the pages of a sequence that ends or is preempted."""
        for pool, pages in zip(self.pools, s.level_pages, strict=True):
            pool.give_back(pages)
        s.level_pages = []

    def _needed(self, s: Sequence, cells: Callable[[Sequence, int], int]) -> list[int]:
        return [-(-cells(s, level) // self.page) for level in range(1, 1 + len(self.pools))]
