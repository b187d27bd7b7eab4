"""The dense gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import Activation, ClampedSwiglu, MlpSpec
from inferlib.models.layers.param import param
from inferlib.ops.matmul import Activations, matmul_partials
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def exact_gelu(x: jax.Array) -> jax.Array:
    """GELU by erf, because kernels have no erfc; in float32, because 1 + erf(x) cancels where x is negative."""
    y = x.astype(jnp.float32)
    return (y * (0.5 + 0.5 * jax.lax.erf(y * 0.5**0.5))).astype(x.dtype)


ACTIVATIONS: Mapping[Any, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": exact_gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gated(activation: Activation | ClampedSwiglu, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) * up."""
    if isinstance(activation, ClampedSwiglu):
        gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
        return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)
    return ACTIVATIONS[activation](gate) * up


@cache
def gating(activation: Activation | ClampedSwiglu) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`gated` of this activation: always the same function, so that kernels which end with it are lowered once."""
    return partial(gated, activation)


class Mlp(nnx.Module):
    """x [T, D] -> down(act(gate(x)) * up(x)) [T, D]: this device's part of the sum, without `down_bias`.

    Gate and up are one matrix, so that one launch reads x once; without a gate it has one half. hidden: F as laid out.
    """

    def __init__(self, spec: MlpSpec, hidden: int, dim: int, dtype):
        self.spec = spec
        halves = 2 if spec.gated else 1
        self.gate_up = param((dim, halves, hidden), (axes.EMBED, axes.GATE_UP, axes.MLP), dtype, contracting=(0,))
        self.down = param((hidden, dim), (axes.MLP, axes.EMBED), dtype, contracting=(0,))
        if spec.bias:
            self.gate_up_bias = param((halves, hidden), (axes.GATE_UP, axes.MLP), dtype, "zeros")
            self.down_bias = param((dim,), (axes.EMBED,), dtype, "zeros")

    def __call__(self, x: Activations, ctx: StepContext, *, partials: bool = False) -> Any:
        """partials: return the last product's split-K `PartialSums` instead."""
        spec, shards = self.spec, ctx.shards
        product: Callable[..., Any] = matmul_partials if partials else ctx.matmul
        if spec.gated and not (spec.bias or spec.sparsity or shards.size(axes.EMBED) > 1):
            hidden = ctx.matmul(x, self.gate_up[...], activation=gating(spec.activation))
            return product(hidden, self.down[...])
        gate_up = shards.sum(ctx.matmul(x, self.gate_up[...]), axes.EMBED)
        if self.spec.bias:
            gate_up = gate_up + self.gate_up_bias[...]
        if not self.spec.gated:
            return product(ACTIVATIONS[self.spec.activation](gate_up[:, 0]), self.down[...])
        gate = self.cut(gate_up[:, 0], shards) if self.spec.sparsity else gate_up[:, 0]
        return product(gated(self.spec.activation, gate, gate_up[:, 1]), self.down[...])

    def cut(self, gate: jax.Array, shards: Shards) -> jax.Array:
        """The gate [T, F] less its quantile (see `MlpSpec.sparsity`), and zero below it."""
        x = gate.astype(jnp.float32)
        sums = jnp.stack([jnp.sum(x, axis=1), jnp.sum(x * x, axis=1)], axis=1)  # padding adds nothing
        mean, square = jnp.split(shards.sum(sums, axes.MLP) / self.spec.hidden, 2, axis=1)
        deviation = jnp.sqrt(jnp.maximum(square - mean * mean, 0))
        return jax.nn.relu(x - (mean + deviation * NormalDist().inv_cdf(self.spec.sparsity))).astype(gate.dtype)

    def finish(self, x: jax.Array) -> jax.Array:
        """The last step, after the sum over devices."""
        return x + self.down_bias[...] if self.spec.bias else x
