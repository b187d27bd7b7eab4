"""Routers: which experts a token goes to."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.batch import StepContext
from inferlib.models.config import NormSpec, RouterSpec
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.ops.choose_experts import choose_experts
from inferlib.sharding import axes


class Router(nnx.Module):
    """x [T, D] -> the chosen experts [T, k] int32 and their weights [T, k] float32, both by descending score.

    Scores are float32. Every device scores all experts for its tokens, wherever the experts are stored.
    """

    def __init__(self, spec: RouterSpec, dim: int, dtype):
        self.spec = spec
        if spec.norm_eps is not None:
            self.norm = Norm(NormSpec(eps=spec.norm_eps), dim, dtype)
        if spec.expert_scale:
            self.expert_scale = param((spec.experts,), (axes.ROUTES,), dtype, "ones")
        self.weight = param((dim, spec.experts), (axes.EMBED, axes.ROUTES), dtype)
        if spec.bias:
            self.bias = param((spec.experts,), (axes.ROUTES,), dtype, "zeros")
        if spec.correction:
            self.correction = param((spec.experts,), (axes.ROUTES,), jnp.float32, "zeros")

    def __call__(self, x: jax.Array, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        """The experts [T, k] of each token of x [T, D], and their weights."""
        spec, shards = self.spec, ctx.shards
        if spec.norm_eps is not None:
            x = self.norm(x, shards) * jnp.asarray(self.norm.dim**-0.5, x.dtype)
        logits = shards.sum(ctx.matmul(x, self.weight[...], out_dtype=jnp.float32), axes.EMBED)
        if spec.bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        if spec.softcap is not None:
            logits = spec.softcap * jnp.tanh(logits / spec.softcap)
        if spec.score == "sparsemixer":
            return sparsemixer(logits, spec.jitter)
        correction = self.correction[...] if spec.correction else None
        groups = None if spec.groups == 1 else partial(best_groups, spec=spec)
        experts, weights = choose_experts(
            logits,
            correction,
            count=spec.chosen,
            score=spec.score,
            renormalize=spec.renormalize,
            among=groups,
            backend=ctx.backend.choose_experts,
        )
        if spec.expert_scale:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[experts]
        return experts, weights * spec.scale


def best_groups(scores: jax.Array, spec: RouterSpec) -> jax.Array:
    """scores [T, E] with -inf for experts outside a token's best groups (node-limited routing of DeepSeek-V2)."""
    grouped = scores.reshape(scores.shape[0], spec.groups, -1)
    group_scores = best_score = jnp.max(grouped, axis=-1)
    if spec.group_score == "top2":  # without a sort of every group
        numbers, count = jnp.arange(grouped.shape[2]), grouped.shape[2]
        first = jnp.min(jnp.where(grouped == best_score[..., None], numbers, count), axis=-1, keepdims=True)
        group_scores = best_score + jnp.max(jnp.where(numbers == first, -jnp.inf, grouped), axis=-1)
    _, best = jax.lax.top_k(group_scores, spec.chosen_groups)
    is_best = jnp.any(best[:, :, None] == jnp.arange(spec.groups), axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def sparsemixer(logits: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The two best experts of logits [T, E] (Liu et al. 2023): each weight is a softmax over the logits that lie within
    2 * `jitter` of the chosen one, relative to magnitude."""
    taken = jnp.zeros(logits.shape, bool)
    experts, weights = [], []
    for _ in range(2):
        remaining = jnp.where(taken, -jnp.inf, logits)
        best, expert = jnp.max(remaining, axis=1, keepdims=True), jnp.argmax(remaining, axis=1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter
        chosen = jnp.arange(logits.shape[1]) == expert[:, None]
        softmax = jax.nn.softmax(jnp.where(far, -jnp.inf, remaining))
        weights.append(jnp.sum(jnp.where(chosen, softmax, 0), axis=1))
        experts.append(expert)
        taken = taken | chosen
    return jnp.stack(experts, axis=1).astype(jnp.int32), jnp.stack(weights, axis=1)
