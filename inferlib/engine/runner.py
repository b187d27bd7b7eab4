"""An engine in its thread, which runs requests for callers in other threads and for readers in event loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import TypeVar

from inferlib.engine.engine import Engine
from inferlib.engine.feed import Feed, deliver
from inferlib.engine.request import Request
from inferlib.engine.sequence import Sequence, Status
from inferlib.engine.text import OutputText
from inferlib.engine.thread import EngineThread

T = TypeVar("T")


class Runner:
    """Runs requests and decodes their tokens to text. Any thread may call it.

    Whoever waits advances the engine for all; while readers of feeds wait, the engine's thread does so by itself.
    """

    def __init__(self, engine: Engine):
        self.engine, self.thread = engine, EngineThread()
        self._texts: dict[Sequence, OutputText] = {}  # of sequences that wait or run
        self._feeds: dict[Sequence, Feed] = {}  # of those whose reader is in an event loop
        self._driving = False

    def submit(self, request: Request) -> None:
        """Queue a request. Raises what the engine does."""
        self.thread.run(partial(self._add, request))

    def wait(self, requests: list[Request]) -> list[Request]:
        """Run until some of the requests are finished; returns these."""
        return self.thread.run(partial(self._finished, requests))

    def step(self, request: Request) -> tuple[str, bool]:
        """Generate a token of a request of one sequence. Returns the new text, and whether it is the last."""
        return self.thread.run(partial(self._step, request))

    def watch(self, feed: Feed) -> None:
        """Run a request whose progress goes to a feed, until that says that it is finished."""
        self.thread.post(partial(self._watch, feed))

    def abort(self, request: Request) -> None:
        """End a request; what it has by then is its result. Its row is free before the next dispatch."""
        self.thread.post(partial(self._abort, request))

    def abandon(self, requests: Iterable[Request]) -> None:
        """Drop requests whose results nobody wants, if they are not finished. Safe while objects are freed."""
        self.thread.post(partial(self._abandon, list(requests)))

    def call(self, function: Callable[[], T]) -> T:
        """What a function returns that is called in the engine's thread."""
        return self.thread.run(lambda: (function(),))[0]

    def settled(self) -> Future[bool]:
        """Done when everything that was asked for before has been done."""
        return self.thread.start(lambda: True)

    # What follows runs in the engine's thread, so that an interrupt cannot strike it.

    def _add(self, request: Request) -> bool:
        for sequence, text in zip(request.sequences, request.texts, strict=True):
            self.engine.add(sequence)
            self._texts[sequence] = text
        return True

    def _finished(self, requests: list[Request]) -> list[Request] | None:
        """The requests that are finished. If there are none, advance the engine and return None."""
        if finished := [request for request in requests if request.finished]:
            return finished
        self._advance()
        return None

    def _step(self, request: Request) -> tuple[str, bool]:
        if not request.finished:
            self._advance(max_steps=1)
        request.check()
        return request.texts[0].delta(), request.finished

    def _advance(self, max_steps: int | None = None) -> None:
        """Advance the engine once and decode the new tokens to text, whoever waits for them."""
        try:
            advanced = self.engine.advance(max_steps=max_steps)
        except BaseException:
            self._tell([s for s in self._feeds if s.status is Status.FINISHED])
            raise
        for sequence in advanced:
            running = sequence.status is not Status.FINISHED
            self._decode(sequence)
            if sequence.status is Status.FINISHED:
                if running:
                    self.engine.cancel(sequence)
                del self._texts[sequence]
        if self._feeds:
            self._tell(advanced)

    def _decode(self, sequence: Sequence) -> None:
        try:
            self._texts[sequence].update()
        except BaseException as error:  # a tokenizer can panic; the others' texts go on
            sequence.fail(error)

    def _abandon(self, requests: list[Request]) -> None:
        for sequence in chain.from_iterable(request.sequences for request in requests):
            if sequence in self._texts:
                self.engine.cancel(sequence)
                del self._texts[sequence]
            self._feeds.pop(sequence, None)

    def _abort(self, request: Request) -> None:
        for sequence, text in zip(request.sequences, request.texts, strict=True):
            if sequence.status is not Status.FINISHED:
                self._texts[sequence] = text  # of one that has not started, too
                sequence.finish("abort")
                self._decode(sequence)
                self.engine.cancel(sequence)
                del self._texts[sequence]
        self._tell(request.sequences)

    def _watch(self, feed: Feed) -> None:
        if feed.request.finished:  # aborted before it started
            deliver([feed])
            return
        sequences = feed.request.sequences
        self._feeds.update(dict.fromkeys(sequences, feed))
        try:
            self._add(feed.request)
        except BaseException as error:
            self._lose(sequences, error)
        if self._feeds and not self._driving:
            self._driving = True
            self.thread.start(self._drive)

    def _drive(self) -> bool | None:
        """Advance the engine once. Returns None as long as there are feeds."""
        if not self._feeds:
            self._driving = False
            return True
        before = len(self._feeds)
        try:
            self._advance()
        except BaseException as error:
            # Usually it ended what ran, and who reads that was told. If it ended nothing, it would come again.
            if len(self._feeds) == before and not any(s.status is Status.FINISHED for s in self._texts):
                self._lose(list(self._feeds), error)
        return None

    def _lose(self, sequences: list[Sequence], error: BaseException) -> None:
        """End sequences with an error, and tell who reads them."""
        for sequence in sequences:
            if self._texts.pop(sequence, None) is not None:
                self.engine.cancel(sequence)
            sequence.fail(error)
        self._tell(sequences)

    def _tell(self, sequences: list[Sequence]) -> None:
        """Publish the progress of these sequences to their readers; those whose event loop is gone are abandoned."""
        feeds: dict[Feed, None] = {}
        for sequence in sequences:
            if (feed := self._feeds.get(sequence)) is not None:
                feeds[feed] = None
                if sequence.status is Status.FINISHED:
                    del self._feeds[sequence]
                    self._texts.pop(sequence, None)
        if feeds and (unread := deliver(feeds)):
            self._abandon([feed.request for feed in unread])
