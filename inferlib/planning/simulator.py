"""The engine without a device: its own code runs programs that take the cost model's time and answer tokens.

Time is virtual. The host's own work takes none, as it is hidden behind the device while dispatches are in flight. The
device keeps what a real one keeps of each row (`RowState`): whether it is active, its length and its budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from inferlib.buckets import Buckets
from inferlib.cache.plan import ONE_DEVICE, CachePlan, plan_cache
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.memory import with_memory
from inferlib.engine.sequence import Sequence as EngineSequence
from inferlib.engine.step_times import StepTimes, full_chunks, full_length, step_keys
from inferlib.planning.costs import Deployed, step_time
from inferlib.planning.planner import PlanError, Ranking, Workload
from inferlib.planning.trace import Offer, Served, Service, StepTotals
from inferlib.programs.arguments import CHUNK_COLUMNS, StepOutput
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.programs.row_changes import Changes
from inferlib.sampling.params import SamplingParams
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards

_CHUNK = {name: column for column, name in enumerate(CHUNK_COLUMNS)}


@dataclass(frozen=True)
class Simulation:
    """How a trace would be served, and the steps that it took."""

    service: Service
    steps: StepTotals
    config: EngineConfig

    def facts(self) -> dict[str, Any]:
        return self.service.facts() | self.steps.facts()


def engine_config(deployed: Deployed, max_batch: int, max_len: int, buckets: Buckets | None = None) -> EngineConfig:
    """The engine's configuration on a target, its defaults where nothing is said: the cache takes the memory that is
    left. Raises ConfigurationError."""
    target = deployed.target
    device = DeviceKind(target.platform, target.chip.cores, target.chip.name)
    options = EngineOptions(
        max_batch=max_batch, max_len=max_len, buckets=buckets, kv_cache_dtype=deployed.kv_cache_dtype
    )

    def resolve(options: EngineOptions) -> EngineConfig:
        return options.resolve(device, deployed.shards, deployed.config, deployed.quantization)

    return with_memory(options, resolve, deployed.model, lambda config: target.hbm_bytes)


def mean_workload(offers: Sequence[Offer], concurrency: int) -> Workload:
    """The workload of requests as long as these are on average."""
    count = len(offers)
    means = sum(offer.input_len for offer in offers) / count, sum(offer.output_len for offer in offers) / count
    return Workload(round(means[0]), round(means[1]), concurrency)


def choose(
    ranking: Ranking,
    offers: Sequence[Offer],
    parallel: str | None = None,
    max_batch: int | None = None,
    *,
    prefill: tuple[int, ...] | None = None,
    batch: tuple[int, ...] | None = None,
) -> tuple[Deployed, EngineConfig]:
    """The best plan of a mesh, by default of all, and the engine's configuration for it and the longest request. Batch
    and buckets are the plan's and the platform's where nothing else is said.

    Raises PlanError for a mesh that no plan has; ConfigurationError for buckets, or a cache that does not fit.
    """
    split = None if parallel is None else Parallelism.parse(parallel)
    best = next((o for o in ranking.options if split in (None, o.deployed.parallel)), None)
    if best is None:
        raise PlanError(
            f"no plan of {ranking.target} that fits has parallel={parallel}: take one that the ranking shows"
        )
    max_len = max(offer.input_len + offer.output_len for offer in offers)
    rows = max_batch or (batch[-1] if batch else best.batch)
    config = engine_config(best.deployed, rows, max_len)
    if prefill or batch:
        usual = config.buckets
        buckets = Buckets(prefill or usual.prefill, batch or usual.batch, usual.cache, usual.tile)
        config = engine_config(best.deployed, rows, max_len, buckets)
    return best.deployed, config


def simulate(
    deployed: Deployed,
    config: EngineConfig,
    offers: Sequence[Offer],
    advanced: Callable[[int], None] = lambda count: None,
) -> Simulation:
    """Serve requests in the order of their arrival. advanced: called with the number of requests that are finished.

    Raises PlanError for a request that the engine would refuse.
    """
    for number, offer in enumerate(offers, 1):
        if offer.input_len + offer.output_len > config.max_len:
            wanted = f"{offer.input_len} + {offer.output_len} tokens"
            raise PlanError(f"request {number} has {wanted}, and max_len is {config.max_len}: take a larger one")
    device = Device(deployed, config)
    engine = Engine(device.model, (), device.config, programs=device)
    if config.itl is not None:
        engine.scheduler.itl.learn("greedy", device.step_times())
    served = serve(engine, offers, device, advanced)
    device.totals.preemptions, device.totals.cached = engine.scheduler.preemptions, engine.stats.cached_tokens
    return Simulation(Service.of(offers, served), device.totals, config)


class Clock(Protocol):
    """The time since the first request could be offered, in seconds."""

    def time(self) -> float: ...

    def wait_until(self, seconds: float) -> None: ...


def serve(
    engine: Engine, offers: Sequence[Offer], clock: Clock, advanced: Callable[[int], None] = lambda count: None
) -> list[Served]:
    """Offer requests to an engine at their times, and run it until all are finished.

    advanced: called with the number of requests that are.
    """
    waiting, served, finished, vocab = deque(offers), {}, 0, engine.model.config.vocab
    while waiting or engine.busy:
        if not engine.busy:
            clock.wait_until(waiting[0].arrival)
        while waiting and waiting[0].arrival <= clock.time():
            offer = waiting.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=offer.output_len, ignore_eos=True)
            prompt = [token % vocab for token in offer.prompt or range(offer.input_len)]
            # Of prompts that are not known, no two begin alike.
            salt = None if offer.prompt else str(len(served))
            sequence = EngineSequence(prompt, params, offer.output_len, seed=0, salt=salt)
            served[sequence] = Served(offer.arrival)
            engine.add(sequence)
        for sequence in engine.advance():
            served[sequence].take(clock.time(), len(sequence.tokens))
            finished += sequence.finish_reason is not None
        advanced(finished)
    return list(served.values())


def kind_of_step(key: ProgramKey) -> str:
    """The kind of a step, as `StepTotals` names it."""
    return "both" if key.chunks and key.rows else "prefill" if key.chunks else "decode"


class Device(ProgramSet):
    """The programs of an engine on a device that does not exist, and the host's `Clock`, which waits for a result where
    the host reads it."""

    def __init__(self, deployed: Deployed, config: EngineConfig):
        sizes: dict[str, Any] = dict(rows=config.max_batch, max_len=config.max_len, chunk=config.row_tokens)
        dtype = deployed.kv_cache_dtype or "bfloat16"
        plan = plan_cache(deployed.model, **sizes, dtype=dtype, platform=config.platform, pool=config.pool)
        on_host = _OnHost(config.shards.mesh, config.shards.rules)
        super().__init__(deployed.model, _Nowhere(**_shallow(plan)), replace(config, shards=on_host))
        self.deployed, self.totals = deployed, StepTotals.none()
        self._now = self._free_at = 0.0
        self._active = np.zeros(config.max_batch, bool)
        self._length, self._budget = np.zeros((2, config.max_batch), np.int64)

    def time(self) -> float:
        return self._now

    def wait_until(self, seconds: float) -> None:
        self._now = max(self._now, seconds)

    def ready(self, key: ProgramKey) -> Callable:
        def program(weights, cache, state, control, more=None):
            if key.cascade:
                return cache, state, self._run(key, control, None, more)
            return cache, state, self._run(key, control, more)

        return program

    def allocate_state(self) -> Any:
        return ()

    def prepare_changes(self) -> None:
        """Nothing is compiled."""

    def change_rows(self, cache: Any, state: Any, changes: Changes) -> tuple[Any, Any]:
        """Move rows, and what is known of them; pages take no time."""
        for move in changes.moves:
            for array in (self._active, self._length, self._budget):
                array[move.target] = array[move.source]
            self._active[move.source] = False
        return cache, state

    def change_snapshots(self, cache: Any, snapshots: Any, changes: Changes) -> tuple[Any, Any]:
        """They take no time."""
        return cache, snapshots

    def _run(self, key: ProgramKey, control: np.ndarray, chunk: Any, prefixes: Any = None) -> StepOutput:
        replicas, rows = control.shape[0], self.config.rows
        self._active &= ~(control[:, :-1] != 0).reshape(-1)
        local = np.arange(replicas * rows) % rows
        of_program = local < key.rows
        once = 0.0 if prefixes is None else self._read_once(key, np.asarray(prefixes))
        seconds, tokens = self._decode(key, of_program, bool(control[0, -1]), once)
        firsts = None
        if chunk is not None:
            seconds = self._seconds(key, self._live(key, of_program), chunk.table)
            firsts = self._admit(key, chunk.table, rows)
        busy = float((tokens >= 0).sum()) / len(tokens) if key.rows else 0.0
        prompt = 0 if chunk is None else int(chunk.table[:, _CHUNK["length"]].sum())
        room = replicas * key.chunks * key.chunk
        self.totals.add(kind_of_step(key), seconds, (prompt, room), (busy, replicas * key.rows))
        self._free_at = max(self._free_at, self._now) + seconds
        first = None if firsts is None else _Result(firsts, self._free_at, self)
        return StepOutput(_Result(tokens[:, of_program], self._free_at, self), chunk_tokens=first)  # type: ignore

    def _decode(
        self, key: ProgramKey, of_program: np.ndarray, yield_early: bool, once: float
    ) -> tuple[float, np.ndarray]:
        """Seconds of all decode steps, and their tokens [K, R]: -1 for rows that are not active. once: positions of a
        row, on average, that another row reads for it."""
        tokens = np.full((key.steps, of_program.size), -1)
        if not key.rows:
            return 0.0, tokens
        started, live = self._active & of_program, self._live(key, of_program)
        done = 0
        for step in tokens:
            now = self._active & of_program
            if not self.config.counted and done and (not now.any() or (yield_early and (started & ~now).any())):
                break
            step[now] = 1
            self._length += now
            self._budget -= now
            self._active &= ~of_program | (self._budget > 0)
            done += 1
        if key.chunks:
            return 0.0, tokens
        work = self.deployed.decode(key.rows, live - once + done / 2, key.mode, key.limit)
        return done * step_time(work, self.deployed.network).seconds, tokens

    def _read_once(self, key: ProgramKey, prefixes: np.ndarray) -> float:
        """Positions of a program's row, on average, that are read with another row's, in the replica with fewest."""
        others = (prefixes[:, 1:] < key.rows).sum(axis=1) - 1
        saved = (prefixes[:, 0] * np.maximum(others, 0)).reshape(self.deployed.replicas, -1).sum(axis=1)
        return float(saved.min()) * self.plan.page / key.rows

    def step_times(self) -> StepTimes:
        """What an engine measures before the first request."""
        config, length = self.config, full_length(self.config, self.plan)
        decode, mixed = step_keys(config, "greedy")
        seconds = {}
        for shape, key in mixed.items():
            chunks = [(float(start), tokens) for _, start, tokens in full_chunks(config, shape, length)]
            seconds[shape] = step_time(self.deployed.mixed(key, length, chunks), self.deployed.network).seconds
        each = step_time(self.deployed.decode(decode.rows, length, longest=decode.limit), self.deployed.network).seconds
        return StepTimes(each, seconds)

    def _live(self, key: ProgramKey, of_program: np.ndarray) -> float:
        """Positions of a program's row in the cache, on average, in the replica that has most."""
        lengths = np.where(self._active & of_program, self._length, 0).reshape(self.deployed.replicas, -1)
        return float(lengths.sum(axis=1).max()) / max(key.rows, 1)

    def _seconds(self, key: ProgramKey, live: float, table: np.ndarray) -> float:
        """Seconds of a step with chunks: as long as its fullest replica takes."""
        of_replicas = table.reshape(self.deployed.replicas, key.chunks, -1)
        fullest = max(of_replicas, key=lambda chunks: chunks[:, _CHUNK["length"]].sum())
        chunks = [(float(c[_CHUNK["start"]]), int(c[_CHUNK["length"]])) for c in fullest if c[_CHUNK["length"]]]
        return step_time(self.deployed.mixed(key, live, chunks), self.deployed.network).seconds

    def _admit(self, key: ProgramKey, table: np.ndarray, rows: int) -> np.ndarray:
        """Rows whose prompt ends start to decode. Returns the first token of each."""
        for number, chunk in enumerate(table):
            if not chunk[_CHUNK["last"]]:
                continue
            row = number // key.chunks * rows + chunk[_CHUNK["row"]]
            self._length[row] = chunk[_CHUNK["start"]] + chunk[_CHUNK["length"]]
            self._budget[row] = chunk[_CHUNK["budget"]] - 1
            self._active[row] = self._budget[row] > 0
        return np.where(table[:, _CHUNK["last"]] != 0, 1, -1)


class _Result:
    """An array that the device has ready at some time; the host waits until then to read it."""

    def __init__(self, value: np.ndarray, at: float, device: Device):
        self._value, self._at, self._device = value, at, device

    def copy_to_host_async(self) -> None:
        """The copy takes no time."""

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self._device.wait_until(self._at)
        return self._value


class _OnHost(Shards):
    """A mesh whose inputs stay on the host."""

    def place(self, x: np.ndarray, names: tuple[str | None, ...]) -> Any:
        return x


class _Nowhere(CachePlan):
    """A cache that takes no memory."""

    def allocate(self, shards: Shards = ONE_DEVICE) -> tuple:
        return ()

    def allocate_snapshots(self, shards: Shards = ONE_DEVICE) -> tuple:
        return ()


def _shallow(plan: CachePlan) -> dict[str, Any]:
    return {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
