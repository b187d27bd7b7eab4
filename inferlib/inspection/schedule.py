"""Plays the schedule of a compiled module: how long a step takes, with copies and collectives in the background.

The compiler orders a TPU's operations statically, and its text has them in that order. They run one after another, each
for its price. Copies to on-chip memory that it starts ahead share HBM with them: they have what an operation leaves of
the bandwidth, and all of it while a collective runs. The operation that needs a copy waits for the rest of it. A
collective stops the step for its time, or, if it is asynchronous, for what is left of it where its result is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inferlib.inspection.bundles import LATENCY
from inferlib.inspection.hlo import ON_CHIP, Computation, Instruction, Module, Shape
from inferlib.inspection.prices import Price
from inferlib.pallas_kernels.fetch_ahead_tpu import FINISH, START

Pricing = Callable[[Computation, Instruction], Price | None]
Waiting = Callable[[Computation, Instruction], Price]
_CALLS = ("call", "async-start", "call-start")


class Span(NamedTuple):
    """A collective, in seconds since the step began: its links are busy from `start` to `end`. The step waits for it
    from `needed` on, unless it has ended by then."""

    start: float
    end: float
    needed: float


@dataclass
class Played:
    """One step. prices, collectives: how often the price of each operation and each collective is paid. waits: seconds
    of waits for copies in the background. fetching: seconds of collectives that such copies use, for which the step
    would have to wait else; exposed: those during which neither copies nor operations run. spans: of collectives; of a
    loop, those of its first two trips."""

    prices: Counter[Price] = field(default_factory=Counter)
    collectives: Counter[Price] = field(default_factory=Counter)
    waits: float = 0.0
    fetching: float = 0.0
    exposed: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def add(self, other: Played, times: int) -> None:
        """Add what is `times` as long."""
        for mine, others in ((self.prices, other.prices), (self.collectives, other.collectives)):
            for price, count in others.items():
                mine[price] += times * count
        for name in ("waits", "fetching", "exposed"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        self.spans += other.spans

    def facts(self) -> dict[str, Any]:
        """The schedule as JSON values: prices with their counts, the dearest first, and seconds."""
        totals = {"waits": self.waits, "fetching": self.fetching, "exposed": self.exposed, "spans": self.spans}
        return {"prices": _dearest(self.prices), "collectives": _dearest(self.collectives), **totals}


def _dearest(prices: Counter[Price]) -> list[dict[str, Any]]:
    ordered = sorted(prices.items(), key=lambda item: -item[0].seconds * item[1])
    return [{**vars(price), "count": count} for price, count in ordered]


def play(module: Module, pricing: Pricing, waiting: Waiting, bandwidth: float) -> Played:
    """Play a step of a module. pricing: of an operation. waiting: of a collective. bandwidth: of HBM, in
    bytes/s."""
    player = _Player(module, pricing, waiting, bandwidth)
    player.run(module.entry, 1)
    return player.played


class _Player:
    """Played so far, and what is under way: the bytes left of each copy, in the order of their starts, and when each
    collective starts and ends."""

    def __init__(self, module: Module, pricing: Pricing, waiting: Waiting, bandwidth: float):
        self.module, self.pricing, self.waiting, self.bandwidth = module, pricing, waiting, bandwidth
        self.played, self.now, self.link_free = Played(), 0.0, 0.0
        self.copies: dict[str, tuple[float, float]] = {}  # bytes left, time of the start
        self.arriving: list[tuple[Shape, str]] = []  # results of kernels that start copies, and the copies' names
        self.under_way: dict[str, tuple[float, float]] = {}  # collectives: start and end

    def run(self, computation: Computation, times: int) -> None:
        """Run a computation, which runs `times` times in a step."""
        for i in computation.instructions.values():
            if i.op == "while":
                self._loop(i, times)
            elif i.op == "conditional":
                for branch in self.module.branches(i):
                    self.run(branch, times)
            elif i.collective:
                self._collective(computation, i)
            elif i.op in _CALLS:
                self._call(i, times)
            elif i.op in ("copy-start", "slice-start"):
                self.copies[i.name] = float(self.module.moved(computation, i)), self.now
            elif i.kernel == START:
                self._fetch(i)
            elif i.kernel == FINISH:
                self._arrive(i)
            elif i.op.endswith("-done") or i.op == "async-update":
                self._done(i)
            elif (price := self.pricing(computation, i)) is not None:
                self.played.prices[price] += 1
                self._pass(price.seconds, price.seconds - price.nbytes / self.bandwidth)

    def _loop(self, i: Instruction, times: int) -> None:
        """The first trip, and the second for each of the others: copies under way from before do not last."""
        body, condition, trips = self.module.loop(i, times)
        outer = self.played
        for count in (1, trips - 1):
            if count > 0:
                self.played = Played()
                self.run(body, times * trips)
                self.run(condition, times * trips)
                outer.add(self.played, count)
        self.played = outer

    def _call(self, i: Instruction, times: int) -> None:
        called = self.module.computations.get(i.called("to_apply") or i.called("calls") or "")
        if called is None:
            return
        inside = called.instructions.values()
        if i.op == "call":
            self.run(called, times)
        elif any(inner.collective for inner in inside):
            for inner in inside:
                if inner.collective:
                    self._start(i.name, self.waiting(called, inner))
        else:
            self.copies[i.name] = float(sum(self.module.moved(called, inner) for inner in inside)), self.now

    def _collective(self, computation: Computation, i: Instruction) -> None:
        price = self.waiting(computation, i)
        if i.op.endswith("-start"):
            self._start(i.name, price)
            return
        self.played.collectives[price] += 1
        self.played.spans.append(Span(self.now, self.now + price.seconds, self.now))
        self._expose(price.seconds)

    def _start(self, name: str, price: Price) -> None:
        self.played.collectives[price] += 1
        start = max(self.now, self.link_free)
        self.link_free = start + price.seconds
        self.under_way[name] = start, self.link_free

    def _done(self, i: Instruction) -> None:
        for name in i.operands:
            if name in self.under_way:
                start, end = self.under_way.pop(name)
                if i.op == "async-update":
                    self.under_way[i.name] = start, end
                else:
                    self.played.spans.append(Span(start, end, self.now))
                    self._expose(max(end - self.now, 0.0))
            elif name in self.copies:
                self._await(name)

    def _fetch(self, i: Instruction) -> None:
        """Start the copies of a kernel, one for each result on chip."""
        for number, shape in enumerate(i.shapes):
            if shape.space == ON_CHIP:
                name = f"{i.name}, {number}"
                self.copies[name] = float(shape.nbytes), self.now
                self.arriving.append((shape, name))

    def _arrive(self, i: Instruction) -> None:
        """Wait for the copies that a kernel waits for: of its results' shapes, those that started first."""
        for wanted in i.shapes:
            if copy := next((copy for copy in self.arriving if copy[0] == wanted), None):
                self.arriving.remove(copy)
                self._await(copy[1])

    def _await(self, name: str) -> None:
        """Wait for a copy, and so for those before it."""
        names = list(self.copies)
        bytes_left = sum(self.copies[other][0] for other in names[: names.index(name) + 1])
        arrival = self.copies[name][1] + LATENCY
        seconds = max(bytes_left / self.bandwidth, arrival - self.now, 0.0)
        self.played.waits += seconds
        self._pass(seconds, seconds)
        self.copies.pop(name, None)

    def _expose(self, seconds: float) -> None:
        before = sum(left for left, _ in self.copies.values())
        self._pass(seconds, seconds)
        fetching = (before - sum(left for left, _ in self.copies.values())) / self.bandwidth
        self.played.fetching += fetching
        self.played.exposed += seconds - fetching

    def _pass(self, seconds: float, free: float) -> None:
        """Let time pass, during which HBM is free for `free` seconds."""
        self.now += seconds
        room = max(free, 0.0) * self.bandwidth
        for name, (left, start) in self.copies.items():
            taken = min(left, room)
            self.copies[name], room = (left - taken, start), room - taken
