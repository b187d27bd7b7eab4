"""Attention of each row's newest tokens over the row's cache, which may be written by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.attention import masked_attention, slot_positions, visible
from inferlib.ops.cache_write import cache_write, rounded


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    limit: int | None = None,
    layer: jax.Array | int | None = None,
    pages: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    mask: jax.Array | None = None,
    new: Sequence[jax.Array] | None = None,
    written: jax.Array | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, ...]:
    """q [B, K, G, h]: row b's query is at position lengths[b] - 1; or [B, C, K, G, h]: at the last C positions.

    k, v: [N, K, S, h], or [L, N, K, S, h] of which `layer` is read, the new tokens' keys and values already written if
    they are not in `new`; v None: keys are values too.
    pages [B, M] int32: position p of row b is in page pages[b, p // S]; without, row b's cache is page b. lengths [B]
    int32 counts the positions written; 0 marks an inactive row (out 0, lse -inf), and what would stand at a negative
    position sees nothing. limit (static): no length exceeds it, so slots beyond are not read. ring: position p lives in
    slot p mod S of one page, or of all; then these are at least window + C - 1. sinks [K, G]: a logit that joins the
    softmax's denominator. window: of all queries, or [B] of each row's, which only "xla" takes. k_scales, v_scales
    [N, K, S] or [L, N, K, S] float32: both or neither; k and v, int8 or float8_e4m3fn, are multiplied by their
    position's and head's. mask [B, C, C] bool: which of a row's new tokens each of its queries sees, of those up to its
    own; all without. Draft trees are verified with it: a token sees its ancestors. Scales and a mask are taken by "xla"
    and "pallas_tpu". What no query sees may hold anything in all of them, NaN included. new: keys and values of the new
    tokens, [B, K, h] or [B, C, K, h] each (or keys alone), of any float type; they are rounded to the cache's and
    written before they are read, but for inactive rows and those where `written` [B] is false. No other row has a page
    that one is written to. "pallas_tpu" writes them where they lie, and other cells of their tiles anew.
    backend: "xla"; "pallas_gpu" and "nki" for Trainium (rows as pages; the former one query); "pallas_tpu", which reads
    live pages only, and is interpreted on CPU.
    Returns out in q's shape and dtype, lse [B, K, G] or [B, C, K, G] float32; with `new` also the cache: k, v if it is
    given, and the scales if there are any.
    """
    if backend != "xla" and isinstance(window, jax.Array):
        raise ValueError(f"backend {backend!r} takes one window for all rows; use xla")
    if backend not in ("xla", "pallas_tpu") and (k_scales is not None or mask is not None):
        given = "mask of new tokens" if k_scales is None else "scales of keys and values"
        raise ValueError(f"backend {backend!r} takes no {given}; use xla")
    if new is not None and backend != "pallas_tpu":
        arrays = {"k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}
        held = {name: x for name, x in arrays.items() if x is not None}
        cache = write_new(tuple(held.values()), new, lengths, written, ring=ring, layer=layer, pages=pages)
        options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, ring=ring, limit=limit, layer=layer)
        arrays |= dict(zip(held, cache, strict=True))
        found = decode_attention(q, lengths=lengths, pages=pages, mask=mask, **arrays, **options, backend=backend)
        return *found, *cache
    if v is None and backend != "pallas_tpu":
        v = k
    options = dict(scale=scale, window=window, softcap=softcap, sinks=sinks)
    if backend == "pallas_gpu":
        from inferlib.pallas_kernels import decode_attention_gpu

        return decode_attention_gpu.decode_attention(q, k, v, lengths, ring=ring, limit=limit, **options)
    if q.ndim == 4:
        options |= dict(ring=ring, limit=limit, layer=layer, pages=pages, k_scales=k_scales, v_scales=v_scales)
        new = None if new is None else [x[:, None] for x in new]
        options |= dict(mask=mask, new=new, written=written)
        out, lse, *cache = decode_attention(q[:, None], k, v, lengths, **options, backend=backend)
        return out[:, 0], lse[:, 0], *cache
    if backend == "nki":
        from inferlib.nki_kernels.flash_decode import flash_decode

        return flash_decode(q, k, v, lengths, ring=ring, limit=limit, table=pages, **options)
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import decode_attention_tpu

        options |= dict(ring=ring, layer=0 if layer is None else layer, pages=pages)
        options |= dict(k_scales=k_scales, v_scales=v_scales, mask=mask, new=new, written=written)
        kernel = partial(decode_attention_tpu.decode_attention, **options)
        return lax.platform_dependent(q, k, v, lengths, cpu=partial(kernel, interpret=True), default=kernel)
    rows, queries = q.shape[:2]
    slots = k.shape[-2] * (1 if pages is None else pages.shape[1])
    slots = slots if ring or limit is None else min(limit, slots)

    def cells(x: jax.Array | None) -> jax.Array | None:
        """Of the rows, [B, K, slots, ...]."""
        if x is None:
            return None
        x = x if layer is None else x[layer]
        if pages is not None:
            x = jnp.moveaxis(x[pages], 2, 1)
            x = x.reshape(rows, x.shape[1], -1, *x.shape[4:])
        return x[:rows, :, :slots]

    positions = lengths[:, None] - queries + jnp.arange(queries)
    window = window[:, None] if isinstance(window, jax.Array) else window
    held = slot_positions(lengths - 1, slots, ring)
    seen = visible(positions, held, window)
    if mask is not None:
        new = held - positions[:, :1]  # which of the new tokens a slot holds, negative if none
        allowed = jnp.take_along_axis(mask, jnp.clip(new, 0, queries - 1)[:, None], axis=2)
        seen &= (new < 0)[:, None] | allowed
    k, v, k_scales, v_scales = map(cells, (k, v, k_scales, v_scales))
    options = dict(scale=scale, softcap=softcap, sinks=sinks, k_scales=k_scales, v_scales=v_scales)
    out, lse = masked_attention(q, k, v, seen, **options)
    return out, jnp.where(lengths[:, None, None, None] > 0, lse, -jnp.inf)


def write_new(
    cache: Sequence[jax.Array],
    new: Sequence[jax.Array],
    lengths: jax.Array,
    written: jax.Array | None,
    *,
    ring: bool,
    layer: jax.Array | int | None,
    pages: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """The cache with the new tokens' cells, as `decode_attention` writes them."""
    new = [x[:, None] if x.ndim == 3 else x for x in new]
    (rows, queries), (count, _, slots) = new[0].shape[:2], cache[0].shape[-4:-1]
    positions, row = lengths[:, None] - queries + jnp.arange(queries), jnp.arange(rows)[:, None]
    kept = (positions >= 0) & (lengths[:, None] > 0)
    kept = kept if written is None else kept & written[:, None]
    positions = positions % (slots * (1 if pages is None else pages.shape[1])) if ring else positions
    page = row if pages is None else jnp.take_along_axis(pages, jnp.maximum(positions, 0) // slots, axis=1)
    at = jnp.where(kept, page, count + row).reshape(-1), (positions % slots).reshape(-1)
    new = rounded([x.reshape(-1, *x.shape[2:]) for x in new], cache[0].dtype, scaled=cache[-1].ndim < cache[0].ndim)
    return tuple(cache_write(x, part, *at, layer=layer) for x, part in zip(cache, new, strict=True))
