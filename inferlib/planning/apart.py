"""Two equal slices without a device: each serves requests by itself, or one prefills for the other, which decodes.

That prefill apart from decoding pays is claimed for long prompts (Zhong et al. 2024, "DistServe"), and more so if those
that are cached for the most part are prefilled beside decoding. All are simulated on a trace, by the engine's own code;
see `inferlib.planning.simulator` and `inferlib.engine.prefiller`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from inferlib.cache.prefix_tree import Match
from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine
from inferlib.engine.fetch import Fetch
from inferlib.engine.page_source import PageSource
from inferlib.engine.prefiller import goes_apart, twin_of
from inferlib.engine.sequence import Sequence as EngineSequence
from inferlib.planning.costs import Deployed
from inferlib.planning.planner import PlanError
from inferlib.planning.simulator import Device, serve
from inferlib.planning.trace import Offer, Service

SPLITS = ("two alike", "prefill apart", "apart, cached beside")


@dataclass(frozen=True)
class Split:
    """How two slices serve a trace: each both, apart, or apart but for prompts that are cached for the most part.

    name: of SPLITS. handed: tokens that were prefilled on the one slice for the other.
    """

    name: str
    service: Service
    handed: int = 0

    def facts(self) -> dict[str, Any]:
        return self.service.facts() | {"handed_tokens": self.handed}


def simulate_splits(
    deployed: Deployed,
    config: EngineConfig,
    offers: Sequence[Offer],
    done: Callable[[Split], None] = lambda split: None,
) -> list[Split]:
    """All of SPLITS on two slices such as this one. done: called with each. Raises PlanError for a slice of several
    replicas, and for a model whose rows keep more than pages."""
    if deployed.replicas > 1:
        raise PlanError("two slices are compared that have one replica each: leave dp and ep out of --parallel")
    if any(Device(deployed, config).plan.of_rows):
        raise PlanError("two slices are compared by pages, and layers have a ring or a state of each row")
    splits = []
    for name in SPLITS:
        serve_one = _served_by_both if name == SPLITS[0] else _served_apart
        splits.append(serve_one(deployed, config, offers, name))
        done(splits[-1])
    return splits


def _served_by_both(deployed: Deployed, config: EngineConfig, offers: Sequence[Offer], name: str) -> Split:
    """Requests whose first page is the same go to one slice: the one with fewer tokens when the first of them came."""
    loads, of_beginning, dealt = [0, 0], {}, ([], [])
    for offer in offers:
        beginning = (offer.prompt or ())[: config.page_size]
        slot = of_beginning.get(beginning) if len(beginning) == config.page_size else None
        slot = min((0, 1), key=lambda i: loads[i]) if slot is None else slot
        if len(beginning) == config.page_size:
            of_beginning[beginning] = slot
        loads[slot] += offer.input_len + offer.output_len
        dealt[slot].append(offer)
    served = []
    for some in filter(None, dealt):
        device = Device(deployed, config)
        served += serve(Engine(device.model, (), device.config, programs=device), some, device)
    return Split(name, Service.of([*dealt[0], *dealt[1]], served))


def _served_apart(deployed: Deployed, config: EngineConfig, offers: Sequence[Offer], name: str) -> Split:
    device = DecodeDevice(deployed, config)
    source = PrefillSlice(deployed, config, device, beside=name == SPLITS[2])
    device.moved = source.catch_up
    engine = Engine(device.model, (), device.config, programs=device, source=source)
    service = Service.of(offers, serve(engine, offers, device))
    return Split(name, service, source.hit_tokens["prefill"])


class DecodeDevice(Device):
    """The slice that decodes. moved: called when its time has moved."""

    moved: Callable[[], None] = staticmethod(lambda: None)

    def wait_until(self, seconds: float) -> None:
        super().wait_until(seconds)
        self.moved()


class PrefillSlice(PageSource):
    """The slice that prefills, as `Prefiller` is to an engine. It follows the time of the one that decodes, and may be
    ahead of it by the steps that it has begun. A page takes the time that its bytes take over one link of each device.

    beside: prompts that are cached for the most part are prefilled beside decoding.
    """

    def __init__(self, deployed: Deployed, config: EngineConfig, target: Device, *, beside: bool):
        super().__init__(config.page_size, ("prefill",))
        self.target, self.beside = target, beside
        self.device = Device(deployed, replace(config, itl=None))
        self.engine = Engine(self.device.model, (), self.device.config, programs=self.device)
        plan, shards = self.device.plan, deployed.shards
        page = sum(array.nbytes(shards) for array in plan.arrays) / (plan.pages // shards.replicas)
        self._page_seconds = page / deployed.target.chip.link_bandwidth
        self._twins: dict[EngineSequence, Fetch] = {}
        self._arriving: list[tuple[float, Fetch]] = []

    def _begin(self, s: EngineSequence, match: Match) -> Fetch:
        fetch, whole = Fetch(len(match.nodes)), (s.length - 1) // self.page
        if not goes_apart(s, match, self.page) or (self.beside and 2 * match.tokens >= s.length):
            return fetch
        fetch.pending, twin = True, twin_of(s, whole * self.page)
        self._fetching[fetch] = Future()
        self._twins[twin] = fetch
        if not self.engine.busy:
            self.device.wait_until(self.target.time())
        self.engine.add(twin)
        return fetch

    def catch_up(self) -> None:
        """Run until the time of the slice that decodes, and hand over what has come by then."""
        while self.engine.busy and self.device.time() < self.target.time():
            self._advance()
        self._arrive(self.target.time())

    def wait(self, seconds: float) -> None:
        """Nothing runs on the slice that decodes: its time goes on to the next arrival, but for no longer than this."""
        end = self.target.time() + seconds
        while self.engine.busy and not self._arriving and self.device.time() < end:
            self._advance()
        if self._fetching:
            self.target.wait_until(min([end, *(at for at, _ in self._arriving)]))

    def _advance(self) -> None:
        for twin in self.engine.advance():
            fetch = self._twins.pop(twin)
            fetch.cached, count = twin.cached, len(twin.prompt) // self.page - fetch.first
            fetch.pages = [(None, "prefill")] * count
            self._arriving.append((self.device.time() + count * self._page_seconds, fetch))

    def _arrive(self, now: float) -> None:
        for at, fetch in self._arriving:
            if at <= now:
                fetch.pending = False
                self._fetching.pop(fetch).set_result(None)
        self._arriving = [(at, fetch) for at, fetch in self._arriving if at > now]

    def prepare(self, cache: tuple) -> tuple:
        return cache

    def write(self, cache: tuple) -> tuple:
        self._restored = {}
        return cache

    def settle(self) -> None:
        """Nothing is on its way when requests are finished."""

    def clear(self) -> None:
        """A trace is served once."""

    def counts(self) -> dict[str, int]:
        return {"handed_tokens": self.hit_tokens["prefill"]}
