"""Attention of prefill chunks over their rows' cache, the chunk itself included."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.attention import masked_attention, slot_positions, visible


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockList:
    """Which positions count, of those that queries see. numbers [P, K, T, M] int32: for each chunk, KV head and tile of
    `queries` tokens, blocks of `keys` positions, block n being those from n * keys on; negative numbers are none."""

    numbers: jax.Array
    queries: int = field(metadata={"static": True})
    keys: int = field(metadata={"static": True})

    def holds(self, positions: jax.Array, width: int) -> jax.Array:
        """[P, K, C, S] bool, for key positions [P, S] and chunks of `width` tokens."""
        listed = self.numbers[..., None] == (positions // self.keys)[:, None, None, None]
        return jnp.repeat(jnp.any(listed, axis=3), self.queries, axis=2)[:, :, :width]


def prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    rows: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    limit: int | None = None,
    layer: jax.Array | int | None = None,
    pages: jax.Array | None = None,
    listed: BlockList | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, K, G, h]: chunk p holds the ascending `positions[p]`, [P, C] int32, of row rows[p].

    k, v: [N, K, S, h], or [L, N, K, S, h] of which `layer` is read, the chunk's own keys and values already written; v
    None: keys are values too.
    pages [B, M] int32: position p of row b is in page pages[b, p // S]; without, row b's cache is page b. window: of
    all queries, or [P, C] of each, which only "xla" takes. limit (static): no position reaches it, so slots beyond are
    not read. ring: position p lives in slot p mod S of one page, or of all; then these are at least the window and the
    span of a chunk. Rows that are not there (absent chunks) give garbage that the caller ignores. listed: what queries
    see at most. k_scales, v_scales [N, K, S] or [L, N, K, S] float32: as in `decode_attention`; not for "nki".
    backend: "xla"; "nki" for the Trainium kernel (rows as pages); "pallas_tpu", which reads only blocks that are seen,
    and is interpreted on CPU.
    Returns out [P, C, K, G, h], lse [P, C, K, G] float32.
    """
    if backend == "nki" and k_scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of keys and values; use xla")
    options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, ring=ring, limit=limit)
    if v is None and backend != "pallas_tpu":
        v = k
    if backend == "nki":
        from inferlib.nki_kernels.flash_prefill import flash_prefill

        return flash_prefill(q, k, v, rows, positions, **options)
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import prefill_attention_tpu

        options |= dict(layer=0 if layer is None else layer, pages=pages, k_scales=k_scales, v_scales=v_scales)
        if listed is not None:
            blocks = prefill_attention_tpu.Blocks(listed.queries, listed.keys, edge=math.gcd(listed.keys, 256))
            options |= dict(visits=listed.numbers, blocks=blocks)
        kernel = partial(prefill_attention_tpu.prefill_attention, **options)
        return lax.platform_dependent(q, k, v, rows, positions, cpu=partial(kernel, interpret=True), default=kernel)
    slots = k.shape[-2] * (1 if pages is None else pages.shape[1])
    slots = slots if ring or limit is None else min(limit, slots)

    def cells(x: jax.Array | None) -> jax.Array | None:
        """Of the chunks' rows, [P, K, slots, ...]."""
        if x is None:
            return None
        x = x if layer is None else x[layer]
        if pages is None:
            return x[:, :, :slots][jnp.minimum(rows, x.shape[0] - 1)]
        x = jnp.moveaxis(x[pages[jnp.minimum(rows, pages.shape[0] - 1)]], 2, 1)
        return x.reshape(rows.size, x.shape[1], -1, *x.shape[4:])[:, :, :slots]

    held = slot_positions(positions[:, -1], slots, ring)
    seen = visible(positions, held, window)
    if listed is not None:
        seen = seen[:, None] & listed.holds(held, positions.shape[1])
    k, v, k_scales, v_scales = map(cells, (k, v, k_scales, v_scales))
    options = dict(scale=scale, softcap=softcap, sinks=sinks, k_scales=k_scales, v_scales=v_scales)
    return masked_attention(q, k, v, seen, **options)
