"""Pages and places on their way from devices that prefill to those that decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax

from inferlib.cache.host_tier import Page
from inferlib.cache.plan import CachePlan
from inferlib.engine.places import Leaving, PlaceTransfer
from inferlib.programs.page_transfer import PageTransfer
from inferlib.sharding.shards import Shards

Arrays: TypeAlias = tuple[jax.Array, ...]


@dataclass(eq=False)
class Handed:
    """A page, what a row gets, or a place that has both, on the devices that decode until it is written. nbytes: on
    each of them, at most. whole: the place that it is a part of."""

    arrays: Page
    nbytes: int
    whole: Handed | None = None


class Handover:
    """Reads what an engine has of prompts, and writes it to the cache of another one. source, target: of the caches of
    both; the meshes are equal but for their devices. A replica may write what another one read."""

    def __init__(self, source: tuple[CachePlan, Shards], target: tuple[CachePlan, Shards]):
        self.plan = target[0]
        self._read, self._write = PageTransfer(*source), PageTransfer(*target)
        of_rows = bool(self.plan.snapshots)
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
        """Bytes that `pages` pages take on a device that decodes, at most. place: the last one is that of a place."""
        of_pages = pages * self._write.call_bytes // self._write.most
        return of_pages + (self._write_places.write_bytes if place and self._write_places is not None else 0)

    def send(self, cache: Arrays, pages: Sequence[int]) -> list[Handed]:
        """Pages of a replica on their way to the devices that decode. The cache stays."""
        of_pages, handed = self.plan.part(cache, of_rows=False), []
        for batch in self._read.batches(pages):
            handed += self._read.sent(self._read.read(of_pages, batch), batch, self._write)
        return [Handed(page, self.nbytes(1, place=False)) for page in handed]

    def send_place(self, cache: Arrays, snapshots: Arrays, leaving: Leaving) -> Handed:
        """A place on its way. Cache and snapshots stay."""
        assert self._read_places is not None
        assert self._write_places is not None
        blocks = self._read_places.read(cache, snapshots, leaving)
        return Handed(self._read_places.sent(blocks, leaving, self._write_places), self.nbytes(1, place=True))

    def parts(self, place: Handed) -> tuple[Handed, Handed]:
        """The page of a place, and what its row gets."""
        assert self._write_places is not None
        page, of_row = self._write_places.parts(place.arrays)
        return Handed(page, 0, place), Handed(of_row, 0, place)

    def write(self, cache: Arrays, pages: Mapping[int, Handed], rows: Mapping[int, Handed]) -> Arrays:
        """The cache, which is donated, with the contents of pages and rows."""
        of_pages = self.plan.part(cache, of_rows=False)
        for batch in self._write.batches(pages):
            of_pages, _ = self._write.write(of_pages, batch, [pages[page].arrays for page in batch])
        cache = self.plan.with_part(cache, of_pages, of_rows=False)
        for row, of_row in rows.items():
            assert self._write_places is not None
            cache, _ = self._write_places.write(cache, row, of_row.arrays)
        return cache
