"""The costs of a step on a device: operations, bytes and collectives, and the time that follows.

The analytical model of Pope et al. 2022 ("Efficiently Scaling Transformer Inference") and of the JAX scaling book.
Weights come from the abstract model, the cache from its plan, collectives from `estimate`; nothing is compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf, prod
from typing import Any, Literal

import jax
import numpy as np

from inferlib.cache.plan import BlockState, CachePlan, plan_cache
from inferlib.config import PoolSize
from inferlib.models.abstract import AbstractModel, WeightSpec, abstract_model
from inferlib.models.blocks import PreNormBlock, kind_of_block
from inferlib.models.cache_levels import cache_owners
from inferlib.models.config import AttentionSpec, LoopSpec, Mixer, MlaSpec, ModelConfig, MoeSpec
from inferlib.models.layers.exchange import pairs_room
from inferlib.models.layout import Layout
from inferlib.models.quantization import Quantization
from inferlib.models.recurrent import Recurrent
from inferlib.ops import fetch_ahead, on_chip
from inferlib.ops.backend import Backend
from inferlib.ops.cache_policy import CachePolicy
from inferlib.ops.choice import Choice
from inferlib.ops.hadamard import factors_of, operations
from inferlib.ops.packed import MEMORY_BOUND_ROWS
from inferlib.ops.quantized import nbytes
from inferlib.option_checks import ConfigurationError, check_kv_cache_dtype
from inferlib.planning import rates
from inferlib.planning.collectives import LATE_SUMS, Collective
from inferlib.planning.estimate import estimate
from inferlib.planning.kernels import (
    Tokens,
    attention_rate,
    dense_rate,
    fetches_ahead,
    numbers_of,
    product_rate,
    shares,
    small_seconds,
)
from inferlib.planning.network import ATTAINED, IDEAL, Efficiency, Network, place
from inferlib.planning.rates import PEAK, Part
from inferlib.planning.sampling_passes import logits_bytes
from inferlib.programs.keys import Mode, ProgramKey
from inferlib.programs.product_choices import loop_products
from inferlib.programs.row_state import RowState, of_loop
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, planned_shards
from inferlib.targets import Target
from inferlib.unrolling import tpu_backend

_EXPERTS = 48 << 20  # bytes of on-chip memory that the kernel of experts is assumed to work in


@dataclass(frozen=True)
class Work:
    """One step on one device. flops: operations, scaled as if all ran at the rate of bfloat16. bytes: bytes read from
    and written to HBM.

    parts: the same by kernel; without any, the step counts as one kernel at the chip's attained rates. small: seconds
    of all other operations. ahead_bytes: of weights, at most so many are fetched during collectives.
    """

    flops: float
    weight_bytes: float
    cache_bytes: float
    activation_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    parts: tuple[Part, ...] = ()
    small: float = 0.0
    ahead_bytes: float = inf

    @property
    def nbytes(self) -> float:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    compute, memory, network: the time of each alone, at attained rates. seconds: the time of all together, with small
    operations. floor: the longest of the three at the published rates, with the others hidden behind it.
    """

    compute: float
    memory: float
    network: float
    seconds: float
    floor: float

    @property
    def bound(self) -> str:
        """The part that takes longest: "compute", "memory" or "network"."""
        parts = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return max(parts, key=parts.__getitem__)


def step_time(work: Work, network: Network) -> StepTime:
    """How long a step takes.

    Kernels follow one another; in most, memory and compute overlap. A collective waits for its input. The next weights
    are fetched meanwhile, as many as on-chip memory holds beside the compiler's scratch: all if XLA multiplies by them,
    and some if kernels do. Late sums of lanes arrive while kernels run.
    """
    target = network.target
    parts = work.parts or (Part(PEAK, work.flops, work.nbytes),)
    compute, memory, busy = (sum(times) for times in zip(*(p.seconds(target, ATTAINED) for p in parts), strict=True))
    waits = _waits(work, network, ATTAINED)
    free = (target.chip.vmem_bytes - target.chip.scratch_bytes) / (target.hbm_bandwidth * ATTAINED.memory)
    ahead = work.ahead_bytes / (target.hbm_bandwidth * ATTAINED.memory)
    fetched = min(memory, ahead, sum(count * min(t, free) for count, t in waits))
    waiting = sum(count * t for count, t in waits)
    late = sum(c.count * network.seconds(c, ATTAINED) for c in work.collectives if c.purpose == LATE_SUMS)
    ideal = max(work.flops / target.rate("bfloat16"), work.nbytes / target.hbm_bandwidth)
    return StepTime(
        compute,
        memory,
        waiting + late,
        seconds=waiting + max(compute, busy - fetched, late) + work.small,
        floor=max(ideal, sum(count * t for count, t in _waits(work, network, IDEAL))),
    )


def _waits(work: Work, network: Network, efficiency: Efficiency) -> list[tuple[int, float]]:
    """(count, seconds) of each kind of wait for a collective; nothing waits for late sums of lanes.

    No weights are used between a reduce-scatter and the all-gather that follows it, so the two are one wait.
    """
    waits, scattered = [], sum(c.count for c in work.collectives if c.kind == "reduce-scatter")
    pairs = 0.0
    for c in work.collectives:
        if c.purpose == LATE_SUMS:
            continue
        if scattered and c.kind in ("reduce-scatter", "all-gather"):
            pairs += c.count * network.seconds(c, efficiency)
        else:
            waits.append((c.count, network.seconds(c, efficiency)))
    return [*waits, (scattered, pairs / max(scattered, 1))]


@dataclass(frozen=True)
class Memory:
    """Bytes on a device. temporaries: an assumption, twice the logits and the widest layer's activations and scores."""

    weights: int
    cache: int
    state: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.state + self.temporaries

    def plus(self, other: Memory) -> Memory:
        """The memory of this model and another one beside it. They share the rows' state, and their temporaries follow
        each other."""
        temporaries = max(self.temporaries, other.temporaries)
        return Memory(self.weights + other.weights, self.cache + other.cache, self.state, temporaries)


@dataclass(frozen=True)
class Matrix:
    """One device's part of a weight.

    elements: number of elements in all layers; for experts, of one expert. inner: elements of one layer for each column
    of the model. experts: the mixture that it belongs to. in_mlp: whether the feed-forward multiplies by it, which may
    take the rows of several devices together (`Shards.mlp_row_shards`). count: number of experts, else 1. packed: one
    layer's part, if it is quantised. passes: how often a step multiplies by it. looped: it is of a layer of a loop.
    on_chip: it lies in on-chip memory, and nbytes are those that are copied there first.
    """

    elements: int
    nbytes: int
    layers: int
    inner: int
    use: Literal["tokens", "sampled", "looked up", "compared"]
    experts: MoeSpec | None = None
    in_mlp: bool = False
    count: int = 1
    packed: WeightSpec | None = None
    passes: int = 1
    looped: bool = False
    on_chip: bool = False


@dataclass(frozen=True)
class Block:
    """Equal layers on one device.

    heads: number of query heads, or of value heads that have a state. cached: bytes of one position in the cache that a
    layer reads, which may be another layer's. state: bytes of one row's state, which a layer reads and writes.
    """

    layers: int
    attention: Mixer
    heads: int
    cached: int
    state: int

    @property
    def written(self) -> int:
        """Bytes that a layer writes to its cache for a token."""
        return self.cached if self.attention.cache_of is None else 0


@dataclass(frozen=True)
class Queries:
    """Tokens of a step that attend alike.

    tokens: their number on a device. rows: how many rows or chunks they belong to. live: positions of each row's cache
    that are read. seen: positions that a token sees, on average. ring: number of devices that pass a row's cache
    around: each reads all of it, and writes what it receives. longest: positions that the program has room for in a
    row.
    """

    tokens: float
    rows: int
    live: float
    seen: float
    ring: int = 1
    decode: bool = False
    longest: int = 0


@dataclass(frozen=True)
class Deployed:
    """A model on a mesh of a target.

    quantization: of the weights, None for bfloat16. kv_cache_dtype: None for bfloat16. Raises ConfigurationError for an
    unknown one. cache_policy: what rows' caches keep, None for all. depth: how many steps of a loop's core a pass runs,
    which decides its time; None: all, for which there is memory in any case.
    """

    config: ModelConfig
    target: Target
    parallel: Parallelism
    quantization: Quantization | None = None
    kv_cache_dtype: str | None = None
    cache_policy: CachePolicy | None = None
    depth: int | None = None

    def __post_init__(self):
        check_kv_cache_dtype(self.kv_cache_dtype)

    @property
    def weights(self) -> str:
        """The format of the weights, by name."""
        return str(self.quantization or "bfloat16")

    @cached_property
    def shards(self) -> Shards:
        return planned_shards(self.parallel)

    @cached_property
    def network(self) -> Network:
        """The mesh on the slice. Raises TargetError if their sizes differ."""
        return place(self.target, tuple(self.shards.mesh.shape.items()) if self.shards.mesh else ())

    @cached_property
    def model(self) -> AbstractModel:
        """The model on the mesh. Raises ShardingError if it does not divide over it."""
        return _abstract(self.config, self.parallel, self.quantization)

    @property
    def replicas(self) -> int:
        """The number of shards that rows are split into."""
        return self.shards.size(axes.ROWS)

    @property
    def width(self) -> int:
        """The width of the residual stream on a device."""
        return self.config.dim // self.shards.size(axes.EMBED)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        return _matrices(self.model, self.shards)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        plan, blocks = self.plan(self.replicas, self.config.context, 1), []
        for block, layers in zip(plan.blocks, self.model.blocks(), strict=True):
            spec = self.config.layers[layers[0]].attention
            layout = self.model.layout.heads(spec)
            heads = layout.groups * layout.queries // self.shards.size(axes.KV_HEADS)
            cached = sum(array.position_bytes(self.shards) for array in block.arrays)
            cached += block.arrays[0].position_bytes(self.shards) if block.massed else 0  # keys are read again
            state = block.row_bytes(self.shards) if isinstance(block, BlockState) else 0
            blocks.append(Block(len(layers) * self.config.runs(layers[0]), spec, heads, cached, state))
        return tuple(blocks)

    def plan(self, rows: int, max_len: int, chunk: int, drafting: AbstractModel | None = None) -> CachePlan:
        """The cache with room for all rows, with what a model that drafts has in it."""
        kind: dict[str, Any] = dict(dtype=self.kv_cache_dtype or "bfloat16", platform=self.target.platform)
        pool = PoolSize()
        if self.cache_policy is not None:
            pool = pool.compacted(self.cache_policy, self.cache_policy.bounds(max_len, chunk))
        return plan_cache(self.model, rows=rows, max_len=max_len, chunk=chunk, pool=pool, drafting=drafting, **kind)

    @property
    def compacts(self) -> bool:
        """True if a mesh like this one can compact rows, or need not: each device has whole groups of heads, and all
        positions of its rows."""
        if self.cache_policy is None:
            return True
        try:
            self.plan(self.replicas, self.config.context, 1)
        except ConfigurationError:
            return False
        return self.shards.size(axes.POSITIONS) == self.shards.size(axes.TOKENS) == 1

    def cells(self, position: float) -> float:
        """How many cells a row of `position` tokens has while it decodes, on average, also over the layers."""
        policy = self.cache_policy
        if policy is None:
            return position
        every = [policy.of_level(level) for level in self.levels]
        return sum(position if position < x.compacts_at else x.budget + x.interval / 2 for x in every) / len(every)

    @property
    def levels(self) -> list[int]:
        """The level of each layer that has a cache of its own (see `inferlib.models.cache_levels`)."""
        mixers = (self.config.layers[number].attention for number in cache_owners(self.config))
        return [mixer.cache_level for mixer in mixers if isinstance(mixer, AttentionSpec)]

    def compaction(self, rows: int, max_len: int, chunk: int) -> float:
        """Seconds of a decode step's share of compacting rows: each reads its pages and writes its budget of cells once
        in an interval."""
        plan, policy = self.plan(self.replicas, max_len, chunk), self.cache_policy
        if policy is None or not plan.bounds:
            return 0.0
        cells = [columns * plan.page + policy.budgets[i] for i, columns in enumerate(plan.level_columns)]
        levels = (block.level for block in plan.blocks)
        moved = sum(x.layers * x.written * cells[i] for x, i in zip(self.blocks, levels, strict=True))
        return rows * moved / policy.interval / (self.target.hbm_bandwidth * ATTAINED.memory)

    def memory(self, batch: int, max_len: int, chunk: int) -> Memory:
        """Memory for `batch` rows over all replicas, prefilled in chunks of `chunk` tokens."""
        model, rows = self.model, batch // self.replicas
        cache, scores, plan = 0, 0, self.plan(batch, max_len, chunk)
        for block, planned in zip(self.blocks, plan.blocks, strict=True):
            cache += sum(array.nbytes(self.shards) for array in planned.owned)
            if isinstance(planned, BlockState):
                continue
            scores = max(scores, block.heads * plan.slots(planned) // self.shards.size(axes.POSITIONS))
        weights = sum(m.nbytes for m in self.matrices)
        vocab = model.layout.vocab // self.shards.size(axes.VOCAB)
        tokens = max(rows, chunk // self.shards.size(axes.TOKENS))
        widest = max(self._widest(m, tokens) for m in self.matrices if m.use == "tokens")
        live = 2 * widest + tokens * (4 * self.width + scores * 4) + rows * vocab * 4
        state = _state_bytes(rows, vocab, sum(plan.level_columns), self.config.loop)
        return Memory(weights, cache, state, 2 * live)

    def _widest(self, matrix: Matrix, tokens: int) -> int:
        """Activations of a device's tokens that a matrix produces; for experts, as many as a round has room for."""
        tokens *= self._row_shards(matrix)
        if matrix.experts is None:
            return tokens * matrix.inner
        everyone = tokens * self.shards.size(axes.EXPERTS)
        return pairs_room(matrix.experts.router.chosen, tokens, everyone, self._backend) * (matrix.inner + self.width)

    def _row_shards(self, matrix: Matrix) -> int:
        """The number of devices whose tokens a matrix multiplies."""
        return self.shards.mlp_row_shards if matrix.in_mlp else 1

    def decode(
        self, rows: int, live: float, mode: Mode = "greedy", longest: int | None = None, drafts: int = 0
    ) -> Work:
        """A decode step of `rows` rows of each replica, `live` positions of each in the cache.

        longest: positions that the program has room for, by default as many. drafts: of each row, which the step
        verifies; what makes them is not counted. Collectives are those of a greedy step.
        """
        key = ProgramKey(mode, rows, limit=1, steps=8, drafts=drafts)
        longest = math.ceil(live) if longest is None else longest
        queries = Queries(key.decoded, rows, live, live, decode=True, longest=longest)
        return self._work(key, key.decoded, (queries,))

    def prefill(self, chunk: int, start: float) -> Work:
        """A chunk of `chunk` prompt tokens of one row of each replica, the first at position `start`."""
        return self.mixed(
            ProgramKey("greedy", 0, limit=round(start + chunk), chunks=1, chunk=chunk), 0, [(start, chunk)]
        )

    def mixed(self, key: ProgramKey, live: float, chunks: Sequence[tuple[float, int]]) -> Work:
        """A step of a program with chunks of prompts, and perhaps rows that decode.

        live: positions of each of the program's rows in the cache, on average. chunks: (position of the first token,
        tokens) of a replica's chunks. Tokens without a chunk are multiplied with the rest and attend to nothing.
        """
        shares = self.shards.size(axes.TOKENS)
        tokens, seen = key.chunks * key.chunk / shares, sum(n * (start + n / 2) for start, n in chunks)
        ends = sum(start + n for start, n in chunks) / len(chunks)
        queries = [Queries(tokens, len(chunks), ends, seen / (key.chunks * key.chunk), ring=shares)]
        if key.rows:
            queries.append(Queries(key.rows, key.rows, live, live, decode=True, longest=key.limit))
        return self._work(key, key.chunks + key.rows, queries)

    @cached_property
    def shallow(self) -> Deployed:
        """This deployment of the model with a core of `depth` steps."""
        assert self.config.loop is not None
        loop = replace(self.config.loop, steps=self.depth)
        return replace(self, config=replace(self.config, loop=loop), depth=None)

    def _work(self, key: ProgramKey, sampled: int, queries: Sequence[Queries]) -> Work:
        if self.depth is not None:
            return self.shallow._work(key, sampled, queries)
        tokens, decode = sum(q.tokens for q in queries), not key.chunks
        count = {"tokens": tokens, "sampled": sampled, "looked up": 0, "compared": 2 * tokens}
        matrices = self._multiplied(tokens)
        parts = [self._product(m, count[m.use], tokens) for m in matrices if m.use != "looked up"]
        flops, weights, moved = (sum(column) for column in zip(*(sums for _, sums in parts), strict=True))
        kernels, cache = [part for part, _ in parts], 0.0
        thin = [self._thin_products(m.packed, m, count[m.use]) for m in matrices if m.packed is not None]
        kernels, flops = kernels + thin, flops + sum(part.flops for part in thin)
        for block, q in itertools.product(self.blocks, queries):
            done, touched = self._attention(block, q)
            latent, partial_sums = isinstance(block.attention, MlaSpec), self._partial_sums(block, q)
            rate = attention_rate(latent, q.decode, self._backend)
            kernels.append(Part(rate, done, touched + partial_sums))
            flops, cache, moved = flops + done, cache + touched, moved + partial_sums
        logits = self._logits(key.mode, sampled)
        kernels.append(Part(PEAK, 0.0, logits))
        moved += logits
        ahead = inf if fetches_ahead(tokens, self._backend) else self._fetched_by_kernels
        small = self._small(Tokens(tokens, self.width, chunk=not decode))
        return Work(flops, weights, cache, moved, self._collectives(key), tuple(kernels), small, ahead)

    @cached_property
    def _fetched_by_kernels(self) -> float:
        """Bytes of weights that kernels fetch ahead in a decode step; see `inferlib.models.fetched_weights`."""
        config, backend = self.config, self._backend
        fit = all(kind_of_block(layer, config) is PreNormBlock and layer.mlp is not None for layer in config.layers)
        if backend.fetch_ahead == "xla" or not fit or self.shards.splits_tokens:
            return 0.0
        latent = any(isinstance(layer.attention, MlaSpec) for layer in config.layers)
        free = fetch_ahead.free_bytes(backend, latent=latent, experts=_EXPERTS if config.mixtures else 0)
        weights = sum(m.nbytes for m in self.matrices if m.use == "tokens" and m.experts is None)
        return min(weights, len(config.layers) * free)

    def _multiplied(self, tokens: float) -> list[Matrix]:
        """The matrices, each as often as a step of `tokens` tokens multiplies by it. A loop whose weights stay on chip
        reads them for the first time only."""
        matrices, once = [], self.reads_core_once(tokens)
        for m in (*self.matrices, *self._compared):
            first = replace(m, on_chip=True) if once and m.looped else m
            again = replace(first, nbytes=0) if first.on_chip else first
            matrices += [first] + [again] * (m.passes - 1)
        return matrices

    def reads_core_once(self, tokens: float) -> bool:
        """Whether a step of `tokens` tokens on a device keeps the weights of a loop on chip."""
        return tokens <= MEMORY_BOUND_ROWS and self.loop_weights.name != "xla"

    @cached_property
    def loop_weights(self) -> Choice:
        """Whether the weights of a loop, if the model has one, stay on chip over its steps while rows decode."""
        if self.config.loop is None or self._backend.loop_weights == "xla":
            return Choice("xla")
        return _loop_weights(self.config, self.parallel, self.quantization, self._backend)

    def _attention(self, block: Block, q: Queries) -> tuple[float, float]:
        """Operations of a block's mixers, and bytes of its cache that they read and write."""
        spec, layers = block.attention, block.layers
        if isinstance(spec, Recurrent):
            drafted = q.decode and q.tokens > q.rows  # then states are read, and later replayed: read again and written
            done = (4.0 if drafted else 2.0) * layers * q.tokens * block.heads * spec.token_products
            return done, (3.0 if drafted else 2.0) * layers * q.rows * block.state
        share = q.ring / self.shards.size(axes.POSITIONS)  # of the positions that a device sees
        reach, width = spec.reach or float("inf"), spec.pair_width(decode=q.decode)
        done = 2.0 * layers * q.tokens * block.heads * width * min(q.seen, reach) * share
        if isinstance(spec, MlaSpec) and not q.decode:  # of the chunk itself with the matrices
            expanded = (q.rows * q.live * share - q.tokens) * spec.kv_rank * (spec.nope_dim + spec.value_dim)
            done += 2.0 * layers * block.heads * max(expanded, 0.0)
        rows = q.tokens if q.decode and share < 1 and self.target.platform != "gpu" else q.rows  # see `RowQueries`
        read = rows * min(q.live, reach + q.tokens * q.ring / rows) * share
        passed = read * (q.ring - 1) / q.ring
        return done, layers * (block.cached * (read + passed) + block.written * q.tokens * share)

    def _partial_sums(self, block: Block, q: Queries) -> float:
        """Bytes of attention of the shares of rows, which a kernel writes and another one merges."""
        spec, backend = block.attention, self._backend
        if not q.decode or not isinstance(spec, AttentionSpec) or backend.decode_attention != "pallas_gpu":
            return 0.0
        kv_heads = block.heads * spec.kv_heads // spec.heads
        longest = min(q.longest, spec.reach or q.longest)
        count = shares(q.rows * kv_heads, spec.head_dim, longest)
        return 2.0 * 4.0 * block.layers * q.tokens * block.heads * (spec.head_dim + 1) * count * (count > 1)

    def _logits(self, mode: Mode, rows: float) -> float:
        """Bytes of the passes over the logits of a step that samples for `rows` rows."""
        vocab, chip = self.model.layout.vocab // self.shards.size(axes.VOCAB), self.target.chip
        on_chip = 4 * rows * vocab <= chip.vmem_bytes - chip.scratch_bytes
        return 0.0 if on_chip else logits_bytes(mode, rows, vocab)

    @property
    def _compared(self) -> list[Matrix]:
        """The head as each step of a loop reads it, if tokens leave by what it makes of their states before and after
        (see `inferlib.models.exit_rules.Divergence`)."""
        loop = self.config.loop
        if loop is None or loop.early_exit != "kl" or not self.config.exits_early:
            return []
        return [replace(m, use="compared", passes=loop.steps) for m in self.matrices if m.use == "sampled"]

    def _product(self, m: Matrix, rows: float, tokens: float) -> tuple[Part, tuple[float, float, float]]:
        """A matrix's products with `rows` rows, and their operations, bytes of weights, and bytes of activations in
        HBM; a step has `tokens` tokens on a device."""
        everyone = tokens * self.shards.mlp_row_shards * self.shards.size(axes.EXPERTS)
        # On average, a device's experts are chosen as often as its tokens choose.
        times = rows * self._row_shards(m) * (m.experts.router.chosen if m.experts else 1)
        flops, moved = 2.0 * times * m.elements, 2.0 * times * self.width
        moved += 2.0 * times * m.inner * (m.use != "sampled")  # logits: see `_logits`
        chip = self.target.chip
        moved *= m.layers * (moved > chip.vmem_bytes - chip.scratch_bytes)  # else they stay on chip
        read = m.experts.read_share(everyone) if m.experts else 1.0  # share of the weight
        rate, elements = PEAK if m.experts else dense_rate(tokens, self._backend), 0.0
        if m.packed is not None and times:
            rate, each = product_rate(m.packed, math.ceil(times), self._backend)
            numbers = numbers_of(m.packed, math.ceil(times), self._backend)
            flops *= self.target.rate("bfloat16") / self.target.rate(numbers)
            read = times / m.count if each else read
            elements = m.elements * m.count * read
        if m.on_chip:
            rate, elements = rates.ON_CHIP.get(self._backend.generation, rates.ON_CHIP[None]), m.elements
        product = Part(rate, rates.rounded(rate, times) * flops, m.nbytes * read + moved, elements, m.layers)
        return product, (flops, m.nbytes * read, moved)

    def _thin_products(self, weight: WeightSpec, m: Matrix, rows: float) -> Part:
        """The rotation of a matrix's inputs and the branch of low rank beside it, if it has them. Inputs and results
        stay on chip, and the bytes of factors are the weight's."""
        scheme, flops, launches = weight.scheme, 0.0, 0
        inputs = prod(weight.shape[i] for i in weight.contracting)
        if scheme is not None and scheme.rotation:
            flops, launches = float(operations(scheme.rotation) * inputs), len(factors_of(scheme.rotation))
        on_gpu = self._backend.matmul == "pallas_gpu"
        if weight.rank:
            flops += 2.0 * weight.rank * (inputs + prod(weight.shape) / inputs)
            launches += rates.THIN_LAUNCHES_GPU if on_gpu else 2
        rate = rates.THIN_GPU if on_gpu else PEAK
        return Part(rate, flops * rows * self._row_shards(m) * m.layers, 0.0, 0.0, m.layers * launches)

    def _small(self, tokens: Tokens) -> float:
        """Seconds of the small operations of all layers."""
        scheme = None if self.quantization is None else self.quantization.scheme
        layers = self.config.layers
        return sum(
            self.config.runs(i) * small_seconds(layer, tokens, scheme, self.target, self.shards)
            for i, layer in enumerate(layers)
        )

    def _collectives(self, key: ProgramKey) -> tuple[Collective, ...]:
        plan = self.plan(self.replicas, key.limit, key.chunk or 1)
        return estimate(self.model, plan, self.shards, key, self._backend)

    @cached_property
    def _backend(self) -> Backend:
        if self.target.platform != "tpu":
            return Backend.for_platform(self.target.platform, self.shards, self.target.chip.cores)
        backend = Backend.for_platform("tpu", self.shards, self.target.chip.cores, self.target.chip.name)
        return tpu_backend(backend, self.config, self.quantization, self.shards, self.target.chip.name)


@lru_cache(maxsize=1024)
def _abstract(config: ModelConfig, parallel: Parallelism, quantization: Quantization | None) -> AbstractModel:
    shards, names = planned_shards(parallel), (axes.KV_HEADS, axes.MLP, axes.VOCAB)
    if quantization is not None:  # no mesh may cut its groups
        names = (*names, axes.EMBED, axes.HEAD_OUT, axes.LATENT)
    sizes = tuple(shards.size(name) for name in names)
    return replace(_traced(_Sizes(config, quantization, sizes, shards)), layout=Layout(config, shards))


@lru_cache(maxsize=64)
def _loop_weights(
    config: ModelConfig, parallel: Parallelism, quantization: Quantization | None, backend: Backend
) -> Choice:
    shards = planned_shards(parallel)
    options: dict[str, Any] = dict(quantization=quantization, backend=backend, shards=shards)
    model = abstract_model(config, "bfloat16", scan=True, **options)
    return on_chip.choose(loop_products(model, shards), backend)


@dataclass(frozen=True)
class _Sizes:
    """A key for `_traced`: meshes that split padded sizes in the same way share abstract weights, which take a while to
    trace."""

    config: ModelConfig
    quantization: Quantization | None
    sizes: tuple[int, ...]
    shards: Shards = field(compare=False)


@lru_cache(maxsize=64)
def _traced(it: _Sizes) -> AbstractModel:
    return abstract_model(it.config, "bfloat16", quantization=it.quantization, scan=True, shards=it.shards)


def _matrices(model: AbstractModel, shards: Shards) -> tuple[Matrix, ...]:
    """All weights; norms and biases count as matrices of one column."""
    matrices = []
    for weight in model.weights:
        local = shards.local_shape(weight.axes, weight.shape)
        names = dict(zip(weight.axes, local, strict=True))
        layers, count = names.pop(axes.LAYERS, 1), names.pop(axes.EXPERTS, 1)
        elements, experts = prod(local) // count, model.mixture_of(weight)
        matrix = weight.init == "normal" and len(names) > 1
        # A table of per-layer embeddings is looked up.
        columns = next((names[n] for n in (axes.EMBED, axes.LATENT, axes.PER_LAYER) if n in names), 1)
        inner = elements // layers // columns if matrix else 0
        use = "tokens"
        if model.looks_up(weight.name):
            use = "looked up"
        elif weight.block is None and axes.VOCAB in names:
            use = "sampled"
        size = sum(nbytes(shards.local_shape(a.axes, a.shape), a.dtype) for a in weight.arrays)
        counts = (elements, size, layers, inner) if matrix else (0, size, 0, 0)
        packed = None
        if weight.scheme is not None:
            one = weight.of_layer
            packed = replace(one, shape=shards.local_shape(one.axes, one.shape))
        in_mlp, passes = weight.part.startswith("mlp."), model.passes(weight)
        looped = passes > 1 and weight.block is not None and bool(weight.contracting)
        matrices.append(Matrix(*counts, use, experts, in_mlp, count, packed, passes, looped))
    return tuple(matrices)


@lru_cache(maxsize=1024)
def _state_bytes(rows: int, vocab: int, columns: int, loop: LoopSpec | None) -> int:
    numbers = tuple(name for name, there in of_loop(loop).items() if there)
    state = jax.eval_shape(lambda: RowState.zeros(rows, vocab, columns, numbers=numbers))
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
