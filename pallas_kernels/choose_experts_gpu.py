"""Choose the experts of a decode-sized batch in one kernel on NVIDIA GPUs (Triton); XLA takes four or five kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def choose_experts(
    logits: jax.Array,
    correction: jax.Array | None,
    *,
    count: int,
    score: str,
    renormalize: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `ops.choose_experts`: logits [T, E] float32 -> experts [T, k] int32 and weights [T, k] float32."""
    tokens, experts = logits.shape
    whole = lambda shape: pl.BlockSpec(shape, lambda token: (0,) * len(shape))  # noqa: E731
    operands = logits, correction
    return pl.pallas_call(
        partial(_kernel, score=score, renormalize=renormalize),
        grid=(tokens,),
        in_specs=[None if x is None else whole(x.shape) for x in operands],
        out_specs=[whole((tokens, count))] * 2,
        out_shape=[jax.ShapeDtypeStruct((tokens, count), dtype) for dtype in (jnp.int32, jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=1 if experts <= 256 else 4, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(*operands)


def _kernel(logits_ref, correction_ref, experts_ref, weights_ref, *, score, renormalize):
    token, (_, count), total = pl.program_id(0), experts_ref.shape, logits_ref.shape[1]
    number = jnp.arange(pl.next_power_of_2(total))
    real = number < total
    logits = plgpu.load(logits_ref.at[token, number], mask=real, other=-jnp.inf)
    if score == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
    else:
        scores = jnp.exp(logits - jnp.max(logits))
        scores = scores / jnp.sum(scores)
    ranks = scores
    if correction_ref is not None:
        ranks = ranks + plgpu.load(correction_ref.at[number], mask=real, other=0.0)
    slots = jnp.arange(pl.next_power_of_2(count))
    experts, weights, taken = jnp.zeros_like(slots), jnp.zeros(slots.shape, jnp.float32), ~real
    for i in range(count):  # takes the best expert that is left, and the first one of equals
        best = jnp.max(jnp.where(taken, -jnp.inf, ranks))
        expert = jnp.min(jnp.where((ranks >= best) & ~taken, number, total - 1))
        weight = jnp.sum(jnp.where(number == expert, scores, 0.0))
        experts, weights = jnp.where(slots == i, expert, experts), jnp.where(slots == i, weight, weights)
        taken = taken | (number == expert)
    if renormalize:
        weights = weights / jnp.maximum(jnp.sum(weights), 1e-20)
    plgpu.store(experts_ref.at[token, slots], experts, mask=slots < count)
    plgpu.store(weights_ref.at[token, slots], weights, mask=slots < count)
