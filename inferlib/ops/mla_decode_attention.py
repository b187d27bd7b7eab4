"""Attention of each row's newest tokens over the row's cache of latents, by queries in the latents' space."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.attention import masked_attention, slot_positions, visible
from inferlib.ops.cache_write import unfolded
from inferlib.ops.decode_attention import write_new


def mla_decode_attention(
    q: jax.Array,
    rotary: jax.Array,
    latents: jax.Array,
    keys: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    limit: int | None = None,
    layer: jax.Array | int | None = None,
    pages: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    new: Sequence[jax.Array] | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, ...]:
    """q [B, H, R] and rotary [B, H, r]: row b's query, at position lengths[b] - 1: H heads taken to the latents' R
    dimensions, and their rotary part; or [B, C, H, R] and [B, C, H, r]: at the last C positions.

    latents [N, 1, S, R] and rotary keys [N, 1, S, r], or folded [N, 1, S / f, f * r] (see `inferlib.ops.cache_write`),
    with those of the new tokens already written if they are not in `new`; or [L, N, ...] of which `layer` is read. A
    latent with its rotary key is a key of all heads, and alone a value. pages, lengths, limit: as in
    `decode_attention`.
    scales [N, 1, S] or [L, N, 1, S] float32: of latents and of rotary keys, int8 or float8_e4m3fn, which only "xla"
    takes.
    new: latents [B, 1, R] and rotary keys [B, 1, r] of the new tokens, or [B, C, 1, ...], of any float type, written
    as in `decode_attention`.
    backend: "xla"; "pallas_tpu", which reads live pages only; "pallas_gpu", which reads live positions only (one query,
    rows as pages of one layer), and writes what is new where it lies. Both are interpreted on CPU.
    Returns out in q's shape and dtype, lse [B, H] or [B, C, H] float32; with `new` also the cache: latents, rotary keys
    and their scales if there are any.
    """
    if backend != "xla" and scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of latents; use xla")
    if backend == "pallas_gpu":
        if layer is not None or pages is not None:
            raise ValueError(f"backend {backend!r} takes rows as pages of one layer, without a page table; use xla")
        from inferlib.pallas_kernels import mla_decode_attention_gpu

        kernel = partial(mla_decode_attention_gpu.mla_decode_attention, scale=scale, limit=limit)
        operands = q, rotary, latents, keys, lengths, new
        return lax.platform_dependent(*operands, cpu=partial(kernel, interpret=True), default=kernel)
    options = dict(scale=scale, limit=limit, layer=layer, pages=pages, backend=backend)
    if new is not None:
        cache = write_new((latents, keys, *(scales or ())), new, lengths, None, ring=False, layer=layer, pages=pages)
        found = mla_decode_attention(q, rotary, *cache[:2], lengths, scales=cache[2:] or None, **options)
        return *found, *cache
    if q.ndim == 3:
        out, lse = mla_decode_attention(q[:, None], rotary[:, None], latents, keys, lengths, scales=scales, **options)
        return out[:, 0], lse[:, 0]
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import mla_decode_attention_tpu

        q, latents, keys = jnp.concatenate([q, rotary], axis=-1), jnp.squeeze(latents, -3), jnp.squeeze(keys, -3)
        options = dict(scale=scale, layer=0 if layer is None else layer, pages=pages)
        kernel = partial(mla_decode_attention_tpu.mla_decode_attention, **options)
        return lax.platform_dependent(q, latents, keys, lengths, cpu=partial(kernel, interpret=True), default=kernel)
    rows, queries = q.shape[:2]
    held = (latents, unfolded(keys, keys.shape[-1] // rotary.shape[-1]), *(scales or ()))
    if layer is not None:
        held = tuple(x[layer] for x in held)
    if pages is not None:
        held = tuple(jnp.moveaxis(x[pages], 2, 1).reshape(rows, 1, -1, *x.shape[3:]) for x in held)
    slots = held[0].shape[2] if limit is None else min(limit, held[0].shape[2])
    latents, keys, *scales = (x[:rows, :, :slots] for x in held)
    of_latents, of_keys = scales or (None, None)
    positions = lengths[:, None] - queries + jnp.arange(queries)
    seen = visible(positions, slot_positions(lengths - 1, slots, ring=False), None)
    kind = dict(k_scales=of_latents, v_scales=of_latents, rotary=(rotary[:, :, None], keys, of_keys))
    out, lse = masked_attention(q[:, :, None], latents, latents, seen, scale=scale, softcap=None, sinks=None, **kind)
    return out[:, :, 0], jnp.where(lengths[:, None, None] > 0, lse[:, :, 0], -jnp.inf)
