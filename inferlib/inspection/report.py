"""A report on compiled programs: memory, bytes, collectives, copies and time of each step.

Times are estimates, not measurements: the schedule of the compiled program, played with the prices of its operations
(`inferlib.inspection.prices`) and the collectives of the cost model (`inferlib.planning.network`). The floor is the
least time that the chip's peak figures allow: weights and cache read once, or the FLOPs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from inferlib.cache.plan import BlockCache, BlockState, CachePlan
from inferlib.config import EngineConfig
from inferlib.inspection.outcome import Outcome
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import AttentionSpec, MlaSpec
from inferlib.models.looped import MATRICES
from inferlib.models.recurrent import Recurrent
from inferlib.ops.quantized import nbytes
from inferlib.ops.sparse_prefill import BLOCK
from inferlib.option_checks import ConfigurationError
from inferlib.planning.experts import expert_bytes
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding import axes
from inferlib.sharding.mesh import ShardingError
from inferlib.sharding.shards import Shards
from inferlib.targets import CHIPS, parse_target, target_names


@dataclass(frozen=True)
class Budget:
    """Bytes on one device that follow from shapes alone.

    rows: number of rows on each of `replicas`. token: bytes of one position of a row's cache, in the layers that store
    all positions. fixed: bytes of a row's cache in the other layers, whose size does not depend on the length.
    """

    weights: int
    cache: int
    rows: int
    replicas: int
    token: int
    fixed: int

    @property
    def row(self) -> int:
        """Bytes of one row's cache."""
        return self.cache // self.rows

    @staticmethod
    def of(programs: ProgramSet) -> Budget:
        shards, plan = programs.config.shards, programs.plan

        def local(shape: tuple[int, ...], names: tuple[str | None, ...], dtype) -> int:
            return nbytes(shards.local_shape(names, shape), dtype)

        blocks = [(sum(array.nbytes(shards) for array in b.owned), b) for b in plan.every_block]
        rows = programs.config.rows
        return Budget(
            weights=sum(local(s.shape, s.axes, s.dtype) for s in programs.specs),
            cache=sum(size for size, _ in blocks),
            rows=rows,
            replicas=shards.replicas,
            token=sum(size * shards.replicas // plan.tokens for size, b in blocks if b.paged),
            fixed=sum(size // rows for size, b in blocks if not b.paged),
        )


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of a step by the schedule of its compiled program (see `inspection.schedule.Played`).

    operations: by how they are priced (see `inspection.prices.Price`): by their "listing", by the compiler's
    "estimate", or by "bytes". waits: for copies in the background. fetching: of
    collectives during which weights arrive; exposed: during which neither weights do nor an operation runs. prices,
    collectives: of each kind of operation and collective, as `Played.facts` has them. spans: see `Played`.
    """

    operations: Mapping[str, float]
    waits: float
    fetching: float
    exposed: float
    prices: Sequence[Mapping[str, Any]]
    collectives: Sequence[Mapping[str, Any]]
    spans: Sequence[Sequence[float]] = ()

    @staticmethod
    def of(facts: Mapping[str, Any] | None) -> StepEstimate | None:
        if facts is None:
            return None
        operations: dict[str, float] = {"listing": 0.0, "estimate": 0.0, "bytes": 0.0}
        for price in facts["prices"]:
            operations[price["how"]] += price["count"] * price["seconds"]
        names = ("waits", "fetching", "exposed", "prices", "collectives")
        return StepEstimate(operations, *(facts[name] for name in names), spans=facts.get("spans", ()))

    @property
    def network(self) -> float:
        """Seconds of all collectives, hidden or not."""
        return sum(c["count"] * c["seconds"] for c in self.collectives)

    @property
    def computing(self) -> float:
        """Seconds of everything but exposed collectives."""
        return sum(self.operations.values()) + self.waits + self.fetching

    @property
    def seconds(self) -> float:
        return self.computing + self.exposed

    def attained(self, bandwidth: float) -> float:
        """Seconds if no operation moves more bytes per second than this."""
        slower = (p["count"] * max(p["nbytes"] / bandwidth - p["seconds"], 0.0) for p in self.prices)
        return self.seconds + sum(slower)


@dataclass(frozen=True)
class ProgramReport:
    """One step of a program on one device, in bytes and seconds; None where the target or the compiler has no figure.

    step: the time by the compiled program's schedule.
    """

    key: ProgramKey
    outcome: Outcome
    temporaries: int | None
    code: int | None
    peak: int | None
    moved_bytes: int | None
    floor_bytes: int
    flops: int
    step: StepEstimate | None
    floor: float | None
    mbu: float | None
    mfu: float | None

    @property
    def estimate(self) -> float | None:
        return self.step and self.step.seconds

    @property
    def fits(self) -> bool:
        return self.outcome.status != "too large"

    @property
    def copies(self) -> list[dict[str, Any]]:
        """Copies of the cache and relayouts of weights."""
        facts = self.outcome.facts or {}
        return [*facts.get("cache_copies", ()), *facts.get("weight_copies", ())]

    @property
    def balanced(self) -> bool:
        """True if bytes and cycles assume that all experts are chosen equally often."""
        return bool((self.outcome.facts or {}).get("balanced"))

    @property
    def kernels(self) -> list[dict[str, Any]]:
        return (self.outcome.facts or {}).get("kernels", [])

    @property
    def collectives(self) -> list[dict[str, Any]]:
        return (self.outcome.facts or {}).get("collectives", [])

    @property
    def overlaps(self) -> list[dict[str, Any]]:
        """See `inferlib.inspection.overlap.Overlap`."""
        return (self.outcome.facts or {}).get("overlaps", [])


@dataclass(frozen=True)
class Latency:
    """The latency of a bucket for users, in seconds, estimated and at the floor: the time to first token of a prompt
    that fills a prefill bucket, or the inter-token latency and throughput of a batch, at `limit` positions."""

    kind: str
    size: int
    limit: int
    estimate: float | None
    floor: float | None

    def rate(self) -> float | None:
        """Tokens per second."""
        seconds = self.estimate or self.floor
        return self.size / seconds if seconds else None


@dataclass(frozen=True)
class Report:
    """The programs of a deployment, one `ProgramReport` each. capacity: bytes of a device's memory, 0 if unknown."""

    deployment: Deployment
    budget: Budget
    capacity: int
    programs: tuple[ProgramReport, ...]

    @staticmethod
    def of(deployment: Deployment, outcomes: Sequence[Outcome]) -> Report:
        planned = deployment.planned()
        programs = tuple(_program(deployment, planned, outcome) for outcome in outcomes)
        return Report(deployment, Budget.of(planned), deployment.slice.hbm_bytes, programs)

    @property
    def ok(self) -> bool:
        """True if everything compiled and fits, and no program copies the cache. On a CPU it may: products with a row's
        keys may want them in another order."""
        free = self.deployment.slice.platform == "cpu"
        return all(p.outcome.ok for p in self.programs) and (free or not self.copied)

    @property
    def copied(self) -> bool:
        """True if a program copies the cache. Scales may move once in and once out."""
        copies = (copy for p in self.programs for copy in (p.outcome.facts or {}).get("cache_copies", ()))
        return any(copy["count"] > 1 or not copy["array"].endswith(" scales") for copy in copies)

    @cached_property
    def overhead(self) -> int:
        """The most bytes that a program takes in addition to weights and cache."""
        stored = self.budget.weights + self.budget.cache
        return max((p.peak - stored for p in self.programs if p.peak is not None), default=0)

    @property
    def room(self) -> int:
        """Bytes left for the cache."""
        return self.capacity - self.budget.weights - max(self.overhead, 0)

    @property
    def largest_batch(self) -> int | None:
        """The number of rows that would fit, at the longest context."""
        if not self.capacity:
            return None
        return max(self.room // self.budget.row, 0) * self.budget.replicas

    @property
    def largest_context(self) -> int | None:
        """The number of positions of each row that would fit, at the largest batch."""
        if not self.capacity or not self.budget.token:
            return None
        a_row = self.room // self.budget.rows - self.budget.fixed
        return min(max(a_row // self.budget.token, 0), self.deployment.model.context)

    def latencies(self) -> list[Latency]:
        """Latencies of prefill buckets and of batch buckets, at each cache bucket."""
        fastest: dict[tuple, Latency] = {}
        for p in self.programs:
            key = p.key
            if key.mode != self.deployment.modes[0] or key.detail or key.drafts:
                continue
            if key.chunks == 1 and not key.rows:
                entry = Latency("TTFT", key.chunk, key.limit, p.estimate, p.floor)
            elif key.chunks == 0:
                entry = Latency("ITL", key.rows * self.budget.replicas, key.limit, p.estimate, p.floor)
            else:
                continue
            if p.outcome.ok and (key.steps > 1 or (entry.kind, entry.size, entry.limit) not in fastest):
                fastest[entry.kind, entry.size, entry.limit] = entry
        return sorted(fastest.values(), key=lambda x: (x.kind, x.limit, x.size))

    def advice(self) -> list[str]:
        """What would fit, and how many bytes are missing, if the programs do not fit."""
        if all(p.fits for p in self.programs):
            return []
        need = self.budget.weights + self.budget.cache
        over = need + max(self.overhead, 0) - self.capacity
        lines = []
        if over > 0:
            lines.append(f"weights and cache exceed a device's memory by {gib(over)}")
        if self.deployment.dtype == "float32" and _need(replace(self.deployment, dtype="bfloat16")) <= self.capacity:
            lines.append("--dtype bfloat16 would do")
        if smaller := self._smaller_cache():
            lines.append(smaller)
        chip = self.deployment.slice.chip.name
        for name in dict.fromkeys([chip, *(c for c in CHIPS if CHIPS[c].platform == "tpu")]):
            if (line := _smallest(self.deployment, name)) is not None:
                lines.append(line)
        return lines or ["no target of one slice holds it: lower the batch or cache buckets"]

    def _smaller_cache(self) -> str:
        batch, context = self.largest_batch, self.largest_context
        if batch:
            return f"on this target {batch} rows of {self.deployment.max_len} tokens would do"
        if context:
            return f"on this target {self.deployment.max_batch} rows of {context} tokens would do"
        return ""

    def facts(self) -> dict[str, Any]:
        """The report as JSON values."""
        programs = []
        for p in self.programs:
            fields = {f: v for f, v in vars(p).items() if f not in ("key", "outcome", "step")}
            programs.append(
                {"program": str(p.key), "key": asdict(p.key), "status": p.outcome.status, "fits": p.fits}
                | {"error": p.outcome.error, **fields, "estimate": p.estimate, "step": p.step and vars(p.step)}
                | {"collectives": p.collectives, "overlaps": p.overlaps, "kernels": p.kernels}
                | {name: (p.outcome.facts or {}).get(name, []) for name in ("cache_copies", "weight_copies")}
                | {name: (p.outcome.facts or {}).get(name) for name in ("trace_seconds", "compile_seconds", "balanced")}
            )
        return {
            "target": self.deployment.target,
            "parallel": str(self.deployment.parallel),
            "dtype": self.deployment.dtype,
            "quantization": self.deployment.quantization and str(self.deployment.quantization),
            "kv_cache_dtype": self.deployment.kv_cache_dtype,
            "backend": self.deployment.backend,
            "ok": self.ok,
            "capacity": self.capacity,
            "weights": self.budget.weights,
            "cache": self.budget.cache,
            "largest_batch": self.largest_batch,
            "largest_context": self.largest_context,
            "programs": programs,
            "latencies": [{**vars(x), "tokens_per_second": x.rate()} for x in self.latencies()],
            "advice": self.advice(),
        }


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _program(deployment: Deployment, planned: ProgramSet, outcome: Outcome) -> ProgramReport:
    target, facts = deployment.slice, outcome.facts or {}
    memory = facts.get("memory", {})
    floor_bytes, flops = _floor_bytes(planned, outcome.key), _flops(planned, outcome.key)
    bandwidth, rate = target.hbm_bandwidth, target.rate(deployment.dtype)
    step = StepEstimate.of(facts.get("step"))
    seconds = step and step.seconds
    floor = max(floor_bytes / bandwidth, flops / rate) if bandwidth and rate else None
    return ProgramReport(
        key=outcome.key,
        outcome=outcome,
        temporaries=memory.get("temporaries"),
        code=memory.get("code"),
        peak=memory["peak"] if memory else None,
        moved_bytes=facts.get("bytes"),
        floor_bytes=floor_bytes,
        flops=flops,
        step=step,
        floor=floor,
        mbu=floor_bytes / (bandwidth * seconds) if seconds else None,
        mfu=flops / (rate * seconds) if seconds else None,
    )


def _tokens(shards: Shards, key: ProgramKey) -> int:
    """The number of tokens of a step on one device."""
    return key.chunks * key.chunk // shards.size(axes.TOKENS) + key.decoded


def _passes(programs: ProgramSet, key: ProgramKey) -> Iterator[tuple[AbstractModel, CachePlan, ProgramKey, int]]:
    """The models that a step runs: each with its cache, the step that it sees, and how often it runs. One that drafts
    runs once for each draft, or once to follow the other."""
    yield programs.model, programs.plan, key, 1
    if programs.drafter is not None and key.part != "choose":
        yield programs.drafter.model, programs.plan.of_drafts, replace(key, drafts=0), max(key.drafts, 1)


def _floor_bytes(programs: ProgramSet, key: ProgramKey) -> int:
    """Bytes that a step must read on one device: its weights once, those of a loop too, and what its tokens see of the
    cache of its rows once. Experts count as far as they are chosen if all are equally likely."""
    config = programs.config
    return sum(times * _bytes_of(model, plan, config, seen) for model, plan, seen, times in _passes(programs, key))


def _bytes_of(model: AbstractModel, plan: CachePlan, config: EngineConfig, key: ProgramKey) -> int:
    shards = config.shards
    tokens, total = _tokens(shards, key), expert_bytes(model, shards, _tokens(shards, key))
    for weight in model.weights:
        if axes.EXPERTS in weight.axes:
            continue
        rows = len(weight.shape) - len(weight.of_layer.shape)  # the dimension of a table's rows
        for spec in weight.arrays:
            size = nbytes(shards.local_shape(spec.axes, spec.shape), spec.dtype)
            row = nbytes(spec.shape[:rows] + spec.shape[rows + 1 :], spec.dtype)
            total += tokens * row if model.looks_up(weight.name) else size
    pairs = zip(plan.blocks, model.blocks(), strict=True)
    reaches = ((block, model.config.layers[layers[0]].attention.reach) for block, layers in pairs)
    return total + sum(_cache_read(block, reach, config, key) for block, reach in reaches)


def _cache_read(block: BlockCache | BlockState, reach: int | None, config: EngineConfig, key: ProgramKey) -> int:
    """Bytes of a block's cache that the tokens of each row and chunk read together. reach: the window of one token."""
    shards, selection, limit = config.shards, config.attention_pages, config.limit_of(key.limit, block.level)
    if isinstance(block, BlockState):
        lead = block.arrays[0].shape[: block.arrays[0].axes.index(axes.PAGES)]
        passes = 2 if key.drafts else 1  # tokens that stand are replayed
        return (passes * key.rows + key.chunks) * prod(lead) * block.row_bytes(shards)

    def seen(tokens: int) -> int:
        positions = limit if reach is None else min(limit, reach + tokens - 1)
        return -(-positions // shards.size(axes.POSITIONS))

    layers = block.shapes[0][0] if len(block.shapes[0]) > 4 else 1
    of_rows, of_chunks = key.rows * seen(1 + key.drafts), key.chunks * seen(key.chunk)
    if shards.size(axes.POSITIONS) > 1 and config.platform != "gpu":  # each query is a row of its own
        of_rows = key.decoded * seen(1)
    summaries = sum(array.position_bytes(shards) for array in block.summaries)
    cells = sum(array.position_bytes(shards) for array in block.arrays) - summaries
    read = of_rows
    if block.block is not None and selection is not None:  # each token selects for itself
        read = min(read, key.decoded * selection.count * block.block)
    return layers * (of_rows * summaries + (read + of_chunks) * cells)


def _flops(programs: ProgramSet, key: ProgramKey) -> int:
    """FLOPs of the matrix products of a step on one device. Rows are full, and a chunk is the last of a full row: its
    tokens see what precedes them, or their window of it; where they list blocks, as many as there is room for. Where
    later layers see fewer tokens, layers count as equal."""
    shards, sparse, total = programs.config.shards, programs.config.block_lists, 0
    for model, _, seen, times in _passes(programs, key):
        most = None
        if sparse is not None and model is programs.model:  # a model that drafts attends in full
            most = sparse.max_blocks(programs.config.max_len, seen.limit) * BLOCK
        of_model = _flops_of(model, shards, seen, most)
        if (how := programs.config.propagation) is not None:
            fewer, every = replace(seen, chunk=how.count(seen.chunk)), len(model.config.layers)
            of_fewer = _flops_of(model, shards, fewer, most)
            of_model = (how.layer * of_model + (every - how.layer) * of_fewer) // every
        total += times * of_model
    return total


def _flops_of(model: AbstractModel, shards: Shards, key: ProgramKey, most: int | None = None) -> int:
    """most: positions that a token of a chunk attends to, in layers that see all."""
    tokens = _tokens(shards, key)
    matrices = [w for w in model.weights if (w.contracting and axes.VOCAB not in w.axes) or w.name in MATRICES]
    inside = sum(model.passes(w) * prod(shards.local_shape(w.axes, w.shape)) for w in matrices)
    head = prod(shards.local_shape((axes.EMBED, axes.VOCAB), (model.config.dim, model.layout.vocab)))
    ends = tokens if key.detail else key.chunks + key.decoded
    attention = 0
    for layer in (x for i, x in enumerate(model.config.layers) for _ in range(model.config.runs(i))):
        spec, heads = layer.attention, model.layout.heads(layer.attention)
        if isinstance(spec, Recurrent):
            attention += 2 * tokens * heads.groups * heads.queries * spec.token_products
            continue
        every, chunked = heads.groups * heads.queries, key.chunks * key.chunk // shards.size(axes.TOKENS)
        attention += 2 * key.decoded * min(key.limit, spec.reach or key.limit) * every * spec.pair_width(decode=True)
        reach = most if spec.reach is None and isinstance(spec, AttentionSpec) else spec.reach
        attention += 2 * chunked * _mean_seen(key, reach) * every * spec.pair_width(decode=False)
        if isinstance(spec, MlaSpec) and key.chunks:  # those of the chunk itself are expanded with the weights
            expanded = key.chunks * max(key.limit - key.chunk, 0)
            attention += 2 * expanded * heads.groups * spec.kv_rank * (spec.nope_dim + spec.value_dim)
    attention //= shards.size(axes.KV_HEADS) * shards.size(axes.POSITIONS)
    return 2 * tokens * inside + 2 * ends * head + attention


def _mean_seen(key: ProgramKey, reach: int | None) -> int:
    """Positions that a token of a chunk sees, itself included, on average."""
    last = np.arange(key.limit - key.chunk, key.limit) + 1
    return round(np.minimum(last, reach or key.limit).clip(1).mean()) if key.chunk else 0


def _need(deployment: Deployment) -> int:
    """Bytes of weights and cache on a device, with a twentieth to spare for everything else."""
    budget = Budget.of(deployment.planned())
    return (budget.weights + budget.cache) * 21 // 20


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without warnings, for trying configurations."""
    log = logging.getLogger("inferlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _smallest(deployment: Deployment, chip: str) -> str | None:
    """The smallest slice of a chip that the model fits, with the tensor axis as long as the other axes allow."""
    for name in target_names(chip):
        target = parse_target(name)
        others = deployment.parallel.devices // deployment.parallel.tensor
        parallel = replace(deployment.parallel, tensor=max(target.devices // others, 1))
        if target.devices > 64 or parallel.devices != target.devices:
            continue
        try:  # `planned` checks the axes against groups of weights and the cache
            with _quiet():
                need = _need(replace(deployment, target=target.name, parallel=parallel))
        except (ShardingError, ConfigurationError):
            continue
        if need <= target.hbm_bytes:
            return f"--target {name} --parallel {parallel} would do"
    return None
