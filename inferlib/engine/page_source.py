"""Where the sequences of an engine fetch pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import jax

from inferlib.cache.prefix_tree import Match, Node
from inferlib.cache.snapshots import Resumed, Snapshot
from inferlib.engine.adapters import AdapterPool
from inferlib.engine.fetch import Fetch, SourceName
from inferlib.engine.sequence import Sequence


class PageSource(ABC):
    """The tiers of the cache (see `Tiers`), or an engine that prefills (see `Prefiller`).

    The engine's thread makes all calls. page: positions of a page. hit_tokens: how many tokens were fetched, by source.
    """

    def __init__(self, page: int, names: Iterable[SourceName]):
        self.page = page
        self.hit_tokens: dict[SourceName, int] = dict.fromkeys(names, 0)
        self._restored: dict[int, Any] = {}  # contents of pages to write before the next program
        self._rows: dict[int, Any] = {}  # what rows get then, of places
        self._fetching: dict[Fetch, Future] = {}

    # ---- for the scheduler

    def evict(self, first: int, node: Node) -> None:  # noqa: B027 (nothing is to be done in every source)
        """A page is about to be taken for others. first: the number of its replica's first page."""

    def leave(self, first: int, number: int, snapshot: Snapshot) -> None:  # noqa: B027
        """A snapshot is about to make room for others. first, number: of its replica's first page and snapshot."""

    @abstractmethod
    def _begin(self, s: Sequence, match: Match) -> Fetch:
        """Begin to bring the pages of a sequence behind a match."""

    def awaited(self, s: Sequence, match: Match) -> Fetch | None:
        """What a sequence that begins with a match has to wait for, before it can take what the source has of it."""
        if s.fetch is None:
            s.fetch = self._begin(s, match)
        return s.fetch if s.fetch.pending else None

    def take(self, s: Sequence, match: Match) -> tuple[Match, list[Any]]:
        """What a sequence that starts takes of its engine's cache, and the contents of what it fetched behind that."""
        self._rows.pop(s.row, None)  # of a sequence that lost the row since
        if isinstance(match, Resumed):
            return self._resumed(s, match)
        fetch, s.fetch = s.fetch, None
        column = len(match.nodes)
        if fetch is None or not fetch.first <= column < fetch.first + len(fetch.pages):
            return match, []
        pages = fetch.pages[column - fetch.first :]
        for _, source in pages:
            self.hit_tokens[source] += self.page
        return Match(match.nodes, None, (column + len(pages)) * self.page), [content for content, _ in pages]

    def _resumed(self, s: Sequence, match: Resumed) -> tuple[Match, list[Any]]:
        """`take` of a sequence that goes on from a place, if all that it fetched for that came. Its row gets what the
        place has of one."""
        fetch, s.fetch = s.fetch, None
        if fetch is None or match.tokens >= fetch.place or not fetch.came:
            return match, []
        whole, column = fetch.place // self.page, (fetch.place - 1) // self.page
        nodes = match.whole.nodes[:whole]  # all are written, or the sequence would wait
        if len(nodes) < fetch.first:
            return match, []
        *pages, (content, source) = fetch.pages[len(nodes) - fetch.first :] or fetch.pages[-1:]
        page, self._rows[s.row] = self._split_place(content)
        for _, of_page in pages:
            self.hit_tokens[of_page] += self.page
        contents = [content for content, _ in pages]
        if len(nodes) <= column:
            self.hit_tokens[source] += fetch.place - column * self.page
            contents.append(page)
        return Resumed(nodes, None, fetch.place, serves=fetch.place), contents

    def _split_place(self, place: Any) -> tuple[Any, Any]:
        """The page of a place, and what its row gets."""
        raise NotImplementedError

    def restore(self, pages: Iterable[int], contents: Iterable[Any]) -> None:
        """Write contents to pages before the next program, once pages are copied."""
        self._restored |= zip(pages, contents, strict=True)

    def leave_out(self, page: int) -> None:
        """Write nothing to a page that is copied to: the sequence that it was for lost it."""
        self._restored.pop(page, None)

    def lose(self) -> None:
        """Forget what was to happen before the next program."""
        self._restored, self._rows = {}, {}

    # ---- for the engine

    def share(self, adapters: AdapterPool) -> None:  # noqa: B027
        """Sequences of the engine may have these adapters."""

    @abstractmethod
    def prepare(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Compile what is needed. The cache is donated; its pages stay as they are."""

    def save(self, cache: tuple[jax.Array, ...], snapshots: tuple[jax.Array, ...]) -> None:  # noqa: B027
        """Read the pages that were evicted, and the snapshots, before anything else changes these arrays."""

    @abstractmethod
    def write(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The cache, which is donated, with the pages that sequences fetched."""

    def learn(self, tokens: int, seconds: float) -> None:  # noqa: B027
        """Learn that steps of the engine took `seconds` to compute `tokens` tokens of prompts."""

    def wait(self, seconds: float) -> None:
        """Wait until what some sequence fetches is there, if any does, but not longer."""
        if futures := list(self._fetching.values()):
            wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)

    @abstractmethod
    def settle(self) -> None:
        """Wait for all pages that are on their way."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all pages."""

    def sleep(self) -> None:  # noqa: B027
        """Free what it has on devices."""

    def wake(self) -> None:  # noqa: B027
        """Take it back."""

    @abstractmethod
    def counts(self) -> Mapping[str, int]:
        """What `EngineStats` say of it, by the names of its fields."""
