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
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, K, G, h]: chunk p holds the ascending `positions[p]`, [P, C] int32, of row rows[p].

    k, v: [N, K, S, h], the chunk's own keys and values already written. window: of all queries, or [P, C] of each.
    limit (static): no position reaches it, so slots beyond are not read. ring: position p lives in slot p mod S;
    then S >= window + the span of a chunk. Rows >= N (absent chunks) give garbage that the caller ignores.
    backend: "xla", or "nki" for the Trainium kernel.
    Returns out [P, C, K, G, h], lse [P, C, K, G] float32.
    """
    if backend == "nki":
        from inferlib.nki_kernels.flash_prefill import flash_prefill

        options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, ring=ring, limit=limit)
        return flash_prefill(q, k, v, rows, positions, **options)
    pages, _, slots, _ = k.shape
    if limit is not None and not ring and limit < slots:
        k, v, slots = k[:, :, :limit], v[:, :, :limit], limit
    row = jnp.minimum(rows, pages - 1)
    seen = visible(positions, slot_positions(positions[:, -1], slots, ring), window)
    return masked_attention(q, k[row], v[row], seen, scale=scale, softcap=softcap, sinks=sinks)
