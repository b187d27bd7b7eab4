"""What a step costs a device: operations, bytes, collectives, and from them time.

The analytical model of Pope et al. 2022 ("Efficiently Scaling Transformer Inference") and of the JAX scaling book.
Weights, cache and collectives are those of the abstract model, the cache plan and `explain`; nothing is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, get_args

import jax
import numpy as np

from inferlib.cache.plan import CachePlan, plan_cache
from inferlib.compile.network import ATTAINED, IDEAL, Efficiency, Network, place
from inferlib.compile.programs import ProgramKey
from inferlib.compile.state import RowState
from inferlib.compile.targets import Target
from inferlib.explain import Collective, explain_step
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.layout import Layout
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, planned_shards

Quantization = Literal["int8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)


@dataclass(frozen=True)
class Work:
    """One step of one device. flops: at the rate of bfloat16; bytes: read from and written to HBM."""

    flops: float
    weight_bytes: float
    cache_bytes: float
    activation_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()

    @property
    def nbytes(self) -> float:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. compute, memory, network: each alone, as attained; seconds: together; floor: with the
    published figures attained and everything hidden behind the longest of the three."""

    compute: float
    memory: float
    network: float
    seconds: float
    floor: float

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {"compute": self.compute, "memory": self.memory, "network": self.network}
        return max(parts, key=parts.__getitem__)


def step_time(work: Work, network: Network) -> StepTime:
    """How long a step takes.

    Memory and compute overlap. A collective waits for what was computed, but meanwhile the next weights are fetched, as
    many as on-chip memory holds beside the compiler's scratch.
    """
    target = network.target
    compute, memory, waits = _alone(work, network, ATTAINED)
    waiting = sum(count * t for count, t in waits)
    free = (target.chip.vmem_bytes - target.chip.scratch_bytes) / (target.hbm_bandwidth * ATTAINED.memory)
    fetched = min(memory, sum(count * min(t, free) for count, t in waits))
    ideal_compute, ideal_memory, ideal_waits = _alone(work, network, IDEAL)
    return StepTime(
        compute,
        memory,
        waiting,
        seconds=waiting + max(compute, memory - fetched),
        floor=max(ideal_compute, ideal_memory, sum(count * t for count, t in ideal_waits)),
    )


def _alone(work: Work, network: Network, efficiency: Efficiency) -> tuple[float, float, list[tuple[int, float]]]:
    """Seconds of compute and of memory; how often and how long collectives are waited for. No weights are used between
    a reduce-scatter and the all-gather that follows, so that they are one wait."""
    target = network.target
    compute = work.flops / (target.rate("bfloat16") * efficiency.compute)
    memory = work.nbytes / (target.hbm_bandwidth * efficiency.memory)
    waits, scattered = [], sum(c.count for c in work.collectives if c.kind == "reduce-scatter")
    pairs = 0.0
    for c in work.collectives:
        if scattered and c.kind in ("reduce-scatter", "all-gather"):
            pairs += c.count * network.seconds(c, efficiency)
        else:
            waits.append((c.count, network.seconds(c, efficiency)))
    return compute, memory, [*waits, (scattered, pairs / max(scattered, 1))]


@dataclass(frozen=True)
class Memory:
    """Bytes on a device. temporaries: assumed, the activations and attention scores of the widest layer and the logits,
    twice."""

    weights: int
    cache: int
    state: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.state + self.temporaries


@dataclass(frozen=True)
class Matrix:
    """A weight's part on a device. elements: in all its layers; inner: those of a layer per column of the model."""

    elements: int
    nbytes: int
    layers: int
    inner: int
    use: Literal["tokens", "sampled", "looked up"]


@dataclass(frozen=True)
class Block:
    """The attention of `layers` layers on a device: KV heads, query heads, and its share of a row's positions."""

    layers: int
    heads: int
    queries: int
    head_dim: int
    window: float
    share: float


@dataclass(frozen=True)
class Deployed:
    """A model on a mesh of a target. quantization: of the layers' matrices and the head, None for bfloat16."""

    config: ModelConfig
    target: Target
    parallel: Parallelism
    quantization: Quantization | None = None

    @cached_property
    def shards(self) -> Shards:
        return planned_shards(self.parallel)

    @cached_property
    def network(self) -> Network:
        """Raises TargetError if the mesh is not the slice."""
        return place(self.target, tuple(self.shards.mesh.shape.items()) if self.shards.mesh else ())

    @cached_property
    def model(self) -> AbstractModel:
        """Raises ShardingError if it does not divide over the mesh."""
        return _abstract(self.config, self.parallel)

    @property
    def replicas(self) -> int:
        """Into how many shares the rows are split."""
        return self.shards.size(axes.ROWS)

    @property
    def width(self) -> int:
        """Of the residual stream on a device."""
        return self.config.dim // self.shards.size(axes.EMBED)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        return _matrices(self.model, self.shards, self.quantization)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        plan, found = self.plan(self.replicas, self.config.context, 1), []
        for block, layers in zip(plan.blocks, self.model.blocks(), strict=True):
            spec = self.config.layers[layers[0]].attention
            *_, heads, slots, head_dim = self.shards.local_shape(block.axes, block.shape)
            queries, share = heads * self.model.layout.heads(spec).queries, slots / block.shape[-2]
            found.append(Block(len(layers), heads, queries, head_dim, spec.window or float("inf"), share))
        return tuple(found)

    def plan(self, rows: int, max_len: int, chunk: int) -> CachePlan:
        return plan_cache(self.model, rows=rows, max_len=max_len, chunk=chunk, dtype="bfloat16")

    def memory(self, batch: int, max_len: int, chunk: int) -> Memory:
        """Of `batch` rows over all replicas, prefilled by chunks of `chunk` tokens."""
        model, rows = self.model, batch // self.replicas
        cache, scores = 0, 0
        for block, held in zip(self.blocks, self.plan(batch, max_len, chunk).blocks, strict=True):
            local = self.shards.local_shape(held.axes, held.shape)
            cache += 2 * 2 * prod(local)
            scores = max(scores, block.queries * local[-2])
        weights = sum(m.nbytes for m in self.matrices)
        vocab = model.layout.vocab // self.shards.size(axes.VOCAB)
        widest = max(m.inner for m in self.matrices if m.use == "tokens")
        tokens = max(rows, chunk // self.shards.size(axes.TOKENS))
        live = tokens * ((2 * self.width + widest) * 2 + scores * 4) + rows * vocab * 4
        return Memory(weights, cache, _state_bytes(rows, vocab), 2 * live)

    def decode(self, rows: int, live: float) -> Work:
        """A greedy decode step of `rows` rows of each replica, `live` positions of each in the cache."""
        key = ProgramKey("greedy", rows, limit=1, steps=8)
        return self._work(key, tokens=rows, sampled=rows, rows=rows, live=live, seen=live)

    def prefill(self, chunk: int, start: float) -> Work:
        """A chunk of `chunk` prompt tokens of one row of each replica, the first at position `start`."""
        shares, live = self.shards.size(axes.TOKENS), start + chunk
        key = ProgramKey("greedy", 0, limit=round(live), chunks=1, chunk=chunk)
        return self._work(key, tokens=chunk / shares, sampled=1, rows=1, live=live, seen=start + chunk / 2, ring=shares)

    def _work(
        self, key: ProgramKey, *, tokens: float, sampled: int, rows: int, live: float, seen: float, ring: int = 1
    ) -> Work:
        """tokens: on a device. live: positions read of a row's cache; seen: by a query, on average. ring: devices that
        pass on their shares of a row's cache, so that each reads all of it, and writes what it is given."""
        count = {"tokens": tokens, "sampled": sampled, "looked up": 0}
        flops = sum(2.0 * count[m.use] * m.elements for m in self.matrices)
        moved = sum(2.0 * count[m.use] * m.layers * (self.width + m.inner) for m in self.matrices)
        weights = sum(m.nbytes for m in self.matrices if m.use != "looked up")
        cache = 0.0
        for block in self.blocks:
            share = block.share * ring  # of the positions that a device sees
            flops += 4.0 * block.layers * tokens * block.queries * block.head_dim * min(seen, block.window) * share
            read = rows * min(live, block.window + tokens * ring / rows) * share
            written = tokens * share + read * (ring - 1) / ring
            cache += 2 * 2 * block.layers * block.heads * block.head_dim * (read + written)
        return Work(flops, weights, cache, moved, self._collectives(key))

    def _collectives(self, key: ProgramKey) -> tuple[Collective, ...]:
        return explain_step(
            self.model, self.plan(key.rows or 1, key.limit, key.chunk or 1), self.shards, key
        ).collectives


@lru_cache(maxsize=1024)
def _abstract(config: ModelConfig, parallel: Parallelism) -> AbstractModel:
    shards = planned_shards(parallel)
    sizes = tuple(shards.size(name) for name in (axes.KV_HEADS, axes.MLP, axes.VOCAB))
    return replace(_traced(_Sizes(config, sizes, shards)), layout=Layout(config, shards))


@dataclass(frozen=True)
class _Sizes:
    """Meshes that split the model's padded sizes alike share its abstract weights, which take a while to trace."""

    config: ModelConfig
    sizes: tuple[int, ...]
    shards: Shards = field(compare=False)


@lru_cache(maxsize=64)
def _traced(it: _Sizes) -> AbstractModel:
    return abstract_model(it.config, "bfloat16", scan=True, shards=it.shards)


def _matrices(model: AbstractModel, shards: Shards, quantization: Quantization | None) -> tuple[Matrix, ...]:
    """Every weight, the norms and biases as matrices of one column. int8 has a float32 scale per output channel."""
    tied, found = model.config.tied, []
    for spec in model.specs:
        local = shards.local_shape(spec.axes, spec.shape)
        names = dict(zip(spec.axes, local, strict=True))
        layers, elements = names.pop(axes.LAYERS, 1), prod(local)
        matrix = axes.EMBED in names and len(names) > 1
        inner = elements // layers // names[axes.EMBED] if matrix else 0
        use = "tokens"
        if spec.block is None and axes.VOCAB in names:
            use = "sampled" if tied or spec.part != "embed" else "looked up"
        nbytes = elements * 2
        if quantization == "int8" and matrix and use != "looked up" and not (tied and use == "sampled"):
            outputs = names[axes.EMBED] if spec.axes[-1] == axes.EMBED else inner
            nbytes = elements + 4 * layers * outputs
        found.append(Matrix(elements if matrix else 0, nbytes, layers if matrix else 0, inner, use))
    return tuple(found)


@lru_cache(maxsize=1024)
def _state_bytes(rows: int, vocab: int) -> int:
    state = jax.eval_shape(lambda: RowState.zeros(rows, vocab))
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in state)
