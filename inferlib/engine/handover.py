"""Pages and places on their way from devices that prefill to those that decode, in blocks (see `PageTransfer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax

from inferlib.cache.plan import CachePlan
from inferlib.engine.places import Leaving, PlaceTransfer
from inferlib.programs.page_transfer import CALL_PAGES, PageTransfer
from inferlib.sharding.shards import Shards

Arrays: TypeAlias = tuple[jax.Array, ...]


@dataclass(eq=False)
class Blocks:
    """What was handed over, on the devices that decode, until it is written. nbytes: on each of them."""

    arrays: Arrays
    nbytes: int


class Handed(NamedTuple):
    """The content of a page: its place in some blocks."""

    blocks: Blocks
    place: int


class HandedPlace(NamedTuple):
    """The content of a place: of its page, and what a row gets."""

    page: Handed
    of_row: Blocks


class Handover:
    """Reads what an engine has of prompts, and writes it to the cache of another one. plan, shards: of the first one's
    cache and of the other's; the meshes are equal but for their devices."""

    def __init__(self, source: tuple[CachePlan, Shards], target: tuple[CachePlan, Shards]):
        self._read, self._write = PageTransfer(*source), PageTransfer(*target)
        of_rows = bool(target[0].snapshots)
        self._read_places = PlaceTransfer(*source, self._read) if of_rows else None
        self._write_places = PlaceTransfer(*target, self._write) if of_rows else None

    def prepare(self) -> None:
        """Compile the programs, unless that is done."""
        self._read.prepare_read()
        self._write.prepare_write()
        if self._read_places is not None and self._write_places is not None:
            self._read_places.prepare_read()
            self._write_places.prepare_write()

    def nbytes(self, pages: int, place: bool) -> int:
        """Bytes that the blocks of so many pages, and of a place, take on a device that decodes."""
        of_place = self._read_places.read_bytes if place and self._read_places is not None else 0
        return -(-pages // CALL_PAGES) * self._write.call_bytes + of_place

    def send(self, cache: Arrays, pages: Sequence[int]) -> list[Handed]:
        """Pages on their way to the devices that decode. The cache stays."""
        handed, of_pages = [], self._read.plan.part(cache, of_rows=False)
        for first in range(0, len(pages), CALL_PAGES):
            batch = pages[first : first + CALL_PAGES]
            blocks = Blocks(self._write.received(self._read.read(of_pages, batch)), self._write.call_bytes)
            handed += [Handed(blocks, place) for place in range(len(batch))]
        return handed

    def send_place(self, cache: Arrays, snapshots: Arrays, leaving: Leaving) -> HandedPlace:
        """A place on its way. Cache and snapshots stay."""
        assert self._read_places is not None
        assert self._write_places is not None
        page, of_row = self._write_places.received(self._read_places.read(cache, snapshots, leaving))
        of_page = Blocks(page, self._write.call_bytes)
        return HandedPlace(Handed(of_page, 0), Blocks(of_row, self._write_places.write_bytes))

    def write(self, cache: Arrays, pages: Mapping[int, Handed], rows: Mapping[int, Blocks]) -> Arrays:
        """The cache, which is donated, with the contents of pages and rows."""
        of_blocks: dict[Blocks, dict[int, int]] = {}
        for page, (blocks, place) in pages.items():
            of_blocks.setdefault(blocks, {})[place] = page
        of_pages = self._write.plan.part(cache, of_rows=False)
        for blocks, batch in of_blocks.items():
            of_pages = self._write.write_blocks(of_pages, batch, blocks.arrays)
        cache = self._write.plan.with_part(cache, of_pages, of_rows=False)
        for row, blocks in rows.items():
            assert self._write_places is not None
            cache = self._write_places.write_blocks(cache, row, blocks.arrays)
        return cache


def blocks_of(content: Handed | HandedPlace) -> list[Blocks]:
    """The blocks that a content is in."""
    return [content.blocks] if isinstance(content, Handed) else [content.page.blocks, content.of_row]
