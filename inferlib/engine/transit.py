"""How much may be on its way between memories. Until it has arrived it takes memory of the devices beside the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import jax

from inferlib.cache.host_tier import Page
from inferlib.programs.page_transfer import PageTransfer

MOST_BYTES = 512 << 20  # on each device: a link of 50 GB/s takes 10 ms for that


class Batch(NamedTuple):
    """What one call reads or writes: its bytes on a device, whether it has arrived, and what waits for that."""

    nbytes: int
    arrived: Callable[[], bool]
    wait: Callable[[], Any]


class Transit:
    """What is on its way to and from the devices of an engine, pages and snapshots alike: at most `MOST_BYTES` on each
    device, or one batch that is larger. The engine's thread makes all calls."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []

    def make_room(self, nbytes: int) -> None:
        """Wait for what left first, until `nbytes` more bytes may leave."""
        self._batches = [batch for batch in self._batches if not batch.arrived()]
        while self._batches and sum(batch.nbytes for batch in self._batches) + nbytes > MOST_BYTES:
            self._batches.pop(0).wait()

    def add_future(self, nbytes: int, future: Future) -> None:
        """Count what is on its way until a future is done, whatever comes of it."""
        self._batches.append(Batch(nbytes, future.done, lambda: wait([future])))

    def add_array(self, nbytes: int, array: Any) -> None:
        """Count what is on its way until an array of JAX is computed."""
        self._batches.append(Batch(nbytes, array.is_ready, array.block_until_ready))

    def write(
        self, transfer: PageTransfer, arrays: tuple[jax.Array, ...], contents: Mapping[int, Page]
    ) -> tuple[jax.Array, ...]:
        """The arrays of pages of a cache, which are donated, with these contents of pages. It waits if too much is on
        its way."""
        for pages in transfer.batches(contents):
            self.make_room(transfer.call_bytes)
            arrays, written = transfer.write(arrays, pages, [contents[page] for page in pages])
            self.add_array(transfer.call_bytes, written)
        return arrays
