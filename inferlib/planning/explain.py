"""Where everything of a model lives on a mesh, and what its steps say to each other: promised, not measured.

Both follow from the abstract model and the rules alone, without a device or a compilation. On several hosts a program
also gathers its output, a few numbers per row, on every device.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console, Group

from inferlib.cache.plan import BlockCache, BlockState, CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import LayerSpec, MlaSpec, MlpSpec, MoeSpec
from inferlib.models.layers.exchange import exchange_of, pairs_room
from inferlib.models.layers.ring import in_ring, rings
from inferlib.models.recurrent import LightningSpec, Mamba2Spec
from inferlib.ops.backend import Backend
from inferlib.ops.cache_write import folded_rows
from inferlib.ops.quantized import nbytes
from inferlib.programs.program import Mode, ProgramKey, fuses
from inferlib.programs.row_state import RowState
from inferlib.sampling.params import MAX_LOGPROBS
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


@dataclass(frozen=True)
class Placement:
    """`count` arrays of one kind. axes: what each dimension means; mesh_axes: what splits it, None for nothing.

    shape: of one whole array; local_shape: of a device's part; nbytes: of the parts of all `count` on a device.
    """

    name: str
    axes: tuple[str | None, ...]
    mesh_axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class Collective:
    """`count` collectives of a step. nbytes: of the whole array of one: what an all-reduce or an all-gather returns,
    what a reduce-scatter, an all-to-all or a permutation takes, and a ragged all-to-all is expected to. axis: the mesh
    axes whose devices take part, joined by "+". A fused one is part of a kernel and not among XLA's collectives: see
    `programs.fuses` and, for a gather or a reduce-scatter during a product of so many `flops` on a device,
    `models.layers.ring`. Of tokens that go to experts in rounds the first counts (see `models.layers.exchange`)."""

    kind: Literal[
        *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute"),
        *("fused all-reduce", "fused all-gather", "fused reduce-scatter"),
    ]
    purpose: str
    axis: str
    nbytes: int
    count: int = 1
    flops: int = 0


@dataclass(frozen=True)
class Step:
    """One program's step (of a decode program: each of its `key.steps`). tokens: of each replica. expert_bytes: that a
    device reads of its experts' weights, expected where all are equally likely (see `MoeSpec.read_share`)."""

    key: ProgramKey
    tokens: int
    collectives: tuple[Collective, ...]
    expert_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its collectives, for each device."""
        return sum(c.count * c.nbytes for c in self.collectives)


@dataclass(frozen=True)
class Explanation:
    """`print` it. waste: see `Layout.waste`."""

    shards: Shards
    weights: tuple[Placement, ...]
    cache: tuple[Placement, ...]
    state: tuple[Placement, ...]
    waste: dict[str, float]
    steps: tuple[Step, ...]

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        placed = {name: [asdict(p) for p in getattr(self, name)] for name in ("weights", "cache", "state")}
        steps = [
            {
                "program": str(s.key),
                "tokens": s.tokens,
                "expert_bytes": s.expert_bytes,
                "collectives": [asdict(c) for c in s.collectives],
            }
            for s in self.steps
        ]
        mesh = dict(self.shards.mesh.shape) if self.shards.mesh is not None else {}
        return {"mesh": mesh, **placed, "waste": self.waste, "steps": steps}

    def __rich__(self) -> Group:
        from inferlib.planning.explain_text import tables

        return Group(*tables(self))

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=140, force_terminal=False, force_jupyter=False).print(self, highlight=False)
        return text.getvalue()


def explain(model: AbstractModel, plan: CachePlan, config: EngineConfig, keys: Sequence[ProgramKey]) -> Explanation:
    """Explain a model under `config.shards`, whose mesh may be abstract, and the steps of some of its programs."""
    place = partial(_place, config.shards)
    state = jax.eval_shape(partial(RowState.zeros, plan.rows, model.layout.vocab))
    fields = zip(RowState._fields, RowState.AXES, state, strict=True)
    return Explanation(
        config.shards,
        weights=_grouped(place(w.part, w.axes, w.shape, w.dtype) for w in model.specs),
        cache=_grouped(
            place(_named(b, i), x.axes, x.shape, x.dtype) for b in plan.blocks for i, x in enumerate(b.held)
        ),
        state=_grouped(place(name, names, x.shape, x.dtype) for name, names, x in fields),
        waste=model.layout.waste(),
        steps=tuple(
            explain_step(
                model,
                plan,
                config.shards,
                key,
                counted=config.counted,
                fused=fuses(model, config, key),
                backend=config.backend,
            )
            for key in keys
        ),
    )


# ---- placement


def _place(shards: Shards, name: str, names: tuple[str | None, ...], shape: tuple[int, ...], dtype) -> Placement:
    """A stacked weight or cache counts as one array for each of its layers."""
    count = 1
    if names[0] == axes.LAYERS:
        count, names, shape = shape[0], names[1:], shape[1:]
    mesh_axes = tuple(_joined(shards.mesh_axes(n)) for n in names)
    local = shards.local_shape(names, shape)
    return Placement(name, names, mesh_axes, shape, local, count * nbytes(local, dtype), count)


def _grouped(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """One entry for those that differ in count alone, in order of appearance."""
    groups: dict[tuple, Placement] = {}
    for p in placements:
        key = (p.name, p.axes, p.shape)
        old = groups.get(key)
        groups[key] = p if old is None else replace(old, count=old.count + p.count, nbytes=old.nbytes + p.nbytes)
    return tuple(groups.values())


# ---- collectives


def explain_step(
    model: AbstractModel,
    plan: CachePlan,
    shards: Shards,
    key: ProgramKey,
    *,
    counted: bool = False,
    fused: bool = False,
    backend: Backend = Backend(),  # noqa: B008
) -> Step:
    """What a step of a program will say over the mesh. counted: see `EngineConfig.counted`; fused: `programs.fuses`."""
    ledger, prompt = _Ledger(shards, fused, backend), key.chunks * key.chunk
    if fused:
        ledger.reduce("mailboxes", (axes.MLP,), (1,), np.float32)
    _forward(ledger, model, plan, key, backend)
    if key.chunks:
        ledger.reduce("last tokens of prompts", (axes.TOKENS,), (key.chunks, _width(model)), model.dtype)
    _head(ledger, model, key.chunks + key.rows)
    for rows in (key.rows, key.chunks):
        if rows:
            _sample(ledger, key.mode, rows, model.layout.vocab)
    if key.detail:
        positions = prompt // shards.size(axes.TOKENS)
        _head(ledger, model, positions)
        if key.detail == "logprobs":
            _score(ledger, positions, model.layout.vocab)
    if key.steps > 1 and not counted:
        ledger.reduce("whether to go on", (axes.ROWS,), (2,), np.int32)
    tokens = prompt // shards.size(axes.TOKENS) + key.rows
    return Step(key, prompt + key.rows, ledger.collectives(), expert_bytes(model, shards, tokens))


class _Ledger:
    """Takes note of the collectives of `Shards`, by the same names, where those would really take place."""

    def __init__(self, shards: Shards, fused: bool, backend: Backend):
        self.shards, self.fused, self.backend = shards, fused, backend
        self.times = 1  # that what is noted takes place
        self._counts: Counter[Collective] = Counter()

    def reduce(self, purpose: str, names: Sequence[str], shape: tuple[int, ...], dtype, count: int = 1) -> None:
        """A sum, maximum or minimum of arrays of this shape."""
        self.add("all-reduce", purpose, names, shape, dtype, count)

    def sum_tokens(self, purpose: str, names: Sequence[str], shape: tuple[int, int], dtype) -> None:
        scattered = self.shards.splits_tokens or self.shards.feeders > 1
        kind = "reduce-scatter" if scattered else "all-reduce"
        self.add(kind, purpose, names, self._padded(shape), dtype)

    def sum_layer(self, purpose: str, names: Sequence[str], shape: tuple[int, int], dtype, flops: int = 0) -> None:
        """The sum that ends a layer's attention or feed-forward. flops: of the product that it takes place with."""
        if flops:
            self.add("fused reduce-scatter", purpose, names, self._padded(shape), dtype, flops=flops)
        elif self.fused:
            self.add("fused all-reduce", purpose, names, shape, dtype)
        else:
            self.sum_tokens(purpose, names, shape, dtype)

    def all_tokens(self, purpose: str, shape: tuple[int, int], dtype, flops: int = 0) -> None:
        """flops: of the product that it takes place with."""
        if self.shards.splits_tokens:
            kind = "fused all-gather" if flops else "all-gather"
            self.add(kind, purpose, (axes.MLP,), self._padded(shape), dtype, flops=flops)

    def fed(self, purpose: str, shape: tuple[int, ...], dtype) -> None:
        if self.shards.feeders > 1:
            self.add("all-gather", purpose, (axes.MLP,), shape, dtype)

    def collectives(self) -> tuple[Collective, ...]:
        return tuple(replace(c, count=count) for c, count in self._counts.items())

    def _padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (self.shards.padded(shape[0]), shape[1]) if self.shards.splits_tokens else shape

    def add(
        self,
        kind: str,
        purpose: str,
        names: Sequence[str],
        shape: tuple[int, ...],
        dtype,
        count: int = 1,
        flops: int = 0,
    ) -> None:
        """names: the logical axes over which the devices speak. shape: see `Collective.nbytes`."""
        axis = _joined(self.shards.mesh_axes(*names))
        if axis and count:
            nbytes = prod(shape) * np.dtype(dtype).itemsize
            self._counts[Collective(kind, purpose, axis, nbytes, flops=flops)] += self.times * count


def expert_bytes(model: AbstractModel, shards: Shards, tokens: int) -> int:
    """Of a device's experts, bytes that a step reads if all are equally likely. tokens: of each device, which those
    that share the experts bring together."""
    total, tokens = 0.0, tokens * shards.feeders * shards.size(axes.EXPERTS)
    for weight in model.weights:
        if axes.EXPERTS in weight.axes:
            held = sum(nbytes(shards.local_shape(a.axes, a.shape), a.dtype) for a in weight.arrays)
            total += held * model.config.layers[model.layers_of(weight.block)[0]].mlp.read_share(tokens)
    return round(total)


def _joined(mesh_axes: tuple[str, ...]) -> str | None:
    return "+".join(mesh_axes) or None


def _width(model: AbstractModel) -> int:
    """Of the residual stream on a device."""
    return model.config.dim // model.layout.shards.size(axes.EMBED)


def _norm(ledger: _Ledger, model: AbstractModel, tokens: int, count: int = 1) -> None:
    numbers = 2 if model.config.norm.kind == "layer" else 1
    ledger.reduce("norms", (axes.EMBED,), (tokens, 1), np.float32, count * numbers)


def _forward(ledger: _Ledger, model: AbstractModel, plan: CachePlan, key: ProgramKey, backend: Backend) -> None:
    """The decoder over a step's tokens."""
    shards = ledger.shards
    tokens = key.chunks * key.chunk // shards.size(axes.TOKENS) + key.rows
    hidden, dtype = (tokens, _width(model)), model.dtype
    fed = (tokens * shards.feeders, _width(model))
    if model.config.mixtures:
        ledger.fed("which rows are active", fed[:1], np.int32)
    ledger.sum_tokens("embedding", (axes.VOCAB,), hidden, dtype)
    per_layer, streams = model.config.per_layer, model.config.streams
    if per_layer is not None:
        numbers = (tokens, len(model.config.layers) * per_layer.dim)
        ledger.sum_tokens("per-layer embeddings", (axes.VOCAB,), numbers, dtype)
        ledger.reduce("per-layer embeddings", (axes.EMBED,), numbers, dtype)
    _streams(ledger, model, tokens, 1)
    passed = set()  # the layers whose cache goes around outside of a scan: XLA passes it on once for all who share it
    for number, (layers, block) in enumerate(zip(model.blocks(), plan.blocks, strict=True)):
        layer, ledger.times = model.config.layers[layers[0]], len(layers)
        flops = _in_ring(model, shards, number, layer, tokens, backend)
        branches = 1 if layer.parallel or layer.mlp is None else 2
        _norm(ledger, model, tokens, 2 * layer.post_norm + layer.pre_norm * branches)
        if streams > 1:  # before and after the layer
            _norm(ledger, model, tokens, 2)
            ledger.reduce("modalities", (axes.EMBED,), (tokens, streams), np.float32, 2)
        if layer.laurel:
            _norm(ledger, model, tokens)
            ledger.reduce("learned residual", (axes.EMBED,), (tokens, layer.laurel), dtype)
        if per_layer is not None:
            _norm(ledger, model, tokens)
            ledger.reduce("gate of per-layer embeddings", (axes.EMBED,), (tokens, per_layer.dim), dtype)
        ledger.all_tokens("input of attention", hidden, dtype, flops["attn.qkv"])
        held, alone = layers[0] if layer.attention.cache_of is None else layer.attention.cache_of, len(layers) == 1
        if isinstance(layer.attention, LightningSpec):
            ledger.reduce("norm of all heads", (axes.KV_HEADS,), (tokens, 1), np.float32)
        if isinstance(layer.attention, Mamba2Spec):
            _shared_norm(ledger, model, layer.attention, tokens)
        if not isinstance(block, BlockState):
            _attention(ledger, model, layer, block, tokens, key, passes=not (alone and held in passed))
        passed |= {held} if alone else set()
        if not layer.parallel:
            ledger.sum_layer("attention", (axes.KV_HEADS, axes.HEAD_OUT), hidden, dtype, flops["attn.o"])
        if layer.mlp is None:
            continue
        if not layer.parallel:
            ledger.all_tokens("input of feed-forward", hidden, dtype, flops["mlp.gate_up"])
        ledger.fed("input of feed-forward", fed, dtype)
        if isinstance(layer.mlp, MoeSpec):
            _mixture(ledger, model, layer.mlp, fed[0])
        else:
            _gate_up(ledger, model, layer.mlp, fed[0])
        own_norms = isinstance(layer.mlp, MoeSpec) and layer.mlp.own_norms
        both = "attention and feed-forward" if layer.parallel else "feed-forward"
        ledger.sum_layer(both, (axes.MLP,), (fed[0], fed[1] * (1 + own_norms)), dtype, flops["mlp.down"])
    ledger.times = 1
    _streams(ledger, model, tokens, streams - 1)
    ledger.all_tokens("head", hidden, dtype)


def _shared_norm(ledger: _Ledger, model: AbstractModel, spec: Mamba2Spec, tokens: int) -> None:
    """Of a group's heads, where several devices have some of them."""
    if model.layout.heads(spec).copies > 1:
        devices = ledger.shards.size(axes.KV_HEADS)
        ledger.add("all-gather", "norms of groups of heads", (axes.KV_HEADS,), (tokens, devices), np.float32)


def _named(block: BlockCache | BlockState, number: int) -> str:
    """What one of a block's own arrays is."""
    if isinstance(block, BlockState):
        return block.names[number]
    return ("ring" if block.ring else "cache") + " scales" * (number >= len(block.shapes))


def _in_ring(
    model: AbstractModel, shards: Shards, block: int, layer: LayerSpec, tokens: int, backend: Backend
) -> Counter[str]:
    """Operations on a device of the products of a block's layer that take place with their collective, by weight."""
    names = in_ring(model.config, layer)
    weights = (w.of_layer for w in model.weights if w.block == block and w.part in names and w.scheme is None)
    shapes = {w.part: shards.local_shape(w.axes, w.shape) for w in weights}
    chosen = rings(model.config, layer, shapes, model.dtype, tokens, shards, backend)
    return Counter({name: 2 * tokens * prod(shapes[name]) for name in chosen})


def _streams(ledger: _Ledger, model: AbstractModel, tokens: int, taken: int) -> None:
    """From one residual to several, or back; `taken` of them are projected."""
    if model.config.streams > 1:
        ledger.add("all-gather", "parallel residuals", (axes.EMBED,), (tokens, taken, model.config.dim), model.dtype)
        ledger.reduce("magnitudes", (axes.EMBED,), (tokens, model.config.streams), np.float32)


def _gate_up(ledger: _Ledger, model: AbstractModel, spec: MlpSpec | MoeSpec, tokens: int) -> None:
    halves = 2 if spec.gated else 1
    width = halves * model.layout.hidden(spec.hidden) // ledger.shards.size(axes.MLP)
    ledger.reduce("gate and up", (axes.EMBED,), (tokens, width), model.dtype)
    if isinstance(spec, MlpSpec) and spec.sparsity:
        ledger.reduce("mean and variance of gates", (axes.MLP,), (tokens, 2), np.float32)


def _mixture(ledger: _Ledger, model: AbstractModel, spec: MoeSpec, tokens: int) -> None:
    """A mixture of experts before the sum over its width; `tokens` on a device."""
    dtype, chosen, width, devices = model.dtype, spec.router.chosen, _width(model), ledger.shards.size(axes.EXPERTS)
    ledger.reduce("router", (axes.EMBED,), (tokens, spec.router.experts), np.float32)
    # Own norms are two behind the experts, and before router and experts those of the residual, whose sum there is.
    _norm(ledger, model, tokens, 2 if spec.own_norms else int(spec.router.norm_eps is not None))
    how = exchange_of(spec, tokens, width * dtype.itemsize, devices, ledger.backend)
    sent = held = tokens * devices
    there, back = "all-gather", "reduce-scatter"
    if how is not None:
        there = back = "ragged-all-to-all" if how.ragged else "all-to-all"
        sent = how.rows
        held = how.room if how.ragged else sent
        if how.ragged:
            ledger.add("all-gather", "how many tokens", (axes.EXPERTS,), (devices, devices), np.int32)
        if held < devices * tokens or not how.ragged:
            ledger.reduce("how many rounds", (axes.ROWS,), (), np.int32)
    ledger.add(there, "tokens to experts", (axes.EXPERTS,), (sent, width), dtype)
    ledger.add(there, "routes", (axes.EXPERTS,), (sent, 2 * chosen), np.float32)
    pairs = pairs_room(chosen, tokens, held, ledger.backend)
    if pairs < held * chosen and ledger.shards.size(axes.EMBED) > 1:
        ledger.reduce("whether more rounds follow", (axes.ROWS,), (), np.int32)
    _gate_up(ledger, model, spec, pairs)
    ledger.add(back, "experts to tokens", (axes.EXPERTS,), (sent, width), dtype)
    if spec.shared is not None:
        _gate_up(ledger, model, spec.shared, tokens)
    if spec.shared_gate:
        ledger.reduce("gate of shared experts", (axes.EMBED,), (tokens, 1), np.float32)


def _attention(
    ledger: _Ledger,
    model: AbstractModel,
    layer: LayerSpec,
    block: BlockCache,
    tokens: int,
    key: ProgramKey,
    passes: bool,
) -> None:
    """A layer's attention before its output projection; `tokens` on a device. passes: whether the rows' cache goes
    around where tokens are dealt out."""
    shards, spec, dtype = ledger.shards, layer.attention, model.dtype
    layout, h = model.layout.heads(spec), spec.head_dim
    kv_heads, g = layout.groups // shards.size(axes.KV_HEADS), layout.queries
    if isinstance(spec, MlaSpec):
        ledger.reduce("latents", (axes.EMBED,), (tokens, spec.latent_dim), dtype)
        if spec.q_rank is None:
            ledger.reduce("queries", (axes.EMBED,), (tokens, kv_heads, h), dtype)
    else:
        ledger.reduce("queries, keys and values", (axes.EMBED,), (tokens, kv_heads, g + spec.fused_heads, h), dtype)
        if spec.own_values:
            ledger.reduce("values", (axes.EMBED,), (tokens, kv_heads, spec.value_dim), dtype)
        if spec.qk_norm == "full":
            ledger.reduce("QK-norm", (axes.KV_HEADS,), (tokens, 1), np.float32, count=1 + (spec.cache_of is None))
        if spec.gate is not None:
            numbers = 1 if spec.gate.per_head else spec.value_dim // shards.size(axes.HEAD_OUT)
            ledger.reduce("gates of heads", (axes.EMBED,), (tokens, kv_heads, g, numbers), np.float32)
    shares = shards.size(axes.POSITIONS)
    if shards.size(axes.TOKENS) > 1:
        slots = block.slots if block.ring else min(block.slots, -(-key.limit // shares) * shares)
        for array in block.arrays:
            heads = shards.local_shape(block.axes, block.shapes[0])[-3]
            size = array.shape[len(block.axes) - 1 :]  # that of a head, none of a scale
            passed = key.chunks, heads, folded_rows(slots // shares, array.fold), *size
            hops = shares - 1 if key.chunks and passes else 0
            ledger.add("collective-permute", "the rows' cache", (axes.POSITIONS,), passed, array.dtype, hops)
        tokens = key.rows
    if tokens:
        heads = (tokens, kv_heads, g)
        ledger.add("all-gather", "log-sum-exps", (axes.POSITIONS,), (shares, *heads), np.float32)
        if shards.size(axes.HEAD_OUT) > 1:
            ledger.add("all-to-all", "parts of attention", (axes.HEAD_OUT,), (*heads, spec.value_dim), dtype)
        else:
            ledger.reduce("parts of attention", (axes.POSITIONS,), (*heads, spec.value_dim), dtype)


def _head(ledger: _Ledger, model: AbstractModel, tokens: int) -> None:
    """The logits of `tokens` tokens."""
    _norm(ledger, model, tokens)
    vocab = model.layout.vocab // ledger.shards.size(axes.VOCAB)
    ledger.reduce("logits", (axes.EMBED,), (tokens, vocab), np.float32)


def _sample(ledger: _Ledger, mode: Mode, rows: int, vocab: int) -> None:
    """The next token of `rows` rows."""
    number = partial(ledger.reduce, names=(axes.VOCAB,), shape=(rows, 1), dtype=np.float32)
    if mode != "greedy":
        number("best logit")
        number("top-p mass")
        number("top-k and top-p, bit by bit", count=2 * 31)
    number("best token")
    number("best token", dtype=np.int32)
    if mode == "logprobs":
        _score(ledger, rows, vocab)


def _score(ledger: _Ledger, rows: int, vocab: int) -> None:
    """Log-probabilities at `rows` positions; `vocab` as laid out."""
    number = partial(ledger.reduce, "log-probabilities", (axes.VOCAB,), (rows, 1))
    number(np.float32, count=3)  # best, normaliser, chosen
    number(np.int32)  # rank
    shares = ledger.shards.size(axes.VOCAB)
    candidates = shares * min(MAX_LOGPROBS, vocab // shares)
    for dtype in (np.float32, np.int32):
        ledger.add("all-gather", "most likely tokens", (axes.VOCAB,), (rows, candidates), dtype)
