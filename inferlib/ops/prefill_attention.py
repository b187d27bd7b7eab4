"""Attention of prefill chunks over their rows' cache, the chunk itself included."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.ops.attention import masked_attention, slot_positions, visible


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    limit: int | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, K, G, h]: chunk p holds the ascending `positions[p]`, [P, C] int32, of row rows[p].

    k, v: [N, K, S, h], the chunk's own keys and values already written. window: of all queries, or [P, C] of each.
    limit (static): no position reaches it, so slots beyond are not read. ring: position p lives in slot p mod S;
    then S >= window + the span of a chunk. Rows >= N (absent chunks) give garbage that the caller ignores.
    k_scales, v_scales [N, K, S] float32: as in `decode_attention`.
    backend: "xla", or "nki" for the Trainium kernel.
    Returns out [P, C, K, G, h], lse [P, C, K, G] float32.
    """
    if backend != "xla" and k_scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of keys and values; use xla")
    if backend == "nki":
        from inferlib.nki_kernels.flash_prefill import flash_prefill

        options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, ring=ring, limit=limit)
        return flash_prefill(q, k, v, rows, positions, **options)
    pages, _, slots, _ = k.shape
    if limit is not None and not ring:
        slots = min(limit, slots)
    row = jnp.minimum(rows, pages - 1)
    k, v, k_scales, v_scales = (x if x is None else x[:, :, :slots][row] for x in (k, v, k_scales, v_scales))
    seen = visible(positions, slot_positions(positions[:, -1], slots, ring), window)
    options = dict(scale=scale, softcap=softcap, sinks=sinks, k_scales=k_scales, v_scales=v_scales)
    return masked_attention(q, k, v, seen, **options)
