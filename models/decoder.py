"""The one decoder: every family is a `ModelConfig` run by this code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.config import LayerSpec, MlaSpec, ModelConfig, MoeSpec
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.embedding import look_up
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.mla import Mla
from inferlib.models.layers.mlp import Mlp
from inferlib.models.layers.moe import Load, Moe
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import OfStack, param
from inferlib.models.layers.per_layer import PerLayerEmbedding, PerLayerInput
from inferlib.models.layers.recurrent import LAYERS
from inferlib.models.layers.residual import AltUp, Laurel, Streams
from inferlib.models.layers.ring import ring_axis, ring_choices, ring_fused, ring_weights
from inferlib.models.layout import Layout
from inferlib.models.recurrent import Recurrent
from inferlib.models.segments import Segment, block_of
from inferlib.ops.add_norm import Unscaled, add_norm, add_norm_fits, add_shares
from inferlib.ops.collective_matmul import RingWeight
from inferlib.ops.matmul import Normed, gives_shares, matmul, rows_of_kernel
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import QuantizedTensor
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

if TYPE_CHECKING:
    from inferlib.pallas_kernels.all_reduce_norm_gpu import Mailboxes


class Stream(NamedTuple):
    """What layers hand on. x [T, D]: the residual, where tokens or the width are split this device's share, or several
    of them [T, N, D]; y [T, D]: its norm, perhaps but for the factor, if the sum that made it brought that along;
    boxes: the mailboxes of such sums; held [T, D]: this device's part of what the next layer's feed-forward is summed
    with (see `MoeSpec.deferred`); load [E]: how many tokens chose each of the layer's experts, if that is counted."""

    x: jax.Array
    y: jax.Array | Unscaled | None = None
    boxes: Mailboxes | None = None
    held: jax.Array | None = None
    load: Load = None


class Block(nnx.Module):
    """One layer."""

    def __init__(self, spec: LayerSpec, layout: Layout, dtype):
        config = layout.config
        self.spec, self.scale = spec, config.residual_scale
        norm = lambda: Norm(config.norm, config.dim, dtype)  # noqa: E731
        heads = layout.heads(spec.attention)
        if isinstance(spec.attention, MlaSpec):
            self.attn = Mla(spec.attention, heads, config.dim, dtype)
        elif isinstance(spec.attention, Recurrent):
            self.attn = LAYERS[type(spec.attention)](spec.attention, heads, config.dim, dtype)
        else:
            self.attn = Attention(spec.attention, heads, config.norm, config.dim, dtype)
        if isinstance(spec.mlp, MoeSpec):
            self.mlp = Moe(spec.mlp, layout, dtype)
        elif spec.mlp is not None:
            self.mlp = Mlp(spec.mlp, layout.hidden(spec.mlp.hidden), config.dim, dtype)
        if spec.pre_norm:
            self.pre_attn_norm = norm()
            if not spec.parallel and spec.mlp is not None:
                self.pre_mlp_norm = norm()
        if spec.post_norm:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()
        if spec.scaled:
            self.scalar = param((1,), (None,), dtype, "ones")
        if spec.laurel:
            self.laurel = Laurel(spec.laurel, config.norm, config.dim, dtype)
        if config.streams > 1:
            self.altup = AltUp(config.streams, config.norm, config.dim, dtype)
        if config.per_layer is not None:
            self.per_layer = PerLayerInput(config.per_layer, config.norm, config.dim, dtype)

    def __call__(
        self,
        stream: Stream,
        ctx: StepContext,
        cache: LayerCache,
        *,
        layer: jax.Array | None = None,
        given: jax.Array | None = None,
        after: jax.Array | None = None,
    ) -> tuple[Stream, LayerCache]:
        """layer: of a scanned segment, the current one. given [T, P]: per-layer embeddings, if any. after [D]: weight
        of the norm that follows, where one kernel computes it with the sum before."""
        if after is not None:
            return self.fused(stream, ctx, cache, after)
        altup = stream.x.ndim > 2
        x = self.altup.predict(stream.x, ctx.shards) if altup else stream.x
        first, held, load, cache = self.plain(x[:, 0] if altup else x, stream.held, ctx, cache, layer)
        x = self.altup.correct(x, first, ctx.shards) if altup else first
        if given is not None and altup:
            x = x.at[:, 1:].add(self.per_layer(x[:, 0] * self.altup.scale[...], given, ctx.shards)[:, None])
        elif given is not None:
            x = x + self.per_layer(x, given, ctx.shards)
        return Stream(x * self.scalar[...] if self.spec.scaled else x, held=held, load=load), cache

    def fused(self, stream: Stream, ctx: StepContext, cache: LayerCache, after: jax.Array) -> tuple[Stream, LayerCache]:
        """Each sum, over devices if there are several, in one kernel with the residual's and the norm that follows, or
        with `few` all but the norm's factor; see `fuses_sums`."""
        if stream.boxes is None and self.sums_shares(ctx):
            return self.few(stream, ctx, cache, after)
        x, y, boxes, *_ = stream
        y = y.whole() if isinstance(y, Unscaled) else y
        with jax.named_scope("attention"):
            attn, cache = self.attn(self.pre_attn_norm(x, ctx.shards) if y is None else y, ctx, cache)
            x, y, boxes = self.sum_and_norm(self.biased(attn), x, self.pre_mlp_norm.weight[...], boxes)
        with jax.named_scope("mlp"):
            mlp, load = self.feed_forward(y, ctx, None)
            return Stream(*self.sum_and_norm(self.mlp.finish(mlp), x, after, boxes), load=load), cache

    def few(self, stream: Stream, ctx: StepContext, cache: LayerCache, after: jax.Array) -> tuple[Stream, LayerCache]:
        """The shares of products of few rows are summed with the residual, and a norm's factor follows its products."""
        x, y, eps = stream.x, stream.y, self.pre_mlp_norm.spec.eps
        with jax.named_scope("attention"):
            y = self.pre_attn_norm(x, ctx.shards) if y is None else y
            attn, cache = self.attn(y, ctx, cache, shares=True)
            x, y = add_shares(attn, x, self.pre_mlp_norm.weight[...], eps)
        with jax.named_scope("mlp"):
            return Stream(*add_shares(self.mlp(y, ctx.shards, shares=True), x, after, eps)), cache

    def sums_shares(self, ctx: StepContext) -> bool:
        """Whether both last products give shares, and nothing follows them but the residual's sum."""
        if not (isinstance(self.attn, Attention) and isinstance(self.mlp, Mlp)):
            return False
        if self.spec.attention.o_bias or self.spec.mlp.bias:
            return False
        weights = (self.attn.o, 3), (self.mlp.down, 1)
        return all(gives_shares(w[...], n, ctx.tokens, self.pre_mlp_norm.weight.dtype) for w, n in weights)

    def sum_and_norm(
        self, branch: jax.Array, x: jax.Array, weight: jax.Array, boxes: Mailboxes | None
    ) -> tuple[jax.Array, jax.Array, Mailboxes | None]:
        eps = self.pre_mlp_norm.spec.eps
        if boxes is None:
            return *add_norm(branch, x, weight, eps), None
        from inferlib.pallas_kernels.all_reduce_norm_gpu import all_reduce_norm

        return all_reduce_norm(branch, x, weight, eps, boxes)

    def plain(
        self, x: jax.Array, before: jax.Array | None, ctx: StepContext, cache: LayerCache, layer: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, Load, LayerCache]:
        """The residual [T, D], what is held for the next layer, the experts' load, and the cache. before: what the last
        layer held."""
        spec, shards, held = self.spec, ctx.shards, None
        with jax.named_scope("attention"):
            own = self.pre_attn_norm(x, shards) if spec.pre_norm else x
            y = own if _travels(self.attn, "qkv") else shards.all_tokens(own, ctx.tokens)
            given = self.pre_attn_norm.for_products(x, y, shards) if spec.pre_norm else y
            attn, cache = self.attn(given, ctx, cache)
        if spec.parallel:
            with jax.named_scope("mlp"):
                mlp, load = self.feed_forward(shards.fed(y), ctx, layer)
                if shards.feeders > 1:  # attention is whole
                    both = attn + shards.sum_tokens(mlp, axes.MLP)
                else:
                    both = shards.sum_tokens(attn + mlp, axes.MLP)
            return self.add(x, self.mlp.finish(self.biased(both))), None, load, cache
        summed = attn if _travels(self.attn, "o") else shards.sum_tokens(attn, axes.KV_HEADS, axes.HEAD_OUT)
        attn = self.biased(summed)
        attn = self.post_attn_norm(attn, shards) if spec.post_norm else attn
        x = _kept(own, attn, spec.normed.attention) if spec.normed else self.add(x, attn)
        if spec.mlp is None:
            return x, None, None, cache
        if spec.laurel:
            x = (x + self.laurel(own, shards)) * jnp.asarray(2**-0.5, x.dtype)
        with jax.named_scope("mlp"):
            if isinstance(spec.mlp, MoeSpec) and spec.mlp.own_norms:
                whole = shards.fed(shards.all_tokens(x, ctx.tokens))
                mlp, load = self.mlp.with_norms(whole, self.pre_mlp_norm(whole, shards), ctx, layer)
            else:
                own = y = self.pre_mlp_norm(x, shards) if spec.pre_norm else x
                y = y if _travels(self.mlp, "gate_up") else shards.fed(shards.all_tokens(y, ctx.tokens))
                if spec.pre_norm and isinstance(self.mlp, Mlp):
                    y = self.pre_mlp_norm.for_products(x, y, shards)
                if isinstance(spec.mlp, MoeSpec) and spec.mlp.deferred:
                    held, mlp, load = self.mlp.apart(y, ctx, layer)
                else:
                    mlp, load = self.feed_forward(y, ctx, layer)
                mlp = mlp if before is None else mlp + before
                mlp = self.mlp.finish(mlp if _travels(self.mlp, "down") else shards.sum_tokens(mlp, axes.MLP))
        mlp = self.post_mlp_norm(mlp, shards) if spec.post_norm else mlp
        return _kept(own, mlp, spec.normed.mlp) if spec.normed else self.add(x, mlp), held, load, cache

    def feed_forward(self, y: jax.Array | Normed, ctx: StepContext, layer: jax.Array | None) -> tuple[jax.Array, Load]:
        """This device's part of the sum."""
        if isinstance(self.mlp, Moe):
            return self.mlp(y, ctx, layer)
        return self.mlp(y, ctx.shards), None

    @property
    def owns_cache(self) -> bool:
        return self.spec.attention.cache_of is None

    def biased(self, attn: jax.Array) -> jax.Array:
        return attn + self.attn.o_bias[...] if self.spec.attention.o_bias else attn

    def add(self, x: jax.Array, branch: jax.Array) -> jax.Array:
        return x + (branch if self.scale == 1.0 else branch * self.scale)


def _kept(normed: jax.Array, branch: jax.Array, scales: tuple[float, float]) -> jax.Array:
    """The residual where it is the norm that a branch read; see `NormedResidual`."""
    return normed * scales[0] + branch * scales[1]


def _travels(module: nnx.Module, name: str) -> bool:
    """Whether the product with a weight is made with its collective."""
    weight = getattr(module, name, None)
    return weight is not None and isinstance(weight.get_value(), RingWeight)


def fuses_sums(config: ModelConfig, *, alone: bool) -> bool:
    """Whether every sum over devices is of one layer, and followed by the residual's and an RMS norm, and by nothing
    between; a bias, which each device would add, only where there is one (`alone`)."""
    plain = config.norm.kind == "rms" and not config.norm.unit_offset and config.residual_scale == 1.0
    return (plain and config.per_layer is None) and all(
        layer.pre_norm
        and layer.mlp is not None
        and not (layer.laurel or layer.normed or layer.post_norm or layer.parallel or layer.scaled)
        and (alone or not (layer.attention.o_bias or layer.mlp.output_bias))
        and not (isinstance(layer.mlp, MoeSpec) and (layer.mlp.deferred or layer.mlp.own_norms))
        for layer in config.layers
    )


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head. Build it under `nnx.eval_shape` (see `abstract_model`).

    `blocks[i]` follows the segments' patterns in order; a scanned block's weights have a leading axis
    "layers" of the segment's count.
    """

    def __init__(self, layout: Layout, segments: tuple[Segment, ...], dtype):
        config = layout.config
        self.config, self.segments = config, segments
        self.embed = param((layout.vocab, config.dim), (axes.VOCAB, axes.EMBED), dtype)
        if config.learned_positions:
            self.positions = param((config.context, config.dim), (axes.CONTEXT, axes.EMBED), dtype)
        if config.per_layer is not None:
            self.per_layer = PerLayerEmbedding(layout, dtype)
        if config.streams > 1:
            self.streams = Streams(config.streams, config.dim, dtype)
        blocks = []
        for segment in segments:
            for spec in segment.pattern:
                block = Block(spec, layout, dtype)
                blocks.append(_stacked(block, segment.count) if segment.count > 1 else block)
        self.blocks = nnx.List(blocks)
        self.final_norm = Norm(config.norm, config.dim, dtype)
        if not config.tied:
            self.head = param((config.dim, layout.vocab), (axes.EMBED, axes.VOCAB), dtype, contracting=(0,))
        if config.head_bias:
            self.head_bias = param((layout.vocab,), (axes.VOCAB,), dtype, "zeros")

    def __call__(
        self, ctx: StepContext, cache: tuple[LayerCache, ...], boxes: Mailboxes | None = None
    ) -> tuple[jax.Array, tuple[LayerCache, ...], Mailboxes | None, jax.Array | None]:
        """Run the step's tokens: last hidden states [T, D], the cache, one `LayerCache` per block, the mailboxes, and
        of the layers that have experts how many tokens chose each [L, E], if that is counted.

        boxes: for sums over devices, where `fuses_sums` and layers are unrolled.
        """
        fused = boxes is not None or self.adds_norms(ctx)
        # Cached now: computed in a scan's body they would not outlive it.
        _ = ctx.positions, ctx.pages, ctx.rope, self.config.mixtures and ctx.fed
        config, x, given = self.config, self.embedding(ctx), None
        if config.per_layer is not None:
            given = self.per_layer(ctx.batch.tokens, x, ctx.shards)
        if config.streams > 1:
            x = self.streams.spread(x, ctx.shards)
        stream, norms = Stream(x, boxes=boxes), [None] * len(self.blocks)
        if fused:
            norms = [*(block.pre_attn_norm.weight[...] for block in self.blocks[1:]), self.final_norm.weight[...]]
        new, loads, at, shared = [], [], 0, {}
        for segment in self.segments:
            end = at + len(segment.pattern)
            blocks = self.blocks[at:end]
            caches = [self.lent(block, new) or own for block, own in zip(blocks, cache[at:end], strict=True)]
            if segment.count > 1:
                stream, caches, load = _scan(blocks, stream, ctx, caches, segment, given)
            else:
                stream, caches, load = _unrolled(blocks, stream, ctx, caches, segment, given, norms[at:end], shared)
            loads += load
            new += [cache if block.owns_cache else LayerCache(()) for block, cache in zip(blocks, caches, strict=True)]
            at = end
        x = self.streams.gather(stream.x, ctx.shards) if config.streams > 1 else stream.x
        load = jnp.concatenate(loads) if loads else None
        return ctx.shards.all_tokens(x, ctx.tokens), tuple(new), stream.boxes, load

    def adds_norms(self, ctx: StepContext) -> bool:
        """Whether sums that are one device's own take place in one kernel with the norms that follow: those of experts
        and of few rows with quantised weights without zero points, whose products are our kernels. To others XLA:GPU
        adds the residual in the product's own kernel."""
        tokens = ctx.batch.tokens.size
        if ctx.backend.add_norm == "xla" or ctx.shards.mesh is not None or not add_norm_fits(tokens, self.config.dim):
            return False
        if any(segment.count > 1 for segment in self.segments) or not fuses_sums(self.config, alone=True):
            return False
        if self.config.mixtures:
            return True
        down = self.blocks[0].mlp.down[...]
        return isinstance(down, QuantizedTensor) and down.zeros is None and tokens <= rows_of_kernel(down)

    def lent(self, block: Block, caches: Sequence[LayerCache]) -> LayerCache | None:
        """The cache of the layer whose keys and values a block's layers attend to, if they have none. caches: of the
        blocks before."""
        if block.owns_cache:
            return None
        number, place = block_of(self.segments, block.spec.attention.cache_of)
        return caches[number] if place is None else replace(caches[number], layer=jnp.int32(place))

    def embedding(self, ctx: StepContext) -> jax.Array:
        """[T, D]; each device looks up the tokens of its share of the vocabulary, the first of them positions too."""
        split, x = ctx.shards.size(axes.VOCAB) > 1, look_up(self.embed[...], ctx.batch.tokens, ctx.shards)
        x = x if self.config.embed_scale == 1.0 else x * jnp.asarray(self.config.embed_scale, x.dtype)
        if self.config.learned_positions:
            at = jnp.take(self.positions[...], ctx.positions, axis=0, mode="clip")
            x = x + (jnp.where(ctx.shards.index(axes.VOCAB) == 0, at, 0) if split else at)
        return ctx.shards.sum_tokens(x, axes.VOCAB) if split else x

    def logits(self, x: jax.Array, shards: Shards) -> jax.Array:
        """Hidden states [T, D] -> logits [T, V] float32, of this device's share of the vocabulary."""
        config = self.config
        with jax.named_scope("head"):
            y = self.final_norm(x, shards)
            head, transposed = (self.embed, True) if config.tied else (self.head, False)
            y = y if transposed else self.final_norm.for_products(x, y, shards)
            logits = matmul(y, head[...], transposed=transposed, out_dtype=jnp.float32)
            logits = shards.sum(logits, axes.EMBED)
            if config.head_bias:
                logits = logits + self.head_bias[...].astype(jnp.float32)
            logits = logits * config.logit_scale
            if config.final_softcap is not None:
                logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
            if logits.shape[1] * shards.size(axes.VOCAB) > config.vocab:
                ids = jnp.arange(logits.shape[1]) + shards.index(axes.VOCAB) * logits.shape[1]
                logits = jnp.where(ids < config.vocab, logits, -jnp.inf)
            return logits


def _unrolled(blocks, stream, ctx, caches, segment: Segment, given, norms, shared):
    new, loads = [], []
    for number, (block, cache, after) in enumerate(zip(blocks, caches, norms, strict=True), segment.start):
        graph, *states = _split(block, ctx, stacked=False)
        key = graph, cache.ring
        if key not in shared:
            shared[key] = _layer(graph, cache.ring, ctx)
        own = None if given is None else given[:, number]
        stream = stream._replace(load=None)
        stream, arrays = shared[key](states, stream, cache.arrays, cache.layer, own, after)
        new.append(LayerCache(arrays, cache.ring))
        loads += [] if stream.load is None else [stream.load[None]]
    return stream, new, loads


def _layer(graph: nnx.GraphDef, ring: bool, ctx: StepContext):
    """A layer as a function that is traced once for all layers alike; XLA inlines it."""

    @jax.jit
    def layer(states, stream, arrays, place, given, after):
        block = nnx.merge(graph, *states)
        stream, cache = block(stream, ctx, LayerCache(arrays, ring, place), given=given, after=after)
        return stream, cache.arrays

    return layer


def _scan(blocks, stream, ctx, caches, segment: Segment, given):
    """The cache rides in the carry: as scan inputs and outputs it would exist twice. What a block's layers share with
    one before is read only and stays outside. Experts and what a kernel may read stay whole, each layer finds its own:
    a layer's slice of them would be copied."""
    graphs, wholes, states = zip(*(_split(block, ctx, stacked=True) for block in blocks), strict=True)
    owns, rings = [block.owns_cache for block in blocks], [cache.ring for cache in caches]
    if given is not None:  # [T, L, P] -> [count, pattern, T, P]
        given = given[:, segment.start : segment.stop]
        given = jnp.moveaxis(given, 0, 1).reshape(segment.count, len(blocks), *given.shape[::2])

    def body(carry, inputs):
        layer, stream, held = carry
        states, given = inputs
        new, loads = [], []
        for i, (graph, whole, state) in enumerate(zip(graphs, wholes, states, strict=True)):
            cache = LayerCache(held[i], rings[i], layer) if owns[i] else caches[i]
            own = None if given is None else given[i]
            whole = jax.tree.map(partial(_of_layer, layer), whole, is_leaf=lambda p: isinstance(p, nnx.Param))
            stream, cache = nnx.merge(graph, whole, state)(stream, ctx, cache, layer=layer, given=own)
            new.append(cache.arrays if owns[i] else ())
            loads += [] if stream.load is None else [stream.load]
            stream = stream._replace(load=None)
        return (layer + 1, stream, tuple(new)), jnp.stack(loads) if loads else None

    carry = (
        jnp.int32(0),  # the layer; as an input it would be sliced from memory at each
        stream._replace(load=None),
        tuple(cache.arrays if own else () for cache, own in zip(caches, owns, strict=True)),
    )
    (_, stream, new), loads = lax.scan(body, carry, (states, given), length=segment.count)
    loads = [] if loads is None else [loads.reshape(-1, loads.shape[-1])]
    return stream, [LayerCache(arrays, ring) for arrays, ring in zip(new, rings, strict=True)], loads


def _split(block: Block, ctx: StepContext, *, stacked: bool) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A block's graph, the weights that layers find their own in by number, and the others."""
    ringed, shards = _ringed(block, ctx, stacked), ctx.shards

    def is_whole(path, p) -> bool:
        kept = axes.EXPERTS in p.axes or p.axes in _WHOLE or isinstance(p.get_value(), PackedTensor)
        return (stacked and kept) or ".".join(path) in ringed

    def travelling(path, p):
        if ".".join(path) not in ringed:
            return p
        values, axis = p.get_value() if stacked else p.get_value()[None], ring_axis(shards)
        kind = dict(scatters=p.axes[-1] == axes.EMBED, interpret=shards.on_cpu)
        kind |= dict(tokens=ctx.tokens, padded=shards.padded(ctx.tokens))
        return p.replace(RingWeight(values, jnp.int32(0), axis, shards.ring(axis), **kind))

    graph, whole, state = nnx.split(block, is_whole, ...)
    return graph, nnx.map_state(travelling, whole), state


def _ringed(block: Block, ctx: StepContext, stacked: bool) -> frozenset[str]:
    """The weights whose products are fused with a collective, see `models.layers.ring`."""
    shapes, names = {}, ring_weights(ctx.config, block.spec)
    for name in names:
        module, weight = name.split(".")
        value = getattr(getattr(block, module), weight).get_value()
        if isinstance(value, jax.Array):
            shapes[name], dtype = value.shape[stacked:], value.dtype
    if not shapes:
        return frozenset()
    return ring_fused(ring_choices(names, shapes, dtype, ctx.tokens, ctx.shards, ctx.backend))


# Of norms, and what expands latents.
_WHOLE = (
    (axes.LAYERS, axes.EMBED),
    (axes.LAYERS, axes.KV_HEADS, axes.HEAD_DIM, axes.LATENT),
    (axes.LAYERS, axes.KV_HEADS, axes.LATENT, axes.HEAD_DIM),
)


def _of_layer(layer: jax.Array, p: nnx.Param) -> nnx.Param:
    w = p.get_value()
    if isinstance(w, (PackedTensor, RingWeight)):
        return p.replace(w.of_layer(layer))
    return p.replace(OfStack(w, layer)) if p.axes in _WHOLE else p


def _stacked(block: Block, count: int) -> Block:
    graph, state = nnx.split(block)
    wide = jax.tree.map(
        lambda p: p.replace(jnp.zeros((count, *p.shape), p.dtype), axes=(axes.LAYERS, *p.axes)),
        state,
        is_leaf=lambda p: isinstance(p, nnx.Param),
    )
    return nnx.merge(graph, wide)
