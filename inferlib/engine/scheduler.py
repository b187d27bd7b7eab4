"""Iteration-level scheduling: which prompts get rows and pages, and what the next dispatch runs (Orca, OSDI 2022)."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from inferlib.buckets import pick
from inferlib.cache.plan import CachePlan
from inferlib.cache.prefix_tree import Match
from inferlib.cache.snapshots import Snapshot, Snapshots
from inferlib.config import EngineConfig
from inferlib.engine.adapters import AdapterPool
from inferlib.engine.bounded import BoundedCache
from inferlib.engine.cascade import Cascade
from inferlib.engine.forced import draft_rows, forced_tokens
from inferlib.engine.host_pages import HostPages
from inferlib.engine.itl import ItlBound
from inferlib.engine.level_pages import LevelPages
from inferlib.engine.page_source import PageSource
from inferlib.engine.profit import Profit, tokens_of_weights
from inferlib.engine.replica_pages import ReplicaPages
from inferlib.engine.sequence import Sequence, Status
from inferlib.programs.keys import DEVICE_MODES, MODES, Mode, ProgramKey
from inferlib.programs.row_changes import Changes, Count, Grant, Move, Past, Save
from inferlib.sampling.sampler import counts_of

# A request goes before those of the next lower priority that came up to this many requests earlier. So none starves.
LEAD = 1000


@dataclass(frozen=True)
class Chunk:
    """`length` tokens of a sequence from position `start` on, which a step prefills for its row.

    last: the prompt, or the part of it that is computed again, ends with them. dropped: how many positions before them
    the row's cache no longer has.
    """

    sequence: Sequence
    row: int
    start: int
    length: int
    last: bool
    dropped: int = 0

    @property
    def cells(self) -> int:
        """How many cells the row has once these tokens are written."""
        return self.start + self.length - self.dropped


# Sequences, and where the results of a program have theirs.
Places = list[tuple[Sequence, int]]


@dataclass(frozen=True)
class Dispatch:
    """One call of a program.

    rows: the sequences whose rows it may advance, each by up to `key.most_tokens` tokens.
    columns: the column of each of these sequences in the tokens that the program returns.
    prefixes: what the rows share, if the program reads that once; see `Cascade.prefixes`.
    drafts: the drafts that the host gives, see `draft_rows`.
    """

    key: ProgramKey
    chunks: list[Chunk]
    rows: list[Sequence]
    columns: list[int]
    prefixes: np.ndarray | None = None
    drafts: np.ndarray | None = None

    def places(self, chunk_indices: list[int]) -> tuple[Places, Places]:
        """The sequences that get a token from their prompt's last chunk, and from their row; each with the index of
        its chunk in the chunk table, or its column."""
        chunks = zip(self.chunks, chunk_indices, strict=True)
        return [(c.sequence, i) for c, i in chunks if c.last], list(zip(self.rows, self.columns, strict=True))

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.rows, *(chunk.sequence for chunk in self.chunks)]

    @property
    def following(self) -> ProgramKey:
        """The key of its second program, if it has two."""
        modes: list[Mode] = [s.choice for s in self.sequences]
        return self.key.choosing(max(modes, key=MODES.index))

    @property
    def takes_logits(self) -> bool:
        """True if a function of a user needs the logits of its first program."""
        return bool(self.key.part) and any(s.params.logits_processors for s in self.sequences)


class Scheduler:
    """Sequences are served by priority, and first come, first served (see `LEAD`). A prompt takes the lowest free row,
    and pages for all of itself. While prompts are prefilled, the rows that decode advance by one token in the same
    step.

    Rows get pages before a dispatch needs them. If none is free, the sequence that is last in order is preempted: it
    loses its row and pages, and its tokens are computed again later. Where fewer rows decode than a program has, high
    rows move to low ones, so that a smaller program serves them.

    A sequence begins with the pages that are cached of its tokens, in the replica that has most of them, unless that is
    busy (see `ReplicaPages`). It waits while another one prefills what it begins with.

    What is to happen before the next dispatch is in `changes`, and rows to stop with it in `cancelled`. Whoever sends
    the dispatch empties them.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: CachePlan,
        cascade: Cascade | None = None,
        source: PageSource | None = None,
        adapters: AdapterPool | None = None,
    ):
        self.config, self.page, self.cascade, self.source, self.adapters = config, plan.page, cascade, source, adapters
        self._forced: dict[Sequence, list[int]] = {}  # of the dispatch that is planned
        self.profit = None if config.speculation is None else Profit(config.speculation, config.platform)
        self.waiting: list[Sequence] = []  # in order
        self.running: dict[int, Sequence] = {}
        self.changes = Changes()
        self.cancelled: set[int] = set()
        self._saves: list[Save] = []  # of rows, once the last dispatch has run
        self.preemptions = 0
        replicas = config.shards.replicas
        self.pages = [_pages(config, plan) for _ in range(replicas)]
        self.bounded = None if config.compacted is None else BoundedCache(config.compacted, config.row_tokens)
        if self.bounded is not None:
            for pages in self.pages:
                pages.cells = self.bounded.cells
                if (columns := plan.level_columns)[1:]:
                    counts = [plan.pages_of(level, replicas) // replicas for level in range(1, len(columns))]
                    pages.levels = LevelPages(tuple(counts), columns, plan.page, self.bounded)
        self.host_pages = source if isinstance(source, HostPages) else None
        if self.host_pages is not None:
            for pages in self.pages:
                pages.cells = self.host_pages.cells
        if source is not None:
            for replica, pages in enumerate(self.pages):
                pages.evicting = partial(source.evict, replica * pages.pool.count)
                if pages.snapshots is not None:
                    pages.snapshots.leaving = partial(self._leave, source, replica)
        self._free = [list(range(config.rows)) for _ in range(replicas)]  # heaps of rows, as replicas number them
        self._arrivals = self._sent = self._received = 0
        self._last: Dispatch | None = None
        self._repeats = 0  # how often the last dispatch may be repeated, unless a call changes what runs
        self.itl = ItlBound(config)
        self._postponed = self._waiting_moves = False  # rows are to be moved, but not before the last dispatch

    def add(self, sequence: Sequence) -> None:
        self._repeats = 0
        sequence.order = self._arrivals + LEAD * sequence.priority
        self._arrivals += 1
        sequence.bound = None if self.bounded is None else self.bounded.policy.compacts_at
        insort(self.waiting, sequence, key=_order)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence that waits or runs."""
        if sequence.row >= 0:
            self.cancelled.add(sequence.row)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the row and the pages of a finished sequence."""
        self._repeats = 0
        if sequence.row < 0:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            sequence.fetch = sequence.waits_for = None
            return
        del self.running[sequence.row]
        if self.adapters is not None:
            self.adapters.give_back(sequence.adapter)
        replica, row = divmod(sequence.row, self.config.rows)
        heapq.heappush(self._free[replica], row)
        self.follow_last()
        self.changes.compacted.pop(sequence.row, None)
        self.changes.snapshots += self.pages[replica].give_back(sequence)
        sequence.row = -1

    def settle(self, sequence: Sequence, key: ProgramKey, taken: int) -> None:
        """Note that a dispatch advanced a sequence by `taken` tokens.

        They are fewer than its steps if the sequence ended, the device returned early for a waiting prompt, or the row
        waited to be compacted. With drafts they are more.
        """
        if taken < key.steps:
            self._repeats = 0
        sequence.scheduled -= key.most_tokens - taken
        sequence.least += taken - key.steps
        if self.bounded is not None:
            self.bounded.settle(sequence, taken)

    def received(self) -> None:
        """The results of the oldest dispatch in flight are known."""
        self._received += 1

    def lose(self) -> list[Sequence]:
        """Drop the dispatches in flight, and the sequences that they or earlier ones ran; returns these."""
        lost = [*self.running.values(), *(s for s in self.waiting if s.ready > self._received)]
        for s in lost:
            self.release(s)
        for pages in self.pages:
            pages.forget()
        if self.source is not None:
            self.source.lose()
        self._received = self._sent
        self.changes, self.cancelled, self._saves = Changes(), set(), []
        return lost

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def plan(self, max_steps: int) -> Dispatch | None:
        """The next dispatch, or None if everything that can run is in flight.

        max_steps: most decode steps of a dispatch.
        """
        self.follow_last()
        steps = self.config.decode_steps if max_steps >= self.config.decode_steps else 1
        if self._last is not None and self._repeats and steps == self._last.key.steps:
            # The usual case. After a wait, with cold caches, planning again would be half of the host's work.
            self._repeats -= 1
            for s in self._last.rows:
                s.scheduled += self._last.key.most_tokens
                s.least += steps
            self._sent += 1
            return self._last
        self._exchange_pages()
        self._admit()
        self._compact_caches()
        dispatch = self._planned(steps)
        if dispatch is not None:
            self._sent += 1
            for s in dispatch.rows:
                assert s.max_length <= len(s.pages) * self.page, "the pages do not cover a dispatch"
        return dispatch

    def follow_last(self) -> None:
        """What is to be saved behind the last dispatch comes before all that follows it."""
        for pages in self.pages:
            pages.unsent.clear()
        if self._saves:
            self.changes.snapshots += self._saves
            self._saves = []

    def _planned(self, steps: int) -> Dispatch | None:
        if any(s.status is Status.PREFILL for s in self.running.values()):
            decoding = self._covered(1)
            unfinished = [s for s in decoding if s.unfinished]
            if prefilling := [s for s in self.running.values() if s.status is Status.PREFILL]:
                decoding = decoding if unfinished else []
                return self._step(*self._chunks(prefilling, decoding), decoding)
        self._compact()
        now = self._steps(steps)
        drafts = self._drafts(now)
        decoding = self._covered(now * (1 + drafts))
        if (more := self._steps(steps)) > now:  # what needed single steps was preempted
            now, drafts, decoding = more, 0, self._covered(more)
        unfinished = [s for s in decoding if s.unfinished]
        return self._decode(decoding, unfinished, now, drafts) if unfinished else None

    def _steps(self, wanted: int) -> int:
        """Steps of a decode dispatch where `wanted` are wanted: one if the host has a part in the choice of tokens, or
        if steps take so long that each is to have as many drafts as pay; and no single step where there is no program
        of one."""
        rows, active = self.config.rows, [s for s in self.running.values() if s.may_be_active]
        if any(s.mode == "processed" for s in active):
            return 1
        last = max((s.row % rows for s in active if s.unfinished), default=0)
        bucket = pick(self.config.row_buckets, 1 + last)
        if bucket not in self.config.one_step_buckets:
            return self.config.decode_steps
        decides = self.profit is not None and active and self.profit.has_long_steps(self._mode(active), bucket)
        return 1 if decides else wanted

    def _drafts(self, steps: int) -> int:
        """How many tokens a decode dispatch drafts in each step: as many as pay, or none where rows would have to be
        preempted for them. If the host has a part in the choice of tokens, they are those that grammars force."""
        running = [s for s in self.running.values() if s.may_be_active]
        unfinished = [s for s in running if s.unfinished]
        if self.profit is None or not unfinished:
            return 0
        rows = pick(self.config.row_buckets, 1 + max(s.row % self.config.rows for s in unfinished))
        if (mode := self._mode(running)) in DEVICE_MODES:
            drafts = self.profit.choose(unfinished, mode, rows)
        else:
            self._forced = forced_tokens(running)
            certain = [len(self._forced.get(s, ())) for s in unfinished]
            choices: list[Mode] = [s.choice for s in running]
            drafts = self.profit.choose_certain(certain, max(choices, key=MODES.index), rows) if any(certain) else 0
        needed: Counter[int] = Counter()
        for s in running if drafts else ():
            more = self._pages(s.length_after(steps * (1 + drafts))) - len(s.pages)
            needed[s.row // self.config.rows] += max(more, 0)
        return drafts if all(self.pages[replica].free >= need for replica, need in needed.items()) else 0

    # ---- rows and pages

    def _admit(self) -> None:
        """Give rows and pages to sequences that wait, in order. One of a higher priority may take them from others.
        Those that wait for pages which are being written let others pass."""
        number = 0
        while number < len(self.waiting):
            sequence = self.waiting[number]
            if sequence.ready > self._received:
                return  # tokens of it are still in flight
            if sequence.waits_for is not None and sequence.waits_for.pending:
                number += 1
                continue
            while (place := self._place_for(sequence)) is None:
                last = max(filter(self._can_return, self.running.values()), key=_order, default=None)
                if last is None or last.priority <= sequence.priority:
                    return
                self._preempt(last)
            sequence.waits_for = place[1].pending
            if sequence.waits_for is None and self.source is not None:
                sequence.waits_for = self.source.awaited(sequence, place[1])
            if sequence.waits_for is None:
                self._start(sequence, *place)

    def _place_for(self, sequence: Sequence) -> tuple[int, Match] | None:
        """A replica with a free row, of those that have pages for a sequence and one for each that grows, and what of
        the sequence is cached there: the one with the lowest row, or if any has a part of it, the least load. None
        also where rows have all slots of adapters, and it needs another one."""
        if self.adapters is not None and not self.adapters.has_room(sequence.adapter):
            return None
        grow = self._growing() if self.running and any(self._free) else Counter()
        able = []
        for replica, (free, pages) in enumerate(zip(self._free, self.pages, strict=True)):
            if not free:
                continue
            match = pages.find(sequence)
            need = pages.need(sequence, match)
            if pages.free >= need + grow[replica] and pages.has_room(sequence):
                able.append((match.tokens > 0, pages.load(need), free[0], replica, match))
        if not able:
            return None
        by_load = any(hit for hit, *_ in able)
        *_, replica, match = min(able, key=lambda x: x[1:4] if by_load else x[2:4])
        return replica, match

    def _start(self, s: Sequence, replica: int, match: Match) -> None:
        """Give a sequence that waits a row, and pages for its context."""
        self.waiting.remove(s)
        s.row = replica * self.config.rows + heapq.heappop(self._free[replica])
        match, fetched = (match, []) if self.source is None else self.source.take(s, match)
        s.begin(match.tokens)
        if self.bounded is not None:
            self.bounded.begin(s)
        self.running[s.row] = s
        pages, changes = self.pages[replica], self.changes
        if self.adapters is not None:
            changes.adapters[s.row] = self.adapters.take(s.adapter)
        if s.depth is not None:
            changes.depths[s.row] = s.depth.steps
            changes.thresholds[s.row] = s.depth.threshold
        first = replica * pages.pool.count
        changes.snapshots += pages.restores(s, match)  # before pages are evicted, and the snapshot with them
        if copy := pages.start(s, match):
            original, target = (first + page for page in copy)
            changes.copy(original, target)
            if self.source is not None:
                self.source.leave_out(target)
        if self.source is not None and fetched:
            column = len(match.nodes)
            self.source.restore((first + page for page in s.pages[column : column + len(fetched)]), fetched)
        changes.grants += [Grant(s.row, column, page) for column, page in enumerate(s.pages)]
        if pages.levels is not None:
            changes.grants += [Grant(s.row, column, page) for column, page in pages.levels.start(s)]
        cached = s.context[: match.tokens]
        if self.profit is not None:
            changes.past += [Past(s.row, position, token) for position, token in enumerate(cached)]
        if cached and s.params.penalizes:
            counts = counts_of(cached[: len(s.prompt)], cached[len(s.prompt) :])
            changes.counts += [Count(s.row, -1, 0), *(Count(s.row, token, count) for token, count in counts.items())]

    def _compact_caches(self) -> None:
        """Compact the caches of rows that have as many cells as they may have. Pages that such a row needs no more are
        free at once: others' cells are written later."""
        if self.bounded is None:
            return
        for s in self.running.values():
            if (cells := self.bounded.due(s)) is not None:
                self.changes.compacted[s.row] = cells
                if s.status is Status.DECODE:
                    self._pages_of(s).keep(s, self._pages(s.most_length))

    def _exchange_pages(self) -> None:
        """Bring pages that rows want from the host's memory and send others there, before others take room."""
        if self.host_pages is None:
            return
        for s in self.running.values():
            if not (s.may_be_active and s.unfinished):
                continue
            more = max(self._pages(s.length_after(self.config.decode_steps)) - len(s.pages), 0)
            if self._waiting_moves and not more:  # which are made before a dispatch that changes nothing else
                continue
            changed = self.host_pages.exchange(s, more, self._pages_of(s))
            self.changes.grants += [Grant(s.row, column, page) for column, page in changed]
            self._grant(s, len(s.pages) + more)

    def _can_return(self, s: Sequence) -> bool:
        """Whether a sequence could be prefilled again, which takes pages for all its tokens."""
        return self.host_pages is None or self._pages(s.max_length + 1) <= self._pages_of(s).pool.count

    def _growing(self) -> Counter[int]:
        """For each replica, how many sequences may need more pages than they have."""
        if self.host_pages is not None:
            return Counter()  # they have as many as they ever need
        rows = self.config.rows
        return Counter(s.row // rows for s in self.running.values() if self._pages(s.most_length) > len(s.pages))

    def _pages(self, positions: int) -> int:
        return -(-positions // self.page)

    def _grant(self, s: Sequence, count: int) -> None:
        """Give a sequence pages until it has `count`."""
        pages = self._pages_of(s).take(count - len(s.pages))
        self.changes.grants += [Grant(s.row, column, page) for column, page in enumerate(pages, len(s.pages))]
        s.pages += pages

    def _covered(self, count: int) -> list[Sequence]:
        """The sequences that may be active, with pages for `count` more tokens; some may be preempted for them."""
        decoding = [s for s in self.running.values() if s.may_be_active]
        page = self.page
        short = [s for s in decoding if s.length_after(count) > len(s.pages) * page]
        if not short:
            return decoding
        for s in sorted(short, key=_order):
            need = self._pages(s.length_after(count))
            while s.row >= 0 and self._pages_of(s).free < need - len(s.pages):
                replica = s.row // self.config.rows
                self._preempt(max((x for r, x in self.running.items() if r // self.config.rows == replica), key=_order))
            if s.row >= 0:
                self._grant(s, need)
        decoding = [s for s in decoding if s.row >= 0]
        self._give_ahead(decoding, count)
        return decoding

    def _give_ahead(self, decoding: Iterable[Sequence], count: int) -> None:
        """Give pages to rows that need them soon, as long as there are many: then the next plans need give none."""
        grow = self._growing()
        for s in decoding:
            soon = self._pages(min(s.length_after(count) + self.page // 2, s.most_length))
            if soon > len(s.pages) and self._pages_of(s).free >= grow[s.row // self.config.rows] + soon - len(s.pages):
                self._grant(s, soon)

    def _pages_of(self, s: Sequence) -> ReplicaPages:
        return self.pages[s.row // self.config.rows]

    def _preempt(self, s: Sequence) -> None:
        """Take a sequence's row and pages. It waits until its tokens in flight are known, at least."""
        self.preemptions += 1
        self.changes.leave_out(s.row)
        self.cancel(s)
        s.status, s.ready = Status.WAITING, self._sent
        insort(self.waiting, s, key=_order)

    def _leave(self, source: PageSource, replica: int, snapshot: Snapshot) -> None:
        """A snapshot of a replica goes to the source, if it is saved by now, and the page that it ends in written."""
        rows, pages = self.config.rows, self.pages[replica]
        assert pages.snapshots is not None
        queued = [x for x in (*self._saves, *self.changes.snapshots) if isinstance(x, Save)]
        if any(x.number == snapshot.number and x.row // rows == replica for x in queued):
            return
        if not (snapshot.nodes[-1].pending or snapshot.nodes[-1] in pages.unsent):
            source.leave(replica * pages.pool.count, replica * pages.snapshots.count, snapshot)

    def _compact(self) -> None:
        """Move the sequences that decode to low rows, if a smaller program then serves them."""
        rows, buckets, self._waiting_moves = self.config.rows, self.config.row_buckets, False
        unfinished = [s for s in self.running.values() if s.may_be_active and s.unfinished]
        if not unfinished or len(buckets) == 1:
            return
        target = pick(buckets, max(Counter(s.row // rows for s in unfinished).values()))
        high = sorted((s for s in unfinished if s.row % rows >= target), key=lambda s: s.row)
        if not high or target >= pick(buckets, 1 + max(s.row % rows for s in high)):
            return
        free = [sorted(row for row in rows_of_one if row < target) for rows_of_one in self._free]
        needed = Counter(s.row // rows for s in high)
        if any(count > len(free[replica]) for replica, count in needed.items()):
            return  # low rows are about to end
        if self.cancelled or self.changes:
            # The next dispatch stops rows, or has pages for them, by their numbers.
            self._postponed = self._waiting_moves = True
            return
        for s in high:
            replica = s.row // rows
            self._move(s, replica * rows + free[replica].pop(0))

    def _move(self, s: Sequence, row: int) -> None:
        rows = self.config.rows
        free, left = self._free[row // rows], s.row % rows
        free[free.index(row % rows)] = left
        heapq.heapify(free)
        self.changes.moves.append(Move(s.row, row))
        del self.running[s.row]
        s.row = row
        self.running[row] = s

    # ---- dispatches

    def _chunks(self, prefilling: list[Sequence], decoding: list[Sequence]) -> tuple[list[Chunk], tuple[int, int]]:
        """The prompt tokens that one step prefills beside rows that decode, first prompts first, and the (P, C) of the
        program for them: the one with most tokens for its time, which goes with all the tokens it has room for.

        A prompt that returns details of every position is prefilled alone, and those that are embedded together.
        """
        prompts = sorted(prefilling, key=_order)
        first = prompts[0].detail
        detail = first in ("logprobs", "logits")
        shapes = self.config.detail_shapes() if detail else self.config.prefill_shapes()
        if decoding:
            shapes = self.itl.within(shapes, self._mode([*prefilling, *decoding]))
        prompts = prompts[:1] if detail else [s for s in prompts if s.detail == first]
        best, most = ([], (0, 0)), (0.0, 1)
        for shape in shapes:
            chunks = self._filled(prompts, *shape)
            tokens = sum(chunk.length for chunk in chunks)
            rate = tokens / (math.prod(shape) + tokens_of_weights(self.config.platform))
            # Of shapes of one size, which hold as much, the last has the widest chunks.
            if (rate, tokens) >= most:
                best, most = (chunks, shape), (rate, tokens)
        return best

    def _filled(self, prompts: list[Sequence], count: int, width: int) -> list[Chunk]:
        """The chunks of a step that prefills `count` chunks of `width` tokens on each replica."""
        chunks, room = [], [count] * self.config.shards.replicas
        narrow = self.config.propagation is not None and width < self.config.segment
        for s in prompts:
            replica, start, whole = s.row // self.config.rows, s.prefilled, len(s.context)
            if narrow and whole - start > width:
                break  # a segment is in one chunk, and no later prompt goes first
            end = min(whole, start + min(self.config.row_tokens, room[replica] * width))
            end = self.pages[replica].stop(s, end)
            end = end if self.bounded is None else min(end, s.boundary)
            if end < whole:
                end = max(start, end - end % self.config.prefill_unit)
            room[replica] -= -(-(end - start) // width)
            for at in range(start, end, width):
                length = min(width, end - at)
                chunks.append(Chunk(s, s.row, at, length, at + length == whole, s.dropped))
            if not any(room):
                break
        return chunks

    def _step(self, chunks: list[Chunk], shape: tuple[int, int], decoding: list[Sequence]) -> Dispatch:
        detail = chunks[0].sequence.detail
        if detail:
            decoding = []
        limit = max(c.cells for c in chunks)
        for chunk in chunks:
            s = chunk.sequence
            s.prefilled += chunk.length
            self._pages_of(s).written(s, chunk.start)
            if chunk.last:
                s.status, s.scheduled, s.least = Status.DECODE, len(s.tokens) + 1, len(s.tokens) + 1
                s.drafts = []
                if self.bounded is not None:
                    self.bounded.decode(s)
        for s in dict.fromkeys(chunk.sequence for chunk in chunks):
            for save in self._pages_of(s).saves(s):
                self._saves.append(save)  # at once, as the next one may make a snapshot leave
        for s in decoding:
            s.scheduled += 1
            s.least += 1
            s.drafts = []
        limit = max([limit, *(s.max_length for s in decoding)])
        rows = self.config.rows if decoding else 0
        sequences = [*(c.sequence for c in chunks), *decoding]
        key = self._key(sequences, rows, limit, chunks=shape[0], chunk=shape[1], detail=detail)
        return Dispatch(key, chunks, decoding, self._columns(decoding, rows))

    def _decode(self, decoding: list[Sequence], unfinished: list[Sequence], steps: int, drafts: int) -> Dispatch:
        replica_rows = self.config.rows
        rows = pick(self.config.row_buckets, 1 + max([s.row % replica_rows for s in unfinished]))
        if rows < replica_rows:
            decoding = [s for s in decoding if s.row % replica_rows < rows]
        most = steps * (1 + drafts)
        for s in decoding:
            s.scheduled += most
            s.least += steps
        longest = max([s.max_length for s in decoding])
        key = self._key(decoding, rows, longest, steps=steps, drafts=drafts)
        prefixes = None
        if self.cascade is not None and not key.part and not drafts and steps == self.config.decode_steps:
            prefixes = self.cascade.prefixes(decoding, rows)
            key = replace(key, cascade=prefixes is not None)
        columns, of_host = self._columns(decoding, rows), None
        if key.part:
            for s in decoding:
                s.drafts = self._forced.get(s, [])[:drafts]
            self._forced = {}
            if drafts:
                of_host = draft_rows(decoding, columns, rows * self.config.shards.replicas, drafts)
        self._last = Dispatch(key, [], decoding, columns, prefixes, of_host)
        left = min([s.max_tokens - s.scheduled for s in unfinished])
        room = [len(s.pages) * self.page - s.max_length for s in unfinished]
        self._repeats = max(0, min(-(-left // steps), (key.limit - longest) // steps, min(room) // steps))
        if self.bounded is not None:
            self._repeats = min(self._repeats, *(self.bounded.room(s) // steps for s in unfinished))
        # A row that was taken just now may be one to move to. What pays changes with each result, as do pages.
        if self._postponed or self.cancelled or self.profit is not None or self.host_pages is not None:
            self._postponed, self._repeats = False, 0
        return self._last

    def _columns(self, sequences: list[Sequence], rows: int) -> list[int]:
        replica_rows = self.config.rows
        return [s.row // replica_rows * rows + s.row % replica_rows for s in sequences]

    @staticmethod
    def _mode(sequences: list[Sequence]) -> Mode:
        return max({s.mode for s in sequences}, key=MODES.index)

    def _key(self, sequences: list[Sequence], rows: int, longest: int, **sizes: Any) -> ProgramKey:
        """The key of the program that does what all these sequences need. longest: the length of the longest."""
        mode = self._mode(sequences)
        part: Any = "forward" if mode == "processed" else ""
        return ProgramKey(mode, rows, pick(self.config.limits, longest), part=part, **sizes)


def _pages(config: EngineConfig, plan: CachePlan) -> ReplicaPages:
    """The pages of one replica, and its snapshots if layers keep more of a row than pages."""
    count, unit, snapshots = plan.pages // config.shards.replicas, None, None
    if plan.no_prefix_caching(config) is None:
        unit = config.prefill_unit
    if unit is not None and plan.snapshots:
        # Drafts that did not stand have overwritten cells of a ring, as far ahead as they were.
        drafts = 0 if config.speculation is None else config.speculation.tokens
        slack = 0 if plan.exact_snapshots else config.row_tokens - drafts
        snapshots = Snapshots(plan.snapshots // config.shards.replicas, plan.page, unit, slack)
    return ReplicaPages(count, plan.page, unit, snapshots)


def _order(s: Sequence) -> float:
    return s.order
