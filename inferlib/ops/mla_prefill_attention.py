"""Attention of prefill chunks over their rows' cache of latents, the chunk itself included."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.cache_write import folded_rows, unfolded
from inferlib.ops.matmul import precision_of
from inferlib.ops.prefill_attention import prefill_attention


def mla_prefill_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    latents: jax.Array,
    keys: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    limit: int | None = None,
    layer: jax.Array | int | None = None,
    weight_layer: jax.Array | int | None = None,
    pages: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """q [P, C, H, n + r]: chunk p holds the ascending `positions[p]`, [P, C] int32, of row rows[p].

    k [H, n, R], v [H, R, v]: what makes a latent each head's key, to which its rotary key is appended, and value; or
    [W, H, ...] of which `weight_layer` is read. latents [N, 1, S, R] and rotary keys [N, 1, S, r], or folded
    [N, 1, S / f, f * r] (see `inferlib.ops.cache_write`), with those of the chunk already written; or [L, N, ...] of
    which `layer` is read; latents may have zeros behind R. rows, pages, limit: as in `prefill_attention`. scales
    [N, 1, S] or [L, N, 1, S] float32: of latents and of rotary keys, int8 or float8_e4m3fn, which only "xla" takes.
    backend: "xla"; "pallas_tpu", which reads only blocks that are seen and expands them on chip, and is interpreted on
    CPU.
    Returns out [P, C, H, v] in q's dtype, lse [P, C, H] float32.
    """
    if backend != "xla" and scales is not None:
        raise ValueError(f"backend {backend!r} takes no scales of latents; use xla")
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import mla_prefill_attention_tpu

        latents, keys = (jnp.squeeze(x, -3) for x in (latents, keys))
        numbers = dict(layer=0 if layer is None else layer, weight_layer=0 if weight_layer is None else weight_layer)
        options = dict(scale=scale, limit=limit, pages=pages) | numbers
        kernel = partial(mla_prefill_attention_tpu.mla_prefill_attention, **options)
        arrays = q, k, v, latents, keys, rows, positions
        return lax.platform_dependent(*arrays, cpu=partial(kernel, interpret=True), default=kernel)
    k, v = (x if x.ndim == 3 else lax.dynamic_index_in_dim(x, weight_layer, keepdims=False) for x in (k, v))
    rotary = q.shape[-1] - k.shape[1]
    fold = keys.shape[-1] // rotary
    held = (latents, keys, *(scales or ()))
    held = held if layer is None else tuple(x[layer] for x in held)
    slots = latents.shape[-2] * (1 if pages is None else pages.shape[1])
    slots = slots if limit is None else min(limit, slots)

    def cells(x: jax.Array, fold: int) -> jax.Array:
        """Of the chunks' rows, [P, slots, ...]."""
        if pages is None:
            x = x[jnp.minimum(rows, x.shape[0] - 1), 0, : folded_rows(slots, fold)]
            return unfolded(x, fold)[:, :slots] if fold > 1 else x
        x = x[pages[jnp.minimum(rows, pages.shape[0] - 1)], 0]
        x = unfolded(x, fold) if fold > 1 else x
        return x.reshape(rows.size, -1, *x.shape[3:])[:, :slots]

    latents, keys, *of = (cells(x, fold if n == 1 else 1) for n, x in enumerate(held))
    if of:
        pairs = zip((latents, keys), of, strict=True)
        latents, keys = ((x.astype(jnp.float32) * s[..., None]).astype(q.dtype) for x, s in pairs)
    latents, keys = latents[..., : k.shape[2]], keys[:, None]
    made = partial(lax.dot_general, precision=precision_of(q.dtype), preferred_element_type=q.dtype)
    key = jnp.moveaxis(made(latents, k, (((2,), (2,)), ((), ()))), 1, 2)  # [P, H, slots, n]
    value = jnp.moveaxis(made(latents, v, (((2,), (1,)), ((), ()))), 1, 2)
    key = jnp.concatenate([key, jnp.broadcast_to(keys, (*key.shape[:3], rotary))], axis=-1)
    out, lse = prefill_attention(q[:, :, :, None], key, value, jnp.arange(rows.size), positions, scale=scale)
    return out[:, :, :, 0], lse[..., 0]
