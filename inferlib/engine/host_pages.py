"""Pages of rows that decode, in the host's memory. The device has those that a row's queries want most, and summaries
of all (see `inferlib.ops.selected_pages`).

Each dispatch tells how often its queries would have read every page of their rows. Before one of the next dispatches
the pages that are wanted and not there come, and those that are wanted least leave for them. So what a step reads is
asked for by the steps of a dispatch before it, as far ahead as dispatches are sent ahead of their results.

Cells of a page that leaves do not change any more. So its copy in the host's memory stays as long as the row does, and
when it leaves again nothing is copied. The engine's thread decides and queues programs: a page is read before anything
can write to its place. The copy to the host is made in a worker thread, while programs run.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from inferlib.cache.host_tier import Page
from inferlib.cache.plan import CachePlan
from inferlib.cache.prefix_tree import Match
from inferlib.config import EngineConfig
from inferlib.engine.fetch import Fetch
from inferlib.engine.page_source import PageSource
from inferlib.engine.replica_pages import ReplicaPages
from inferlib.engine.sequence import Sequence
from inferlib.engine.transit import Transit
from inferlib.option_checks import ConfigurationError
from inferlib.programs.memory import host_bytes
from inferlib.programs.page_transfer import CALL_PAGES, PageTransfer

# What was wanted counts half as much after each further dispatch. So a page that one dispatch reads now and then stays.
_REMEMBERED = 0.5


class HostPages(PageSource):
    """Moves pages of rows between one device and the host's memory.

    A row that decodes has at most `most` pages on the device: the first one, those that are not full, and others. It
    keeps all pages of its prompt until it is known what it wants, but for the room that new pages need. Then they leave
    a few before each dispatch, so that the copies take none of its time.

    wanted: how often queries would have read a page, if it had been there; absent: how often it was not.
    """

    def __init__(self, plan: CachePlan, config: EngineConfig):
        assert config.resident is not None
        super().__init__(plan.page, ())
        self.plan, self.most, self.transfer = plan, config.resident, PageTransfer(plan, config.shards)
        self.sent = self.brought = self.wanted = self.absent = 0
        self._leaving: dict[int, Future[Page]] = {}  # pages to read before the next program
        self._transit = Transit()
        self._saver = ThreadPoolExecutor(1, "inferlib-host-pages")

    # ---- for the scheduler

    def cells(self, s: Sequence) -> int:
        """For how many cells a sequence gets pages when it starts: those that it keeps are there from then on, so that
        none has to give up its row for another one that grows."""
        return max(s.length, min(self.most * self.page, s.most_length))

    def exchange(self, s: Sequence, more: int, pages: ReplicaPages) -> list[tuple[int, int]]:
        """Let pages of a sequence that decodes leave and come, so that it has room for `more` new ones. Returns the
        columns that change with their pages, -1 where there is none any more."""
        numbers = np.array(s.pages)
        wanted = np.zeros(len(numbers)) if s.wanted is None else s.wanted[: len(numbers)]
        here, absent = np.flatnonzero(numbers >= 0), np.flatnonzero((numbers < 0) & (wanted > 0))
        over = min(len(here) + more - self.most, more if s.wanted is None else max(more, CALL_PAGES))
        stay = here[(here > 0) & (here < s.written // self.page)]
        stay = stay[np.argsort(wanted[stay], kind="stable")].tolist()  # of those that are wanted as much, the oldest
        assert over <= len(stay), "the device keeps fewer pages than dispatches write"
        leave, come = stay[: max(over, 0)], []
        for column in absent[np.argsort(-wanted[absent], kind="stable")].tolist():
            if over < 0:
                over += 1
            elif len(leave) < len(stay) and wanted[stay[len(leave)]] < wanted[column]:
                leave.append(stay[len(leave)])
            else:
                break
            come.append(column)
        return [*self._send(s, leave, pages), *self._bring(s, come, pages)]

    def learn_wanted(self, s: Sequence, counts: np.ndarray) -> None:
        """Note what a dispatch tells of a sequence's row: see `StepOutput.wanted`."""
        of_pages, absent = counts[:-1], int(counts[-1])
        self.wanted, self.absent = self.wanted + int(of_pages.sum()), self.absent + absent
        s.wanted = of_pages + (0 if s.wanted is None else _REMEMBERED * s.wanted)

    def lose(self) -> None:
        self._leaving = {}
        super().lose()

    def _begin(self, s: Sequence, match: Match) -> Fetch:
        return Fetch(0)

    def _send(self, s: Sequence, columns: list[int], pages: ReplicaPages) -> list[tuple[int, int]]:
        for column in columns:
            if column not in s.hosted:
                s.hosted[column] = self._leaving[s.pages[column]] = Future()
                self.sent += 1
        pages.pool.give_back(s.pages[column] for column in columns)
        for column in columns:
            s.pages[column] = -1
        return [(column, -1) for column in columns]

    def _bring(self, s: Sequence, columns: list[int], pages: ReplicaPages) -> list[tuple[int, int]]:
        taken = pages.take(len(columns))
        for column, page in zip(columns, taken, strict=True):
            s.pages[column] = page
        self.restore(taken, [s.hosted[column].result() for column in columns])
        self.brought += len(columns)
        return list(zip(columns, taken, strict=True))

    # ---- for the engine

    def prepare(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        self.transfer.prepare()
        return cache

    def save(self, cache: tuple[jax.Array, ...], snapshots: tuple[jax.Array, ...]) -> None:
        """It waits if too much is on its way (see `Transit`)."""
        leaving, self._leaving = self._leaving, {}
        of_pages = self.plan.part(cache, of_rows=False)
        for numbers in self.transfer.batches(leaving):
            self._transit.make_room(self.transfer.call_bytes)
            blocks, copies = self.transfer.read(of_pages, numbers), [leaving[page] for page in numbers]
            self._transit.add_future(self.transfer.call_bytes, self._saver.submit(self._save, blocks, numbers, copies))

    def _save(self, blocks: tuple[jax.Array, ...], numbers: list[int], copies: list[Future[Page]]) -> None:
        try:
            contents = self.transfer.cut(blocks, numbers)
        except BaseException as error:
            for copy in copies:
                copy.set_exception(error)
            raise
        for copy, content in zip(copies, contents, strict=True):
            copy.set_result(content)

    def write(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        restored, self._restored = self._restored, {}
        of_pages = self._transit.write(self.transfer, self.plan.part(cache, of_rows=False), restored)
        return self.plan.with_part(cache, of_pages, of_rows=False)

    def settle(self) -> None:
        self._saver.submit(int).result()

    def clear(self) -> None:
        self.settle()

    def counts(self) -> Mapping[str, int]:
        return {
            "sent_pages": self.sent,
            "brought_pages": self.brought,
            "wanted_reads": self.wanted,
            "absent_reads": self.absent,
        }


def check_host_pages(plan: CachePlan, config: EngineConfig) -> None:
    """Raise ConfigurationError if this machine cannot hold the pages of all rows."""
    if config.resident is None:
        return
    need = plan.rows * plan.columns * PageTransfer(plan, config.shards).nbytes
    memory = host_bytes()
    if need > memory > 0:
        raise ConfigurationError(
            f"attention_pages {str(config.attention_pages)!r} may send pages of {need / 2**30:.1f} GiB to the host's "
            f"memory, and this machine has {memory / 2**30:.1f} GiB: lower max_batch or max_len"
        )
