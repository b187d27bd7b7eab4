"""Iteration-level scheduling: which prompts get rows, and what the next dispatch runs (Orca, OSDI 2022)."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from inferlib.config import EngineConfig, pick
from inferlib.engine.sequence import Sequence, Status
from inferlib.programs.program import MODES, Mode, ProgramKey


@dataclass(frozen=True)
class Chunk:
    """`length` prompt tokens of a sequence from position `start`. last: the prompt ends with them."""

    sequence: Sequence
    start: int
    length: int
    last: bool


@dataclass(frozen=True)
class Dispatch:
    """One call of a program.

    rows: the sequences whose rows it may advance, each by up to `key.steps` tokens.
    columns: the column of each of these sequences in the tokens that the program returns.
    """

    key: ProgramKey
    chunks: list[Chunk]
    rows: list[Sequence]
    columns: list[int]


class Scheduler:
    """First come, first served. A prompt takes the lowest free row. While prompts are prefilled, the rows that decode
    advance by one token in the same step."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        # Replicas fill evenly: the lowest local row of any replica comes first.
        self._free = [(row % config.rows, row) for row in range(config.max_batch)]
        heapq.heapify(self._free)
        self._last: Dispatch | None = None
        self._repeats = 0  # how often the last dispatch may be repeated, unless a call changes what runs

    def add(self, sequence: Sequence) -> None:
        self._repeats = 0
        self.waiting.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the row of a finished sequence."""
        self._repeats = 0
        if self.running.get(sequence.row) is sequence:
            del self.running[sequence.row]
            heapq.heappush(self._free, (sequence.row % self.config.rows, sequence.row))

    def unused(self, sequence: Sequence, steps: int) -> None:
        """Take back steps of a dispatch that did not advance the sequence: it ended, or the device returned early for a
        waiting prompt."""
        self._repeats = 0
        sequence.scheduled -= steps

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def plan(self, max_steps: int) -> Dispatch | None:
        """The next dispatch, or None if everything that can run is in flight.

        max_steps: most decode steps of a dispatch.
        """
        steps = self.config.decode_steps if max_steps >= self.config.decode_steps else 1
        if self._last is not None and self._repeats and steps == self._last.key.steps:
            # The usual case. After a wait, with cold caches, planning again would be half of the host's work.
            self._repeats -= 1
            for s in self._last.rows:
                s.scheduled += steps
            return self._last
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            _, sequence.row = heapq.heappop(self._free)
            sequence.status = Status.PREFILL
            self.running[sequence.row] = sequence
        decoding = [s for s in self.running.values() if s.may_be_active]
        prefilling = [s for s in self.running.values() if s.status is Status.PREFILL]
        # Sequences with tokens left to generate, as far as the host knows.
        unfinished = [s for s in decoding if s.scheduled < s.max_tokens]
        if prefilling:
            return self._step(*self._chunks(prefilling), decoding if unfinished else [])
        return self._decode(decoding, unfinished, steps) if unfinished else None

    def _chunks(self, prefilling: list[Sequence]) -> tuple[list[Chunk], tuple[int, int]]:
        """As many prompt tokens as one step can prefill, oldest prompts first, and the (P, C) of the program for them.

        A prompt that returns details is prefilled alone.
        """
        prompts = sorted(prefilling, key=lambda s: s.arrival)
        detail, shapes = bool(prompts[0].detail), self.config.prefill_shapes()
        prompts = prompts[:1] if detail else [s for s in prompts if not s.detail]
        best, most = ([], (0, 0)), 0
        for shape in self.config.detail_shapes() if detail else shapes:
            chunks = self._filled(prompts, *shape)
            tokens = sum(chunk.length for chunk in chunks)
            # Of shapes of one size, which hold as much, the last has the widest chunks.
            if tokens > most or (tokens == most and math.prod(shape) == math.prod(best[1])):
                best, most = (chunks, shape), tokens
        return best

    def _filled(self, prompts: list[Sequence], count: int, width: int) -> list[Chunk]:
        """The chunks of a step that prefills `count` chunks of `width` tokens on each replica."""
        chunks, room = [], [count] * self.config.shards.replicas
        for s in prompts:
            replica, start = s.row // self.config.rows, s.prefilled
            end = min(len(s.prompt), start + min(self.config.row_tokens, room[replica] * width))
            room[replica] -= -(-(end - start) // width)
            for at in range(start, end, width):
                length = min(width, end - at)
                chunks.append(Chunk(s, at, length, at + length == len(s.prompt)))
            if not any(room):
                break
        return chunks

    def _step(self, chunks: list[Chunk], shape: tuple[int, int], decoding: list[Sequence]) -> Dispatch:
        detail = chunks[0].sequence.detail
        if detail:
            decoding = []
        limit = max(c.start + c.length for c in chunks)
        for chunk in chunks:
            s = chunk.sequence
            s.prefilled += chunk.length
            if chunk.last:
                s.status, s.scheduled = Status.DECODE, 1
        for s in decoding:
            s.scheduled += 1
        limit = max([limit, *(s.max_length for s in decoding)])
        mode = self._mode([*(c.sequence for c in chunks), *decoding])
        rows = self.config.rows if decoding else 0
        key = ProgramKey(
            mode, rows, pick(self.config.buckets.cache, limit), chunks=shape[0], chunk=shape[1], detail=detail
        )
        return Dispatch(key, chunks, decoding, self._columns(decoding, rows))

    def _decode(self, decoding: list[Sequence], unfinished: list[Sequence], steps: int) -> Dispatch:
        replica_rows = self.config.rows
        rows = pick(self.config.row_buckets, 1 + max([s.row % replica_rows for s in unfinished]))
        if rows < replica_rows:
            decoding = [s for s in decoding if s.row % replica_rows < rows]
        for s in decoding:
            s.scheduled += steps
        longest = max([s.max_length for s in decoding])
        limit = pick(self.config.buckets.cache, longest)
        key = ProgramKey(self._mode(decoding), rows, limit, steps)
        self._last = Dispatch(key, [], decoding, self._columns(decoding, rows))
        left = min([s.max_tokens - s.scheduled for s in unfinished])
        self._repeats = max(0, min(-(-left // steps), (limit - longest) // steps))
        return self._last

    def _columns(self, sequences: list[Sequence], rows: int) -> list[int]:
        replica_rows = self.config.rows
        return [s.row // replica_rows * rows + s.row % replica_rows for s in sequences]

    @staticmethod
    def _mode(sequences: list[Sequence]) -> Mode:
        return max({s.mode for s in sequences}, key=MODES.index)
