"""Decode attention on NVIDIA GPUs from the products of queries, keys and values on: the sum of their shares, bias,
norms of heads, rotary embedding, the write of the new cell and attention in one kernel (Triton lowering), whose
programs' results are then merged.

XLA takes five to ten kernels for what precedes attention, each longer by its launch than by its work on a few rows.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels import decode_attention_gpu as over_cache
from inferlib.pallas_kernels.shares_gpu import norm_factor, summed

MOST_SHARES = 16  # of products, that each program of attention sums for itself


def qkv_attention(
    qkv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    bias: jax.Array | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    limit: int | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    squares: jax.Array | None = None,
    inputs: int | None = None,
    inputs_eps: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [B, K, G + 2, h]: of each row's newest token, at position lengths[b] - 1, G queries, a key and a value for
    each KV head -> out [B, K, G, h] and the cache with what is new.

    bias [K, G + 2, h] is added; queries and keys are then normed (RMS over a head, eps, times `norms`, the weights [h]
    of queries and of keys, plus offset) and, of their first r numbers, the pairs (i, i + r / 2) rotated by rope: cos
    and sin [B, r / 2] float32. Key and value are rounded to the dtype of k, v [N, K, S, h], written in place and
    attended to. The rest is as in `decode_attention_gpu.decode_attention`.

    With a dtype, qkv [P, B, K, G + 2, h] float32 are shares, whose sum over P is rounded to it; squares [B, n], inputs,
    inputs_eps: of the norm that was multiplied, whose factor is to come, see `shares_gpu`.
    """
    if qkv.ndim != (4 if dtype is None else 5):
        raise ValueError(f"give a dtype with shares [P, B, K, G + 2, h], and none with their sum, not {qkv.shape}")
    if squares is not None and (dtype is None or inputs is None):
        raise ValueError("squares of a norm go with shares of its products: give a dtype and how many inputs a row has")
    rows, kv_heads, slots_made, size = qkv.shape[-4:]
    group = slots_made - 2
    options = over_cache.dealt(k, v, rows, kv_heads, size, window=window, ring=ring, limit=limit)
    splits, stored = options["splits"], dtype or qkv.dtype
    if dtype is not None and (rows * kv_heads * splits > over_cache.FEW or qkv.shape[0] > MOST_SHARES):
        norm = dict(inputs=inputs, eps=inputs_eps, dtype=dtype, interpret=interpret)
        qkv = summed(qkv.reshape(*qkv.shape[:2], -1), squares, **norm).reshape(qkv.shape[1:])
        squares = None
    q_norm, k_norm = norms or (None, None)
    cos, sin = rope or (None, None)

    def whole(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec(x.shape, lambda b, h, s: (0,) * x.ndim)

    def of_row(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec((None, x.shape[1]), lambda b, h, s: (b, 0))

    def of_head(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec((None, *x.shape[1:]), lambda b, h, s: (h,) + (0,) * (x.ndim - 1))

    page = pl.BlockSpec((None, None, *k.shape[2:]), lambda b, h, s: (b, h, 0, 0))
    made = pl.BlockSpec((None, None, slots_made, size), lambda b, h, s: (b, h, 0, 0))
    if qkv.ndim == 5:
        made = pl.BlockSpec((qkv.shape[0], None, None, slots_made, size), lambda b, h, s: (0, b, h, 0, 0))
    out_shape = (rows, kv_heads, group, size)
    parts, lses, k, v = pl.pallas_call(
        partial(
            _kernel,
            norm=norms and (eps, offset),
            inputs_norm=(inputs, inputs_eps),
            stored=stored,
            scale=scale,
            softcap=softcap,
            **options,
        ),
        grid=(rows, kv_heads, splits),
        in_specs=[
            whole(lengths),
            made,
            page,
            page,
            whole(squares),
            of_head(bias),
            whole(q_norm),
            whole(k_norm),
            of_row(cos),
            of_row(sin),
            of_head(sinks),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, size), lambda b, h, s: (s, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda b, h, s: (s, b, h, 0)),
            page,
            page,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *out_shape), stored if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *out_shape[:3]), jnp.float32),
            jax.ShapeDtypeStruct(k.shape, k.dtype),
            jax.ShapeDtypeStruct(v.shape, v.dtype),
        ],
        input_output_aliases={2: 2, 3: 3},
        compiler_params=plgpu.CompilerParams(num_warps=over_cache.WARPS, num_stages=over_cache.STAGES),
        interpret=interpret,
        name="qkv_attention",
    )(lengths, qkv, k, v, squares, bias, q_norm, k_norm, cos, sin, sinks)
    out = parts[0] if splits == 1 else over_cache.merge(parts, lses, stored, interpret)[0]
    return out, k, v


def _kernel(
    lengths_ref,
    made_ref,
    k_ref,
    v_ref,
    squares_ref,
    bias_ref,
    q_norm_ref,
    k_norm_ref,
    cos_ref,
    sin_ref,
    sinks_ref,
    out_ref,
    lse_ref,
    k_out,
    v_out,
    *,
    norm,
    inputs_norm,
    stored,
    scale,
    window,
    softcap,
    ring,
    block,
    splits,
    programs,
):
    """One share: lengths_ref [B], made_ref [G + 2, h] or [P, G + 2, h], bias_ref [G + 2, h], k_ref, v_ref [S, h],
    squares_ref [B, n], q_norm_ref, k_norm_ref [h], cos_ref, sin_ref [r / 2], sinks_ref [G], out_ref [G, h], lse_ref
    [G], k_out, v_out: the cache itself."""
    (group, size), slots, row, split = out_ref.shape, k_ref.shape[0], pl.program_id(0), pl.program_id(2)
    heads = jnp.arange(over_cache.power_of_two(group))
    columns = jnp.arange(over_cache.power_of_two(size))
    half = 0 if cos_ref is None else cos_ref.shape[0]
    turned = columns < 2 * half
    partner = jnp.where(turned, jnp.where(columns < half, columns + half, columns - half), columns)
    factor = 1.0 if squares_ref is None else norm_factor(squares_ref, row, *inputs_norm)
    shares = [()] if made_ref.ndim == 2 else [(n,) for n in range(made_ref.shape[0])]

    def rounded(x):
        return x.astype(stored).astype(jnp.float32)

    def product(slot, column):
        """[..., C] float32 of some heads."""
        mask = (slot < group + 2) & (column < size)
        load = lambda ref, *at: plgpu.load(ref.at[(*at, slot, column)], mask=mask, other=0).astype(jnp.float32)  # noqa: E731
        x = rounded(sum(load(made_ref, *share) for share in shares) * factor)
        return x if bias_ref is None else rounded(x + load(bias_ref))

    def finished(slot, weight_ref):
        """Products after their norm and rotation."""
        at, other = jnp.broadcast_to(columns, slot.shape), jnp.broadcast_to(partner, slot.shape)
        x, across = product(slot, at), product(slot, other) if half else None
        if norm:
            eps, offset = norm
            of_head = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / size + eps)

            def scaled(x, column):
                weight = plgpu.load(weight_ref.at[column], mask=column < size, other=0).astype(jnp.float32)
                return rounded(x * of_head * (weight + offset))

            x, across = scaled(x, at), scaled(across, other) if half else None
        if not half:
            return x
        angle = lax.rem(columns, half)
        cos = plgpu.load(cos_ref.at[angle], mask=turned, other=1.0)
        sin = jnp.where(columns < half, -1.0, 1.0) * plgpu.load(sin_ref.at[angle], mask=turned, other=0.0)
        return rounded(x * cos + across * sin)

    compute = jnp.promote_types(stored, k_ref.dtype)
    tile = (heads.size, columns.size)
    q = finished(jnp.broadcast_to(heads[:, None], tile), q_norm_ref).astype(compute)
    q = jnp.where((heads < group)[:, None], q, jnp.zeros((), compute))
    length, start, stop = over_cache.share_of(lengths_ref, row, split, window, block, splits, programs)

    # The new cell belongs to the last share, which writes it; no program reads it from the cache.
    owner = (start < stop) & (stop == length)
    key = finished(jnp.full(columns.shape, group), k_norm_ref).astype(k_ref.dtype)
    value = product(jnp.full(columns.shape, group + 1), columns).astype(v_ref.dtype)
    slot = lax.rem(length - 1, slots) if ring else length - 1
    for ref, cell in ((k_out, key), (v_out, value)):
        plgpu.store(ref.at[jnp.maximum(slot, 0), columns], cell, mask=owner & (slot < slots) & (columns < size))
    logits = jnp.sum(q.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=1)
    top = jnp.where(owner, over_cache.capped(logits * scale, softcap), -jnp.inf)
    weight = total = jnp.where(owner, jnp.ones(heads.shape, jnp.float32), 0.0)
    if sinks_ref is not None:  # counted once, by the row's first share
        sinks = plgpu.load(sinks_ref.at[heads], mask=heads < group, other=0).astype(jnp.float32)
        here, cell = (split == 0) & (length > 0), top
        top = jnp.where(here, jnp.maximum(cell, sinks), cell)
        weight = jnp.where(owner, jnp.exp(cell - top), 0.0)
        # A share that is not the owner's begins with the sink alone, which may be -inf.
        total = weight + jnp.where(here, jnp.where(owner, jnp.exp(sinks - top), 1.0), 0.0)
    acc = weight[:, None] * jnp.where(owner, value.astype(jnp.float32), 0.0)[None]
    cells = k_ref, v_ref, start, jnp.minimum(stop, length - 1)
    carry = acc, top, total
    acc, top, total = over_cache.attend(q, cells, carry, scale=scale, softcap=softcap, ring=ring, block=block)
    over_cache.store_share(acc, top, total, out_ref, lse_ref, split=splits > 1, some=start < stop)
