"""The thread in which an engine runs, whichever thread asks for results."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """Runs calls one at a time in a thread of its own: those of several threads take turns.

    Python raises KeyboardInterrupt, and what other signal handlers raise, in the main thread alone. So an interrupt
    ends the wait for a call and never the call itself, which would lose results or donated buffers.
    """

    def __init__(self) -> None:
        # A SimpleQueue, since a garbage collection within `put` may end a stream, which calls `put`.
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name="inferlib-engine", daemon=True)
        _running[self._thread] = self._calls
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    def start(self, step: Callable[[], T | None]) -> Future[T]:
        """Call `step` until it returns something, which the future then has. Other calls take turns with it."""
        future: Future[T] = Future()
        self._calls.put((future, step))
        return future

    def run(self, step: Callable[[], T | None]) -> T:
        """Call `step` until it returns something, and return that. Other threads' calls take turns with it. Raises
        RuntimeError in the thread itself, where it would wait forever."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a logits processor, which runs inside the engine, must not call its LLM")
        future = self.start(step)
        try:
            return future.result()
        finally:
            future.cancel()  # after an interrupt, nobody waits for it

    def post(self, call: Callable[[], Any]) -> None:
        """Call it once, after everything that was asked for before, and do not wait. Safe while objects are freed."""
        self.start(lambda: (call(),))

    def end(self) -> None:
        """End the thread and wait for it."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


# Also those whose `EngineThread` is gone, as after an interrupt: a last call may be under way.
_running: dict[threading.Thread, SimpleQueue] = {}


@atexit.register
def _end_all() -> None:
    """A thread that is inside the runtime while the interpreter ends would crash the process."""
    try:
        for thread, calls in list(_running.items()):
            calls.put(None)
            if thread.ident is not None:  # an interrupt may have come before it was started
                thread.join()
    except KeyboardInterrupt:
        os._exit(130)  # at once: the interpreter must not end beside it


def _work(calls: SimpleQueue) -> None:
    try:
        _serve(calls)
    finally:
        _running.pop(threading.current_thread(), None)


def _serve(calls: SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        again = _turn(*call)
        while again and calls.empty():
            again = _turn(*call)
        if again:
            calls.put(call)
        del call  # holds what was called


def _turn(future: Future, step: Callable[[], Any]) -> bool:
    """Call `step` once. Returns whether it is to be called again."""
    if future.cancelled():
        return False
    try:
        result = step()
    except BaseException as error:  # of any kind: it belongs to the thread that waits
        with suppress(InvalidStateError):
            future.set_exception(error)
        return False
    if result is None:
        return True
    with suppress(InvalidStateError):  # cancelled meanwhile
        future.set_result(result)
    return False
