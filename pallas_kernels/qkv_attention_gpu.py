"""Decode attention on NVIDIA GPUs that starts from the projection of queries, keys and values (Triton lowering).

One kernel adds up the projection's partial sums, adds the bias, norms the heads, rotates them, writes the new cells and
attends; a second one merges its programs' results. XLA takes five to ten kernels for the steps before attention, and
for a few rows each of them takes longer to launch than to run. A row has one new token, or several that are verified
in one step.
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
from inferlib.pallas_kernels.partial_sums_gpu import summed
from inferlib.pallas_kernels.projected_heads_gpu import ProjectedHeads
from inferlib.pallas_kernels.row_cells_gpu import RowCells, page_specs

MOST_SHARES = 16  # most partial sums that each program of attention adds up for itself
SHARES_OF_MANY = 4  # the same, times a row's tokens, where these are several or not all programs work at once


def qkv_attention(
    qkv: jax.Array | QkvPartials,
    cache: KvCache,
    lengths: jax.Array,
    transforms: HeadTransforms,
    options: AttentionOptions,
    *,
    counts: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from the projection of each row's C newest tokens, at the last C of its lengths[b] positions.

    qkv [B * C, K, G + 2, h]: for each KV head G queries, a key and a value, row by row; or their partial sums.
    `transforms` turn it into queries, keys and values. Keys and values are rounded to the dtype of the cache's k, v
    [N, K, S, h], written in place, unless the position's page does not exist, and attended to. counts [B] int32: how
    many of a row's tokens are new, the last ones; cells of the others are in the cache already, and what these attend
    to is unspecified but finite. None: all are new. cache, lengths [B], options, interpret: as in
    `decode_attention_gpu.decode_attention`.
    Returns out [B * C, K, G, h] and the cache's k and v with the new cells. Raises ValueError for other shapes.
    """
    products, addend, squares, stored = _products(qkv)
    rows, (tokens, kv_heads, slots, size) = lengths.shape[0], products.shape[-4:]
    queries = tokens // rows
    if queries * rows != tokens:
        raise ValueError(f"{tokens} tokens are not as many for each of {rows} rows")
    split, launch = over_cache.dealt(cache, rows, kv_heads, size, window=options.shared_window, queries=queries)
    inputs_norm = (None, 0.0)
    if isinstance(qkv, QkvPartials):
        inputs_norm = qkv.inputs, qkv.eps
        many = rows * kv_heads * split["splits"] > over_cache.CONCURRENT
        if products.shape[0] * queries > (SHARES_OF_MANY if many or queries > 1 else MOST_SHARES):
            norm: dict[str, Any] = dict(inputs=qkv.inputs, eps=qkv.eps, dtype=stored, interpret=interpret)
            flat = products.reshape(*products.shape[:2], -1)
            addend = None if addend is None else addend.reshape(tokens, -1)
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
    cos, sin = (x.reshape(rows, queries, -1) for x in transforms.rope) if transforms.rope else (None, None)
    products, addend = (
        x if x is None else x.reshape(*x.shape[:-4], rows, queries, kv_heads, slots, size) for x in (products, addend)
    )
    operands = _Operands(
        *(lengths, products, cache.k, cache.values, addend, squares, transforms.bias, q_norm, k_norm, cos, sin),
        *(options.sinks, cache.pages, counts),
    )
    static = tuple(how.items()), launch
    parts, lses, k, v = call_lowered(_call, static, operands, interpret=interpret)
    out = parts[0] if split["splits"] == 1 else over_cache.merge(parts, lses, stored, interpret)[0]
    return out.reshape(tokens, *out.shape[2:]), k, v


def _products(
    qkv: jax.Array | QkvPartials,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.typing.DTypeLike]:
    """The projection or its partial sums, what is added to these, the squares of its norm, and its dtype."""
    if not isinstance(qkv, QkvPartials):
        if qkv.ndim != 4:
            raise ValueError(f"a projection is [T, K, G + 2, h], and partial sums come as QkvPartials, not {qkv.shape}")
        return qkv, None, None, qkv.dtype
    if qkv.partials.ndim != 5:
        raise ValueError(f"partial sums are [S, T, K, G + 2, h], not {qkv.partials.shape}")
    if qkv.squares is not None and qkv.inputs is None:
        raise ValueError("squares of a norm need the number of a row's inputs")
    return qkv.partials, qkv.addend, qkv.squares, qkv.dtype


class _Operands(NamedTuple):
    """lengths [B], products [(S,) B, C, K, G + 2, h], k and v [N, K, S, h], addend [B, C, K, G + 2, h], squares
    [B * C, n], bias [K, G + 2, h], q_norm and k_norm [h], cos and sin [B, C, r / 2], sinks [K, G], pages [B, M], counts
    [B]."""

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
    counts: Any


def _specs(x: _Operands) -> _Operands:
    def whole(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec(x.shape, lambda b, h, s: (0,) * x.ndim)

    def of_row(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec((None, *x.shape[1:]), lambda b, h, s: (b, 0, 0))

    def of_head(x: jax.Array | None) -> pl.BlockSpec | None:
        return x if x is None else pl.BlockSpec((None, *x.shape[1:]), lambda b, h, s: (h,) + (0,) * (x.ndim - 1))

    page, table = page_specs(x.k, x.pages, 0, 1)
    (queries, _, *head), shares = x.products.shape[-4:], x.products.shape[0]
    of_row_and_head = products = pl.BlockSpec((None, queries, None, *head), lambda b, h, s: (b, 0, h, 0, 0))
    if x.products.ndim == 6:
        products = pl.BlockSpec((shares, None, queries, None, *head), lambda b, h, s: (0, b, 0, h, 0, 0))
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
        whole(x.counts),
    )


def _call(
    static: tuple[tuple[str, Any], ...], launch: over_cache.Launch, operands: _Operands, *, interpret: bool = False
) -> Sequence[jax.Array]:
    how = dict(static)
    splits, stored = how["splits"], how["stored"]
    rows, queries, kv_heads, heads, size = operands.products.shape[-5:]
    specs, shape = _specs(operands), (rows, queries, kv_heads, heads - 2, size)
    return pl.pallas_call(
        partial(_kernel, **how),
        grid=(rows, kv_heads, splits),
        in_specs=[*specs],
        out_specs=[
            pl.BlockSpec((None, None, queries, None, *shape[3:]), lambda b, h, s: (s, b, 0, h, 0, 0)),
            pl.BlockSpec((None, None, queries, None, shape[3]), lambda b, h, s: (s, b, 0, h, 0)),
            specs.k,
            specs.v,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *shape), stored if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, *shape[:4]), jnp.float32),
            jax.ShapeDtypeStruct(operands.k.shape, operands.k.dtype),
            jax.ShapeDtypeStruct(operands.v.shape, operands.v.dtype),
        ],
        input_output_aliases={2: 2, 3: 3},
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
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
    counts_ref,
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
    """One share: lengths_ref, counts_ref [B], made_ref [C, G + 2, h] or [P, C, G + 2, h], bias_ref [G + 2, h], k_ref,
    v_ref [S, h] or, with table_ref [M], [N, K, S, h], addend_ref [C, G + 2, h], squares_ref [B * C, n], q_norm_ref,
    k_norm_ref [h], cos_ref, sin_ref [C, r / 2], sinks_ref [G], out_ref [C, G, h], lse_ref [C, G], k_out, v_out: the
    cache itself."""
    (queries, group, size), row, split = out_ref.shape, pl.program_id(0), pl.program_id(2)
    several, columns = queries > 1, jnp.arange(over_cache.power_of_two(size))
    # The token and the slot of each query, and the tokens of new cells; padding counts as the last token.
    heads = jnp.arange(over_cache.power_of_two(queries * group))
    numbers: Any = 0
    token: Any = 0
    newest: Any = 0
    if several:
        numbers = jnp.arange(over_cache.power_of_two(queries))
        token, newest = (jnp.minimum(x, queries - 1) for x in (heads // group, numbers))
    slot = heads - token * group
    made = ProjectedHeads(
        *(made_ref, addend_ref, squares_ref, bias_ref, cos_ref, sin_ref),
        first=row * queries,
        columns=columns.size,
        norm=norm,
        inputs_norm=inputs_norm,
        stored=stored,
    )
    # All loads come before the first reduction; also those that find the first block's page.
    loaded_q, loaded_k = made.load(token, slot), made.load(newest, group)
    loaded_v = made.load(newest, group + 1, rotated=False)
    q_weights, k_weights = (made.load_weights(ref) for ref in (q_norm_ref, k_norm_ref))
    count = queries if counts_ref is None else plgpu.load(counts_ref.at[row])
    cells = RowCells(k_ref, table_ref, pl.program_id(1), block, ring)
    visible = window if window is None else window + queries - 1
    dealing: dict[str, Any] = dict(
        visible=visible, block=block, splits=splits, programs=programs, paged=table_ref is not None
    )
    share = over_cache.share_of(lengths_ref, row, split, **dealing)
    page = cells.page(share.start)

    compute = jnp.promote_types(stored, k_ref.dtype)
    real = (slot < group) & (heads < queries * group)
    q = made.finished(loaded_q, q_weights).astype(compute)
    q = jnp.where(real[:, None], q, jnp.zeros((), compute))

    some, length = share.start < share.stop, share.length
    before = over_cache.sums_before(sinks_ref, slot, real, (split == 0) & (length > 0))
    older, last = share._replace(stop=jnp.minimum(share.stop, length - count)), length - queries + token
    spans = (last - window + 1, last) if several and window is not None else None
    carry = jnp.zeros((heads.size, columns.size), jnp.float32), *before, *page
    weighing = dict(scale=scale, softcap=softcap)
    sums = over_cache.attend(q, (cells, v_ref), older, carry, spans=spans, **weighing)

    def with_new_cells(sums):
        """Write the row's newest cells and attend to them."""
        key = made.finished(loaded_k, k_weights).astype(k_ref.dtype)
        value = made.finished(loaded_v).astype(v_ref.dtype)
        new: Any = (numbers < queries) & (numbers >= queries - count)
        place, exists = cells.cell(jnp.maximum(length - queries + numbers, 0))
        over: list[Any] = [*place, exists & new]
        *place, exists = (x[:, None] if jnp.ndim(x) else x for x in over)
        for ref, cell in ((k_out, key), (v_out, value)):
            at = *place, jnp.broadcast_to(columns, cell.shape)
            plgpu.store(ref.at[at], cell, mask=exists & (columns < size))
        if not several:
            return over_cache.add_cell(q, key, value, sums, **weighing)
        behind = token[:, None] - newest[None]
        seen = new[None] & (behind >= 0) & (True if window is None else behind < window)
        keys, values = key.astype(compute), value.astype(compute)
        # A token that is not new may have seen nothing.
        return over_cache.add_block(q, keys, lambda: values, seen, sums, unseen=True, **weighing)

    # The new cells belong to the last share; no program reads them from the cache. They come last, so that loads of
    # older cells start earlier.
    sums = lax.cond(some & (share.stop == length), with_new_cells, lambda sums: sums, sums)
    over_cache.store_share(sums, out_ref, lse_ref, (token, slot), real & some if splits > 1 else real, real)
