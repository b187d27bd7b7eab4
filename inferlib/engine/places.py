"""Places: what the tiers have of models whose rows keep rings and states beside pages.

A prompt can go on where a snapshot was saved, which may be within a page. So a snapshot that leaves the devices is one
entry, under a key of all tokens up to there: the page that these end in, and the row's rings and states behind them.
The whole pages before it are entries of their own, as in models that have pages alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from inferlib.cache.disk_tier import Form
from inferlib.cache.host_tier import Page, key_of, page_keys, place_key, root_key
from inferlib.cache.plan import CachePlan
from inferlib.cache.prefix_tree import encoded
from inferlib.cache.snapshots import Snapshot
from inferlib.engine.sequence import Sequence as Tokens
from inferlib.programs.page_transfer import EntryTransfer, PageTransfer
from inferlib.sharding.shards import Shards

_TOKEN = len(encoded([0]))


class Leaving(NamedTuple):
    """A snapshot that leaves the devices: the page that its tokens end in, and its number, both among those of all
    replicas; and from where on to where it serves."""

    page: int
    number: int
    first: int
    last: int


class Place(NamedTuple):
    """A point behind `tokens` tokens from which a sequence could go on.

    key: that of the page in which the tokens end; keys: those of the pages before it.
    """

    tokens: int
    key: bytes
    keys: list[bytes]


class PlaceTransfer:
    """Reads places from pages and snapshots, and writes the latter's part to rows, one of each replica a call. pages:
    of the same cache."""

    def __init__(self, plan: CachePlan, shards: Shards, pages: PageTransfer):
        self.plan, self.pages = plan, pages
        each, rows = plan.snapshots // shards.replicas, plan.rows // shards.replicas
        self._snapshots = EntryTransfer(plan.snapshot_arrays, shards, each, 1, pages.memory)
        self._rows = EntryTransfer(plan.part(plan.arrays, of_rows=True), shards, rows, 1, pages.memory)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of a place's arrays on the host, those of its page first."""
        return self.pages.forms + self._snapshots.forms

    @property
    def nbytes(self) -> int:
        """Bytes of a place on the host."""
        return self.pages.nbytes + self._snapshots.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes that the blocks of one place take on a device."""
        return self.pages.call_bytes + self._snapshots.call_bytes

    @property
    def write_bytes(self) -> int:
        """Bytes that a call writes to a row."""
        return self._rows.call_bytes

    def prepare(self) -> None:
        """Compile the programs, unless that is done."""
        self.prepare_read()
        self.prepare_write()

    def prepare_read(self) -> None:
        self._snapshots.prepare_read()

    def prepare_write(self) -> None:
        self._rows.prepare_write()

    def read(self, cache: tuple, snapshots: tuple, leaving: Leaving) -> tuple[jax.Array, ...]:
        """Blocks of a place, which `cut` takes. Cache and snapshots stay."""
        page = self.pages.read(self.plan.part(cache, of_rows=False), [leaving.page])
        return page + self._snapshots.read(snapshots, [leaving.number])

    def cut(self, blocks: Sequence[jax.Array], leaving: Leaving) -> list[Page]:
        """The place on the host. It waits for the copies."""
        count = self.pages.blocks
        (page,) = self.pages.cut(blocks[:count], [leaving.page])
        (of_row,) = self._snapshots.cut(blocks[count:], [leaving.number])
        return [page + of_row]

    def hosted(self, place: Page) -> Page:
        """A place from elsewhere, such as a file, as those on the host are."""
        page, of_row = self.parts(place)
        return self.pages.hosted(page) + self._snapshots.hosted(of_row)

    def write(self, cache: tuple, row: int, of_row: Page) -> tuple[tuple, Any]:
        """The cache, which is donated, with a row that has the second part of a place; and an array that is
        there once it is written."""
        rows, written = self._rows.write(self.plan.part(cache, of_rows=True), [row], [of_row])
        return self.plan.with_part(cache, rows, of_rows=True), written

    def sent(self, blocks: Sequence[jax.Array], leaving: Leaving, target: PlaceTransfer) -> Page:
        """The place on its way to an equal mesh of other devices, see `EntryTransfer.sent`."""
        count = self.pages.blocks
        (page,) = self.pages.sent(blocks[:count], [leaving.page], target.pages)
        (of_row,) = self._snapshots.sent(blocks[count:], [leaving.number], target._snapshots)
        return page + of_row

    def parts(self, place: Page) -> tuple[Page, Page]:
        """The page of a place, and what its row gets."""
        count = len(self.pages.forms)
        return place[:count], place[count:]


def key_of_snapshot(snapshot: Snapshot, page: int) -> bytes:
    """The key of the place where a snapshot serves that has all its nodes. page: positions of a page."""
    node = snapshot.nodes[-1]
    assert node.parent is not None
    return place_key(key_of(node.parent), node.tokens[: ((snapshot.last - 1) % page + 1) * _TOKEN])


def places_of(s: Tokens, page: int, unit: int, beyond: int) -> Iterator[Place]:
    """The places of a sequence behind its first `beyond` tokens, the last one first: multiples of the unit, but not
    behind its last token, whose logits are computed in any case."""
    end = (s.length - 1) // unit * unit
    size = page * _TOKEN
    keys = list(page_keys(s.cache_key, s.encoded[: end * _TOKEN], size))
    for tokens in range(end, beyond, -unit):
        column = (tokens - 1) // page
        before = keys[column - 1] if column else root_key(s.cache_key)
        yield Place(tokens, place_key(before, s.encoded[column * size : tokens * _TOKEN]), keys[:column])
