"""The one decoder: every family is a `ModelConfig` run by this code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block, PreNormBlock, kind_of_block, sums_feed_norms
from inferlib.models.config import ConfigError, LayerSpec, MoeSpec
from inferlib.models.depth import Taken
from inferlib.models.layers.embedding import look_up
from inferlib.models.layers.exchange import gathers
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layers.per_layer import PerLayerEmbedding
from inferlib.models.layers.residual import Streams
from inferlib.models.layout import Layout
from inferlib.models.looped import Loop
from inferlib.models.propagation import propagate
from inferlib.models.run_segment import run_segment, stacked
from inferlib.models.segments import Segment, block_of
from inferlib.models.stream import Residual
from inferlib.ops.matmul import decode_sized, matmul
from inferlib.ops.residual_norm import Mailboxes, choose
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Forward(NamedTuple):
    """What a pass over T tokens gives.

    hidden [T, D]: the last hidden states, before the final norm; in lanes, see `LaneDecoder`. cache: one `LayerCache`
    per block. mailboxes: see `Decoder`. load [L, E]: the number of tokens that chose each expert of the layers with
    experts, if it is counted. features [T, N, D]: the hidden states after the N `feature_layers` of the step, if it
    names any. core: steps of a loop's core, if tokens may leave it.
    """

    hidden: jax.Array
    cache: tuple[LayerCache, ...]
    mailboxes: Mailboxes | None
    load: jax.Array | None
    features: jax.Array | None
    core: Taken | None = None


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head. Build it under `nnx.eval_shape` (see `abstract_model`).

    `blocks` follow the patterns of the segments in order. The weights of a scanned block have a leading axis "layers",
    as long as the segment's count.
    """

    def __init__(self, layout: Layout, segments: tuple[Segment, ...], dtype):
        config = layout.config
        self.config, self.segments = config, segments
        self.embed = param((layout.vocab, config.dim), (axes.VOCAB, axes.EMBED), dtype)
        if config.learned_positions:
            self.positions = param((config.context, config.dim), (axes.CONTEXT, axes.EMBED), dtype)
        if config.per_layer is not None:
            self.per_layer = PerLayerEmbedding(config.per_layer, layout, dtype)
        if config.streams > 1:
            self.streams = Streams(config.streams, config.dim, dtype)
        blocks = []
        for segment in segments:
            for spec in segment.pattern:
                block = self.kind_of_block(spec)(spec, layout, dtype)
                blocks.append(stacked(block, segment.count) if segment.count > 1 else block)
        self.blocks = nnx.List(blocks)
        self.final_norm = self.build_final_norm(dtype)
        if config.loop is not None:
            self.loop = Loop(config.loop, config, self.final_norm, dtype)
        if not config.tied:
            self.head = param((self.head_inputs, layout.vocab), (axes.EMBED, axes.VOCAB), dtype, contracting=(0,))
        if config.head_bias:
            self.head_bias = param((layout.vocab,), (axes.VOCAB,), dtype, "zeros")

    def __call__(self, ctx: StepContext, cache: tuple[LayerCache, ...], mailboxes: Mailboxes | None = None) -> Forward:
        """Run the step's tokens.

        mailboxes: for kernels that also sum over devices; they need `sums_feed_norms` and unrolled layers, and leave no
        sums from which features could be taken.
        """
        self.must_have(ctx.feature_layers, mailboxes)
        self.compute_shared(ctx)
        x, inputs = self.inputs(ctx)
        residual = self.first_residual(x, ctx, mailboxes)
        new, loads, at, traced, core = [], [], 0, {}, None
        features, before, propagated = {0: residual.x}, residual, None
        for segment in self.segments:
            if ctx.propagation is not None and segment.start == ctx.propagation.layer:
                propagated = propagate(self.blocks[at - 1], before, ctx)
                residual, ctx, traced = propagated.residual(residual), propagated.ctx, {}
                self.compute_shared(ctx)
            before, end = residual, at + len(segment.pattern)
            blocks = self.blocks[at:end]
            caches = [
                self.borrowed_cache(block, new) or cache for block, cache in zip(blocks, cache[at:end], strict=True)
            ]
            run = partial(self.loop, logits=self.logits_in(ctx)) if segment.looped else run_segment
            ran = run(segment, blocks, residual, ctx, caches, inputs, traced)
            residual, caches = ran.residual, ran.caches
            core = ran.core if segment.looped else core
            loads += ran.loads
            features |= ran.features
            new += [cache if block.owns_cache else LayerCache(()) for block, cache in zip(blocks, caches, strict=True)]
            at = end
        if residual.pending is not None:  # `logits` norms the tokens that are sampled
            residual, _ = self.final_norm.read(residual, ctx.shards, defer=True)
        load = jnp.concatenate(loads) if loads else None
        chosen = [ctx.shards.all_tokens(features[n], ctx.tokens) for n in ctx.feature_layers]
        stacked_features = jnp.stack(chosen, axis=1) if chosen else None
        hidden = self.outputs(residual, ctx)
        hidden = hidden if propagated is None else propagated.restored(hidden)
        return Forward(hidden, tuple(new), residual.mailboxes, load, stacked_features, core)

    def kind_of_block(self, spec: LayerSpec) -> type[Block]:
        """The class of a layer's block."""
        return kind_of_block(spec, self.config)

    def build_final_norm(self, dtype) -> Norm:
        """The norm before the head."""
        return Norm(self.config.norm, self.config.dim, dtype)

    @property
    def head_inputs(self) -> int:
        """Rows of the head."""
        return self.config.dim

    def first_residual(self, x: jax.Array, ctx: StepContext, mailboxes: Mailboxes | None) -> Residual:
        """The residual before the first layer, of its inputs x [T, D] or [T, N, D]."""
        return Residual(x, mailboxes=mailboxes, lazy=mailboxes is not None or self.leaves_pending(ctx))

    def compute_shared(self, ctx: StepContext) -> None:
        """Compute what the layers of a step share: values that are cached inside a scan's body do not outlive it."""
        _ = ctx.positions, ctx.rows, ctx.written, ctx.rope, self.config.mixtures and ctx.mlp_active
        _ = self.gathers_tokens(ctx) and ctx.experts_active
        _ = ctx.adapters is not None and ctx.mlp_slots
        _ = [ctx.of_level(level).written for level in range(1, 1 + len(ctx.levels))]

    def gathers_tokens(self, ctx: StepContext) -> bool:
        """Whether experts of some layer take the tokens of all devices."""
        tokens, dtype = ctx.tokens * ctx.shards.mlp_row_shards, self.final_norm.weight[...].dtype
        row_bytes = self.config.dim // ctx.shards.size(axes.EMBED) * dtype.itemsize
        specs = [spec for layer in self.config.layers if isinstance(spec := layer.mlp, MoeSpec)]
        return any(gathers(spec, tokens, row_bytes, ctx.shards, ctx.backend) for spec in specs)

    def must_have(self, feature_layers: tuple[int, ...], mailboxes: Mailboxes | None) -> None:
        """Raise ConfigError if the hidden states after these layers cannot be returned."""
        if not feature_layers:
            return
        count = len(self.config.layers)
        if odd := [n for n in feature_layers if not 0 <= n <= count]:
            raise ConfigError(f"features after {odd[0]} layers are asked for of a model of {count}")
        if self.config.streams > 1:
            raise ConfigError(f"{self.config.family} has {self.config.streams} residuals, and features are of one")
        if self.config.loop is not None:
            raise ConfigError(f"{self.config.family} repeats layers, and features are of layers that run once")
        if mailboxes is not None:
            raise ValueError("features are taken from whole sums: run the step without mailboxes")

    def inputs(self, ctx: StepContext) -> tuple[jax.Array, jax.Array | None]:
        """The residual before the first layer, [T, D] or [T, N, D], and the per-layer embeddings [T, L, P], if there
        are some."""
        x = self.embedding(ctx)
        inputs = None if self.config.per_layer is None else self.per_layer(x, ctx)
        return self.streams.spread(x, ctx.shards) if self.config.streams > 1 else x, inputs

    def outputs(self, residual: Residual, ctx: StepContext) -> jax.Array:
        """The hidden states [T, D] after the last layer."""
        x = self.streams.gather(residual.x, ctx.shards) if self.config.streams > 1 else residual.x
        return ctx.shards.all_tokens(x, ctx.tokens)

    def leaves_pending(self, ctx: StepContext) -> bool:
        """True if one kernel adds each branch of this device and norms the sum.

        That pays after products that are kernels too, of experts and of decode-sized batches with quantised weights,
        and after products that stay partial sums. After others, XLA adds the residual in the product's own kernel.
        """
        scanned = any(segment.count > 1 for segment in self.segments)
        if scanned or ctx.shards.mesh is not None or not sums_feed_norms(self.config, sharded=False):
            return False
        if choose(ctx.tokens, self.config.dim, backend=ctx.backend.add_norm).name == "xla":
            return False
        if self.config.mixtures:
            return True
        if isinstance(down := self.blocks[0].mlp.down[...], jax.Array):
            return all(isinstance(block, PreNormBlock) and block.leaves_partials(ctx) for block in self.blocks)
        return decode_sized(down, ctx.tokens, ctx.backend.matmul)

    def borrowed_cache(self, block: Block, caches: Sequence[LayerCache]) -> LayerCache | None:
        """The cache that a block's layers borrow, if they attend to another layer's keys and values. caches: the caches
        of the blocks before it."""
        owner = block.spec.attention.cache_of
        if owner is None:
            return None
        number, place = block_of(self.segments, owner)
        return caches[number] if place is None else replace(caches[number], layer=jnp.int32(place))

    def embedding(self, ctx: StepContext) -> jax.Array:
        """The tokens' embeddings [T, D]. Each device looks up its share of the vocabulary, and the first one adds
        positions."""
        split, x = ctx.shards.size(axes.VOCAB) > 1, look_up(self.embed[...], ctx.batch.tokens, ctx.shards)
        x = x if self.config.embed_scale == 1.0 else x * jnp.asarray(self.config.embed_scale, x.dtype)
        if self.config.learned_positions:
            at = jnp.take(self.positions[...], ctx.positions, axis=0, mode="clip")
            x = x + (jnp.where(ctx.shards.index(axes.VOCAB) == 0, at, 0) if split else at)
        return ctx.shards.sum_tokens(x, axes.VOCAB) if split else x

    def logits_in(self, ctx: StepContext) -> Callable[[jax.Array], jax.Array]:
        """`logits` as this step computes them."""
        return partial(self.logits, shards=ctx.shards, backend=ctx.backend.matmul)

    def normed(self, hidden: jax.Array, shards: Shards) -> jax.Array:
        """Hidden states after the final norm [..., D]."""
        return self.final_norm(hidden, shards)

    def logits(
        self, x: jax.Array, shards: Shards, backend: str | None = None, *, norm: Norm | None = None
    ) -> jax.Array:
        """Hidden states [T, D] -> logits [T, V] float32, of this device's part of the vocabulary.

        backend: see `matmul`. norm: instead of the final one.
        """
        config, norm = self.config, self.final_norm if norm is None else norm
        with jax.named_scope("head"):
            logits = shards.sum(self.head_logits(x, norm, shards, backend), axes.EMBED)
            if config.head_bias:
                logits = logits + self.head_bias[...].astype(jnp.float32)
            logits = logits * config.logit_scale
            if config.final_softcap is not None:
                logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
            if logits.shape[1] * shards.size(axes.VOCAB) > config.vocab:
                ids = jnp.arange(logits.shape[1]) + shards.index(axes.VOCAB) * logits.shape[1]
                logits = jnp.where(ids < config.vocab, logits, -jnp.inf)
            return logits

    def head_logits(self, x: jax.Array, norm: Norm, shards: Shards, backend: str | None) -> jax.Array:
        """The norm's and the head's product [T, V] float32, a partial sum where the head's inputs are split."""
        y = norm(x, shards)
        head, transposed = (self.embed, True) if self.config.tied else (self.head, False)
        y = y if transposed else norm.for_products(x, y, shards)
        return matmul(y, head[...], transposed=transposed, out_dtype=jnp.float32, backend=backend)
