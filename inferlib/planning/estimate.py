"""The collectives of a greedy step by formulas, for the planner: it ranks hundreds of meshes in a second.

`explain` records a program's collectives from a trace, which takes a hundred times as long. A test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from inferlib.cache.plan import BlockCache, BlockState, CachePlan
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import AttentionSpec, LaneExchange, LayerSpec, MlaSpec, MlpSpec, MoeSpec
from inferlib.models.exit_rules import blocks_of
from inferlib.models.lanes import Way
from inferlib.models.layers.exchange import exchange_of, gathers, pairs_room, returns_parts
from inferlib.models.recurrent import Recurrent
from inferlib.ops.backend import Backend
from inferlib.ops.cache_write import folded_rows
from inferlib.planning.collectives import LATE_SUMS, Collective
from inferlib.programs.keys import ProgramKey
from inferlib.programs.product_choices import ring_products
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def estimate(
    model: AbstractModel, plan: CachePlan, shards: Shards, key: ProgramKey, backend: Backend
) -> tuple[Collective, ...]:
    """The collectives of one step of a greedy program without details."""
    ledger = _Ledger(shards, backend)
    _forward(ledger, model, plan, key)
    if key.chunks:
        ledger.reduce("last tokens of prompts", (axes.TOKENS,), (key.chunks, _width(model)), model.dtype)
        if model.config.exits_early:
            ledger.reduce("how many steps these took", (axes.TOKENS,), (key.chunks, 1), np.int32)
    _head(ledger, model, key.chunks + key.decoded)
    for rows, count in ((key.rows, 1 + key.drafts), (key.chunks, 1)):
        if rows:
            pairs = shards.size(axes.VOCAB), 2, rows
            ledger.add(Collective("all-gather", "best token", "", _nbytes(pairs, np.int32), count), (axes.VOCAB,))
    if key.steps > 1:
        ledger.reduce("whether to go on", (axes.ROWS,), (2,), np.int32)
    return ledger.collectives()


class _Ledger:
    """A list of collectives. Its methods have the names of `Shards`'s methods, and note nothing where those do
    nothing."""

    def __init__(self, shards: Shards, backend: Backend):
        self.shards, self.backend = shards, backend
        self.times = 1  # how often each of the next collectives takes place
        self._counts: Counter[Collective] = Counter()

    def reduce(self, purpose: str, names: Sequence[str], shape: tuple[int, ...], dtype, count: int = 1) -> None:
        """A sum, maximum or minimum of arrays of this shape."""
        self.add(Collective("all-reduce", purpose, "", _nbytes(shape, dtype), count), names)

    def sum_tokens(self, purpose: str, names: Sequence[str], shape: tuple[int, int], dtype, flops: int = 0) -> None:
        """The sum of partial sums [T, D]. flops: operations of the product that hides it, on a device."""
        kind = "reduce-scatter" if self.shards.splits_tokens or self.shards.mlp_row_shards > 1 else "all-reduce"
        kind = "fused reduce-scatter" if flops else kind
        self.add(Collective(kind, purpose, "", _nbytes(self._padded(shape), dtype), flops=flops), names)

    def all_tokens(self, purpose: str, shape: tuple[int, int], dtype, flops: int = 0) -> None:
        """The gather of split tokens. flops: operations of the product that hides it, on a device."""
        if self.shards.splits_tokens:
            kind = "fused all-gather" if flops else "all-gather"
            self.add(Collective(kind, purpose, "", _nbytes(self._padded(shape), dtype), flops=flops), (axes.MLP,))

    def gather_for_mlp(self, purpose: str, shape: tuple[int, ...], dtype) -> None:
        """The gather of the rows of all devices that share a feed-forward."""
        if self.shards.mlp_row_shards > 1:
            self.gather(purpose, (axes.MLP,), shape, dtype)

    def gather(self, purpose: str, names: Sequence[str], shape: tuple[int, ...], dtype) -> None:
        """An all-gather whose result has this shape."""
        self.add(Collective("all-gather", purpose, "", _nbytes(shape, dtype)), names)

    def add(self, collective: Collective, names: Sequence[str]) -> None:
        """A collective over the devices that split these logical axes."""
        axis = "+".join(self.shards.mesh_axes(*names))
        if axis and collective.count:
            self._counts[replace(collective, axis=axis, count=1)] += self.times * collective.count

    def collectives(self) -> tuple[Collective, ...]:
        return tuple(replace(c, count=count) for c, count in self._counts.items())

    def _padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (self.shards.padded(shape[0]), shape[1]) if self.shards.splits_tokens else shape


def _nbytes(shape: tuple[int, ...], dtype) -> int:
    return prod(shape) * np.dtype(dtype).itemsize


def _width(model: AbstractModel) -> int:
    """The width of the residual stream on a device."""
    return model.config.dim // model.layout.shards.size(axes.EMBED)


def _norm(ledger: _Ledger, model: AbstractModel, tokens: int, count: int = 1) -> None:
    numbers = 2 if model.config.norm.kind == "layer" else 1
    ledger.reduce("norms", (axes.EMBED,), (tokens, 1), np.float32, count * numbers)


def _forward(ledger: _Ledger, model: AbstractModel, plan: CachePlan, key: ProgramKey) -> None:
    """The decoder over a step's tokens."""
    shards, config = ledger.shards, model.config
    tokens = key.chunks * key.chunk // shards.size(axes.TOKENS) + key.decoded
    hidden, dtype = (tokens, _width(model)), model.dtype
    if config.mixtures:
        taken, devices = tokens * shards.mlp_row_shards, shards.size(axes.EXPERTS)
        ledger.gather_for_mlp("which rows are active", (taken,), np.int32)
        specs = [spec for layer in config.layers if isinstance(spec := layer.mlp, MoeSpec)]
        if any(gathers(spec, taken, _width(model) * dtype.itemsize, shards, ledger.backend) for spec in specs):
            ledger.gather("which rows are active", (axes.EXPERTS,), (taken * devices,), np.int32)
    ledger.sum_tokens("embedding", (axes.VOCAB,), hidden, dtype)
    if config.per_layer is not None:
        numbers = (tokens, len(config.layers) * config.per_layer.dim)
        ledger.sum_tokens("per-layer embeddings", (axes.VOCAB,), numbers, dtype)
        ledger.reduce("per-layer embeddings", (axes.EMBED,), numbers, dtype)
    _streams(ledger, model, tokens, 1)
    if (loop := config.loop) is not None:
        ledger.reduce("how many steps of the core", (axes.ROWS,), (), np.int32)
        for axis in (axes.ROWS, axes.TOKENS) if config.exits_early else ():
            ledger.reduce("whether to go on", (axis,), (), np.int32, loop.steps)
        if config.exits_early and loop.early_exit == "kl":
            blocks, size = blocks_of(tokens)
            ledger.reduce("next-token distributions", (axes.VOCAB,), (size, 2, 1), np.float32, 2 * blocks * loop.steps)
            ledger.reduce("next-token distributions", (axes.VOCAB,), (size,), np.float32, blocks * loop.steps)
    passed = set()  # unscanned layers whose cache was passed on: XLA passes it on once for all layers that share it
    for number, (layers, block) in enumerate(zip(model.blocks(), plan.blocks, strict=True)):
        layer, ledger.times = config.layers[layers[0]], len(layers) * config.runs(layers[0])
        flops = _in_ring(ledger, model, number, tokens)
        _extras(ledger, model, layer, tokens)
        ledger.all_tokens("input of attention", hidden, dtype, flops["attn.qkv"])
        owner = layers[0] if layer.attention.cache_of is None else layer.attention.cache_of
        slots = 0 if isinstance(block, BlockState) else plan.slots(block)
        if not block.ring:
            slots = min(slots, -(-key.limit // (devices := shards.size(axes.POSITIONS))) * devices)
        passed_slots = slots if len(layers) > 1 or owner not in passed else 0
        _mixer(ledger, model, layer, block, tokens, key, passed_slots)
        passed |= {owner} if len(layers) == 1 else set()
        if layer.exchange is not None:
            _lanes(ledger, layer.exchange, hidden, dtype)
            continue
        if not layer.parallel:
            ledger.sum_tokens("attention", (axes.KV_HEADS, axes.HEAD_OUT), hidden, dtype, flops["attn.o"])
        if layer.mlp is not None:
            _feed_forward(ledger, model, layer, tokens, flops)
    ledger.times = 1
    _streams(ledger, model, tokens, config.streams - 1)
    ledger.all_tokens("head", hidden, dtype)


def _extras(ledger: _Ledger, model: AbstractModel, layer: LayerSpec, tokens: int) -> None:
    """A layer's norms, and the other steps around its branches."""
    config, branches = model.config, 1 if layer.parallel or layer.mlp is None else 2
    _norm(ledger, model, tokens, 2 * layer.post_norm + layer.pre_norm * branches)
    if config.streams > 1:  # before and after the layer
        _norm(ledger, model, tokens, 2)
        ledger.reduce("modalities", (axes.EMBED,), (tokens, config.streams), np.float32, 2)
    if layer.laurel:
        _norm(ledger, model, tokens)
        ledger.reduce("learned residual", (axes.EMBED,), (tokens, layer.laurel), model.dtype)
    if config.per_layer is not None:
        _norm(ledger, model, tokens)
        ledger.reduce("gate of per-layer embeddings", (axes.EMBED,), (tokens, config.per_layer.dim), model.dtype)


def _in_ring(ledger: _Ledger, model: AbstractModel, block: int, tokens: int) -> Counter[str]:
    """Operations on a device of the products of a block's layer that hide their collective, by weight."""
    products = ring_products(model, block, tokens, ledger.shards, ledger.backend)
    return Counter({p.part: 2 * tokens * prod(p.shape) for p in products if p.choice.name == "pallas_tpu"})


def _lanes(ledger: _Ledger, exchange: LaneExchange, shape: tuple[int, int], dtype) -> None:
    """The sums [T, D] that the lanes of a layer add at once, or send to later layers."""
    nbytes = _nbytes(shape, dtype)
    way = Way.of(ledger.shards.size(axes.LANES), nbytes)
    if exchange.adds == "now" or (exchange.sends and not way.first):
        ledger.reduce("attention", (axes.LANES,), shape, dtype)
        ledger.reduce("feed-forward", (axes.LANES,), shape, dtype)
    if exchange.sends:
        hops = sum(len(hops) for steps in way for hops in steps)
        ledger.add(Collective("collective-permute", LATE_SUMS, "", nbytes, 2 * hops), (axes.LANES,))


def _streams(ledger: _Ledger, model: AbstractModel, tokens: int, projected: int) -> None:
    """Add what it takes to go from one residual to several, or back. projected: how many of them are projected."""
    if model.config.streams > 1:
        ledger.gather("parallel residuals", (axes.EMBED,), (tokens, projected, model.config.dim), model.dtype)
        ledger.reduce("magnitudes", (axes.EMBED,), (tokens, model.config.streams), np.float32)


def _feed_forward(ledger: _Ledger, model: AbstractModel, layer: LayerSpec, tokens: int, flops: Counter[str]) -> None:
    """A layer's feed-forward, from the gather of its input to its sum."""
    dtype, width, spec = model.dtype, _width(model), layer.mlp
    if not layer.parallel:
        ledger.all_tokens("input of feed-forward", (tokens, width), dtype, flops["mlp.gate_up"])
    tokens *= ledger.shards.mlp_row_shards
    ledger.gather_for_mlp("input of feed-forward", (tokens, width), dtype)
    if isinstance(spec, MoeSpec):
        _mixture(ledger, model, spec, tokens)
        width *= 2 if spec.separate_norms else 1
    elif spec is not None:
        _gate_up(ledger, model, spec, tokens)
    purpose = "attention and feed-forward" if layer.parallel else "feed-forward"
    ledger.sum_tokens(purpose, (axes.MLP,), (tokens, width), dtype, flops["mlp.down"])


def _gate_up(ledger: _Ledger, model: AbstractModel, spec: MlpSpec | MoeSpec, tokens: int) -> None:
    halves = 2 if spec.gated else 1
    width = halves * model.layout.hidden(spec.hidden) // ledger.shards.size(axes.MLP)
    ledger.reduce("gate and up", (axes.EMBED,), (tokens, width), model.dtype)
    if isinstance(spec, MlpSpec) and spec.sparsity:
        ledger.reduce("mean and variance of gates", (axes.MLP,), (tokens, 2), np.float32)


def _mixture(ledger: _Ledger, model: AbstractModel, spec: MoeSpec, tokens: int) -> None:
    """A mixture of experts up to the sum over its width; `tokens` on a device."""
    chosen, row_bytes = spec.router.chosen, _width(model) * model.dtype.itemsize
    is_gathered = gathers(spec, tokens, row_bytes, ledger.shards, ledger.backend)
    routed = tokens * (ledger.shards.size(axes.EXPERTS) if is_gathered else 1)
    ledger.reduce("router", (axes.EMBED,), (routed, spec.router.experts), np.float32)
    if spec.separate_norms:
        # Two norms follow the experts; the two before them take the sum of the residual's norm.
        _norm(ledger, model, tokens, 2)
        if is_gathered and spec.router.norm_eps is not None:
            _norm(ledger, model, routed)
    elif spec.router.norm_eps is not None:
        _norm(ledger, model, routed)
    received, home = _exchange(ledger, model, spec, tokens)
    pairs = pairs_room(chosen, tokens, received, ledger.backend)
    if pairs < received * chosen and ledger.shards.size(axes.EMBED) > 1:
        ledger.reduce("whether more rounds follow", (axes.ROWS,), (), np.int32)
    _gate_up(ledger, model, spec, pairs)
    ledger.add(home, (axes.EXPERTS,))
    if spec.shared is not None:
        _gate_up(ledger, model, spec.shared, tokens)
    if spec.shared_gate:
        ledger.reduce("gate of shared experts", (axes.EMBED,), (tokens, 1), np.float32)


def _exchange(ledger: _Ledger, model: AbstractModel, spec: MoeSpec, tokens: int) -> tuple[int, Collective]:
    """Send tokens to the experts of other devices. Returns how many tokens a device receives in a round, and the
    function that notes the return of the experts' sums."""
    dtype, width, devices = model.dtype, _width(model), ledger.shards.size(axes.EXPERTS)
    how = exchange_of(spec, tokens, width * dtype.itemsize, devices, ledger.backend)
    sent = received = tokens * devices
    there, back = "all-gather", "reduce-scatter"
    if how is not None:
        there = back = "ragged-all-to-all" if how.ragged else "all-to-all"
        sent = how.rows
        received = how.room if how.ragged else sent
        if how.ragged:
            ledger.gather("how many tokens", (axes.EXPERTS,), (devices, devices), np.int32)
        if received < devices * tokens or not how.ragged:
            ledger.reduce("how many rounds", (axes.ROWS,), (), np.int32)
    rows, routes = _nbytes((sent, width), dtype), _nbytes((sent, 2 * spec.router.chosen), np.float32)
    if how is None:
        if returns_parts(tokens, width, ledger.backend):
            back = "all-to-all"
        inputs = 2 if spec.separate_norms else 1  # the router's are others then
        ledger.add(Collective(there, "tokens to experts", "", inputs * rows), (axes.EXPERTS,))
    else:
        ledger.add(Collective(there, "tokens to experts", "", rows), (axes.EXPERTS,))
        ledger.add(Collective(there, "routes", "", routes), (axes.EXPERTS,))
    return received, Collective(back, "experts to tokens", "", rows)


def _mixer(
    ledger: _Ledger,
    model: AbstractModel,
    layer: LayerSpec,
    block: BlockCache | BlockState,
    tokens: int,
    key: ProgramKey,
    passed: int,
) -> None:
    """A layer's mixer before its output projection; `tokens` on a device. passed: see `_over_stripes`."""
    spec = layer.attention
    if isinstance(spec, Recurrent):
        for other in spec.collectives(model.layout.heads(spec), ledger.shards.size(axes.KV_HEADS)):
            nbytes = _nbytes((tokens, other.numbers), np.float32)
            ledger.add(Collective(other.kind, other.purpose, "", nbytes), (axes.KV_HEADS,))
    elif not isinstance(block, BlockState):
        heads = model.layout.heads(spec)
        groups = heads.groups // ledger.shards.size(axes.KV_HEADS), heads.queries
        _projections(ledger, model, spec, tokens, groups)
        _over_stripes(ledger, model, spec, block, key, groups, passed)


def _projections(
    ledger: _Ledger, model: AbstractModel, spec: AttentionSpec | MlaSpec, tokens: int, groups: tuple[int, int]
) -> None:
    """Queries, keys and values. groups: KV heads on a device, and queries of each."""
    kv_heads, queries = groups
    numbers = lambda purpose, *shape: ledger.reduce(purpose, (axes.EMBED,), (tokens, *shape), model.dtype)  # noqa: E731
    if isinstance(spec, MlaSpec):
        numbers("latents", spec.latent_dim)
        if spec.q_rank is None:
            numbers("queries", kv_heads, spec.head_dim)
        return
    numbers("queries, keys and values", kv_heads, queries + spec.fused_heads, spec.head_dim)
    if spec.separate_values:
        numbers("values", kv_heads, spec.value_dim)
    if spec.qk_norm == "full":
        ledger.reduce("QK-norm", (axes.KV_HEADS,), (tokens, 1), np.float32, count=1 + (spec.cache_of is None))
    if spec.gate is not None:
        width = 1 if spec.gate.per_head else spec.value_dim // ledger.shards.size(axes.HEAD_OUT)
        ledger.reduce("gates of heads", (axes.EMBED,), (tokens, kv_heads, queries, width), np.float32)


def _over_stripes(
    ledger: _Ledger,
    model: AbstractModel,
    spec: AttentionSpec | MlaSpec,
    block: BlockCache,
    key: ProgramKey,
    groups: tuple[int, int],
    passed: int,
) -> None:
    """Attention over positions that several devices own. groups: see `_projections`. passed: slots of a row that are
    passed around if chunks are dealt out, over all devices."""
    shards, tokens = ledger.shards, key.chunks * key.chunk + key.rows
    devices = shards.size(axes.POSITIONS)
    if shards.size(axes.TOKENS) > 1:
        tokens = key.rows
        for array in block.arrays:
            heads = shards.local_shape(block.axes, block.shapes[0])[-3]
            cell = array.shape[len(block.axes) - 1 :]  # nothing for scales
            shape = key.chunks, heads, folded_rows(passed // devices, array.fold), *cell
            hops = devices - 1 if key.chunks and passed else 0
            permute = Collective("collective-permute", "the rows' cache", "", _nbytes(shape, array.dtype), hops)
            ledger.add(permute, (axes.POSITIONS,))
    if tokens:
        ledger.gather("log-sum-exps", (axes.POSITIONS,), (devices, tokens, *groups), np.float32)
        shape = (tokens, *groups, spec.value_dim)
        if shards.size(axes.HEAD_OUT) > 1:
            exchange = Collective("all-to-all", "parts of attention", "", _nbytes(shape, model.dtype))
            ledger.add(exchange, (axes.HEAD_OUT,))
        else:
            ledger.reduce("parts of attention", (axes.POSITIONS,), shape, model.dtype)


def _head(ledger: _Ledger, model: AbstractModel, tokens: int) -> None:
    """The logits of `tokens` tokens."""
    _norm(ledger, model, tokens)
    if (lanes := model.config.lanes) is not None:
        width = model.config.dim
        if lanes.head == "lane":
            ledger.gather("head", (axes.LANES,), (tokens, lanes.lanes * width), model.dtype)
        elif lanes.head == "replicate":
            ledger.reduce("head", (axes.LANES,), (tokens, width), model.dtype)
    vocab = model.layout.vocab // ledger.shards.size(axes.VOCAB)
    ledger.reduce("logits", (axes.EMBED,), (tokens, vocab), np.float32)
