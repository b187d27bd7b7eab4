"""The decoder's pass over whole rows of tokens, which gradients go through.

Shapes: B rows of T tokens; D width; K, G, h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.cache.plan import plan_cache
from inferlib.config import PoolSize
from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import AttentionSpec
from inferlib.models.decoder import Decoder
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.moe import Experts, Moe
from inferlib.ops.grouped_gradients import grouped_matmul_with_gradients


@dataclass(frozen=True)
class RowAttend:
    """What `Attention.attend` computes, of B whole rows, causally, and without a cache.

    kernel: the implementation of `jax.nn.dot_product_attention`.
    """

    rows: int
    scale: float
    kernel: Any

    def __call__(
        self, q: jax.Array, new: Sequence[jax.Array], cache: LayerCache, ctx: StepContext
    ) -> tuple[jax.Array, LayerCache]:
        """The attention of queries [B T, K, G, h] to keys and values [B T, K, h] each. The cache stays as it is."""
        queries, keys, values = (y.reshape(self.rows, len(q) // self.rows, -1, q.shape[-1]) for y in (q, *new))
        out = jax.nn.dot_product_attention(
            queries, keys, values, scale=self.scale, is_causal=True, implementation=self.kernel
        )
        return out.reshape(q.shape), cache


def row_kernel(dtype: jax.typing.DTypeLike) -> str:
    """The implementation of `jax.nn.dot_product_attention` for whole rows of a dtype on this platform."""
    return "cudnn" if jax.default_backend() == "gpu" and dtype == jnp.bfloat16 else "xla"


def hidden_states(model: AbstractModel, weights: Sequence[Any], tokens: jax.Array) -> tuple[Decoder, jax.Array]:
    """The decoder, and its last hidden states [B, T, D] of rows of tokens [B, T]. Traceable.

    On GPUs, layers of causal attention take cuDNN's kernel. Others write a cache and read it. Experts have gradients.
    """
    (rows, length), decoder = tokens.shape, model.merge(weights)
    page = PoolSize(page=1 << (length - 1).bit_length())  # each row is one page
    plan = plan_cache(model, rows=rows, max_len=length, chunk=length, dtype=model.dtype, pool=page)
    cache = plan.view([jnp.zeros(array.shape, array.dtype) for array in plan.arrays])
    if (kernel := row_kernel(model.dtype)) == "cudnn":
        take_row_attention(decoder, rows, kernel)
    take_gradients_of_experts(decoder)
    places = jnp.arange(rows, dtype=jnp.int32)
    batch = StepBatch.of_chunks(tokens, places, jnp.zeros_like(places))
    ran = decoder(StepContext(batch, model.config, plan.max_len), cache)
    return decoder, ran.hidden.reshape(rows, length, -1)


def has_gradients(loss: Callable[..., jax.Array], *shapes: Any) -> bool:
    """Whether a loss of a model's rows has gradients by its first argument: loops that run as often as the device says
    have none. shapes: of its arguments."""
    try:
        jax.eval_shape(jax.grad(loss), *shapes)
    except ValueError as error:
        if "Reverse-mode differentiation" not in str(error):
            raise
        return False
    return True


def take_gradients_of_experts(decoder: Decoder) -> None:
    """Let experts multiply by products that have gradients, and be computed again for these: else each of a token's
    experts would leave its activations in memory."""
    for _, module in nnx.iter_modules(decoder):
        if isinstance(module, Experts):
            module.multiply = grouped_matmul_with_gradients
        if isinstance(module, Moe):
            module.weighted_sum = _computed_again(module.weighted_sum)


def _computed_again(weighted_sum: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`Moe.weighted_sum`, of which memory keeps three inputs alone: the tokens, their experts and the weights."""

    def again(x: jax.Array, experts: jax.Array, weights: jax.Array, *others: Any) -> jax.Array:
        return jax.checkpoint(lambda *inputs: weighted_sum(*inputs, *others))(x, experts, weights)

    return again


def take_row_attention(decoder: Decoder, rows: int, kernel: str) -> None:
    """Let the layers whose attention is causal and nothing else compute it by `RowAttend`."""
    if any(layer.attention.cache_of is not None for layer in decoder.config.layers):
        return  # these layers read what others write
    for block in decoder.blocks:
        if _is_causal(block.attn):
            block.attn.attend = RowAttend(rows, block.attn.spec.scale, kernel)


def _is_causal(layer: Any) -> bool:
    """True for attention of every query to all positions up to its own, and nothing else, in heads that cuDNN takes."""
    if type(layer) is not Attention:
        return False
    spec: AttentionSpec = layer.spec
    others = (spec.window, spec.softcap, spec.chunk)
    fits = spec.value_dim == spec.head_dim and spec.head_dim % 8 == 0 and spec.head_dim <= 128
    return fits and not spec.sinks and all(other is None for other in others)
