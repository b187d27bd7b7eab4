"""Tiers of the prefix cache: pages that the devices have no room for go to host memory and to disk, and come back.

The engine's thread decides and queues programs. A page that is evicted is read before anything can write to it, since
the read is queued before the next program. What follows happens in worker threads: the copy to the host, and files. So
does what a sequence fetches from a file, while it waits.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

import jax

from inferlib.cache.disk_tier import DiskTier, check_folder
from inferlib.cache.host_tier import HostTier, Page, key_of, nbytes_of, page_keys
from inferlib.cache.plan import CachePlan
from inferlib.cache.prefix_tree import Match, Node, encoded
from inferlib.cache.snapshots import Resumed, Snapshot
from inferlib.config import EngineConfig
from inferlib.engine.fetch import Fetch, SourceName
from inferlib.engine.fetch_rule import FetchRule
from inferlib.engine.fingerprint import fingerprint
from inferlib.engine.page_source import PageSource
from inferlib.engine.places import Leaving, PlaceTransfer, key_of_snapshot, places_of
from inferlib.engine.sequence import Sequence
from inferlib.engine.transit import Transit
from inferlib.models.abstract import AbstractModel
from inferlib.option_checks import ConfigurationError
from inferlib.programs.memory import host_bytes
from inferlib.programs.page_transfer import CALL_PAGES, PageTransfer

log = logging.getLogger(__name__)

_WRITING_BYTES = 2 << 30  # of pages on their way to files
_MOST_FETCHES = 8  # sequences whose pages are on their way from a tier
_TRIALS = 3


class Tiers(PageSource):
    """The tiers of an engine's cache.

    What the devices have no room for goes to the host and to disk at the same time, and what comes from disk to the
    host too. models, weights: see `fingerprint`. dropped: pages that are in no tier, as the disk did not keep up.
    places: of models whose rows are more than pages, see `inferlib.engine.places`.
    """

    def __init__(self, models: Items[AbstractModel], weights: Items[jax.Array], plan: CachePlan, config: EngineConfig):
        super().__init__(plan.page, ("host", "disk"))
        self.plan, self.unit = plan, config.prefill_unit
        self.transfer, self.disk = PageTransfer(plan, config.shards), None
        self.places = PlaceTransfer(plan, config.shards, self.transfer) if plan.snapshots else None
        if config.disk_cache is not None:
            of_model = fingerprint(models, weights, plan, self.transfer)
            self.disk = DiskTier(config.disk_cache, of_model, config.disk_cache_size)
        self.host = HostTier(config.host_cache) if config.host_cache else None
        self.rule = FetchRule()
        self.dropped = 0
        self._evicted: dict[bytes, int] = {}  # pages to read before the next program, by key
        self._leaving: dict[bytes, Leaving] = {}  # snapshots likewise
        self._transit = Transit()
        self._saving: dict[bytes, Future[dict[bytes, Page]]] = {}
        self._writing: dict[bytes, Page] = {}
        self._reader, self._saver, self._writer = self._threads = tuple(
            ThreadPoolExecutor(1, f"inferlib-tier-{name}") for name in ("reader", "saver", "writer")
        )

    # ---- for the scheduler

    def evict(self, first: int, node: Node) -> None:
        """Save the page before it is taken."""
        if node.count < self.page:
            return
        if not self._has(key := key_of(node)):
            self._evicted.setdefault(key, first + node.page)

    def leave(self, first: int, number: int, snapshot: Snapshot) -> None:
        if not self._has(key := key_of_snapshot(snapshot, self.page)):
            page = first + snapshot.nodes[-1].page
            self._leaving.setdefault(key, Leaving(page, number + snapshot.number, snapshot.first, snapshot.last))

    def awaited(self, s: Sequence, match: Match) -> Fetch | None:
        if s.fetch is None and len(self._fetching) >= _MOST_FETCHES and (others := list(self._fetching)):
            return others[0]
        return super().awaited(s, match)

    def lose(self) -> None:
        self._evicted, self._leaving = {}, {}
        super().lose()

    # ---- for the engine

    def prepare(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Compile the programs and time the way to the devices."""
        self.transfer.prepare()
        if self.places is not None:
            self.places.prepare()
        of_pages, pages = self.plan.part(cache, of_rows=False), list(range(min(CALL_PAGES, self.transfer.each)))
        contents = self.transfer.cut(self.transfer.read(of_pages, pages), pages)
        best = float("inf")
        for _ in range(_TRIALS):
            start = time.perf_counter()
            of_pages, written = self.transfer.write(of_pages, pages, contents)
            jax.block_until_ready(written)
            best = min(best, time.perf_counter() - start)
        self.rule.link.add(len(pages) * self.transfer.nbytes, best)
        return self.plan.with_part(cache, of_pages, of_rows=False)

    def save(self, cache: tuple[jax.Array, ...], snapshots: tuple[jax.Array, ...]) -> None:
        """It waits if too much is on its way (see `Transit`)."""
        self._save_places(cache, snapshots)
        evicted, self._evicted = {page: key for key, page in self._evicted.items()}, {}
        cache = self.plan.part(cache, of_rows=False)
        for pages in self.transfer.batches(evicted):
            self._transit.make_room(self.transfer.call_bytes)
            blocks = self.transfer.read(cache, pages)
            saving = self._bring([evicted[page] for page in pages], partial(self.transfer.cut, blocks, pages))
            self._transit.add_future(self.transfer.call_bytes, saving)

    def write(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        restored, self._restored = self._restored, {}
        of_pages = self._transit.write(self.transfer, self.plan.part(cache, of_rows=False), restored)
        return self._with_rows(self.plan.with_part(cache, of_pages, of_rows=False))

    def settle(self) -> None:
        for thread in self._threads:
            thread.submit(int).result()

    def clear(self) -> None:
        self.lose()
        self.settle()
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.clear()

    def learn(self, tokens: int, seconds: float) -> None:
        self.rule.computed.add(tokens, seconds)

    def counts(self) -> dict[str, int]:
        hits, host, disk = self.hit_tokens, self.host, self.disk
        counts = {"host_tokens": hits["host"], "disk_tokens": hits["disk"], "dropped_pages": self.dropped}
        if host is not None:
            counts |= {"host_pages": len(host), "host_evicted_pages": host.evictions}
            counts["host_bytes"] = host.nbytes
        if disk is not None:
            counts |= {"disk_pages": len(disk), "disk_bytes": disk.nbytes, "disk_evicted_pages": disk.evictions}
        return counts

    # ---- inside

    def _has(self, key: bytes) -> bool:
        """Whether nothing is to be saved for a key."""
        if key in self._saving or self._at_hand(key) is not None:
            return True
        return self.host is None and self._on_disk(key)

    def _at_hand(self, key: bytes) -> Page | None:
        """A page that is in the host's memory."""
        page = None if self.host is None else self.host.get(key)
        return self._writing.get(key) if page is None else page

    def _on_disk(self, key: bytes) -> bool:
        return self.disk is not None and key in self.disk

    def _bring(self, keys: list[bytes], cut: Callable[[], list[Page]]) -> Future:
        """Begin to bring to the host what was read. cut: makes a content for each key."""
        future = self._saver.submit(self._save, keys, cut)
        self._saving.update((key, future) for key in keys)
        future.add_done_callback(partial(self._saved, keys))
        return future

    def _save(self, keys: list[bytes], cut: Callable[[], list[Page]]) -> dict[bytes, Page]:
        saved = dict(zip(keys, cut(), strict=True))
        for key, page in saved.items():
            self._store(key, page)
        return saved

    def _save_places(self, cache: tuple[jax.Array, ...], snapshots: tuple[jax.Array, ...]) -> None:
        leaving, self._leaving = self._leaving, {}
        for key, place in leaving.items():
            assert self.places is not None
            self._transit.make_room(self.places.read_bytes)
            blocks = self.places.read(cache, snapshots, place)
            saving = self._bring([key], partial(self.places.cut, blocks, place))
            self._transit.add_future(self.places.read_bytes, saving)

    def _with_rows(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The cache, which is donated, with what rows get of places."""
        rows, self._rows = self._rows, {}
        for row, content in rows.items():
            assert self.places is not None
            self._transit.make_room(self.places.write_bytes)
            cache, written = self.places.write(cache, row, content)
            self._transit.add_array(self.places.write_bytes, written)
        return cache

    def _saved(self, keys: list[bytes], future: Future) -> None:
        for key in keys:
            self._saving.pop(key, None)
        if error := future.exception():
            log.warning("%d pages of the cache were not saved: %s", len(keys), error)

    def _store(self, key: bytes, page: Page) -> None:
        """Put a page in the tiers. Of those that leave the host for it, the disk has most already."""
        left = [] if self.host is None else self.host.put(key, page)
        for pair in ((key, page), *left):
            self._offer(*pair)

    def _offer(self, key: bytes, page: Page) -> None:
        """Write a page to disk, if it is not there and the disk keeps up."""
        if self.disk is None or key in self.disk or key in self._writing:
            return
        if sum(map(nbytes_of, list(self._writing.values()))) > _WRITING_BYTES:
            self.dropped += self.host is None or key not in self.host
            return
        with suppress(RuntimeError):  # the interpreter ends
            future = self._writer.submit(self.disk.write, key, page)
            self._writing[key] = page
            future.add_done_callback(lambda _: self._writing.pop(key, None))

    def _begin(self, s: Sequence, match: Match) -> Fetch:
        """Look for the pages of a sequence behind a match, and bring those that are not at hand."""
        fetch = Fetch(len(match.nodes))
        if not s.takes_cached:
            return fetch
        if isinstance(match, Resumed):
            return self._started(self._deepest(s, match))
        whole, wanted = (s.length - 1) // self.page, self.rule.choose(self.page, self.transfer.nbytes)
        if whole <= fetch.first:
            return fetch
        page = len(encoded([0])) * self.page
        for key in islice(page_keys(s.cache_key, s.encoded[: whole * page], page), fetch.first, None):
            if (tier := self._tier_of(key)) is None or not wanted[tier]:
                break
            fetch.keys.append(key)
        return self._started(fetch)

    def _deepest(self, s: Sequence, match: Resumed) -> Fetch:
        """What to fetch of the deepest place behind a match that is worth it: what the tree has of the pages before it
        is taken from there."""
        assert self.places is not None
        for place in places_of(s, self.page, self.unit, match.tokens):
            first = min(len(match.whole.nodes), place.tokens // self.page)
            keys = [*place.keys[first:], place.key]
            tiers = list(takewhile(bool, map(self._tier_of, reversed(keys))))
            if len(tiers) < len(keys):
                continue
            nbytes = (len(keys) - 1) * self.transfer.nbytes + self.places.nbytes
            if self.rule.choose(place.tokens - match.tokens, nbytes)["disk" if "disk" in tiers else "host"]:
                return Fetch(first, keys, place=place.tokens)
        return Fetch(len(match.nodes))

    def _split_place(self, place: Page) -> tuple[Page, Page]:
        assert self.places is not None
        return self.places.parts(place)

    def _started(self, fetch: Fetch) -> Fetch:
        """Begin to bring what is not at hand."""
        for key in fetch.keys:
            if (content := self._at_hand(key)) is None:
                break
            fetch.pages.append((content, "host"))
        if len(fetch.pages) < len(fetch.keys):
            fetch.pending = True
            self._fetching[fetch] = future = self._reader.submit(self._load, fetch)
            future.add_done_callback(partial(self._fetched, fetch))
        return fetch

    def _tier_of(self, key: bytes) -> SourceName | None:
        if key in self._saving or self._at_hand(key) is not None:
            return "host"
        return "disk" if self._on_disk(key) else None

    def _load(self, fetch: Fetch) -> None:
        """Bring the rest of the pages of a fetch, up to the first that is gone."""
        for key in fetch.keys[len(fetch.pages) :]:
            place = self.places if fetch.place and key is fetch.keys[-1] else None
            if (loaded := self._loaded(key, place or self.transfer)) is None:
                break
            fetch.pages.append(loaded)

    def _loaded(self, key: bytes, transfer: PageTransfer | PlaceTransfer) -> tuple[Page, SourceName] | None:
        if (saving := self._saving.get(key)) is not None:
            return saving.result()[key], "host"
        if (content := self._at_hand(key)) is not None:
            return content, "host"
        start = time.perf_counter()
        if self.disk is None or (content := self.disk.read(key, transfer.forms)) is None:
            return None
        self.rule.disk.add(nbytes_of(content), time.perf_counter() - start)
        if self.host is not None:
            content = transfer.hosted(content)
            self._store(key, content)
        return content, "disk"

    def _fetched(self, fetch: Fetch, future: Future) -> None:
        if error := future.exception():
            log.warning("pages of the cache did not come back: %s", error)
        self._fetching.pop(fetch, None)
        fetch.pending = False


def check_tiers(plan: CachePlan, config: EngineConfig) -> None:
    """Raise ConfigurationError if tiers are asked for that this model and this machine cannot have."""
    asked = [name for name in ("host_cache", "disk_cache") if getattr(config, name) is not None]
    if not asked:
        return
    why = "all layers keep rings or states" if all(plan.of_rows) else plan.no_prefix_caching(config)
    if why is not None:
        raise ConfigurationError(f"{asked[0]} has pages that prompts share, and {why}: leave {' and '.join(asked)} out")
    if config.shards.several_processes:
        raise ConfigurationError(f"{asked[0]} serves the devices of one process: leave {' and '.join(asked)} out")
    pages = PageTransfer(plan, config.shards)
    nbytes, what = pages.nbytes, "page"
    if plan.snapshots:
        nbytes, what = PlaceTransfer(plan, config.shards, pages).nbytes, "page with a snapshot"
    if config.host_cache is not None and config.host_cache < nbytes:
        raise ConfigurationError(
            f"host_cache of {config.host_cache} bytes holds no {what}, which has {nbytes}: give many times that, such "
            "as '16GiB'"
        )
    if config.disk_cache is not None:
        _check_disk(config.disk_cache, config.disk_cache_size, nbytes)
    memory = host_bytes()
    if config.host_cache is not None and config.host_cache > memory > 0:
        raise ConfigurationError(
            f"host_cache of {config.host_cache / 2**30:.1f} GiB is more than the {memory / 2**30:.1f} GiB that this "
            "machine has: give less, as weights are loaded through it too"
        )


def _check_disk(folder: Path, most: int | None, page: int) -> None:
    check_folder(folder)
    if most is None:
        return
    if most < page:
        raise ConfigurationError(
            f"disk_cache_size of {most} bytes holds no page, which has {page}: give many times that, such as '100GiB'"
        )
    disk = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).total
    if most > disk:
        raise ConfigurationError(
            f"disk_cache_size of {most / 2**30:.1f} GiB is more than the {disk / 2**30:.1f} GiB of the disk that "
            f"{folder} is on: give less"
        )
