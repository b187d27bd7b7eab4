"""The one decoder: every family is a `ModelConfig` run by this code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.config import LayerSpec, MlaSpec, ModelConfig, MoeSpec
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.mla import Mla
from inferlib.models.layers.mlp import Mlp
from inferlib.models.layers.moe import Load, Moe
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layout import Layout
from inferlib.ops.matmul import matmul
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

if TYPE_CHECKING:
    from inferlib.pallas_kernels.all_reduce_norm_gpu import Mailboxes


class Stream(NamedTuple):
    """What layers hand on. x [T, D]: the residual, where tokens or the width are split this device's share; y [T, D]:
    its norm, if the sum that made it brought that along; boxes: the mailboxes of such sums; held [T, D]: this device's
    part of what the next layer's feed-forward is summed with (see `MoeSpec.deferred`); load [E]: how many tokens chose
    each of the layer's experts, if that is counted."""

    x: jax.Array
    y: jax.Array | None = None
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
        else:
            self.attn = Attention(spec.attention, heads, config.norm, config.dim, dtype)
        if isinstance(spec.mlp, MoeSpec):
            self.mlp = Moe(spec.mlp, layout, dtype)
        else:
            self.mlp = Mlp(spec.mlp, layout.hidden(spec.mlp.hidden), config.dim, dtype)
        if spec.pre_norm:
            self.pre_attn_norm = norm()
            if not spec.parallel:
                self.pre_mlp_norm = norm()
        if spec.post_norm:
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()
        if spec.scaled:
            self.scalar = param((1,), (None,), dtype, "ones")

    def __call__(
        self, stream: Stream, ctx: StepContext, cache: LayerCache, after: jax.Array | None = None
    ) -> tuple[Stream, LayerCache]:
        """after [D]: the weight of the norm that follows, with mailboxes."""
        if stream.boxes is not None:
            return self.fused(stream, ctx, cache, after)
        return self.plain(stream, ctx, cache)

    def fused(self, stream: Stream, ctx: StepContext, cache: LayerCache, after: jax.Array) -> tuple[Stream, LayerCache]:
        """Each sum over devices in one kernel with the residual's and the norm that follows; see `fuses_sums`."""
        from inferlib.pallas_kernels.all_reduce_norm_gpu import all_reduce_norm

        x, y, boxes, *_ = stream
        eps = self.pre_mlp_norm.spec.eps
        with jax.named_scope("attention"):
            attn, cache = self.attn(self.pre_attn_norm(x, ctx.shards) if y is None else y, ctx, cache)
            x, y, boxes = all_reduce_norm(attn, x, self.pre_mlp_norm.weight[...], eps, boxes)
        with jax.named_scope("mlp"):
            mlp, load = self.feed_forward(y, ctx, cache)
            return Stream(*all_reduce_norm(mlp, x, after, eps, boxes), load=load), cache

    def plain(self, stream: Stream, ctx: StepContext, cache: LayerCache) -> tuple[Stream, LayerCache]:
        spec, shards, x, held = self.spec, ctx.shards, stream.x, None
        with jax.named_scope("attention"):
            y = shards.all_tokens(self.pre_attn_norm(x, shards) if spec.pre_norm else x, ctx.tokens)
            attn, cache = self.attn(y, ctx, cache)
        if spec.parallel:
            with jax.named_scope("mlp"):
                mlp, load = self.feed_forward(shards.fed(y), ctx, cache)
                if shards.feeders > 1:  # attention is whole
                    both = attn + shards.sum_tokens(mlp, axes.MLP)
                else:
                    both = shards.sum_tokens(attn + mlp, axes.MLP)
            return Stream(self.add(x, self.mlp.finish(self.biased(both))), load=load), cache
        attn = self.biased(shards.sum_tokens(attn, axes.KV_HEADS, axes.HEAD_OUT))
        x = self.add(x, self.post_attn_norm(attn, shards) if spec.post_norm else attn)
        with jax.named_scope("mlp"):
            y = shards.fed(shards.all_tokens(self.pre_mlp_norm(x, shards) if spec.pre_norm else x, ctx.tokens))
            if isinstance(spec.mlp, MoeSpec) and spec.mlp.deferred:
                held, mlp, load = self.mlp.apart(y, ctx, cache.layer)
            else:
                mlp, load = self.feed_forward(y, ctx, cache)
            mlp = mlp if stream.held is None else mlp + stream.held
            mlp = self.mlp.finish(shards.sum_tokens(mlp, axes.MLP))
        x = self.add(x, self.post_mlp_norm(mlp, shards) if spec.post_norm else mlp)
        return Stream(x * self.scalar[...] if spec.scaled else x, held=held, load=load), cache

    def feed_forward(self, y: jax.Array, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, Load]:
        """This device's part of the sum."""
        if isinstance(self.mlp, Moe):
            return self.mlp(y, ctx, cache.layer)
        return self.mlp(y, ctx.shards), None

    def biased(self, attn: jax.Array) -> jax.Array:
        return attn + self.attn.o_bias[...] if self.spec.attention.o_bias else attn

    def add(self, x: jax.Array, branch: jax.Array) -> jax.Array:
        return x + (branch if self.scale == 1.0 else branch * self.scale)


@dataclass(frozen=True)
class Segment:
    """`count` repetitions of a pattern of layers, from layer `start`; scanned if count > 1."""

    start: int
    pattern: tuple[LayerSpec, ...]
    count: int = 1

    def layers(self, offset: int) -> range:
        """Indices of the layers at `offset` in the pattern."""
        return range(self.start + offset, self.start + len(self.pattern) * self.count, len(self.pattern))


def segments_of(layers: Sequence[LayerSpec], *, scan: bool) -> tuple[Segment, ...]:
    """Cut the layers into repeating patterns (`scan`), or into one segment per layer.

    At each layer, the pattern that covers the most layers when repeated is taken, the shortest of equals.
    """
    if not scan:
        return tuple(Segment(i, (spec,)) for i, spec in enumerate(layers))
    segments, start = [], 0
    while start < len(layers):
        size, count = 1, 1
        for width in range(1, (len(layers) - start) // 2 + 1):
            pattern, repeats = layers[start : start + width], 1
            while layers[start + repeats * width : start + (repeats + 1) * width] == pattern:
                repeats += 1
            if repeats > 1 and repeats * width > size * count:
                size, count = width, repeats
        segments.append(Segment(start, tuple(layers[start : start + size]), count))
        start += size * count
    return tuple(segments)


def fuses_sums(config: ModelConfig) -> bool:
    """Whether every sum over devices is of one layer, and followed by the residual's and an RMS norm, and by nothing
    between."""
    plain = config.norm.kind == "rms" and not config.norm.unit_offset and config.residual_scale == 1.0
    return plain and all(
        layer.pre_norm
        and not (layer.post_norm or layer.parallel or layer.scaled or layer.attention.o_bias or layer.mlp.output_bias)
        and not (isinstance(layer.mlp, MoeSpec) and layer.mlp.deferred)
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
        # Cached now: computed in a scan's body they would not outlive it.
        _ = ctx.positions, ctx.pages, ctx.rope, self.config.mixtures and ctx.fed
        stream, norms = Stream(self.embedding(ctx), boxes=boxes), [None] * len(self.blocks)
        if boxes is not None:
            norms = [*(block.pre_attn_norm.weight[...] for block in self.blocks[1:]), self.final_norm.weight[...]]
        new, loads, at, shared = [], [], 0, {}
        for segment in self.segments:
            end = at + len(segment.pattern)
            blocks, caches = self.blocks[at:end], cache[at:end]
            if segment.count > 1:
                stream, caches, load = _scan(blocks, stream, ctx, caches, segment.count)
            else:
                stream, caches, load = _unrolled(blocks, stream, ctx, caches, norms[at:end], shared)
            new += caches
            loads += load
            at = end
        hidden = ctx.shards.all_tokens(stream.x, ctx.tokens)
        return hidden, tuple(new), stream.boxes, jnp.concatenate(loads) if loads else None

    def embedding(self, ctx: StepContext) -> jax.Array:
        """[T, D]; each device looks up the tokens of its share of the vocabulary, the first of them positions too."""
        table, ids, split = self.embed[...], ctx.batch.tokens, ctx.shards.size(axes.VOCAB) > 1
        if split:
            ids = ids - ctx.shards.index(axes.VOCAB) * table.shape[0]
            own = (ids >= 0) & (ids < table.shape[0])
            x = jnp.where(own[:, None], jnp.take(table, ids, axis=0, mode="clip"), 0)
        else:
            x = jnp.take(table, ids, axis=0, mode="clip")
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


def _unrolled(blocks, stream, ctx, caches, norms, shared):
    new, loads = [], []
    for block, cache, after in zip(blocks, caches, norms, strict=True):
        graph, state = nnx.split(block)
        key = graph, cache.ring
        if key not in shared:
            shared[key] = _layer(graph, cache.ring, ctx)
        stream, arrays = shared[key](state, stream._replace(load=None), cache.arrays, after)
        new.append(LayerCache(arrays, cache.ring))
        loads += [] if stream.load is None else [stream.load[None]]
    return stream, new, loads


def _layer(graph: nnx.GraphDef, ring: bool, ctx: StepContext):
    """A layer as a function that is traced once for all layers alike; XLA inlines it."""

    @jax.jit
    def layer(state, stream, arrays, after):
        stream, cache = nnx.merge(graph, state)(stream, ctx, LayerCache(arrays, ring), after)
        return stream, cache.arrays

    return layer


def _scan(blocks, stream, ctx, caches, count: int):
    """The cache rides in the carry: as scan inputs and outputs it would exist twice. Experts stay whole, each layer
    reads its own: a layer's slice of them would be copied, chosen or not."""
    graphs, experts, states = zip(*(nnx.split(block, _is_expert, ...) for block in blocks), strict=True)
    rings = [cache.ring for cache in caches]

    def body(carry, inputs):
        stream, caches = carry
        layer, states = inputs
        new, loads = [], []
        for graph, whole, state, arrays, ring in zip(graphs, experts, states, caches, rings, strict=True):
            stream, cache = nnx.merge(graph, whole, state)(stream, ctx, LayerCache(arrays, ring, layer))
            new.append(cache.arrays)
            loads += [] if stream.load is None else [stream.load]
            stream = stream._replace(load=None)
        return (stream, tuple(new)), jnp.stack(loads) if loads else None

    carry = (stream._replace(load=None), tuple(cache.arrays for cache in caches))
    (stream, new), loads = lax.scan(body, carry, (jnp.arange(count), states))
    loads = [] if loads is None else [loads.reshape(-1, loads.shape[-1])]
    return stream, [LayerCache(arrays, ring) for arrays, ring in zip(new, rings, strict=True)], loads


def _is_expert(_path, p) -> bool:
    return axes.EXPERTS in p.axes


def _stacked(block: Block, count: int) -> Block:
    graph, state = nnx.split(block)
    wide = jax.tree.map(
        lambda p: p.replace(jnp.zeros((count, *p.shape), p.dtype), axes=(axes.LAYERS, *p.axes)),
        state,
        is_leaf=lambda p: isinstance(p, nnx.Param),
    )
    return nnx.merge(graph, wide)
