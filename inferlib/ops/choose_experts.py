"""Which experts tokens go to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_FEW = 256  # tokens, whose choice is bound by starting kernels


def choose_experts(
    logits: jax.Array,
    correction: jax.Array | None,
    *,
    count: int,
    score: str,
    renormalize: bool,
    among: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """logits [T, E] float32 -> the `count` best experts [T, k] int32 and their weights [T, k] float32, both by
    descending rank, the first of equals first.

    score: "softmax" or "sigmoid". correction [E]: joins the scores for choosing, and not the weights. renormalize:
    weights sum to 1. among: of what ranks them [T, E], that with -inf where experts cannot be chosen. On NVIDIA GPUs
    few tokens are the kernel's, if they can be sent to any expert.
    """
    options = dict(count=count, score=score, renormalize=renormalize)
    forms = {"default": partial(_by_xla, **options, among=among)}
    if logits.shape[0] <= _FEW and among is None:
        from inferlib.pallas_kernels.choose_experts_gpu import choose_experts as kernel

        forms["cuda"] = partial(kernel, **options)
    return lax.platform_dependent(logits, correction, **forms)


def _by_xla(
    logits: jax.Array,
    correction: jax.Array | None,
    *,
    count: int,
    score: str,
    renormalize: bool,
    among: Callable[[jax.Array], jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    scores = jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits)
    ranks = scores if correction is None else scores + correction
    _, experts = lax.top_k(ranks if among is None else among(ranks), count)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if renormalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-20)
    return experts, weights
