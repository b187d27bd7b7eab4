"""Prompts are prefilled apart from decoding: an engine on devices of its own computes the whole pages of a prompt, and
the engine that decodes takes them over. So a long prompt does not stall the rows that decode (Zhong et al. 2024,
"DistServe"; Patel et al. 2024, "Splitwise").

To the engine that decodes this is one more source of pages: a sequence whose pages it does not have waits until they
have come, others pass, and then it begins as behind a hit. What is left of the prompt, less than a page, it prefills
itself. The engine that prefills has a prefix cache of its own. Where rows keep rings and states, a snapshot of these is
handed over with the page that its tokens end in (see `inferlib.engine.places`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize

import jax
from jax.sharding import Mesh

from inferlib.cache.plan import CachePlan
from inferlib.cache.prefix_tree import Match, Node, PrefixTree, encoded
from inferlib.cache.snapshots import Resumed, Snapshot
from inferlib.config import EngineConfig
from inferlib.engine import transit
from inferlib.engine.adapters import AdapterPool
from inferlib.engine.engine import Engine
from inferlib.engine.fetch import Fetch
from inferlib.engine.handover import Handed, Handover
from inferlib.engine.page_source import PageSource
from inferlib.engine.places import Leaving
from inferlib.engine.replica_pages import ReplicaPages
from inferlib.engine.sequence import Sequence, Status
from inferlib.engine.thread import EngineThread
from inferlib.option_checks import ConfigurationError, brief, is_list
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet, planned_keys
from inferlib.sampling.params import SamplingParams
from inferlib.sharding.mesh import MESH_AXES, Device, Parallelism, make_mesh
from inferlib.sharding.rules import preset
from inferlib.sharding.shards import Shards

log = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)


class Job(NamedTuple):
    """What is prefilled. target: the sequence that waits for it."""

    fetch: Fetch
    target: Sequence


class Computed(NamedTuple):
    """What a replica has of a prompt. nodes: from the first page on. snapshot: of a place, whose page is that of the
    last node."""

    replica: int = 0
    nodes: tuple[Node, ...] = ()
    snapshot: Snapshot | None = None


class Prefiller(PageSource):
    """Prefills for another engine, whose thread makes all calls.

    engine: the one that prefills, in a thread of its own. plan, shards: of the other one's cache; the meshes are equal
    but for their devices. unit: see `ReplicaPages`.
    """

    def __init__(self, engine: Engine, plan: CachePlan, shards: Shards):
        super().__init__(plan.page, ("prefill",))
        self.engine, self.unit, drafter = engine, engine.config.prefill_unit, engine.programs.drafter
        self._defers = drafter is not None and drafter.defers  # until the next token is known, which the twin has then
        self._handover = Handover((engine.plan, engine.config.shards), (plan, shards))
        self._thread, self._waiter = EngineThread(), ThreadPoolExecutor(1, "inferlib-handover")
        # What follows belongs to the engine's own thread.
        self._jobs: dict[Sequence, Job] = {}
        self._waiting: list[tuple[Fetch, Computed]] = []  # for room
        self._handed = 0  # bytes on a device that are not written yet, at most
        self._driving = False

    # ---- for the scheduler

    def take(self, s: Sequence, match: Match) -> tuple[Match, list[Handed]]:
        fetch, before = s.fetch, match.tokens
        match, pages = super().take(s, match)
        if match.tokens > before and fetch is not None and s.cached is None:
            s.cached = max(before, min(fetch.cached or 0, match.tokens))
        return match, pages

    # ---- for the engine

    def share(self, adapters: AdapterPool) -> None:
        assert self.engine.adapters is not None
        self.engine.adapters.named = adapters.named

    def prepare(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        self._handover.prepare()
        return cache

    def write(self, cache: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pages, rows = self._restored, self._rows
        self._restored, self._rows = {}, {}
        return self._handover.write(cache, pages, rows)

    def settle(self) -> None:
        while futures := list(self._fetching.values()):
            futures[0].result()

    def clear(self) -> None:
        self.lose()
        self.settle()
        self._call(self.engine.forget_prefixes)

    def sleep(self) -> None:
        self._call(self.engine.sleep)

    def wake(self) -> None:
        self._call(self.engine.wake)

    def counts(self) -> dict[str, int]:
        return {"handed_tokens": self.hit_tokens["prefill"]}

    @property
    def keys(self) -> list[ProgramKey]:
        """The programs of the engine that prefills."""
        keys = planned_keys(self.engine.config, ("greedy",))
        return [key for key in keys if key.chunks and not key.rows and not key.detail]

    def warmup(self, done: Any = lambda key: None) -> int:
        """Compile `keys`; a program that is missing later is an error. Returns how many they are. done: called with the
        key of each."""

        def compile_all() -> None:
            programs = self.engine.programs
            programs.compile_all(self.keys, done)
            programs.prepare_changes()
            programs.strict = True

        self._call(compile_all)
        return len(self.keys)

    # ---- inside

    def _call(self, function: Any) -> None:
        self._thread.run(lambda: (function(),))

    def _begin(self, s: Sequence, match: Match) -> Fetch:
        """Ask for the whole pages of a sequence behind a match, or for the last place and the pages before it."""
        fetch = Fetch(len(match.nodes))
        if not goes_apart(s, match, self.page):
            return fetch
        tokens = (s.length - 1) // self.page * self.page + self._defers
        if isinstance(match, Resumed):
            fetch.place = (s.length - 1) // self.unit * self.unit
            fetch.first = min(len(match.whole.nodes), fetch.place // self.page)
            tokens = fetch.place + 1  # a snapshot is saved where the last unit before a token ends
        fetch.pending = True
        self._fetching[fetch] = Future()
        self._thread.post(partial(self._add, twin_of(s, tokens), Job(fetch, s)))
        return fetch

    def _split_place(self, place: Handed) -> tuple[Handed, Handed]:
        return self._handover.parts(place)

    def _end(self, fetch: Fetch) -> None:
        """What came of a fetch is in its pages."""
        fetch.pending = False
        if (future := self._fetching.pop(fetch, None)) is not None:
            future.set_result(None)

    # What follows runs in the thread of the engine that prefills.

    def _add(self, twin: Sequence, job: Job) -> None:
        try:
            self.engine.add(twin)
        except RuntimeError as error:  # it sleeps
            log.warning("a prompt is prefilled beside decoding: %s", error)
            self._end(job.fetch)
            return
        self._jobs[twin] = job
        if not self._driving:
            self._driving = True
            self._thread.start(self._drive)

    def _drive(self) -> bool | None:
        """Advance the engine once. Returns None as long as it has something to do."""
        for twin, job in list(self._jobs.items()):
            if job.target.status is Status.FINISHED:
                self.engine.cancel(twin)
                self._end(self._jobs.pop(twin).fetch)
        if not self._jobs:
            self._driving = False
            return True
        try:
            ended = [twin for twin in self.engine.advance() if twin.status is Status.FINISHED]
        except BaseException as error:  # what was lost is prefilled beside decoding
            log.warning("the devices that prefill failed: %s", error)
            ended = [twin for twin in self._jobs if twin.status is Status.FINISHED] or list(self._jobs)
            self._lose_waiting()
        for twin in ended:
            self._finish(twin)
        return None

    def _finish(self, twin: Sequence) -> None:
        """Hold the pages of a prompt, until there is room for them on the devices that decode."""
        job = self._jobs.pop(twin)
        if twin.error is not None or twin.status is not Status.FINISHED:
            self.engine.cancel(twin)
            self._end(job.fetch)
            return
        job.fetch.cached = twin.cached
        every = enumerate(self.engine.scheduler.pages)
        computed = max((computed_of(twin, job.fetch, *of_one) for of_one in every), key=lambda x: len(x.nodes))
        self._tree(computed).refer(computed.nodes)
        self._waiting.append((job.fetch, computed))
        self._hand_over()

    def _tree(self, computed: Computed) -> PrefixTree:
        tree = self.engine.scheduler.pages[computed.replica].tree
        assert tree is not None
        return tree

    def _hand_over(self) -> None:
        """Send pages to the devices that decode, as long as there is room for them."""
        while self._waiting:
            fetch, computed = self._waiting[0]
            count, has_place = len(computed.nodes) - fetch.first, computed.snapshot is not None
            size = self._handover.nbytes(count, has_place) if count > 0 else 0
            if self._handed and self._handed + size > transit.MOST_BYTES:
                return
            del self._waiting[0]
            try:
                sent = self._sent(fetch, computed)
            except Exception as error:  # memory, for one
                log.warning("a prompt is prefilled beside decoding: its pages were not sent: %s", error)
                sent = []
            self._tree(computed).release(computed.nodes)
            with suppress(RuntimeError):  # the interpreter ends
                self._waiter.submit(self._arrived, fetch, sent)

    def _sent(self, fetch: Fetch, computed: Computed) -> list[Handed]:
        """What is on its way to the devices that decode: all that was asked for, or nothing."""
        engine, snapshot, of_replica = self.engine, computed.snapshot, self.engine.scheduler.pages[computed.replica]
        first = computed.replica * of_replica.pool.count
        pages = [first + node.page for node in computed.nodes]
        if snapshot is None:
            sent = self._handover.send(engine.cache, pages[fetch.first :])
        elif of_replica.snapshots is None or snapshot.number < 0:  # another one took its place
            return []
        else:
            engine.change_rows()
            number = computed.replica * of_replica.snapshots.count + snapshot.number
            leaving = Leaving(pages.pop(), number, snapshot.first, snapshot.last)
            sent = self._handover.send(engine.cache, pages[fetch.first :])
            sent.append(self._handover.send_place(engine.cache, engine.snapshots, leaving))
        for handed in sent:
            finalize(handed, self._thread.post, partial(self._freed, handed.nbytes)).atexit = False
            self._handed += handed.nbytes
        return sent

    def _lose_waiting(self) -> None:
        """The engine failed, and pages that were not sent yet are lost with its cache."""
        for fetch, computed in self._waiting:
            self._tree(computed).release(computed.nodes)
            self._end(fetch)
        self._waiting = []
        for pages in self.engine.scheduler.pages:
            pages.forget()

    def _freed(self, nbytes: int) -> None:
        self._handed -= nbytes
        self._hand_over()

    def _arrived(self, fetch: Fetch, sent: list[Handed]) -> None:
        """Wait for pages in a thread for that, so that the devices that decode never do."""
        try:
            jax.block_until_ready([handed.arrays for handed in sent])
            fetch.pages = [(content, "prefill") for content in sent]
        except Exception as error:
            log.warning("a prompt is prefilled beside decoding: its pages did not come: %s", error)
        self._end(fetch)


def goes_apart(s: Sequence, match: Match, page: int) -> bool:
    """True if a sequence that begins with a match has whole pages more that others can prefill, or as many tokens."""
    if isinstance(match, Resumed):
        return s.takes_cached and s.length - 1 - match.tokens >= page
    return s.takes_cached and (s.length - 1) // page > len(match.nodes)


def computed_of(twin: Sequence, fetch: Fetch, replica: int, pages: ReplicaPages) -> Computed:
    """What a replica has of a prompt that was computed: nothing if a snapshot that it needs is gone."""
    if pages.tree is None:
        return Computed()
    match = pages.tree.match(twin.cache_key, encoded(twin.prompt), fetch.place or len(twin.prompt))
    if pages.snapshots is None:
        return Computed(replica, match.nodes)
    resumed, nodes = pages.snapshots.resume(match), match.nodes if match.part is None else (*match.nodes, match.part)
    if resumed.snapshot is None or resumed.tokens < fetch.place or nodes[-1].pending:
        return Computed()
    return Computed(replica, nodes, resumed.snapshot)


def twin_of(s: Sequence, tokens: int) -> Sequence:
    """A sequence that computes the first tokens of another one, and generates none."""
    context = (s.prompt + s.tokens)[:tokens]
    params = replace(_GREEDY, depth=s.params.depth, exit_threshold=s.params.exit_threshold)
    same = {"priority": s.priority, "salt": s.salt, "adapter": s.adapter}
    return Sequence(context, params, max_tokens=0, seed=0, **same)


def check_prefilling(devices: Any, programs: ProgramSet, config: EngineConfig, *, compiled: bool) -> list[Device]:
    """The devices of the option `prefill_devices`, which has devices, or their numbers; or is None, for none. compiled:
    these are programs of artifacts.

    Raises ConfigurationError if these devices cannot prefill for an engine of these programs.
    """
    known = jax.devices()
    if devices is None:
        return []
    if not is_list(devices) or not devices:
        raise ConfigurationError(
            f"prefill_devices are devices, such as jax.devices()[4:], or their numbers, got {brief(devices)}"
        )
    if odd := [x for x in devices if x not in known and not (type(x) is int and 0 <= x < len(known))]:
        raise ConfigurationError(f"prefill_devices has {brief(odd[0])}, and JAX has devices 0 to {len(known) - 1}")
    chosen = [known[x] if isinstance(x, int) else x for x in devices]
    mesh = config.shards.mesh
    used = list(mesh.devices.flat) if isinstance(mesh, Mesh) else known[:1]
    if shared := set(chosen) & set(used):
        raise ConfigurationError(f"prefill_devices has {min(map(str, shared))}, which decodes: give other devices")
    if len(set(chosen)) != len(used) or len(chosen) != len(used):
        raise ConfigurationError(
            f"prefill_devices are as many as those that decode, {len(used)}, all different, got {len(chosen)}"
        )
    without = programs.plan.no_prefix_caching(config)
    reasons = {
        "run programs of their own, which artifacts do not have: leave artifacts out": compiled,
        "hand over pages, and all layers keep rings or states": all(programs.plan.of_rows),
        f"hand over pages that prompts share, and {without}": without is not None,
        "serve devices of one process": config.shards.several_processes,
        "take the place of tiers: leave host_cache and disk_cache out": config.has_tiers,
        "count no load: leave expert_load out": config.expert_load,
    }
    if why := next((why for why, holds in reasons.items() if holds), None):
        raise ConfigurationError(f"prefill_devices {why}")
    return chosen


def prefiller_of(programs: ProgramSet, weights: tuple[jax.Array, ...], devices: Items[Device]) -> Prefiller | None:
    """What prefills on these devices (see `check_prefilling`), if there are some, for an engine of these programs and
    weights."""
    if not devices:
        return None
    model, plan, config = programs.model, programs.plan, programs.config
    rules, mesh = config.shards.rules, config.shards.mesh
    shape = (
        Parallelism()
        if rules is None or mesh is None
        else Parallelism(**{name: mesh.shape[name] for name in MESH_AXES}, rules=rules.name)
    )
    shards = Shards(make_mesh(shape, devices), rules or preset(shape.rules))
    drafts = None if programs.drafter is None else config.speculation  # of a model, which has cells of prompts too
    apart = replace(config, shards=shards, itl=None, speculation=drafts, cascade=False)
    of_engine = ProgramSet(model, plan, apart, programs.layouts, drafter=programs.drafter)
    places = [form or shards.sharding(spec.axes) for form, spec in zip(of_engine.formats, of_engine.specs, strict=True)]
    copies = tuple(jax.device_put(list(weights), places))
    return Prefiller(Engine(model, copies, apart, programs=of_engine), plan, config.shards)
