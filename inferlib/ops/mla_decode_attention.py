"""Attention of each row's newest tokens over the row's cache of latents, by queries in the latents' space."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.attention import masked_attention, slot_positions, visible
from inferlib.ops.cache_write import unfolded


def mla_decode_attention(
    q: jax.Array,
    latents: jax.Array,
    keys: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    limit: int | None = None,
    layer: jax.Array | int | None = None,
    pages: jax.Array | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [B, H, R + r]: row b's query, at position lengths[b] - 1: H heads taken to the latents' R dimensions, and their
    rotary part; or [B, C, H, R + r]: at the last C positions.

    latents [N, 1, S, R] and rotary keys [N, 1, S, r], or folded [N, 1, S / f, f * r] (see `inferlib.ops.cache_write`),
    with those of the new tokens already written; or [L, N, ...] of which `layer` is read. A latent with its rotary key
    is a key of all heads, and alone a value. pages, lengths, limit: as in `decode_attention`.
    backend: "xla"; "pallas_tpu", which reads live pages only, and is interpreted on CPU.
    Returns out [B, H, R] or [B, C, H, R] in q's dtype, lse [B, H] or [B, C, H] float32.
    """
    if q.ndim == 3:
        options = dict(scale=scale, limit=limit, layer=layer, pages=pages, backend=backend)
        out, lse = mla_decode_attention(q[:, None], latents, keys, lengths, **options)
        return out[:, 0], lse[:, 0]
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import mla_decode_attention_tpu

        latents, keys = (jnp.squeeze(x, -3) for x in (latents, keys))
        options = dict(scale=scale, layer=0 if layer is None else layer, pages=pages)
        kernel = partial(mla_decode_attention_tpu.mla_decode_attention, **options)
        return lax.platform_dependent(q, latents, keys, lengths, cpu=partial(kernel, interpret=True), default=kernel)
    if layer is not None:
        latents, keys = latents[layer], keys[layer]
    (rows, queries), rank = q.shape[:2], latents.shape[-1]
    keys = unfolded(keys, latents.shape[-2] // keys.shape[-2])
    if pages is not None:
        latents, keys = (x[pages].reshape(rows, 1, -1, x.shape[3]) for x in (latents, keys))
    slots = latents.shape[2] if limit is None else min(limit, latents.shape[2])
    latents, keys = latents[:rows, :, :slots], keys[:rows, :, :slots]
    positions = lengths[:, None] - queries + jnp.arange(queries)
    seen = visible(positions, slot_positions(lengths - 1, slots, ring=False), None)
    q = q[:, :, None]
    options = dict(scale=scale, softcap=None, sinks=None, rotary=(q[..., rank:], keys))
    out, lse = masked_attention(q[..., :rank], latents, latents, seen, **options)
    return out[:, :, 0], jnp.where(lengths[:, None, None] > 0, lse[:, :, 0], -jnp.inf)
