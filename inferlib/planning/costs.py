"""What a step costs a device: operations, bytes, collectives, and from them time.

The analytical model of Pope et al. 2022 ("Efficiently Scaling Transformer Inference") and of the JAX scaling book.
Weights, cache and collectives are those of the abstract model, the cache plan and `explain`; nothing is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

import jax
import numpy as np

from inferlib.cache.plan import BlockState, CachePlan, plan_cache
from inferlib.config import check_kv_cache_dtype
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import Mixer, MlaSpec, ModelConfig, MoeSpec
from inferlib.models.layers.exchange import pairs_room
from inferlib.models.layout import Layout
from inferlib.models.quantization import Quantization
from inferlib.models.recurrent import Recurrent
from inferlib.ops.backend import Backend
from inferlib.ops.quantized import nbytes
from inferlib.planning.collectives import Collective
from inferlib.planning.estimate import estimate
from inferlib.planning.network import ATTAINED, IDEAL, Efficiency, Network, place
from inferlib.programs.program import ProgramKey
from inferlib.programs.row_state import RowState
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, planned_shards
from inferlib.targets import Target


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
    """A weight's part on a device. elements: in all its layers, of experts those of one; inner: those of a layer per
    column of the model. experts: of which mixture. fed: of the feed-forward, see `Shards.feeders`."""

    elements: int
    nbytes: int
    layers: int
    inner: int
    use: Literal["tokens", "sampled", "looked up"]
    experts: MoeSpec | None = None
    fed: bool = False


@dataclass(frozen=True)
class Block:
    """Layers that are alike, on a device. heads: of queries, or of values that have a state; cached: bytes of a
    position in the cache that a layer reads, its own or another's; state: bytes of a row that a layer reads and
    writes."""

    layers: int
    attention: Mixer
    heads: int
    cached: int
    state: int

    @property
    def written(self) -> int:
        """Numbers that a layer writes for a token."""
        return self.cached if self.attention.cache_of is None else 0


@dataclass(frozen=True)
class Deployed:
    """A model on a mesh of a target. quantization: of the weights, None for bfloat16; kv_cache_dtype: likewise.

    Raises ConfigurationError for an unknown one."""

    config: ModelConfig
    target: Target
    parallel: Parallelism
    quantization: Quantization | None = None
    kv_cache_dtype: str | None = None

    def __post_init__(self):
        check_kv_cache_dtype(self.kv_cache_dtype)

    @property
    def weights(self) -> str:
        """What they are kept in."""
        return str(self.quantization or "bfloat16")

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
        return _abstract(self.config, self.parallel, self.quantization)

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
        return _matrices(self.model, self.shards)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        plan, blocks = self.plan(self.replicas, self.config.context, 1), []
        for block, layers in zip(plan.blocks, self.model.blocks(), strict=True):
            spec = self.config.layers[layers[0]].attention
            layout = self.model.layout.heads(spec)
            heads = layout.groups * layout.queries // self.shards.size(axes.KV_HEADS)
            cached = sum(array.position_bytes(self.shards) for array in block.arrays)
            state = block.row_bytes(self.shards) if isinstance(block, BlockState) else 0
            blocks.append(Block(len(layers), spec, heads, cached, state))
        return tuple(blocks)

    def plan(self, rows: int, max_len: int, chunk: int) -> CachePlan:
        kind = dict(dtype=self.kv_cache_dtype or "bfloat16", platform=self.target.platform)
        return plan_cache(self.model, rows=rows, max_len=max_len, chunk=chunk, **kind)

    def memory(self, batch: int, max_len: int, chunk: int) -> Memory:
        """Of `batch` rows over all replicas, prefilled by chunks of `chunk` tokens."""
        model, rows = self.model, batch // self.replicas
        cache, scores = 0, 0
        for block, planned in zip(self.blocks, self.plan(batch, max_len, chunk).blocks, strict=True):
            cache += sum(array.nbytes(self.shards) for array in planned.held)
            if isinstance(planned, BlockState):
                continue
            scores = max(scores, block.heads * self.shards.local_shape(planned.axes, planned.shapes[0])[-2])
        weights = sum(m.nbytes for m in self.matrices)
        vocab = model.layout.vocab // self.shards.size(axes.VOCAB)
        tokens = max(rows, chunk // self.shards.size(axes.TOKENS))
        widest = max(self._widest(m, tokens) for m in self.matrices if m.use == "tokens")
        live = 2 * widest + tokens * (4 * self.width + scores * 4) + rows * vocab * 4
        return Memory(weights, cache, _state_bytes(rows, vocab), 2 * live)

    def _widest(self, matrix: Matrix, tokens: int) -> int:
        """Numbers of a layer that a device's tokens take beside a matrix; of experts, those a round has room for."""
        tokens *= self._feeders(matrix)
        if matrix.experts is None:
            return tokens * matrix.inner
        everyone = tokens * self.shards.size(axes.EXPERTS)
        return pairs_room(matrix.experts.router.chosen, tokens, everyone, self._backend) * (matrix.inner + self.width)

    def _feeders(self, matrix: Matrix) -> int:
        """Of how many devices a matrix takes the tokens."""
        return self.shards.feeders if matrix.fed else 1

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
        everyone = tokens * self.shards.feeders * self.shards.size(axes.EXPERTS)
        flops = moved = weights = cache = 0.0
        for m in self.matrices:
            # A device's experts take, on average, as many choices as its tokens make.
            times = count[m.use] * self._feeders(m) * (m.experts.router.chosen if m.experts else 1)
            flops += 2.0 * times * m.elements
            moved += 2.0 * times * m.layers * (self.width + m.inner)
            if m.use != "looked up":
                weights += m.nbytes * (m.experts.read_share(everyone) if m.experts else 1)
        share = ring / self.shards.size(axes.POSITIONS)  # of the positions that a device sees
        for block in self.blocks:
            spec, layers = block.attention, block.layers
            if isinstance(spec, Recurrent):
                flops += 2.0 * layers * tokens * block.heads * spec.token_products
                cache += 2.0 * layers * rows * block.state
                continue
            reach, width = spec.reach or float("inf"), spec.pair_width(decode=not key.chunks)
            flops += 2.0 * layers * tokens * block.heads * width * min(seen, reach) * share
            if isinstance(spec, MlaSpec) and key.chunks:  # of the chunk itself with the matrices
                expanded = (live * share - tokens) * spec.kv_rank * (spec.nope_dim + spec.value_dim)
                flops += 2.0 * layers * block.heads * max(expanded, 0.0)
            read = rows * min(live, reach + tokens * ring / rows) * share
            passed = read * (ring - 1) / ring
            cache += layers * (block.cached * (read + passed) + block.written * tokens * share)
        return Work(flops, weights, cache, moved, self._collectives(key))

    def _collectives(self, key: ProgramKey) -> tuple[Collective, ...]:
        plan = self.plan(self.replicas, key.limit, key.chunk or 1)
        return estimate(self.model, plan, self.shards, key, self._backend)

    @cached_property
    def _backend(self) -> Backend:
        return Backend.for_platform(self.target.platform, self.shards, self.target.chip.cores)


@lru_cache(maxsize=1024)
def _abstract(config: ModelConfig, parallel: Parallelism, quantization: Quantization | None) -> AbstractModel:
    shards, names = planned_shards(parallel), (axes.KV_HEADS, axes.MLP, axes.VOCAB)
    if quantization is not None:  # no mesh may cut its groups
        names = (*names, axes.EMBED, axes.HEAD_OUT, axes.LATENT)
    sizes = tuple(shards.size(name) for name in names)
    return replace(_traced(_Sizes(config, quantization, sizes, shards)), layout=Layout(config, shards))


@dataclass(frozen=True)
class _Sizes:
    """Meshes that split the model's padded sizes alike share its abstract weights, which take a while to trace."""

    config: ModelConfig
    quantization: Quantization | None
    sizes: tuple[int, ...]
    shards: Shards = field(compare=False)


@lru_cache(maxsize=64)
def _traced(it: _Sizes) -> AbstractModel:
    return abstract_model(it.config, "bfloat16", quantization=it.quantization, scan=True, shards=it.shards)


def _matrices(model: AbstractModel, shards: Shards) -> tuple[Matrix, ...]:
    """Every weight, the norms and biases as matrices of one column."""
    matrices = []
    for weight in model.weights:
        local = shards.local_shape(weight.axes, weight.shape)
        names = dict(zip(weight.axes, local, strict=True))
        layers, count = names.pop(axes.LAYERS, 1), names.pop(axes.EXPERTS, 1)
        elements, experts = prod(local) // count, None
        if axes.EXPERTS in weight.axes:
            experts = model.config.layers[model.layers_of(weight.block)[0]].mlp
        matrix = weight.init == "normal" and len(names) > 1
        # Of per-layer embeddings, the table is looked up.
        columns = next((names[n] for n in (axes.EMBED, axes.LATENT, axes.PER_LAYER) if n in names), 1)
        inner = elements // layers // columns if matrix else 0
        use = "tokens"
        if model.looks_up(weight.name):
            use = "looked up"
        elif weight.block is None and axes.VOCAB in names:
            use = "sampled"
        size = sum(nbytes(shards.local_shape(a.axes, a.shape), a.dtype) for a in weight.arrays)
        counts = (elements, size, layers, inner) if matrix else (0, size, 0, 0)
        matrices.append(Matrix(*counts, use, experts, fed=weight.part.startswith("mlp.")))
    return tuple(matrices)


@lru_cache(maxsize=1024)
def _state_bytes(rows: int, vocab: int) -> int:
    state = jax.eval_shape(lambda: RowState.zeros(rows, vocab))
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in state)
