"""Run a segment's layers: one after the other, or as a scan over stacked weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block, Output
from inferlib.models.depth import Taken
from inferlib.models.fetched_weights import NOTHING, Ahead, fetched_weights
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.param import OfStack
from inferlib.models.layers.ring import ring_axis, ring_choices, ring_fused, ring_weights
from inferlib.models.segments import Segment
from inferlib.models.stream import Residual
from inferlib.ops.adapted_matmul import AdaptedWeight
from inferlib.ops.collective_matmul import RingWeight
from inferlib.ops.fetch_ahead import ArrivingWeight, arrived, fetching
from inferlib.ops.low_rank import LowRankWeight
from inferlib.ops.packed import PackedTensor
from inferlib.sharding import axes


class Ran(NamedTuple):
    """The residual after a segment, the caches of its blocks, the loads [layers, E] of their experts, and the hidden
    states [T, D] that the step asks for, by the number of layers before them. core: of a loop's core, see `Forward`."""

    residual: Residual
    caches: list[LayerCache]
    loads: list[jax.Array]
    features: dict[int, jax.Array]
    core: Taken | None = None


def run_segment(
    segment: Segment,
    blocks: Sequence[Block],
    residual: Residual,
    ctx: StepContext,
    caches: Sequence[LayerCache],
    inputs: jax.Array | None,
    traced: dict,
) -> Ran:
    """Run the layers of a segment.

    inputs [T, L, P]: per-layer embeddings of all the model's layers. traced: functions of layers, shared by segments.
    """
    if segment.count > 1:
        return _scan(segment, blocks, residual, ctx, caches, inputs)
    new, loads, features = [], [], {}
    for number, (block, cache) in enumerate(zip(blocks, caches, strict=True), segment.start):
        parts = _split(block, ctx, is_stacked=False)
        if parts.graph not in traced:
            traced[parts.graph] = _traced_layer(parts.graph, ctx)
        of_layer = None if inputs is None else inputs[:, number]
        residual, cache, load = traced[parts.graph](parts[1:], residual, cache, of_layer)
        new.append(cache)
        loads += [] if load is None else [load[None]]
        if number + 1 in ctx.feature_layers:
            features[number + 1] = residual.value
    return Ran(residual, new, loads, features)


def _traced_layer(graph: nnx.GraphDef, ctx: StepContext):
    """A layer as a function that is traced once for all equal layers; XLA inlines it."""

    @jax.jit
    def layer(states, residual, cache, inputs):
        residual, cache, load = nnx.merge(graph, *states)(residual, ctx, cache, token_inputs=inputs)
        return residual, replace(cache, layer=None), load

    return layer


def _scan(
    segment: Segment,
    blocks: Sequence[Block],
    residual: Residual,
    ctx: StepContext,
    caches: Sequence[LayerCache],
    inputs: jax.Array | None,
) -> Ran:
    """Scan over the repetitions of the segment's pattern.

    The cache is part of the carry: as an input and output of the scan it would exist twice. The cache of an earlier
    block is only read, so it stays outside. Weights of experts, and weights that kernels read by layer, stay whole:
    slices of them would be copied. Weights that are fetched ahead arrive while the layer before runs, so those of the
    first block are part of the carry. Hidden states that are asked for are part of it too, as an output of the scan
    would have those of all layers.
    """
    pattern = [(block.spec, _by_name(block)) for block in blocks]
    ahead = fetched_weights(pattern, ctx.tokens, ctx.config, ctx.shards, ctx.backend)
    parts = [_split(block, ctx, names, is_stacked=True) for block, names in zip(blocks, ahead, strict=True)]
    fetches = any(names.mixer or names.mlp for names in ahead)
    if inputs is not None:  # [T, L, P] -> [count, pattern, T, P]
        inputs = inputs[:, segment.start : segment.stop]
        inputs = jnp.moveaxis(inputs, 0, 1).reshape(segment.count, len(blocks), *inputs.shape[::2])
    wanted = [n for n in sorted(set(ctx.feature_layers)) if segment.start < n <= segment.stop]

    def body(carry, slices):
        layer, residual, owned, features, mixer = carry
        states, inputs = slices
        new, loads, read = [], [], []
        for i, (block, part, state) in enumerate(zip(blocks, parts, states, strict=True)):
            cache = replace(owned[i], layer=layer) if block.owns_cache else caches[i]
            of_layer = None if inputs is None else inputs[i]
            after = layer if i + 1 < len(parts) else jnp.minimum(layer + 1, segment.count - 1)
            following = (parts[(i + 1) % len(parts)].mixer, after) if fetches else None
            this = _Layer(part, layer, mixer, state)
            (residual, cache, load), mixer = this.run(residual, ctx, cache, of_layer, following)
            new.append(replace(cache, layer=None, inputs=()) if block.owns_cache else LayerCache(()))
            read.append(cache.inputs)
            loads += [] if load is None else [load]
            done = segment.start + layer * len(blocks) + i + 1
            features = {
                n: jnp.where(done == n, residual.value, x) if (n - segment.start - 1) % len(blocks) == i else x
                for n, x in features.items()
            }
        return (layer + 1, residual, tuple(new), features, mixer), (jnp.stack(loads) if loads else None, read)

    first, residual = arrived(*fetching(parts[0].mixer, jnp.int32(0), residual, interpret=ctx.shards.on_cpu))
    carry = (
        jnp.int32(0),  # the layer's number, which as an input would be sliced from memory
        residual,
        tuple(cache if block.owns_cache else LayerCache(()) for block, cache in zip(blocks, caches, strict=True)),
        {n: jnp.zeros_like(residual.x) for n in wanted},
        first,
    )
    slices = tuple(part.sliced for part in parts), inputs
    (_, residual, new, features, _), (loads, read) = lax.scan(body, carry, slices, length=segment.count)
    loads = [] if loads is None else [loads.reshape(-1, loads.shape[-1])]
    new = [replace(cache, inputs=inputs) for cache, inputs in zip(new, read, strict=True)]
    return Ran(residual, new, loads, features)


class _Parts(NamedTuple):
    """A block's graph and its weights. mixer, mlp: stacks of which a layer is fetched ahead; whole: other stacks that
    kernels index by layer; sliced: the others."""

    graph: nnx.GraphDef
    mixer: nnx.State
    mlp: nnx.State
    whole: nnx.State
    sliced: nnx.State


class _Layer(NamedTuple):
    """Layer `number` of a stack. mixer: its part of `_Parts.mixer`, on chip. sliced: its part of `_Parts.sliced`."""

    parts: _Parts
    number: jax.Array
    mixer: nnx.State
    sliced: nnx.State

    def block(self, mlp: nnx.State) -> Any:
        """The block. mlp: its part of `_Parts.mlp`, or the stacks."""
        whole = (_at_layer(self.number, state) for state in (self.mixer, mlp, self.parts.whole))
        return nnx.merge(self.parts.graph, *whole, self.sliced)

    def run(
        self,
        residual: Residual,
        ctx: StepContext,
        cache: LayerCache,
        token_inputs: jax.Array | None,
        following: tuple[nnx.State, jax.Array] | None,
    ) -> tuple[Output, nnx.State]:
        """What the layer returns, and `_Layer.mixer` of the next one. following: the stacks of that, and its number;
        None: nothing is fetched ahead.

        Copies of the feed-forward's weights run beside the mixer and its collectives, those of the next mixer's weights
        beside the feed-forward and its collectives.
        """
        if following is None:
            block, number = self.block(self.parts.mlp), self.number
            return block(residual, ctx, cache, layer=number, token_inputs=token_inputs), self.mixer
        options = dict(interpret=ctx.shards.on_cpu)
        mlp, residual = fetching(self.parts.mlp, self.number, residual, **options)
        block = self.block(mlp)
        residual, cache = block.after_mixer(residual, ctx, cache)
        mixer, residual = fetching(*following, residual, **options)
        residual, load = block.after_mlp(residual, ctx, self.number)
        mixer, residual = arrived(mixer, residual)
        return (residual, cache, load), mixer


def _split(block: Block, ctx: StepContext, ahead: Ahead = NOTHING, *, is_stacked: bool) -> _Parts:
    ringed, shards, axis = _ringed(block, ctx, is_stacked), ctx.shards, ring_axis(ctx.shards)

    def is_whole(path, p) -> bool:
        w = p.get_value()
        for kind in (AdaptedWeight, LowRankWeight):
            w = w.base if isinstance(w, kind) else w
        packed = isinstance(w, PackedTensor)
        indexed = axes.EXPERTS in p.axes or p.axes in _WHOLE or packed
        return (is_stacked and indexed) or ".".join(path) in ringed

    def with_collective(path, p):
        if axis is None or ".".join(path) not in ringed:
            return p
        values, scatters = p.get_value() if is_stacked else p.get_value()[None], p.axes[-1] == axes.EMBED
        tokens, ring = (ctx.tokens, shards.padded(ctx.tokens)), shards.ring(axis)
        return p.replace(RingWeight(values, jnp.int32(0), axis, ring, scatters, *tokens, interpret=shards.on_cpu))

    is_mixer, is_mlp = (lambda path, _, names=names: ".".join(path) in names for names in ahead)
    graph, mixer, mlp, whole, sliced = nnx.split(block, is_mixer, is_mlp, is_whole, ...)
    return _Parts(graph, mixer, mlp, nnx.map_state(with_collective, whole), sliced)


def _by_name(block: Block) -> dict[str, Any]:
    return {".".join(map(str, path)): p.get_value() for path, p in nnx.to_flat_state(nnx.state(block))}


def _at_layer(layer: jax.Array, weights: nnx.State) -> nnx.State:
    return jax.tree.map(partial(_of_layer, layer), weights, is_leaf=lambda p: isinstance(p, nnx.Param))


def _ringed(block: Block, ctx: StepContext, is_stacked: bool) -> frozenset[str]:
    """The weights whose products are fused with a collective; see `models.layers.ring`."""
    shapes, dtype, names = {}, None, ring_weights(ctx.config, block.spec)
    for name in names:
        module, weight = name.split(".")
        value = getattr(getattr(block, module), weight).get_value()
        if isinstance(value, jax.Array):
            shapes[name], dtype = value.shape[is_stacked:], value.dtype
    if not shapes:
        return frozenset()
    return ring_fused(ring_choices(names, shapes, dtype, ctx.tokens, ctx.shards, ctx.backend))


# Axes of stacked weights that kernels index by layer: those of norms, and those that expand latents; and of tables, of
# which few rows are read.
_WHOLE = (
    (axes.LAYERS, axes.EMBED),
    (axes.LAYERS, axes.TOKEN_IDS, axes.KV_HEADS, axes.HEAD_DIM),
    (axes.LAYERS, axes.KV_HEADS, axes.HEAD_DIM, axes.LATENT),
    (axes.LAYERS, axes.KV_HEADS, axes.LATENT, axes.HEAD_DIM),
)


def _of_layer(layer: jax.Array, p: nnx.Param) -> nnx.Variable:
    w = p.get_value()
    if isinstance(w, AdaptedWeight):
        return p.replace(w.of_layer(layer, w.base.of_layer(layer)))
    if isinstance(w, (PackedTensor, RingWeight, LowRankWeight, ArrivingWeight)):
        return p.replace(w.of_layer(layer))
    return p.replace(OfStack(w, layer)) if p.axes in _WHOLE else p


def stacked(block: Block, count: int) -> Block:
    """The block with `count` layers' weights, stacked along a leading axis."""
    graph, state = nnx.split(block)
    wide = jax.tree.map(
        lambda p: p.replace(jnp.zeros((count, *p.shape), p.dtype), axes=(axes.LAYERS, *p.axes)),
        state,
        is_leaf=lambda p: isinstance(p, nnx.Param),
    )
    return nnx.merge(graph, wide)
