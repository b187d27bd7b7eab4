"""Attention of one new token per row over the row's cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.ops.attention import masked_attention, slot_positions, visible


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    limit: int | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [B, K, G, h]: row b's query is at position lengths[b] - 1; its cache is page b.

    k, v: [N, K, S, h] with N >= B, the new token's key and value already written. lengths [B] int32
    counts the visible positions; 0 marks an inactive row (out 0, lse -inf). limit (static): no length
    exceeds it, so slots beyond are not read. ring: position p lives in slot p mod S.
    window: of all queries, or [B] of each, which only "xla" takes. backend: "xla", "pallas" for the GPU kernel, or
    "nki" for Trainium's.
    Returns out [B, K, G, h], lse [B, K, G] float32.
    """
    if backend != "xla" and isinstance(window, jax.Array):
        raise ValueError(f"backend {backend!r} takes one window for all rows; use xla")
    options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if backend == "pallas":
        from inferlib.pallas_kernels import decode_attention_gpu

        return decode_attention_gpu.decode_attention(q, k, v, lengths, ring=ring, limit=limit, **options)
    if backend == "nki":
        from inferlib.nki_kernels.flash_decode import flash_decode

        out, lse = flash_decode(q[:, None], k, v, lengths, ring=ring, limit=limit, **options)
        return out[:, 0], lse[:, 0]
    rows, slots = q.shape[0], k.shape[2]
    slots = slots if ring or limit is None else min(limit, slots)
    k, v = k[:rows, :, :slots], v[:rows, :, :slots]
    last = lengths - 1
    window = window[:, None] if isinstance(window, jax.Array) else window
    seen = visible(last[:, None], slot_positions(last, slots, ring), window)
    out, lse = masked_attention(q[:, None], k, v, seen, scale=scale, softcap=softcap, sinks=sinks)
    return out[:, 0], jnp.where(lengths[:, None, None] > 0, lse[:, 0], -jnp.inf)
