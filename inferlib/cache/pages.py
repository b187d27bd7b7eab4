"""The pages of a replica's cache, as the host gives them to rows (Kwon et al. 2023, "PagedAttention")."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Which of the pages 0 to `count` - 1 are free."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # the last is taken first
        self._taken = bytearray(count)

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` pages. Raises ValueError if fewer are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} pages are wanted, and {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._taken[page] = 1
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages. Raises ValueError for a page that is free already."""
        for page in pages:
            if not self._taken[page]:
                raise ValueError(f"page {page} is free already")
            self._taken[page] = 0
            self._free.append(page)
