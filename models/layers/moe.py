"""Mixture of experts: a router, experts of which each token takes a few, and shared experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.config import MoeSpec
from inferlib.models.layers.exchange import Exchange, exchange_of, pairs_room, through_experts
from inferlib.models.layers.mlp import ACTIVATIONS, Mlp, gated
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layers.router import Router
from inferlib.models.layout import Layout
from inferlib.ops import expert_mlp as mlp_op
from inferlib.ops import grouped_matmul as grouped_op
from inferlib.ops.expert_mlp import ExpertWeights, expert_mlp
from inferlib.ops.group_order import GroupOrder, group_order, take_in_bounds
from inferlib.ops.grouped_matmul import chosen_matmul, grouped_matmul
from inferlib.ops.loops import expected_trips
from inferlib.ops.segment_sum import TILE, Pieces, Segments, segment_sum
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

Load = jax.Array | None  # [E] number of tokens that chose each expert, if they are counted (`StepContext.counted`)


class Moe(nnx.Module):
    """x [T, D] -> [T, D]: this device's partial sum over the feed-forward width; `finish` follows the sum over devices.

    If experts are split over devices, tokens travel to them and back; see `exchange`. If a file places the experts in S
    slots, `slots` [S] lists the slots of expert 0, then those of expert 1, and so on, and `copies` [E] counts them.
    """

    def __init__(self, spec: MoeSpec, layout: Layout, dtype):
        self.spec, dim = spec, layout.config.dim
        self.router = Router(spec.router, dim, dtype)
        self.experts = Experts(spec, layout, dtype)
        self.has_placement = layout.slots is not None
        if layout.slots is not None:
            self.slots = param((layout.slots,), (None,), jnp.int32, "range")
            self.copies = param((spec.experts,), (axes.ROUTES,), jnp.int32, "ones")
        if spec.shared is not None:
            self.shared = Mlp(spec.shared, layout.hidden(spec.shared.hidden), dim, dtype)
        if spec.shared_gate:
            self.shared_gate = param((dim,), (axes.EMBED,), dtype)
        if spec.separate_norms:
            norm = layout.config.norm
            self.pre_norm, self.post_norm = Norm(norm, dim, dtype), Norm(norm, dim, dtype)
            self.post_shared_norm = Norm(norm, dim, dtype)

    def __call__(self, x: jax.Array, ctx: StepContext, layer: jax.Array | None = None) -> tuple[jax.Array, Load]:
        """layer: the current layer of a scanned segment, whose experts are stacked (see `Experts`)."""
        routed, load = self.run_chosen(x, x, ctx, layer)
        return routed if self.spec.shared is None else routed + self.run_shared(x, ctx), load

    def run_apart(self, x: jax.Array, ctx: StepContext, layer: jax.Array | None) -> tuple[jax.Array, jax.Array, Load]:
        """The sum of the chosen experts and, apart from it, that of the shared experts."""
        routed, load = self.run_chosen(x, x, ctx, layer)
        return routed, self.run_shared(x, ctx), load

    def with_norms(
        self, x: jax.Array, shared: jax.Array, ctx: StepContext, layer: jax.Array | None
    ) -> tuple[jax.Array, Load]:
        """The output of experts with separate norms, summed over devices; where tokens are split, of this device's
        tokens.

        x [T, D]: the residual; shared [T, D]: input of the shared experts.
        """
        shards, dim = ctx.shards, x.shape[1]
        routed, load = self.run_chosen(self.pre_norm(x, shards), x, ctx, layer)
        sums = shards.sum_tokens(jnp.concatenate([routed, self.run_shared(shared, ctx)], axis=1), axes.MLP)
        out = self.post_norm(sums[:, :dim], shards) + self.post_shared_norm(self.finish(sums[:, dim:]), shards)
        return out, load

    def run_chosen(
        self, x: jax.Array, router_input: jax.Array, ctx: StepContext, layer: jax.Array | None
    ) -> tuple[jax.Array, Load]:
        """The sum of the chosen experts, and the load. router_input [T, D]: the router may read other activations than
        the experts."""
        shards, devices = ctx.shards, ctx.shards.size(axes.EXPERTS)
        row_bytes, active = x.shape[1] * x.dtype.itemsize, ctx.mlp_active
        exchange = exchange_of(self.spec, x.shape[0], row_bytes, devices, ctx.backend)
        is_gathered = exchange is None and devices > 1
        if is_gathered:
            with jax.named_scope("experts"):
                inputs = (x,) if router_input is x else (x, router_input)
                everyone = shards.gather(jnp.concatenate(inputs, axis=1), axes.EXPERTS, dim=0)
            x, *others = jnp.split(everyone, len(inputs), axis=1)
            router_input, active = others[0] if others else x, ctx.experts_active
        with jax.named_scope("router"):
            experts, weights = self.router(router_input, ctx)
        if x.shape[0] > 1:
            experts = jnp.where(active[:, None], experts, -1)  # inactive rows choose none
        with jax.named_scope("experts"):
            routed = self.weighted_sum(x, experts, weights, exchange, ctx, layer)
        if ctx.counted is None:
            return routed, None
        experts = shards.part(experts, axes.EXPERTS) if is_gathered else experts
        return routed, self.load(shards.local_rows(experts), ctx.counted)

    def load(self, experts: jax.Array, counted: jax.Array) -> jax.Array:
        """The number of `counted` tokens [T] that chose each expert."""
        chosen = (experts[:, :, None] == jnp.arange(self.spec.experts)) & counted[:, None, None]
        return jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32)

    def placement(self, experts: jax.Array, turns: jax.Array) -> jax.Array:
        """The slots of experts [T, k], -1 for none. turns [T]: a number for each token, by which tokens take an
        expert's copies in turn."""
        if not self.has_placement:
            return experts
        copies, slots = self.copies[...], self.slots[...]
        at = (jnp.cumsum(copies) - copies)[experts] + turns[:, None] % copies[experts]
        return jnp.where(experts >= 0, slots[at], -1)

    def weighted_sum(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        exchange: Exchange | None,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """The weighted sum of the chosen experts [T, k] for this device's tokens; -1 is none. Experts from E on are
        identities (LongCat's zero experts, `MoeSpec.identity`). exchange: of `through_experts`."""
        shards, devices = ctx.shards, ctx.shards.size(axes.EXPERTS)
        identity = self.spec.identity and experts >= self.spec.experts
        tokens_each = x.shape[0] // (devices if exchange is None else 1)
        compute = partial(self.experts, tokens_each=tokens_each, ctx=ctx, layer=layer)
        count = self.experts.count // devices
        turns = jnp.arange(x.shape[0]) + (0 if exchange is None else shards.index(axes.ROWS))
        slots = self.placement(jnp.where(identity, -1, experts) if self.spec.identity else experts, turns)
        out = through_experts(x, slots, weights, count, exchange, compute, shards, ctx.backend)
        if not self.spec.identity:
            return out
        share = jnp.sum(jnp.where(identity, weights, 0), axis=1, keepdims=True)
        same = (x * share).astype(x.dtype)
        return out + on_one_device(shards.part(same, axes.EXPERTS) if exchange is None else same, shards)

    def run_shared(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        """The output of the shared experts."""
        out = self.shared(x, ctx)
        if self.spec.shared_gate:
            gate = ctx.shards.sum(ctx.matmul(x, self.shared_gate[...][:, None], out_dtype=jnp.float32), axes.EMBED)
            out = out * jax.nn.sigmoid(gate).astype(x.dtype)
        return out

    def finish(self, x: jax.Array) -> jax.Array:
        """The last step, after the sum over devices."""
        return x if self.spec.shared is None else self.shared.finish(x)


def on_one_device(x: jax.Array, shards: Shards) -> jax.Array:
    """x on one of the devices that will be summed over the feed-forward width, zeros on the others."""
    return jnp.where(shards.index(axes.MLP) == 0, x, 0) if shards.size(axes.MLP) > 1 else x


class Pairs(NamedTuple):
    """The M pairs of tokens and local experts of a grouped product, in the order of its rows.

    ids [M]: each pair's expert. scales [M]: each pair's router weight, if it multiplies the expert's input.
    times_gate_up: the product of x [T, D] with gate_up; times_down: the product of rows [M, F] with down.
    """

    ids: jax.Array
    scales: jax.Array | None
    times_gate_up: Callable[..., jax.Array]
    times_down: Callable[..., jax.Array]


class Experts(nnx.Module):
    """The feed-forwards of this device's experts. Gate and up are one weight, which has one half if there is no gate. E
    and F are as laid out.

    multiply: the product of rows sorted by expert, which training replaces by one with gradients.
    """

    multiply: Callable[..., jax.Array] = staticmethod(grouped_matmul)

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
        tokens_each: int,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """x [T, *D], experts and weights [T, k] -> [T, *D]: the weighted sum over this device's experts.

        tokens_each: number of tokens that each device brings. layer: the weights are stacks [L, ...] of which this
        layer is used.
        """
        shards, (tokens, chosen) = ctx.shards, experts.shape
        count = self.count // shards.size(axes.EXPERTS)
        experts = experts - shards.index(axes.EXPERTS) * count
        is_local = (experts >= 0) & (experts < count)
        ids = jnp.where(is_local, experts, count)
        mlp, split = self._weights(layer), shards.size(axes.EMBED) > 1
        if mlp_op.choose(tokens, mlp, x.dtype, ctx.backend.expert_mlp, split_inputs=split).name != "xla":
            return self._unsorted_mlp(x, ids, weights, count, ctx, mlp)
        if (room := pairs_room(chosen, tokens_each, tokens, ctx.backend)) < ids.size:
            return self._in_rounds(x, ids, weights, count, room, tokens_each, ctx, layer)
        shape, x = x.shape, x.reshape(tokens, -1)
        # A single token on a single device chooses no expert elsewhere: nothing has to be masked, which saves kernels.
        is_single = tokens == 1 and shards.size(axes.EXPERTS) == 1 and not self.spec.identity
        choice = grouped_op.choose(
            ids.size, self.gate_up[...], x.dtype, ctx.backend.grouped_matmul, stacked=layer is not None
        )
        # Outputs are added one by one: for a sum over a dimension, XLA would write its input to memory, or lay it out
        # anew.
        if choice.name == grouped_op.UNSORTED:
            ids = (experts if is_single else jnp.where(is_local, ids, -1)).reshape(-1)
            outputs = self._unsorted(x, ids, weights, ctx, layer).reshape(tokens, chosen, -1)
            outputs = [outputs[:, i] for i in range(chosen)]
        else:
            order = group_order(ids, count, backend=ctx.backend.grouped_matmul)
            scales = weights[order.tokens, order.choices] if self.spec.scale_input else None
            sorted_outputs = self._by_expert(x, order.tokens, order, scales, ctx, layer)
            # Back in the order of tokens, so that a token's sum does not depend on other tokens.
            outputs = [take_in_bounds(sorted_outputs, places) for places in order.places]
        if not self.spec.scale_input:
            outputs = [y * weights[:, i, None] for i, y in enumerate(outputs)]
        total: Any = sum(
            outputs if is_single else [jnp.where(is_local[:, i, None], y, 0) for i, y in enumerate(outputs)]
        )
        return total.astype(x.dtype).reshape(shape)

    def _weights(self, layer: jax.Array | None) -> ExpertWeights:
        bias = self.gate_up_bias[...] if self.spec.bias else None
        return ExpertWeights(self.gate_up[...], self.down[...], bias, layer, self.spec.activation)

    def _unsorted(
        self, x: jax.Array, ids: jax.Array, weights: jax.Array, ctx: StepContext, layer: jax.Array | None
    ) -> jax.Array:
        """x [T, D] through the experts ids [T * k], -1 for none, in the order of the tokens -> [T * k, D]."""
        scales, chosen = weights.reshape(-1), weights.shape[1]
        product = partial(chosen_matmul, ids=ids, layer=layer, backend=ctx.backend.grouped_matmul)
        scales = scales if self.spec.scale_input else None
        return self._forward(x, Pairs(ids, scales, partial(product, turns=chosen), product), ctx.shards, layer)

    def _by_expert(
        self,
        x: jax.Array,
        rows: jax.Array,
        order: GroupOrder,
        scales: jax.Array | None,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """Rows [M] of x [T, *D] through their experts, in the order of the experts -> [M, D]."""
        sizes, backend = order.sizes, ctx.backend.grouped_matmul
        product = partial(self.multiply, sizes=sizes, most=min(x.shape[0], rows.size), layer=layer, backend=backend)
        ids = jnp.minimum(order.ids, sizes.size - 1)
        gathered = None if x.ndim > 2 else rows
        if x.ndim > 2:  # x has the exchange's layout; only the rows that are used are laid out anew
            x = x[rows].reshape(ids.size, -1)
        return self._forward(x, Pairs(ids, scales, partial(product, rows=gathered), product), ctx.shards, layer)

    def _in_rounds(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        count: int,
        room: int,
        tokens_each: int,
        ctx: StepContext,
        layer: jax.Array | None,
    ) -> jax.Array:
        """Like `__call__`, in rounds of `room` pairs. The tokens of all devices could choose these experts, but seldom
        do.

        ids [T, k]: local experts; `count` stands for experts of other devices. A round takes as many whole tiles of
        tokens as have at most `room` pairs. No token is in two rounds, so its sum does not depend on other tokens.
        """
        shards, (tokens, chosen) = ctx.shards, ids.shape
        devices, total, by_input = shards.size(axes.EXPERTS), ids.size, self.spec.scale_input
        counts = jnp.pad(jnp.sum(ids < count, axis=1, dtype=jnp.int32), (0, -tokens % TILE))
        ends = jnp.cumsum(counts)
        tile_ends, tiles = ends[TILE - 1 :: TILE], counts.size // TILE
        pairs, backend = _local_first(ids, weights, count, room), ctx.backend.grouped_matmul
        rows = jax.ShapeDtypeStruct((room, *x.shape[1:]), x.dtype)
        pieces = Pieces.of(ids, count, rows, tokens_each * chosen, backend)
        # The tokens here are those with a local expert, or all tokens of all devices.
        longest = self.spec.most_choices(TILE * max(devices * tokens_each / tokens, 1), devices)

        def one_round(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tile, _, out = carry
            first = jnp.where(tile > 0, tile_ends[tile - 1], 0)
            stop = jnp.sum(tile_ends <= first + room, dtype=jnp.int32)
            pair_ids, experts, factors = (lax.dynamic_slice_in_dim(a, first, room) for a in pairs)
            place = jnp.arange(room, dtype=jnp.int32)
            in_round = place < tile_ends[stop - 1] - first
            pair_ids = jnp.where(in_round, pair_ids, total + place)
            experts = jnp.where(in_round, experts, count)[:, None]
            order = group_order(experts, count, numbers=pair_ids, most=total + room, backend=backend)
            pair = jnp.minimum(order.tokens, total - 1)
            scales = weights[pair // chosen, pair % chosen] if by_input else None
            outputs = self._by_expert(x, pair // chosen, order, scales, ctx, layer)
            out = segment_sum(
                out,
                outputs,
                Segments(order.places[0], None if by_input else factors, ends - counts - first, counts),
                tile,
                stop,
                tiles=tiles,
                longest=longest,
                runs=pieces and pieces.runs(tile, experts[:, 0], pair_ids // chosen, order.sizes),
            )
            unfinished = stop < tiles
            if shards.size(axes.EMBED) > 1:  # a round has collectives, so all devices run equally many rounds
                unfinished = shards.max(unfinished.astype(jnp.int32), axes.ROWS) > 0
            return stop, unfinished, out

        out = lax.empty((counts.size, *x.shape[1:]), x.dtype)  # every round writes its tiles
        with expected_trips(1):
            out = lax.while_loop(lambda carry: carry[1], one_round, (jnp.int32(0), jnp.bool(True), out))[2]
        return out[:tokens]

    def _unsorted_mlp(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        count: int,
        ctx: StepContext,
        mlp: ExpertWeights,
    ) -> jax.Array:
        """All tokens go through each expert that any of them chose: nothing is sorted, gathered or brought back."""
        chosen = ids[:, :, None] == jnp.arange(count, dtype=jnp.int32)
        factors = jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1)
        out = expert_mlp(
            x,
            mlp,
            factors,
            partial(gated, self.spec.activation),
            scale_input=self.spec.scale_input,
            read=self.spec.read_share(x.shape[0]),
            most=min(count, ids.size),
            backend=ctx.backend.expert_mlp,
        )
        if not self.spec.bias:
            return out
        if self.spec.scale_input:
            factors = jnp.any(chosen, axis=1).astype(factors.dtype)
        down_bias = self.down_bias[...] if mlp.layer is None else self.down_bias[...][mlp.layer]
        return out + on_one_device(ctx.matmul(factors, down_bias.astype(jnp.float32)), ctx.shards).astype(x.dtype)

    def _forward(self, x: jax.Array, pairs: Pairs, shards: Shards, layer: jax.Array | None) -> jax.Array:
        """x [T, D] -> [M, D]: each pair through gate and up, the activation, and down."""

        def bias(param: nnx.Param) -> jax.Array:
            return (param[...] if layer is None else param[...][layer])[pairs.ids]

        gate_up = shards.sum(pairs.times_gate_up(x, self.gate_up[...]), axes.EMBED)
        if pairs.scales is not None:
            gate_up = (gate_up * pairs.scales[:, None, None]).astype(x.dtype)
        if self.spec.bias:
            gate_up = gate_up + bias(self.gate_up_bias)
        if self.spec.gated:
            hidden = gated(self.spec.activation, gate_up[:, 0], gate_up[:, 1])
        else:
            hidden = ACTIVATIONS[self.spec.activation](gate_up[:, 0])
        out = pairs.times_down(hidden, self.down[...])
        return out + on_one_device(bias(self.down_bias), shards) if self.spec.bias else out


def _local_first(ids: jax.Array, weights: jax.Array, count: int, room: int) -> list[jax.Array]:
    """The numbers, experts and weights of the pairs ids [T, k] in the order of tokens, but pairs of local experts
    (below `count`) first; padded by `room`. Sorting all three is faster than gathering two of them by the first."""
    pairs = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    pairs = [a.reshape(-1) for a in (jnp.where(ids < count, pairs, pairs + ids.size), ids, weights)]
    return [jnp.pad(a, (0, room)) for a in lax.sort(pairs, num_keys=1, is_stable=False)]
