"""Mixture of experts: a router, feed-forwards of which each token takes a few, and shared ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.config import MoeSpec
from inferlib.models.layers.exchange import exchange_of, pairs_room, through_experts
from inferlib.models.layers.mlp import ACTIVATIONS, Mlp, gated
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layers.router import Router
from inferlib.models.layout import Layout
from inferlib.ops.expert_mlp import expert_mlp, most_tokens
from inferlib.ops.group_order import GroupOrder, group_order
from inferlib.ops.grouped_matmul import chosen_matmul, grouped_matmul, unsorted_pays
from inferlib.ops.loops import expected_trips
from inferlib.ops.matmul import matmul
from inferlib.ops.segment_sum import TILE, segment_sum
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

Load = jax.Array | None  # [E] how many tokens chose each expert, if that is counted (see `StepContext.counted`)


class Moe(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over the feed-forward width; `finish` what follows that sum.

    Where experts are split over devices, tokens go to them and back as `exchange` says. Where they are placed by a
    file, their S slots are not in the order of the E experts: `slots` [S] lists those of each expert in turn, and
    `copies` [E] how many each has.
    """

    def __init__(self, spec: MoeSpec, layout: Layout, dtype):
        self.spec, dim = spec, layout.config.dim
        self.router = Router(spec.router, dim, dtype)
        self.experts = Experts(spec, layout, dtype)
        self.placed = layout.slots is not None
        if self.placed:
            self.slots = param((layout.slots,), (None,), jnp.int32, "range")
            self.copies = param((spec.experts,), (axes.ROUTES,), jnp.int32, "ones")
        if spec.shared is not None:
            self.shared = Mlp(spec.shared, layout.hidden(spec.shared.hidden), dim, dtype)
        if spec.shared_gate:
            self.shared_gate = param((dim,), (axes.EMBED,), dtype)
        if spec.own_norms:
            norm = layout.config.norm
            self.pre_norm, self.post_norm = Norm(norm, dim, dtype), Norm(norm, dim, dtype)
            self.post_shared_norm = Norm(norm, dim, dtype)

    def __call__(self, x: jax.Array, ctx: StepContext, layer: jax.Array | None = None) -> tuple[jax.Array, Load]:
        """layer: of a scanned segment, whose experts are stacked; see `Experts`."""
        routed, shared, load = self.apart(x, ctx, layer)
        return routed if shared is None else routed + shared, load

    def apart(
        self, x: jax.Array, ctx: StepContext, layer: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None, Load]:
        """The sum of the chosen experts, and that of the shared ones if there are any."""
        routed, load = self.chosen(x, x, ctx, layer)
        return routed, None if self.spec.shared is None else self.always(x, ctx.shards), load

    def with_norms(
        self, x: jax.Array, shared: jax.Array, ctx: StepContext, layer: jax.Array | None
    ) -> tuple[jax.Array, Load]:
        """The whole sum over devices, of this device's tokens where they are split, by experts with norms of their own.

        x [T, D]: the residual; shared [T, D]: what shared experts take in.
        """
        shards, dim = ctx.shards, x.shape[1]
        routed, load = self.chosen(self.pre_norm(x, shards), x, ctx, layer)
        both = shards.sum_tokens(jnp.concatenate([routed, self.always(shared, shards)], axis=1), axes.MLP)
        out = self.post_norm(both[:, :dim], shards) + self.post_shared_norm(self.finish(both[:, dim:]), shards)
        return out, load

    def chosen(
        self, x: jax.Array, judged: jax.Array, ctx: StepContext, layer: jax.Array | None
    ) -> tuple[jax.Array, Load]:
        """The sum of the chosen experts; judged [T, D]: what the router reads."""
        with jax.named_scope("router"):
            experts, weights = self.router(judged, ctx.shards, ctx.backend.choose_experts)
        if x.shape[0] > 1:
            experts = jnp.where(ctx.fed[:, None], experts, -1)  # inactive rows need none
        with jax.named_scope("experts"):
            routed = self.routed(x, experts, weights, ctx, layer)
        return routed, None if ctx.counted is None else self.load(ctx.shards.unfed(experts), ctx.counted)

    def load(self, experts: jax.Array, counted: jax.Array) -> jax.Array:
        """How many of the counted tokens [T] chose each expert."""
        chosen = (experts[:, :, None] == jnp.arange(self.spec.experts)) & counted[:, None, None]
        return jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)

    def placement(self, experts: jax.Array, turns: jax.Array) -> jax.Array:
        """The slots of experts [T, k], -1 for none; tokens take turns [T] at the copies of an expert."""
        if not self.placed:
            return experts
        copies, slots = self.copies[...], self.slots[...]
        at = (jnp.cumsum(copies) - copies)[experts] + turns[:, None] % copies[experts]
        return jnp.where(experts >= 0, slots[at], -1)

    def routed(
        self, x: jax.Array, experts: jax.Array, weights: jax.Array, ctx: StepContext, layer: jax.Array | None
    ) -> jax.Array:
        """The weighted sum of the chosen experts [T, k]; -1 is none."""
        shards, devices = ctx.shards, ctx.shards.size(axes.EXPERTS)
        identity = self.spec.identity and experts >= self.spec.experts
        row = x.shape[1] * x.dtype.itemsize
        how = exchange_of(self.spec, x.shape[0], row, devices, ctx.backend)
        compute = partial(self.experts, of_each=x.shape[0], ctx=ctx, layer=layer)
        own = self.experts.count // devices
        turns = jnp.arange(x.shape[0]) + shards.index(axes.ROWS)
        slots = self.placement(jnp.where(identity, -1, experts) if self.spec.identity else experts, turns)
        out = through_experts(x, slots, weights, own, how, compute, shards)
        if not self.spec.identity:
            return out
        kept = jnp.sum(jnp.where(identity, weights, 0), axis=1, keepdims=True)
        return out + once((x * kept).astype(x.dtype), shards)

    def always(self, x: jax.Array, shards: Shards) -> jax.Array:
        """The shared experts."""
        out = self.shared(x, shards)
        if self.spec.shared_gate:
            gate = shards.sum(matmul(x, self.shared_gate[...][:, None], out_dtype=jnp.float32), axes.EMBED)
            out = out * jax.nn.sigmoid(gate).astype(x.dtype)
        return out

    def finish(self, x: jax.Array) -> jax.Array:
        """What follows the sum over devices."""
        return x if self.spec.shared is None else self.shared.finish(x)


def once(x: jax.Array, shards: Shards) -> jax.Array:
    """x on one of the devices whose parts will be summed over the feed-forward width, zeros on the others."""
    return jnp.where(shards.index(axes.MLP) == 0, x, 0) if shards.size(axes.MLP) > 1 else x


class Experts(nnx.Module):
    """The feed-forwards of this device's experts; gate and up are one weight, which without gates has one half. E and F
    are as laid out."""

    def __init__(self, spec: MoeSpec, layout: Layout, dtype):
        self.spec = spec
        self.count, f, dim = layout.experts(spec.experts), layout.hidden(spec.hidden), layout.config.dim
        e, names = self.count, (axes.EXPERTS, axes.GATE_UP, axes.EMBED, axes.MLP)
        halves = 2 if spec.gated else 1
        self.gate_up = param((e, halves, dim, f), names, dtype, contracting=(2,))
        self.down = param((e, f, dim), (axes.EXPERTS, axes.MLP, axes.EMBED), dtype, contracting=(1,))
        if spec.bias:
            self.gate_up_bias = param((e, halves, f), (axes.EXPERTS, axes.GATE_UP, axes.MLP), dtype, "zeros")
            self.down_bias = param((e, dim), (axes.EXPERTS, axes.EMBED), dtype, "zeros")

    def __call__(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        of_each: int,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """x [T, *D], experts and weights [T, k] -> [T, *D]: the sum of those that are this device's.

        of_each: tokens of each device that experts are shared with. layer: with it all weights are [L, ...], and those
        of this layer are used.
        """
        shards, (tokens, chosen) = ctx.shards, experts.shape
        own = self.count // shards.size(axes.EXPERTS)
        experts = experts - shards.index(axes.EXPERTS) * own
        ours = (experts >= 0) & (experts < own)
        few = tokens <= most_tokens(self.gate_up[...])
        if ctx.backend.expert_mlp == "pallas_tpu" and few and shards.size(axes.EMBED) == 1:
            return self.at_once(x, jnp.where(ours, experts, own), weights, own, ctx, layer)
        ids = jnp.where(ours, experts, own)
        if (room := pairs_room(chosen, of_each, tokens, ctx.backend)) < ids.size:
            return self.in_rounds(x, ids, weights, own, room, of_each, ctx, layer)
        shape, x = x.shape, x.reshape(tokens, -1)
        by_input = self.spec.scale_input
        # An active row alone, on one device, has chosen experts that are there: each kernel less counts.
        alone = tokens == 1 and shards.size(axes.EXPERTS) == 1 and not self.spec.identity
        # One by one: XLA:GPU writes what a sum over a dimension takes in to memory first, XLA:TPU lays it out anew.
        if unsorted_pays(self.gate_up[...], ids.size, own, ctx.backend.grouped_matmul):
            ids, scales = (experts if alone else jnp.where(ours, ids, -1)).reshape(-1), weights.reshape(-1)
            product = partial(chosen_matmul, ids=ids, layer=layer, backend=ctx.backend.grouped_matmul)
            first = partial(product, turns=chosen)
            outputs = self.forward(x, first, ids, product, scales if by_input else None, shards, layer)
            outputs = outputs.reshape(tokens, chosen, -1)
            parts = [outputs[:, i] for i in range(chosen)]
        else:
            order = group_order(ids, own, backend=ctx.backend.grouped_matmul)
            scales = weights[order.tokens, order.choices] if by_input else None
            outputs = self.by_expert(x, order.tokens, order, scales, ctx, layer)
            # Back in the order of the tokens, whose sums then depend on nothing but themselves.
            parts = [outputs[places] for places in order.places]
        if not by_input:
            parts = [y * weights[:, i, None] for i, y in enumerate(parts)]
        total = sum(parts if alone else [jnp.where(ours[:, i, None], y, 0) for i, y in enumerate(parts)])
        return total.astype(x.dtype).reshape(shape)

    def by_expert(
        self,
        x: jax.Array,
        rows: jax.Array,
        order: GroupOrder,
        scales: jax.Array | None,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """`forward` of choices in the order of their experts: of rows [M] of x [T, *D] -> [M, D]."""
        sizes, backend = order.sizes, ctx.backend.grouped_matmul
        product = partial(grouped_matmul, sizes=sizes, most=min(x.shape[0], rows.size), layer=layer, backend=backend)
        ids = jnp.minimum(order.ids, sizes.size - 1)
        if x.ndim > 2:  # as they were exchanged; only those that are taken are laid out anew
            x, rows = x[rows].reshape(ids.size, -1), None
        return self.forward(x, partial(product, rows=rows), ids, product, scales, ctx.shards, layer)

    def in_rounds(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        own: int,
        room: int,
        of_each: int,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """As many tokens at a time, in tiles, as have no more than `room` pairs with this device's experts (ids [T, k],
        `own` for others'): tokens of all devices could choose these, but seldom do. No token is in two rounds, so that
        its sum does not depend on others."""
        shards, (tokens, chosen) = ctx.shards, ids.shape
        devices, total, by_input = shards.size(axes.EXPERTS), ids.size, self.spec.scale_input
        counts = jnp.sum(ids < own, axis=1, dtype=jnp.int32)
        counts = jnp.pad(counts, (0, -tokens % TILE))
        ends = jnp.cumsum(counts)
        tile_ends, tiles = ends[TILE - 1 :: TILE], counts.size // TILE
        # This device's first, in the order of tokens. A TPU sorts all three sooner than it gathers one by the other.
        pairs = jnp.arange(total, dtype=jnp.int32).reshape(ids.shape)
        pairs = [a.reshape(-1) for a in (jnp.where(ids < own, pairs, pairs + total), ids, weights)]
        pairs = [jnp.pad(a, (0, room)) for a in lax.sort(pairs, num_keys=1, is_stable=False)]
        # Of the tokens of all devices those here are the ones that have a pair, or all.
        longest = self.spec.most_choices(TILE * max(devices * of_each / tokens, 1), devices)

        def one_round(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tile, _, out = carry
            first = jnp.where(tile > 0, tile_ends[tile - 1], 0)
            stop = jnp.sum(tile_ends <= first + room, dtype=jnp.int32)
            some, now, factors = (lax.dynamic_slice_in_dim(a, first, room) for a in pairs)
            place = jnp.arange(room, dtype=jnp.int32)
            fits = place < tile_ends[stop - 1] - first
            some, now = jnp.where(fits, some, total + place), jnp.where(fits, now, own)[:, None]
            order = group_order(now, own, numbers=some, most=total + room, backend=ctx.backend.grouped_matmul)
            pair = jnp.minimum(order.tokens, total - 1)
            scales = weights[pair // chosen, pair % chosen] if by_input else None
            outputs = self.by_expert(x, pair // chosen, order, scales, ctx, layer)
            out = segment_sum(
                out,
                outputs,
                order.places[0],
                None if by_input else factors,
                ends - counts - first,
                counts,
                tile,
                stop,
                tiles=tiles,
                longest=longest,
            )
            left = stop < tiles
            if shards.size(axes.EMBED) > 1:  # there are collectives in a round, which all devices take part in
                left = shards.max(left.astype(jnp.int32), axes.ROWS) > 0
            return stop, left, out

        out = lax.empty((counts.size, *x.shape[1:]), x.dtype)  # each tile is written by the round that has it
        with expected_trips(1):
            out = lax.while_loop(lambda carry: carry[1], one_round, (jnp.int32(0), jnp.bool(True), out))[2]
        return out[:tokens]

    def at_once(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        own: int,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """All tokens through each expert that one of them chose: nothing is sorted, gathered and brought back."""
        chosen = experts[:, :, None] == jnp.arange(own, dtype=jnp.int32)
        factors = jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1)
        out = expert_mlp(
            x,
            self.gate_up[...],
            self.down[...],
            factors,
            partial(gated, self.spec.activation),
            layer=layer,
            gate_up_bias=self.gate_up_bias[...] if self.spec.bias else None,
            scale_input=self.spec.scale_input,
            read=self.spec.read_share(x.shape[0]),
            backend=ctx.backend.expert_mlp,
        )
        if not self.spec.bias:
            return out
        if self.spec.scale_input:
            factors = jnp.any(chosen, axis=1).astype(factors.dtype)
        down_bias = self.down_bias[...] if layer is None else self.down_bias[...][layer]
        return out + once(matmul(factors, down_bias.astype(jnp.float32)), ctx.shards).astype(x.dtype)

    def forward(
        self,
        x: jax.Array,
        first: Callable[..., jax.Array],
        ids: jax.Array,
        product: Callable[..., jax.Array],
        scales: jax.Array | None,
        shards: Shards,
        layer: jax.Array | None,
    ) -> jax.Array:
        """x [T, D] -> [M, D]: of each pair the expert ids [M], and what multiplies its input, scales [M]. product: of
        inputs [M, I] and the experts' weights; first: of x, which knows whose pairs they are."""

        def bias(param: nnx.Param) -> jax.Array:
            return (param[...] if layer is None else param[...][layer])[ids]

        both = shards.sum(first(x, self.gate_up[...]), axes.EMBED)
        if scales is not None:
            both = (both * scales[:, None, None]).astype(x.dtype)
        if self.spec.bias:
            both = both + bias(self.gate_up_bias)
        if self.spec.gated:
            hidden = gated(self.spec.activation, both[:, 0], both[:, 1])
        else:
            hidden = ACTIVATIONS[self.spec.activation](both[:, 0])
        out = product(hidden, self.down[...])
        return out + once(bias(self.down_bias), shards) if self.spec.bias else out
