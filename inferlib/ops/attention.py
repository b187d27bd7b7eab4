"""What the attention contracts share: which cache slots a query sees, softmax with LSE, and merging.

Slots that a query does not see may hold anything, NaN included; they never change an output.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.ops.int4_cells import decoded_keys, decoded_values
from inferlib.ops.precision import precision_of


def slot_positions(last: jax.Array, slots: int, ring: bool) -> jax.Array:
    """The position in each cache slot, [..., slots]; negative if the slot is empty.

    last: [...] the position written last. In a ring, position p lives in slot p mod `slots`.
    """
    slot = jnp.arange(slots)
    if not ring:
        return jnp.broadcast_to(slot, (*last.shape, slots))
    return last[..., None] - (last[..., None] - slot) % slots


def visible(queries: jax.Array, keys: jax.Array, window: int | jax.Array | None) -> jax.Array:
    """Causal (and windowed) visibility [..., C, S] of key positions [..., S] to query positions [..., C].

    window: one for all queries, or [..., C] of each.
    """
    q, k = queries[..., :, None], keys[..., None, :]
    seen = (k <= q) & (k >= 0)
    return seen if window is None else seen & (k > (queries - window)[..., :, None])


def masked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    options: AttentionOptions,
    *,
    scales: tuple[jax.Array, jax.Array] | None = None,
    rotary: tuple[jax.Array, jax.Array, jax.Array | None] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reference attention: q [B, C, K, G, h], k and v [B, K, S, h], seen [B, C, S] or [B, K, C, S] bool, which includes
    the window. Values may differ from keys in size. Both may be packed cells, see `inferlib.ops.int4_cells`.

    scales: scales of keys and of values, [B, K, S] float32 each, which multiply k and v; they are folded into logits
    and probabilities. rotary: a part of q and of k that is stored apart, and its scales or None. Returns out [B, C, K,
    G, h] in q's dtype and the log-sum-exp of the logits [B, C, K, G] float32. A query that sees nothing yields 0 and
    -inf. Softmax in float32. A value or its scale that is not finite counts as zero, even if seen; a key or its scale
    does not.
    """
    b, c, k_heads, g, _ = q.shape
    k, v = decoded_keys(k, q.dtype), decoded_values(v, q.dtype)
    highest, slots = precision_of(q.dtype), k.shape[2]
    scale, softcap, sinks = options.scale, options.softcap, options.sinks
    k_scales, v_scales = scales or (None, None)
    dot = partial(lax.dot_general, precision=highest, preferred_element_type=jnp.float32)

    def products(q: jax.Array, k: jax.Array, scales: jax.Array | None) -> jax.Array:
        """[B, K, G, C, S]: the G * C queries of a head are the rows of one matrix."""
        rows = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b, k_heads, g * c, q.shape[-1])
        k = k if scales is None else k.astype(q.dtype)
        # `scale` comes first: behind the scales, XLA would multiply the scales by it and write them to memory.
        s = dot(rows, k, (((3,), (3,)), ((0, 1), (0, 1)))).reshape(b, k_heads, g, c, slots) * scale
        return s if scales is None else s * scales[:, :, None, None]

    s = products(q, k, k_scales)
    s = s if rotary is None else s + products(*rotary)
    v = v if v_scales is None else v.astype(q.dtype)
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    seen = seen[:, None, None] if seen.ndim == 3 else seen[:, :, None]
    s = jnp.where(seen, s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)  # [B, K, G, C, 1]
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32)[:, :, None, None])
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    p = jnp.exp(s - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[:, :, None, None] - top)
    # 0 * NaN is NaN, so unseen values must be finite. Testing the values themselves costs nothing. A mask of positions
    # would double a TPU's decode step: positions lie along lanes in the mask and along sublanes in v.
    v = jnp.where(jnp.isfinite(v), v, 0)
    if v_scales is not None:
        p = p * jnp.where(jnp.isfinite(v_scales), v_scales, 0)[:, :, None, None]
    out = dot(p.astype(v.dtype).reshape(b, k_heads, g * c, slots), v, (((3,), (2,)), ((0, 1), (0, 1))))
    out = out.reshape(b, k_heads, g, c, v.shape[-1])
    out = jnp.where(total > 0, out / jnp.maximum(total, 1e-37), 0.0)
    lse = (top + jnp.log(total))[..., 0]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).astype(q.dtype), jnp.transpose(lse, (0, 3, 1, 2))


def merge_attention(
    outs: jax.Array, lses: jax.Array, axis: int = 0, sinks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention over a union of disjoint key sets, from the parts' outputs and LSEs.

    outs [M, ..., h], lses [M, ...] (M at `axis`) -> (out [..., h], lse [...]). Any split gives the same answer. sinks
    [K, G]: a logit that joins the union's denominator, and no part's.
    """
    lse = jax.nn.logsumexp(lses, axis=axis)
    lse = lse if sinks is None else jnp.logaddexp(lse, sinks.astype(jnp.float32))
    weight = jnp.exp(lses - jnp.expand_dims(jnp.where(jnp.isfinite(lse), lse, 0.0), axis))
    out = jnp.sum(outs.astype(jnp.float32) * weight[..., None], axis=axis)
    return out.astype(outs.dtype), lse
