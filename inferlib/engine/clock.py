"""A clock for requests, which stands still while programs are compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of a monotonic clock, without those spent in `stopped`. One thread at a time stops it."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._stopped_at: float | None = None

    def now(self) -> float:
        stopped_at = self._stopped_at  # read once: another thread may start the clock again
        return (time.monotonic() if stopped_at is None else stopped_at) - self._lost

    @contextmanager
    def stopped(self) -> Iterator[None]:
        start = self._stopped_at = time.monotonic()
        try:
            yield
        finally:
            self._lost += time.monotonic() - start
            self._stopped_at = None
