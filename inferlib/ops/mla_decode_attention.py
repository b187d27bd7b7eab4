"""Attention of one new token per row over the row's cache of latents, by queries in the latents' space."""

from __future__ import annotations

import jax

from inferlib.ops.decode_attention import decode_attention


def mla_decode_attention(
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    *,
    rank: int,
    scale: float,
    limit: int | None = None,
    scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q [B, H, c]: row b's query, at position lengths[b] - 1: H heads taken to the latents' R dimensions, and their
    rotary part.

    cache: [N, 1, S, c] with N >= B, the new token's latent and rotary key already written; a cell is a key, and its
    first R (`rank`) numbers are the value. scales [N, 1, S] float32: that cells are multiplied by. lengths, limit: as
    in `decode_attention`.
    Returns out [B, H, R], lse [B, H] float32.
    """
    # The rotary part of the values is computed and dropped: cut from the cache, it would be a copy of all the rest.
    options = dict(scale=scale, limit=limit, k_scales=scales, v_scales=scales)
    out, lse = decode_attention(q[:, None], cache, cache, lengths, **options)
    return out[:, 0, :, :rank], lse[:, 0]
