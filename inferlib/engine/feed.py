"""From the engine's thread to readers in event loops: one wake-up of a loop hands over all that a dispatch made."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from inferlib.engine.request import Progress, Request


class Readers:
    """The readers of one event loop, which are woken together."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._changed: deque[Feed] = deque()
        self._called = False  # the loop will wake them, and has not begun to

    def add(self, feed: Feed) -> None:
        """In the engine's thread: the next `wake` is for the reader of this feed too."""
        if not feed.listed:
            feed.listed = True
            self._changed.append(feed)

    def wake(self) -> bool:
        """In the engine's thread: have the loop wake them, unless it is about to. False if the loop is closed."""
        if self.loop.is_closed():
            return False
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # closed just now
                return False
        return True

    def _wake(self) -> None:
        self._called = False  # first: what comes from now on may need another call
        while self._changed:
            feed = self._changed.popleft()
            feed.listed = False
            feed.wake()


class Feed:
    """The progress of one request, for its reader.

    The engine's thread replaces it, and the reader takes it when it comes to that. So a slow reader misses steps in
    between, and nothing piles up.

    readers: those of the reader's event loop, once it has begun to read. listed: its reader is to be woken.
    """

    def __init__(self, request: Request):
        self.request = request
        self.readers: Readers | None = None
        self.listed = False
        self._latest: tuple[Progress, ...] | None = None
        self._seen: tuple[Progress, ...] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def publish(self) -> None:
        """In the engine's thread: replace the progress."""
        self._latest = self.request.progress()

    def wake(self) -> None:
        """In the event loop: let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """In the event loop: nobody wants more, and who waits gets None."""
        self._closed = True
        self.wake()

    async def next(self) -> tuple[Progress, ...] | None:
        """Progress that was not returned before; waits for it."""
        while self._latest is self._seen and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._seen = self._latest
        return None if self._closed else self._seen


def deliver(feeds: Iterable[Feed]) -> list[Feed]:
    """In the engine's thread: publish the progress of requests and wake each event loop once. Returns the feeds whose
    loop is closed."""
    of_loops: dict[Readers, list[Feed]] = {}
    for feed in feeds:
        assert feed.readers is not None
        feed.publish()
        feed.readers.add(feed)
        of_loops.setdefault(feed.readers, []).append(feed)
    return [feed for readers, of_loop in of_loops.items() if not readers.wake() for feed in of_loop]
