"""One decoder layer, or a stack of equal ones: a mixer and a feed-forward around the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import AttentionSpec, LayerSpec, MlaSpec, ModelConfig, MoeSpec
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.mla import Mla
from inferlib.models.layers.mlp import Mlp
from inferlib.models.layers.moe import Load, Moe
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layers.per_layer import PerLayerInput
from inferlib.models.layers.residual import AltUp, Laurel
from inferlib.models.layout import Layout
from inferlib.models.recurrent import Recurrent, is_absent
from inferlib.models.stream import Branch, Residual
from inferlib.ops.collective_matmul import RingWeight
from inferlib.ops.matmul import Activations, as_array, choose
from inferlib.sharding import axes

Output = tuple[Residual, LayerCache, Load]


class Block(nnx.Module):
    """The modules of a layer, and its two branches. Subclasses say how the branches meet the residual."""

    def __init__(self, spec: LayerSpec, layout: Layout, dtype):
        config = layout.config
        self.spec, self.scale = spec, config.residual_scale
        norm = lambda: Norm(config.norm, config.dim, dtype)  # noqa: E731
        heads = layout.heads(spec.attention)
        if is_absent(spec.attention):
            self.attn: Any = None
        elif isinstance(spec.attention, MlaSpec):
            self.attn = Mla(spec.attention, heads, config.dim, dtype)
        elif isinstance(spec.attention, Recurrent):
            self.attn = spec.attention.build(heads, config.dim, dtype)
        else:
            self.attn = Attention(spec.attention, heads, config.norm, config.dim, dtype)
        if isinstance(spec.mlp, MoeSpec):
            self.mlp = Moe(spec.mlp, layout, dtype)
        elif spec.mlp is not None:
            self.mlp = Mlp(spec.mlp, layout.hidden(spec.mlp.hidden), config.dim, dtype)
        if spec.pre_norm and not is_absent(spec.attention):
            self.pre_attn_norm = norm()
        if spec.pre_norm and not spec.parallel and spec.mlp is not None:
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
        residual: Residual,
        ctx: StepContext,
        cache: LayerCache,
        *,
        layer: jax.Array | None = None,
        token_inputs: jax.Array | None = None,
    ) -> Output:
        """The residual after this layer, its cache, and the load of its experts.

        layer: the current layer of a scanned segment. token_inputs [T, P]: this layer's per-layer embeddings.
        """
        raise NotImplementedError

    def attend(
        self, y: Activations, ctx: StepContext, cache: LayerCache, *, partials: bool = False
    ) -> tuple[Branch, LayerCache]:
        """The mixer's branch. partials: leave it as split-K partial sums."""
        y = y if _overlaps_collective(self.attn, "qkv") else _gathered(y, ctx)
        out, cache = self.attn(y, ctx, cache, **{"partials": True} if partials else {})
        over = () if _overlaps_collective(self.attn, "o") else (axes.KV_HEADS, axes.HEAD_OUT)
        return Branch(out, over, self.attn_biases), cache

    def feed(
        self, y: Activations, ctx: StepContext, layer: jax.Array | None, *, partials: bool = False
    ) -> tuple[Branch, Load]:
        """The feed-forward's branch. partials: leave it as split-K partial sums."""
        if not _overlaps_collective(self.mlp, "gate_up"):
            y = _gathered(y, ctx)
            y = ctx.shards.gather_for_mlp(as_array(y)) if ctx.shards.mlp_row_shards > 1 else y
        out, load = self.feed_forward(y, ctx, layer, partials=partials)
        return Branch(out, () if _overlaps_collective(self.mlp, "down") else (axes.MLP,), self.mlp_biases), load

    def feed_forward(
        self, y: Activations, ctx: StepContext, layer: jax.Array | None, *, partials: bool = False
    ) -> tuple[Any, Load]:
        """This device's partial sum, and the load of its experts."""
        if isinstance(self.mlp, Moe):
            return self.mlp(as_array(y), ctx, layer)
        return self.mlp(y, ctx, partials=partials), None

    @property
    def attn_biases(self) -> tuple[jax.Array, ...]:
        """The bias that follows the mixer's sum, if there is one."""
        return (self.attn.o_bias[...],) if self.spec.attention.o_bias else ()

    @property
    def mlp_biases(self) -> tuple[jax.Array, ...]:
        """The bias that follows the feed-forward's sum, if there is one."""
        if self.spec.mlp is None or not self.spec.mlp.output_bias:
            return ()
        return ((self.mlp.shared if isinstance(self.mlp, Moe) else self.mlp).down_bias[...],)

    @property
    def owns_cache(self) -> bool:
        """False if its layers attend to another layer's keys and values."""
        return self.spec.attention.cache_of is None


class PreNormBlock(Block):
    """x += attention(norm(x)); x += mlp(norm(x)) (Llama, and most others)."""

    def __call__(self, residual, ctx, cache, *, layer=None, token_inputs=None) -> Output:
        residual, cache = self.after_mixer(residual, ctx, cache)
        residual, load = self.after_mlp(residual, ctx, layer)
        return residual, cache, load

    def after_mixer(self, residual: Residual, ctx: StepContext, cache: LayerCache) -> tuple[Residual, LayerCache]:
        """The residual with the mixer's branch, and the cache."""
        partials = self.stays_partial(residual, ctx)
        with jax.named_scope("attention"):
            residual, y = self.pre_attn_norm.read(residual, ctx.shards, defer=partials)
            branch, cache = self.attend(y, ctx, cache, partials=partials)
            return residual.plus(branch, ctx.shards, self.scale), cache

    def after_mlp(self, residual: Residual, ctx: StepContext, layer: jax.Array | None) -> tuple[Residual, Load]:
        """The residual with the feed-forward's branch, if there is one, and the load."""
        if self.spec.mlp is None:
            return residual, None
        partials = self.stays_partial(residual, ctx)
        with jax.named_scope("mlp"):
            residual, y = self.pre_mlp_norm.read(residual, ctx.shards, defer=partials)
            branch, load = self.feed(y, ctx, layer, partials=partials)
            return residual.plus(branch, ctx.shards, self.scale), load

    def stays_partial(self, residual: Residual, ctx: StepContext) -> bool:
        """True if a branch is left as split-K partial sums."""
        return residual.lazy and residual.mailboxes is None and self.leaves_partials(ctx)

    def leaves_partials(self, ctx: StepContext) -> bool:
        """True if both branches can stay split-K partial sums, because only the residual's sum follows them."""
        attention, mlp = self.spec.attention, self.mlp
        if not (isinstance(attention, AttentionSpec) and isinstance(mlp, Mlp)) or attention.o_bias or mlp.spec.bias:
            return False
        products, dtype = ((self.attn.o, 3), (mlp.down, 1)), self.pre_mlp_norm.weight.dtype
        choices = (
            choose(w[...], ctx.tokens, dtype, contract=contract, backend=ctx.backend.matmul, partials=True)
            for w, contract in products
        )
        return all(choice.name != "xla" for choice in choices)


class FeedForwardBlock(Block):
    """x += mlp(norm(x)): a layer without a mixer, whose cache has no arrays (Nemotron-H)."""

    def __call__(self, residual, ctx, cache, *, layer=None, token_inputs=None) -> Output:
        with jax.named_scope("mlp"):
            residual, y = self.pre_mlp_norm.read(residual, ctx.shards)
            branch, load = self.feed(y, ctx, layer)
            return residual.plus(branch, ctx.shards, self.scale), cache, load


class SandwichBlock(Block):
    """x += post(attention(pre(x))); x += post(mlp(pre(x))) (Gemma, GLM-4); or without the norms before (OLMo 2)."""

    def __call__(self, residual, ctx, cache, *, layer=None, token_inputs=None) -> Output:
        shards, pre = ctx.shards, self.spec.pre_norm
        with jax.named_scope("attention"):
            y = self.pre_attn_norm.read(residual, shards)[1] if pre else residual.x
            branch, cache = self.attend(y, ctx, cache)
            y = self.post_attn_norm(branch.total(shards), shards)
            residual = residual.plus(Branch(y), shards, self.scale)
        with jax.named_scope("mlp"):
            y = self.pre_mlp_norm.read(residual, shards)[1] if pre else residual.x
            branch, load = self.feed(y, ctx, layer)
            y = self.post_mlp_norm(branch.total(shards), shards)
            return residual.plus(Branch(y), shards, self.scale), cache, load


class NormedSumBlock(Block):
    """x = post(x + attention(pre(x))); x = post(x + mlp(pre(x))) (Huginn)."""

    def __call__(self, residual, ctx, cache, *, layer=None, token_inputs=None) -> Output:
        shards = ctx.shards
        with jax.named_scope("attention"):
            branch, cache = self.attend(self.pre_attn_norm.read(residual, shards)[1], ctx, cache)
            x = self.post_attn_norm(residual.plus(branch, shards, self.scale).x, shards)
        with jax.named_scope("mlp"):
            residual = replace(residual, x=x)
            branch, load = self.feed(self.pre_mlp_norm.read(residual, shards)[1], ctx, layer)
            x = self.post_mlp_norm(residual.plus(branch, shards, self.scale).x, shards)
        return replace(residual, x=x), cache, load


class ParallelBlock(Block):
    """y = norm(x); x += attention(y) + mlp(y) (Cohere)."""

    def __call__(self, residual, ctx, cache, *, layer=None, token_inputs=None) -> Output:
        shards = ctx.shards
        with jax.named_scope("attention"):
            y = _gathered(self.pre_attn_norm.read(residual, shards)[1], ctx)
            attn, cache = self.attn(y, ctx, cache)
        with jax.named_scope("mlp"):
            mlp, load = self.feed_forward(shards.gather_for_mlp(as_array(y)), ctx, layer)
            biases = self.attn_biases + self.mlp_biases
            if shards.mlp_row_shards > 1:  # attention is whole
                branch = Branch(attn + shards.sum_tokens(mlp, axes.MLP), (), biases)
            else:
                branch = Branch(attn + mlp, (axes.MLP,), biases)
            return residual.plus(branch, shards, self.scale), cache, load


class GeneralBlock(Block):
    """A layer whose residual is more than a sum: LAuReL, AltUp, per-layer embeddings, normed residuals, experts that
    are deferred or have norms of their own (Gemma 3n, Gemma 4, MiniMax, LongCat)."""

    def __call__(self, residual, ctx, cache, *, layer=None, token_inputs=None) -> Output:
        altup = residual.x.ndim > 2
        predicted = self.altup.predict(residual.x, ctx) if altup else residual.x
        x, cache = self.after_attention(predicted[:, 0] if altup else predicted, ctx, cache)
        x, deferred, load = self.after_mlp(x, residual.deferred, ctx, layer)
        x = self.altup.correct(predicted, x, ctx) if altup else x
        if token_inputs is not None and altup:
            x = x.at[:, 1:].add(self.per_layer(x[:, 0] * self.altup.scale[...], token_inputs, ctx)[:, None])
        elif token_inputs is not None:
            x = x + self.per_layer(x, token_inputs, ctx)
        x = x * self.scalar[...] if self.spec.scaled else x
        return replace(residual, x=x, deferred=deferred), cache, load

    def after_attention(self, x: jax.Array, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """The residual [T, D] with attention's branch added."""
        spec, shards = self.spec, ctx.shards
        with jax.named_scope("attention"):
            y = self.pre_attn_norm.read(Residual(x), shards)[1] if spec.pre_norm else x
            branch, cache = self.attend(y, ctx, cache)
        out = branch.total(shards)
        out = self.post_attn_norm(out, shards) if spec.post_norm else out
        scales = spec.normed.attention if spec.normed else None
        x = self.add(x, as_array(y), out, scales)
        if spec.laurel:
            x = (x + self.laurel(as_array(y), ctx)) * jnp.asarray(2**-0.5, x.dtype)
        return x, cache

    def after_mlp(
        self, x: jax.Array, deferred: jax.Array | None, ctx: StepContext, layer: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, Load]:
        """The residual [T, D] with the feed-forward's branch added, the sum of experts that is deferred to the next
        layer, and the load. deferred: the sum that the layer before deferred."""
        spec, shards = self.spec, ctx.shards
        if spec.mlp is None:
            return x, None, None
        y, later = x, None
        with jax.named_scope("mlp"):
            if isinstance(self.mlp, Moe) and self.mlp.spec.separate_norms:
                tokens = shards.gather_for_mlp(shards.all_tokens(x, ctx.tokens))
                out, load = self.mlp.with_norms(tokens, self.pre_mlp_norm(tokens, shards), ctx, layer)
            else:
                y = self.pre_mlp_norm.read(Residual(x), shards)[1] if spec.pre_norm else x
                if isinstance(self.mlp, Moe) and self.mlp.spec.deferred:
                    tokens = shards.gather_for_mlp(as_array(_gathered(y, ctx)))
                    later, out, load = self.mlp.run_apart(tokens, ctx, layer)
                    branch = Branch(out, (axes.MLP,), self.mlp_biases)
                else:
                    branch, load = self.feed(y, ctx, layer)
                if deferred is not None:
                    branch = replace(branch, partials=branch.partials + deferred)
                out = branch.total(shards)
        out = self.post_mlp_norm(out, shards) if spec.post_norm else out
        return self.add(x, as_array(y), out, spec.normed.mlp if spec.normed else None), later, load

    def add(self, x: jax.Array, y: jax.Array, out: jax.Array, scales: tuple[float, float] | None) -> jax.Array:
        """The residual with a branch's output added. scales: the factors of a `NormedResidual`, which adds to y, the
        norm of x."""
        if scales is not None:
            return y * scales[0] + out * scales[1]
        return x + (out if self.scale == 1.0 else out * self.scale)


def kind_of_block(spec: LayerSpec, config: ModelConfig) -> type[Block]:
    """The class of a layer's block."""
    if is_absent(spec.attention):
        return FeedForwardBlock
    defers = any(isinstance(layer.mlp, MoeSpec) and layer.mlp.deferred for layer in config.layers)
    normed = spec.normed or (isinstance(spec.mlp, MoeSpec) and spec.mlp.separate_norms)
    extended = config.streams > 1 or config.per_layer is not None or spec.laurel or spec.scaled
    if defers or normed or extended or not (spec.pre_norm or spec.post_norm):
        return GeneralBlock
    if spec.norms_sums:
        return NormedSumBlock
    return ParallelBlock if spec.parallel else SandwichBlock if spec.post_norm else PreNormBlock


def sums_feed_norms(config: ModelConfig, *, sharded: bool) -> bool:
    """True if only an RMS norm reads the residual after every branch, so that one kernel can add and norm.

    sharded: the kernel also sums over devices; then there may be no output biases, which every device would add.
    """
    if config.norm.kind != "rms" or config.norm.unit_offset or config.residual_scale != 1.0:
        return False
    if config.loop is not None or config.lanes is not None:  # an injection reads it too; each lane adds other sums
        return False
    return all(
        kind_of_block(layer, config) is PreNormBlock
        and layer.mlp is not None
        and not (sharded and (layer.attention.o_bias or layer.mlp.output_bias))
        for layer in config.layers
    )


def _gathered(y: Activations, ctx: StepContext) -> Activations:
    """The activations of all tokens, where they are split."""
    return ctx.shards.all_tokens(as_array(y), ctx.tokens) if ctx.shards.splits_tokens else y


def _overlaps_collective(module: nnx.Module, name: str) -> bool:
    """True if one kernel computes the product with this weight and its collective."""
    weight = getattr(module, name, None)
    return weight is not None and isinstance(weight.get_value(), RingWeight)
