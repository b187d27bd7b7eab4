"""Lanes: residuals of which each has its own run of every layer's heads and feed-forward (see `LaneSpec`).

On a mesh, each device has as many lanes as the others. Then a layer's branch is the device's own sum and what it knows
of the others': late sums of them, which arrive while the layers between compute. They are part of the residual:
`Residual.late` has for each of the next `delay` layers the sums that its two branches add.

Shapes: T tokens; N lanes of a device, of L in all; D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block, Output
from inferlib.models.config import ConfigError, LayerSpec, ModelConfig, NormSpec
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.mlp import Mlp, gated
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layout import Layout
from inferlib.models.quantization import Quantization
from inferlib.models.stream import Residual
from inferlib.ops.precision import precision_of
from inferlib.ops.separate_gate_up import SeparateGateUp
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def must_multiply(layout: Layout, quantization: Quantization | None, *, adapted: bool) -> None:
    """Raise ConfigError if the lanes of a device cannot be multiplied by weights that are quantised or adapted."""
    if (spec := layout.config.lanes) is None:
        return
    if adapted:
        raise ConfigError(f"{layout.config.family} has lanes, whose matrices no adapter changes: leave adapters out")
    if quantization is not None and spec.lanes > layout.shards.size(axes.LANES):
        raise ConfigError(
            f"quantization {quantization.name!r} needs one lane on each device: use tp={spec.lanes}, or leave it out"
        )


class LaneNorm(Norm):
    """x [T, N, D] -> [T, N, D], with weights of each lane."""

    def __init__(self, spec: NormSpec, lanes: int, dim: int, dtype):
        super().__init__(spec, dim, dtype)
        self.weight = param((lanes, dim), (axes.LANES, axes.EMBED), dtype, "ones")


def lane_norm(config: ModelConfig, dtype) -> Norm:
    """The norm before a branch of a layer."""
    assert config.lanes is not None
    if config.lanes.lane_norms:
        return LaneNorm(config.norm, config.lanes.lanes, config.dim, dtype)
    return Norm(config.norm, config.dim, dtype)


Steps = tuple[tuple[int, ...], ...]  # hops of each step, see `Shards.sum_of`


# Larger sums are made at once, by an all-reduce: permutations send more bytes, which no layer is long enough to hide.
MOST_BYTES = 1 << 20


class Way(NamedTuple):
    """How the sums of a branch reach all lanes: steps in the layer that makes them, and those in the layer that adds
    them. Each step adds what other devices have so far. Without steps, an all-reduce makes them at once."""

    first: Steps
    rest: Steps

    @staticmethod
    def of(devices: int, nbytes: int) -> Way:
        """Pairs of devices tell each other theirs, then each tells the others what its pair has. nbytes: of the sums of
        a lane, [T, D]."""
        return Way((), ()) if nbytes > MOST_BYTES else Way(*_hops(devices))


def _hops(devices: int) -> tuple[Steps, Steps]:
    """The hops within pairs of devices, and between pairs. If the number of devices is no power of two, all tell all
    others at once. Beyond four devices a hop to the other one of a pair is shorter in the order of `make_mesh`."""
    if devices & (devices - 1):
        return (tuple(range(1, devices)),), ()
    between = tuple(hop + (hop > 2) for hop in range(2, devices, 2))
    return ((1,),) * (devices > 1), (between,) * (devices > 2)


def in_time(shards: Shards, *values: Any) -> tuple[Any, ...]:
    """The values, of which what is computed from any takes place behind all of them, where lanes are on devices.

    XLA starts a permutation no earlier than before the last operation that takes as long. Without this that would be a
    short one for several permutations, or the same one for two steps.
    """
    return jax.lax.optimization_barrier(values) if shards.size(axes.LANES) > 1 else values


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums of a branch on their way to other lanes, after some steps.

    others [T, N, D]: for each lane of this device, the sum over the others of its group of devices. group [T, D]: the
    sum over all lanes of the group.
    """

    others: jax.Array
    group: jax.Array

    @staticmethod
    def begun(sums: jax.Array, way: Way, shards: Shards) -> Sums:
        """After the first steps. sums: each lane's [T, N, D]."""
        here = sums.sum(axis=1)
        if shards.size(axes.LANES) > 1 and not way.first:
            total = shards.sum(here, axes.LANES)
            return Sums(total[:, None] - sums, total)
        return Sums(jnp.zeros_like(sums) if sums.shape[1] == 1 else here[:, None] - sums, here).after(way.first, shards)

    def after(self, steps: Steps, shards: Shards) -> Sums:
        """After more steps."""
        others, group = self.others, self.group
        for hops in steps:
            arrived = shards.sum_of(group, axes.LANES, hops)
            others, group = others + arrived[:, None], group + arrived
        return Sums(others, group)


class LateSums(NamedTuple):
    """The sums that a layer adds, on their way."""

    attention: Sums
    mlp: Sums

    @staticmethod
    def none(lanes: jax.Array) -> LateSums:
        """The late sums of residuals [T, N, D] for which nothing arrives."""
        nothing = jnp.zeros_like(lanes)
        return LateSums(*(Sums(nothing, nothing[:, 0]),) * 2)


class LaneBlock(Block):
    """x_l += own_l + others_l after norm and attention, and again after norm and feed-forward, for each lane l."""

    def __init__(self, spec: LayerSpec, layout: Layout, dtype):
        super().__init__(spec, layout, dtype)
        assert layout.config.lanes is not None
        assert spec.exchange is not None
        self.lanes, self.exchange = layout.config.lanes, spec.exchange
        self.pre_attn_norm, self.pre_mlp_norm = (lane_norm(layout.config, dtype) for _ in range(2))

    def __call__(
        self, residual: Residual, ctx: StepContext, cache: LayerCache, *, layer=None, token_inputs=None
    ) -> Output:
        x, shards, late = residual.x, ctx.shards, residual.late
        way = Way.of(shards.size(axes.LANES), x[:, 0].nbytes)
        now = late[0] if self.exchange.adds == "late" else None
        with jax.named_scope("attention"):
            heads, cache = self.attended(x, ctx, cache)
            arriving = now and now.attention.after(way.rest, shards).others
            heads, arriving, of_mlp = in_time(shards, heads, arriving, now and now.mlp)
            sums = self.joined(heads, x.shape[1], ctx)
            x, sent = self.added(x, sums, arriving, shards), self.begun(sums, way, shards)
        with jax.named_scope("mlp"):
            arriving = of_mlp and of_mlp.after(way.rest, shards).others
            sums = self.narrowed(self.widened(x, ctx), x.shape[1], ctx)
            sums, sent = in_time(shards, sums, sent)
            x, also = self.added(x, sums, arriving, shards), self.begun(sums, way, shards)
        if late:
            late = (*late[1:], LateSums(sent, also) if sent and also else LateSums.none(sums))
        return replace(residual, x=x, late=late), cache, None

    def attended(self, x: jax.Array, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """The heads of all lanes of the device [T, K, G, h], and the cache."""
        y, attn = self.pre_attn_norm(x, ctx.shards), self.attn
        if x.shape[1] == 1:
            return attn.attended(_of_one(self.pre_attn_norm, x, y, ctx.shards), ctx, cache)
        q, new = attn.finished(into_lanes(y, attn.qkv[...]), y, ctx)
        return attn.attend(q, new, cache, ctx)

    def joined(self, heads: jax.Array, lanes: int, ctx: StepContext) -> jax.Array:
        """Each lane's sum over its heads [T, N, D]."""
        o = self.attn.o[...]
        return ctx.matmul(heads, o, contract=3)[:, None] if lanes == 1 else out_of_lanes(heads, o, lanes)

    def widened(self, x: jax.Array, ctx: StepContext) -> jax.Array:
        """The feed-forward's hidden numbers of all lanes of the device, [T, F]."""
        y = self.pre_mlp_norm(x, ctx.shards)
        mlp = cast(Mlp, self.mlp)
        if x.shape[1] == 1:
            one = _of_one(self.pre_mlp_norm, x, y, ctx.shards)
            return ctx.matmul(one, mlp.gate_up[...], activation=partial(gated, mlp.spec.activation))
        both = mlp.gate_up[...]
        halves = (both.gate, both.up) if isinstance(both, SeparateGateUp) else jnp.moveaxis(both, 1, 0)
        gate, up = (into_lanes(y, cast(jax.Array, half)) for half in halves)  # not quantised, see `must_multiply`
        return gated(mlp.spec.activation, gate, up)

    def narrowed(self, hidden: jax.Array, lanes: int, ctx: StepContext) -> jax.Array:
        """Each lane's sum over its hidden numbers [T, N, D]."""
        down = cast(Mlp, self.mlp).down[...]
        return ctx.matmul(hidden, down)[:, None] if lanes == 1 else out_of_lanes(hidden, down, lanes)

    def begun(self, sums: jax.Array, way: Way, shards: Shards) -> Sums | None:
        """Each lane's sum [T, N, D] on its way to a later layer, if one adds it."""
        return Sums.begun(sums, way, shards) if self.exchange.sends else None

    def added(self, x: jax.Array, sums: jax.Array, arriving: jax.Array | None, shards: Shards) -> jax.Array:
        """The residuals with a branch added. sums: each lane's. arriving: those of other lanes, of an earlier
        layer. All [T, N, D]."""
        if self.exchange.adds == "now":
            return x + shards.sum(sums.sum(axis=1), axes.LANES)[:, None]
        if arriving is not None:
            return x + sums + arriving
        return x + sums * jnp.asarray(self.lanes.lanes**0.5, sums.dtype)


def into_lanes(y: jax.Array, weight: jax.Array, dtype=None) -> jax.Array:
    """y [T, N, D] times a weight [D, K, ...], of which each lane has a run of K: [T, K, ...]."""
    count, dim = y.shape[1:]
    runs = weight.reshape(dim, count, -1)
    out = jnp.einsum("tnd,dne->tne", y, runs, precision=precision_of(y.dtype), preferred_element_type=dtype or y.dtype)
    return out.reshape(y.shape[0], *weight.shape[1:])


def out_of_lanes(hidden: jax.Array, weight: jax.Array, lanes: int) -> jax.Array:
    """hidden [T, K, ...] times a weight [K, ..., D], of which each lane has a run of K: each lane's sum [T, N, D]."""
    runs, inputs = weight.reshape(lanes, -1, weight.shape[-1]), hidden.reshape(hidden.shape[0], lanes, -1)
    precision = precision_of(hidden.dtype)
    return jnp.einsum("tne,ned->tnd", inputs, runs, precision=precision, preferred_element_type=hidden.dtype)


def _of_one(norm: Norm, x: jax.Array, y: jax.Array, shards: Shards):
    """The norm y of a device's only lane x [T, 1, D], for products."""
    return y[:, 0] if isinstance(norm, LaneNorm) else norm.for_products(x[:, 0], y[:, 0], shards)
