"""Sequences that end at a given time, whatever they have by then."""

from __future__ import annotations

import heapq
import itertools

from inferlib.engine.sequence import Sequence, Status

_LEAST = 64


class Deadlines:
    """The deadlines of the sequences that wait or run, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._most = _LEAST  # sequences, before those that are finished are forgotten
        self._count = itertools.count()  # sequences have no order of their own

    def add(self, sequence: Sequence) -> None:
        """Remember a sequence's deadline, if it has one."""
        if (seconds := sequence.params.deadline) is not None:
            if len(self._heap) >= self._most:
                self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
                heapq.heapify(self._heap)
                self._most = max(_LEAST, 2 * len(self._heap))
            heapq.heappush(self._heap, (sequence.arrival + seconds, next(self._count), sequence))

    def passed(self) -> list[Sequence]:
        """The unfinished sequences whose deadline has passed. Each is returned once."""
        passed = []
        while self._heap:
            at, _, sequence = self._heap[0]
            finished = sequence.status is Status.FINISHED
            if not finished and at > sequence.clock.now():
                break
            heapq.heappop(self._heap)
            passed += [] if finished else [sequence]
        return passed
