"""Decode attention from the products of queries, keys and values on."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax


def qkv_attention(
    qkv: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, arrays: dict[str, jax.Array | tuple], **options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [B, K, G + 2, h], or with a dtype its shares [P, B, K, G + 2, h], and the cache -> attention's output
    [B, K, G, h] and the cache with what is new.

    What bias, norms of heads, rotary embedding (`Attention.project`) and `decode_attention` with `new` do one after the
    other, by the GPU kernel, which is interpreted on CPU.

    arrays: those that a layer has of "squares", "bias", "norms", "rope" and "sinks"; see
    `pallas_kernels.qkv_attention_gpu`.
    """
    from inferlib.pallas_kernels.qkv_attention_gpu import qkv_attention as kernel

    def run(qkv, k, v, lengths, arrays, *, interpret: bool):
        return kernel(qkv, k, v, lengths, **arrays, **options, interpret=interpret)

    forms = {"cpu": partial(run, interpret=True), "default": partial(run, interpret=False)}
    return lax.platform_dependent(qkv, k, v, lengths, arrays, **forms)
