"""Decode attention on NVIDIA GPUs that starts from the projection of queries, keys and values (Triton lowering).

One kernel adds up the projection's partial sums, adds the bias, norms the heads, rotates them, writes the new cell and
attends; a second one merges its programs' results. XLA takes five to ten kernels for the steps before attention, and
for a few rows each of them takes longer to launch than to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import AttentionOptions, HeadTransforms, KvCache, QkvPartials
from inferlib.pallas_kernels import decode_attention_gpu as over_cache
from inferlib.pallas_kernels.lowered_once import call_lowered
from inferlib.pallas_kernels.partial_sums_gpu import load_squares, norm_factor, summed
from inferlib.pallas_kernels.row_cells_gpu import RowCells, page_specs

MOST_SHARES = 16  # most partial sums that each program of attention adds up for itself
SHARES_OF_MANY = 4  # the same, where not all programs work at once


def qkv_attention(
    qkv: jax.Array | QkvPartials,
    cache: KvCache,
    lengths: jax.Array,
    transforms: HeadTransforms,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from the projection of each row's newest token, at position lengths[b] - 1.

    qkv [B, K, G + 2, h]: for each KV head G queries, a key and a value; or their partial sums. `transforms` turn it
    into queries, keys and values. Key and value are rounded to the dtype of the cache's k, v [N, K, S, h], written in
    place, unless the position's page does not exist, and attended to. cache, lengths, options, interpret: as in
    `decode_attention_gpu.decode_attention`.
    Returns out [B, K, G, h] and the cache's k and v with the new cells. Raises ValueError for other shapes.
    """
    products, addend, squares, stored = _products(qkv)
    rows, kv_heads, _, size = products.shape[-4:]
    split, launch = over_cache.dealt(cache, rows, kv_heads, size, window=options.shared_window)
    inputs_norm = (None, 0.0)
    if isinstance(qkv, QkvPartials):
        inputs_norm = qkv.inputs, qkv.eps
        many = rows * kv_heads * split["splits"] > over_cache.CONCURRENT
        if products.shape[0] > (SHARES_OF_MANY if many else MOST_SHARES):
            norm: dict[str, Any] = dict(inputs=qkv.inputs, eps=qkv.eps, dtype=stored, interpret=interpret)
            flat = products.reshape(*products.shape[:2], -1)
            addend = None if addend is None else addend.reshape(rows, -1)
            products = summed(flat, squares, addend, **norm).reshape(products.shape[1:])
            addend = squares = None
    how = dict(
        norm=transforms.norms and (transforms.eps, transforms.offset),
        inputs_norm=inputs_norm,
        stored=jnp.dtype(stored),
        scale=options.scale,
        softcap=options.softcap,
        **split,
    )
    q_norm, k_norm = transforms.norms or (None, None)
    cos, sin = transforms.rope or (None, None)
    operands = _Operands(
        *(lengths, products, cache.k, cache.values, addend, squares, transforms.bias, q_norm, k_norm, cos, sin),
        *(options.sinks, cache.pages),
    )
    static = tuple(how.items()), launch.stages
    parts, lses, k, v = call_lowered(_call, static, operands, interpret=interpret)
    out = parts[0] if split["splits"] == 1 else over_cache.merge(parts, lses, stored, interpret)[0]
    return out, k, v


def _products(
    qkv: jax.Array | QkvPartials,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.typing.DTypeLike]:
    """The projection or its partial sums, what is added to these, the squares of its norm, and its dtype."""
    if not isinstance(qkv, QkvPartials):
        if qkv.ndim != 4:
            raise ValueError(f"a projection is [B, K, G + 2, h], and partial sums come as QkvPartials, not {qkv.shape}")
        return qkv, None, None, qkv.dtype
    if qkv.partials.ndim != 5:
        raise ValueError(f"partial sums are [S, B, K, G + 2, h], not {qkv.partials.shape}")
    if qkv.squares is not None and qkv.inputs is None:
        raise ValueError("squares of a norm need the number of a row's inputs")
    return qkv.partials, qkv.addend, qkv.squares, qkv.dtype


class _Operands(NamedTuple):
    """lengths [B], products [(S,) B, K, G + 2, h], k and v [N, K, S, h], addend [B, K, G + 2, h], squares [B, n],
    bias [K, G + 2, h], q_norm and k_norm [h], cos and sin [B, r / 2], sinks [K, G], pages [B, M]."""

    lengths: Any
    products: Any
    k: Any
    v: Any
    addend: Any
    squares: Any
    bias: Any
    q_norm: Any
    k_norm: Any
    cos: Any
    sin: Any
    sinks: Any
    pages: Any


def _specs(x: _Operands) -> _Operands:
    def whole(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec(x.shape, lambda b, h, s: (0,) * x.ndim)

    def of_row(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec((None, x.shape[1]), lambda b, h, s: (b, 0))

    def of_head(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec((None, *x.shape[1:]), lambda b, h, s: (h,) + (0,) * (x.ndim - 1))

    page, table = page_specs(x.k, x.pages, 0, 1)
    head = x.products.shape[-2:]
    of_row_and_head = products = pl.BlockSpec((None, None, *head), lambda b, h, s: (b, h, 0, 0))
    if x.products.ndim == 5:
        products = pl.BlockSpec((x.products.shape[0], None, None, *head), lambda b, h, s: (0, b, h, 0, 0))
    return _Operands(
        whole(x.lengths),
        products,
        page,
        page,
        None if x.addend is None else of_row_and_head,
        whole(x.squares),
        of_head(x.bias),
        whole(x.q_norm),
        whole(x.k_norm),
        of_row(x.cos),
        of_row(x.sin),
        of_head(x.sinks),
        table,
    )


def _call(
    static: tuple[tuple[str, Any], ...], stages: int, operands: _Operands, *, interpret: bool = False
) -> Sequence[jax.Array]:
    how = dict(static)
    splits, stored = how["splits"], how["stored"]
    rows, kv_heads, heads, size = operands.products.shape[-4:]
    specs, shape = _specs(operands), (rows, kv_heads, heads - 2, size)
    return pl.pallas_call(
        partial(_kernel, **how),
        grid=(rows, kv_heads, splits),
        in_specs=[*specs],
        out_specs=[
            pl.BlockSpec((None, None, None, *shape[2:]), lambda b, h, s: (s, b, h, 0, 0)),
            pl.BlockSpec((None, None, None, shape[2]), lambda b, h, s: (s, b, h, 0)),
            specs.k,
            specs.v,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *shape), stored if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *shape[:3]), jnp.float32),
            jax.ShapeDtypeStruct(operands.k.shape, operands.k.dtype),
            jax.ShapeDtypeStruct(operands.v.shape, operands.v.dtype),
        ],
        input_output_aliases={2: 2, 3: 3},
        compiler_params=plgpu.CompilerParams(num_warps=over_cache.WARPS, num_stages=stages),
        interpret=interpret,
        name="qkv_attention",
    )(*operands)


def _kernel(
    lengths_ref,
    made_ref,
    k_ref,
    v_ref,
    addend_ref,
    squares_ref,
    bias_ref,
    q_norm_ref,
    k_norm_ref,
    cos_ref,
    sin_ref,
    sinks_ref,
    table_ref,
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
    """One share: lengths_ref [B], made_ref [G + 2, h] or [P, G + 2, h], bias_ref [G + 2, h], k_ref, v_ref [S, h] or,
    with table_ref [M], [N, K, S, h], addend_ref [G + 2, h], squares_ref [B, n], q_norm_ref, k_norm_ref [h], cos_ref,
    sin_ref [r / 2],
    sinks_ref [G], out_ref [G, h], lse_ref [G], k_out, v_out: the cache itself."""
    (group, size), row, split = out_ref.shape, pl.program_id(0), pl.program_id(2)
    heads = jnp.arange(over_cache.power_of_two(group))
    columns = jnp.arange(over_cache.power_of_two(size))
    half = 0 if cos_ref is None else cos_ref.shape[0]
    turned = columns < 2 * half
    partner = jnp.where(turned, jnp.where(columns < half, columns + half, columns - half), columns)
    shares = [()] if made_ref.ndim == 2 else [(n,) for n in range(made_ref.shape[0])]

    def rounded(x):
        return x.astype(stored).astype(jnp.float32)

    def load(ref, at: tuple, real, other=0.0):
        return plgpu.load(ref.at[at], mask=real, other=other).astype(jnp.float32)

    def load_product(slot, column):
        """The sum over shares of some heads' numbers [..., C], and their bias."""
        mask, place = (slot < group + 2) & (column < size), (slot, column)
        total = sum(load(made_ref, (*share, *place), mask) for share in shares)
        total = total if addend_ref is None else total + load(addend_ref, place, mask)
        return total, None if bias_ref is None else load(bias_ref, place, mask)

    def product(loaded):
        """[..., C] float32."""
        total, bias = loaded
        x = rounded(total * factor)
        return x if bias is None else rounded(x + bias)

    def load_heads(slot):
        """Two of `load_product`: of the heads, and of the numbers that these are rotated with."""
        at, other = jnp.broadcast_to(columns, slot.shape), jnp.broadcast_to(partner, slot.shape)
        return load_product(slot, at), load_product(slot, other) if half else None

    def load_weights(weight_ref):
        """A norm's weights for the heads, and for the numbers that these are rotated with."""
        return [load(weight_ref, (at,), at < size) + norm[1] for at in (columns, partner)] if norm else None

    def finished(heads, weights):
        """Products after their norm and rotation."""
        x = product(heads[0])
        across = product(heads[1]) if half else x
        if norm:
            of_head = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / size + norm[0])
            x, across = (rounded(y * of_head * weight) for y, weight in zip((x, across), weights, strict=True))
        return rounded(x * cos + across * sin) if half else x

    tile, one = (heads.size, columns.size), columns.shape
    # All loads come before the first reduction, see `partial_sums_gpu`; also those that find the first block's page.
    loaded_q, loaded_k = (load_heads(slot) for slot in (jnp.broadcast_to(heads[:, None], tile), jnp.full(one, group)))
    loaded_v = load_product(jnp.full(one, group + 1), columns)
    squares = load_squares(squares_ref, row)
    q_weights, k_weights = (load_weights(ref) for ref in (q_norm_ref, k_norm_ref))
    if half:
        angle = lax.rem(columns, half)
        cos = load(cos_ref, (angle,), turned, 1.0)
        sin = jnp.where(columns < half, -1.0, 1.0) * load(sin_ref, (angle,), turned)
    cells = RowCells(k_ref, table_ref, pl.program_id(1), block, ring)
    dealing = dict(visible=window, block=block, splits=splits, programs=programs, paged=table_ref is not None)
    share = over_cache.share_of(lengths_ref, row, split, **dealing)
    page = cells.page(share.start)
    factor = norm_factor(squares, *inputs_norm)

    compute = jnp.promote_types(stored, k_ref.dtype)
    q = finished(loaded_q, q_weights).astype(compute)
    q = jnp.where((heads < group)[:, None], q, jnp.zeros((), compute))

    some, length = share.start < share.stop, share.length
    top, total = over_cache.sums_before(sinks_ref, heads < group, (split == 0) & (length > 0))
    older = share._replace(stop=jnp.minimum(share.stop, length - 1))
    carry = jnp.zeros(tile, jnp.float32), top, total
    carry = over_cache.attend(q, (cells, v_ref), older, (*carry, *page), scale=scale, softcap=softcap)

    def with_new_cell(carry):
        """Write the row's newest cell and attend to it."""
        acc, top, total = carry
        key, value = finished(loaded_k, k_weights).astype(k_ref.dtype), product(loaded_v).astype(v_ref.dtype)
        place, exists = cells.cell(length - 1)
        for ref, cell in ((k_out, key), (v_out, value)):
            plgpu.store(ref.at[*place, columns], cell, mask=exists & (columns < size))
        logits = jnp.sum(q.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=1)
        logits = over_cache.capped(logits * scale, softcap)
        new_top = jnp.maximum(top, logits)
        weight, decay = jnp.exp(logits - new_top), jnp.exp(top - new_top)
        acc = acc * decay[:, None] + weight[:, None] * value.astype(jnp.float32)[None]
        return acc, new_top, total * decay + weight

    # The new cell belongs to the last share; no program reads it from the cache. It comes last, so that loads of older
    # cells start earlier.
    acc, top, total = lax.cond(some & (share.stop == length), with_new_cell, lambda carry: carry, carry)
    over_cache.store_share(acc, top, total, out_ref, lse_ref, split=splits > 1, some=some)
