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
    scales: tuple[jax.Array, jax.Array] | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [B, H, R + r]: row b's query, at position lengths[b] - 1: H heads taken to the latents' R dimensions, and their
    rotary part; or [B, C, H, R + r]: at the last C positions.

    latents [N, 1, S, R] and rotary keys [N, 1, S, r], or folded [N, 1, S / f, f * r] (see `inferlib.ops.cache_write`),
    with those of the new tokens already written; or [L, N, ...] of which `layer` is read. A latent with its rotary key
    is a key of all heads, and alone a value. pages, lengths, limit: as in `decode_attention`.
    scales [N, 1, S] or [L, N, 1, S] float32: of latents and of rotary keys, int8 or float8_e4m3fn, which only "xla"
    takes.
    backend: "xla"; "pallas_tpu", which reads live pages only, and is interpreted on CPU.
    Returns out [B, H, R] or [B, C, H, R] in q's dtype, lse [B, H] or [B, C, H] float32.
    """
    if q.ndim == 3:
        options = dict(scale=scale, limit=limit, layer=layer, pages=pages, scales=scales, backend=backend)
        out, lse = mla_decode_attention(q[:, None], latents, keys, lengths, **options)
        return out[:, 0], lse[:, 0]
    if backend != "xla" and scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of latents; use xla")
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import mla_decode_attention_tpu

        latents, keys = (jnp.squeeze(x, -3) for x in (latents, keys))
        options = dict(scale=scale, layer=0 if layer is None else layer, pages=pages)
        kernel = partial(mla_decode_attention_tpu.mla_decode_attention, **options)
        return lax.platform_dependent(q, latents, keys, lengths, cpu=partial(kernel, interpret=True), default=kernel)
    (rows, queries), rank = q.shape[:2], latents.shape[-1]
    held = (latents, unfolded(keys, keys.shape[-1] // (q.shape[-1] - rank)), *(scales or ()))
    if layer is not None:
        held = tuple(x[layer] for x in held)
    if pages is not None:
        held = tuple(jnp.moveaxis(x[pages], 2, 1).reshape(rows, 1, -1, *x.shape[3:]) for x in held)
    slots = held[0].shape[2] if limit is None else min(limit, held[0].shape[2])
    latents, keys, *scales = (x[:rows, :, :slots] for x in held)
    of_latents, of_keys = scales or (None, None)
    positions = lengths[:, None] - queries + jnp.arange(queries)
    seen = visible(positions, slot_positions(lengths - 1, slots, ring=False), None)
    q = q[:, :, None]
    kind = dict(k_scales=of_latents, v_scales=of_latents, rotary=(q[..., rank:], keys, of_keys))
    out, lse = masked_attention(q[..., :rank], latents, latents, seen, scale=scale, softcap=None, sinks=None, **kind)
    return out[:, :, 0], jnp.where(lengths[:, None, None] > 0, lse[:, :, 0], -jnp.inf)
