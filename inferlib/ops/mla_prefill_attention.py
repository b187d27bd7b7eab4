"""Attention of prefill chunks over their rows' cache of latents, the chunk itself included."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions, Expansion
from inferlib.ops.cache_write import folded_rows, unfolded
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.kv_cache import KvCache, LatentCache, Shaped, gather_pages, shape_of
from inferlib.ops.precision import precision_of
from inferlib.ops.prefill_attention import prefill_attention

# Implementations that read one layer of a stacked cache and of stacked weights in place.
IN_PLACE = frozenset({"pallas_tpu"})


def choose(rank: int, rotary: int, backend: str, *, scaled: bool) -> Choice:
    """The implementation for latents of `rank` and rotary keys of `rotary` numbers, quantised if `scaled`."""
    if backend == "xla":
        return Choice(backend)
    if backend != "pallas_tpu":
        return Choice("xla", "latent attention")
    tiles = rank % 128 == 0 and rotary in (32, 64, 128)
    return Choice.of(backend, None if tiles else f"latents of {rank} and rotary keys of {rotary}")


def choose_for(q: Shaped, expansion: Expansion, cache: LatentCache, backend: str) -> Choice:
    """The implementation for queries [P, C, H, n + r] and arrays, all of which may be shapes, if `choose` took the
    backend's."""
    if backend != "pallas_tpu":
        return Choice(backend)
    from inferlib.pallas_kernels.mla_prefill_attention_tpu import unsupported

    shapes = map(shape_of, (q, expansion.keys, expansion.values, cache.latents, cache.keys))
    return Choice.of(backend, unsupported(*shapes, pages=cache.columns))


def mla_prefill_attention(
    q: jax.Array,
    expansion: Expansion,
    cache: LatentCache,
    rows: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, H, n + r]: chunk p holds the ascending `positions[p]`, [P, C] int32, of row rows[p].

    The cache already has the chunk's latents and rotary keys. A head's key is the latent's expansion followed by the
    rotary key. Latents may have zeros behind R. rows: as in `prefill_attention`. scale multiplies the logits. backend:
    "xla", the only one that takes scales; "pallas_tpu", which reads only blocks that some query sees, expands them on
    chip, and is interpreted on CPU. Returns out [P, C, H, v] in q's dtype, lse [P, C, H] float32. Raises ValueError for
    scales with "pallas_tpu".
    """
    if backend != "xla" and cache.scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of latents; use xla")
    if backend == "pallas_tpu":
        return _by_tpu_kernel(q, expansion, cache, rows, positions, scale)
    k, v = expansion.of_layer()
    rotary = q.shape[-1] - k.shape[1]
    latents, keys = _cells(cache, rows, rotary, q.dtype)
    latents, keys = latents[..., : k.shape[2]], keys[:, None]
    dot = partial(lax.dot_general, precision=precision_of(q.dtype), preferred_element_type=q.dtype)
    key = jnp.moveaxis(dot(latents, k, (((2,), (2,)), ((), ()))), 1, 2)  # [P, H, slots, n]
    value = jnp.moveaxis(dot(latents, v, (((2,), (1,)), ((), ()))), 1, 2)
    key = jnp.concatenate([key, jnp.broadcast_to(keys, (*key.shape[:3], rotary))], axis=-1)
    q, expanded = q[:, :, :, None], KvCache(key, value)
    out, lse = prefill_attention(q, expanded, jnp.arange(rows.size), positions, AttentionOptions(scale))
    return out[:, :, :, 0], lse[..., 0]


def _by_tpu_kernel(
    q, expansion: Expansion, cache: LatentCache, rows, positions, scale: float
) -> tuple[jax.Array, jax.Array]:
    from inferlib.pallas_kernels import mla_prefill_attention_tpu

    latents, keys = (jnp.squeeze(x, -3) for x in (cache.latents, cache.keys))

    def run(q, keys, values, latents, rotary_keys, rows, positions, *, interpret: bool):
        of_call, weights = (
            replace(cache, latents=latents, keys=rotary_keys),
            replace(expansion, keys=keys, values=values),
        )
        kernel = mla_prefill_attention_tpu.mla_prefill_attention
        return kernel(q, weights, of_call, rows, positions, scale, interpret=interpret)

    arrays = q, expansion.keys, expansion.values, latents, keys, rows, positions
    return run_kernel(run, *arrays)


def _cells(cache: LatentCache, rows: jax.Array, rotary: int, dtype) -> tuple[jax.Array, jax.Array]:
    """The latents [P, slots, ...] and rotary keys [P, slots, r] of the chunks' rows, dequantised if they have
    scales."""
    fold, pages, limit = cache.fold(rotary), cache.pages, cache.limit
    slots = cache.latents.shape[-2] * (1 if pages is None else pages.shape[1])
    slots = slots if limit is None else min(limit, slots)

    def cells(x: jax.Array, fold: int) -> jax.Array:
        """[P, slots, ...] of one of the arrays."""
        if pages is None:
            x = x if cache.layer is None else x[cache.layer]
            x = x[jnp.minimum(rows, x.shape[0] - 1), 0, : folded_rows(slots, fold)]
        else:
            x = gather_pages(x, pages[jnp.minimum(rows, pages.shape[0] - 1)], cache.layer)[:, 0]
        return unfolded(x, fold)[:, :slots] if fold > 1 else x[:, :slots]

    latents, keys, *scales = (cells(x, fold if n == 1 else 1) for n, x in enumerate(cache.arrays))
    if scales:
        pairs = zip((latents, keys), scales, strict=True)
        latents, keys = ((x.astype(jnp.float32) * s[..., None]).astype(dtype) for x, s in pairs)
    return latents, keys
