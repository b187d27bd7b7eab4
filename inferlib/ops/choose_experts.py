"""Choose the experts of tokens, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.by_platform import by_platform
from inferlib.ops.choice import Choice


def choose(backend: str, *, grouped: bool) -> Choice:
    """The implementation that tokens take. grouped: a token may choose experts of its best groups only.

    The kernel takes any number of tokens: XLA would sort, and XLA:GPU compiles the sort of each layer anew.
    """
    if backend == "xla":
        return Choice("xla")
    reason = "the kernel chooses among all experts, not among those of a token's best groups"
    return Choice.of(backend, reason if grouped else "")


def choose_experts(
    logits: jax.Array,
    correction: jax.Array | None,
    *,
    count: int,
    score: str,
    renormalize: bool,
    among: Callable[[jax.Array], jax.Array] | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """logits [T, E] float32 -> the k = `count` best experts [T, k] int32 and their weights [T, k] float32, both by
    descending rank; of equal ranks, the lower expert comes first.

    score: "softmax" or "sigmoid". correction [E]: added to the scores for choosing, but not to the weights.
    renormalize: weights sum to 1. among: maps ranks [T, E] to ranks with -inf for experts that cannot be chosen.
    backend: "xla"; or "pallas_gpu", which other platforms than NVIDIA GPUs replace by XLA; see `choose`.
    """
    options = dict(count=count, score=score, renormalize=renormalize)
    forms = {"default": partial(_by_xla, **options, among=among)}
    if choose(backend, grouped=among is not None).name == "pallas_gpu":
        from inferlib.pallas_kernels.choose_experts_gpu import choose_experts as kernel

        forms["cuda"] = partial(kernel, **options)
    return by_platform(logits, correction, **forms)


def _by_xla(
    logits: jax.Array,
    correction: jax.Array | None,
    *,
    count: int,
    score: str,
    renormalize: bool,
    among: Callable[[jax.Array], jax.Array] | None,
) -> tuple[jax.Array, jax.Array]:
    if score == "softmax" and renormalize and correction is None and among is None:
        best, experts = lax.top_k(logits, count)
        return experts, jax.nn.softmax(best)  # the others would cancel
    scores = jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits)
    ranks = scores if correction is None else scores + correction
    weights, experts = lax.top_k(ranks if among is None else among(ranks), count)
    if not (correction is None and among is None):
        # The ranks are other numbers than the scores, and TPUs take half a dozen operations to gather single ones.
        is_chosen = experts[:, :, None] == jnp.arange(scores.shape[1])
        weights = jnp.sum(jnp.where(is_chosen, scores[:, None], 0), axis=2)
    if renormalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-20)
    return experts, weights
