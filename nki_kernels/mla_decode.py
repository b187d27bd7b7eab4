"""Decode attention over latents (MLA, DeepSeek-AI 2024) on Trainium: a latent is read once, as key and as value.

All heads share one cache, so that a token of a row has up to 128 queries. They lie on partitions: maxima and sums are
then columns, which is the least work for the Vector engine where there are many queries. Up to 128 queries form a
group, and groups use a block of latents in turn while it is on chip. The Tensor engine turns the block once for all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.attention_values import LatentCache, Shaped
from inferlib.nki_kernels.attention_tiles import (
    BLOCK_TILES,
    FLOOR,
    FP32_MIN,
    clear_unseen,
    keys_a_bank,
    load_spans,
    mark_span,
    slot_positions,
    turn_keys,
    turn_queries,
)
from inferlib.nki_kernels.call import call
from inferlib.nki_kernels.flash_decode import cut_cache, find_pages, load_block, two_buffers

# Queries that are computed together: the partitions of the chip.
GROUP = 128
MOST_QUERIES, MOST_RANK, MOST_ROTARY = 1024, 512, 128


def fits(rank: int, rotary: int) -> bool:
    """Whether the kernel takes latents of `rank` and rotary keys of `rotary` numbers: they are cut into equal pieces of
    at most 128 numbers, and cleared in words of 4 bytes."""
    return rank <= MOST_RANK and rank % -(-rank // 128) == 0 and rotary <= MOST_ROTARY and (rank | rotary) % 2 == 0


def unsupported(q: Shaped, latents: Shaped, keys: Shaped, *, pages: int | None = None) -> str | None:
    """Why the kernel cannot run q [B, C, H, R + r] on latents [..., S, R] and rotary keys [..., S, r], or None.

    pages: columns of the page table, None if row b's page is b.
    """
    (rows, tokens, heads, width), (slots, rank) = q.shape, latents.shape[-2:]
    if latents.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or keys.dtype != latents.dtype:
        return f"it takes a cache of float32, bfloat16 or float16, not {latents.dtype} and {keys.dtype}"
    if tuple(keys.shape[-2:]) != (slots, width - rank):
        return f"rotary keys {keys.shape} are not those of {slots} latents and queries of {width}"
    if not fits(rank, width - rank):
        return f"latents of {rank} and rotary keys of {width - rank}"
    if tokens * heads > MOST_QUERIES:
        return f"{tokens} x {heads} queries of a row exceed {MOST_QUERIES}"
    if pages is None:
        return f"{rows} rows exceed a cache of {latents.shape[-4]}" if rows > latents.shape[-4] else None
    if slots & (slots - 1):
        return f"pages of {slots} positions are no power of two"
    if latents.shape[-4] * max(slots // BLOCK_TILES, 1) >= 2**24:
        return f"{latents.shape[-4]} pages: places are found in float32, exact below 2**24"
    return None


def mla_decode(
    q: jax.Array, rotary: jax.Array, cache: LatentCache, lengths: jax.Array, scale: float, *, lnc: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [B, C, H, R] and rotary [B, C, H, r]: query i of row b stands at position lengths[b] - C + i.

    The cache is one layer without scales and has the queries' own cells already; `cache.limit` is not read with a page
    table. lengths [B] int32 counts the visible positions; 0 marks an inactive row. A query before position 0 sees
    nothing. scale, which is positive, multiplies the logits. lnc: physical cores that share the work, by default the
    host's. Slots that no query sees may hold anything.
    Returns out [B, C, H, R] in q's dtype, lse [B, C, H] float32. Raises ValueError for what `unsupported` names.
    """
    rows, tokens, heads, rank = q.shape
    latents, keys, table = cache.latents, cache.keys, cache.pages
    whole = jax.ShapeDtypeStruct((*q.shape[:3], rank + rotary.shape[3]), q.dtype)
    if reason := unsupported(whole, latents, keys, pages=cache.columns):
        raise ValueError(f"the Trainium kernel does not take this cache of latents: {reason}")
    if scale <= 0:
        raise ValueError(f"scale {scale} must be positive")
    slots = latents.shape[2] * (cache.columns or 1)
    if table is None and cache.limit is not None:
        slots = min(cache.limit, slots)
    seen = jnp.clip(lengths[:, None] - tokens + 1 + jnp.arange(tokens), 0, slots)
    live = seen[:, -1:].astype(jnp.float32)
    spans = jnp.stack([jnp.zeros_like(live), live], axis=1)
    stops = jnp.repeat(seen - 0.5, heads, axis=1)[:, :, None]
    q, rotary = (x.reshape(rows, tokens * heads, x.shape[3]) for x in (q, rotary))
    results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(stops.shape, jnp.float32)
    pages = jnp.zeros((rows, 1), jnp.int32) if table is None else table
    static = dict(slots=slots, scale=float(scale), paged=table is not None)
    out, lse = call("mla_decode", kernel, lnc, results, q, rotary, latents, keys, spans, stops, pages, **static)
    lse = jnp.where(seen[:, :, None] > 0, lse.reshape(rows, tokens, heads), -jnp.inf)
    return out.reshape(rows, tokens, heads, rank), lse


@nki.jit
def kernel(q, rotary, latents, keys, spans, stops, table, slots, scale, paged):
    """Attention of the queries of each row to `slots` slots of its latents.

    q [B, n, R], rotary [B, n, r]; latents [N, 1, S, R], keys [N, 1, S, r]; spans [B, 2, 1] float32: first slot and
    number of those that any query sees; stops [B, n, 1] float32: the slot behind the last that a query sees, less a
    half; table [B, pages] int32 as in `flash_decode.kernel`.
    Returns out [B, n, R] in q's dtype, lse [B, n, 1] float32. Of two cores each reads half of the blocks.
    """
    rows, queries, rank = q.shape
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((rows, queries, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    run = min(BLOCK_TILES, latents.shape[2])
    blocks = cut_cache(slots, run, paged)
    positions = slot_positions(blocks)
    sources = ((latents, two_buffers(latents, blocks, paged), paged), (keys, two_buffers(keys, blocks, paged), paged))
    for row in range(rows):
        live = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
        mark_span(live, positions, load_spans(spans, row), 0, slots, 1.0)
        index = live
        if paged:
            index = find_pages(table, row, blocks, latents.shape[2] // run, 1, live)
        groups = []
        for first in range(0, queries, GROUP):
            here = (row, first, min(queries, first + GROUP))
            groups.append((here, load_queries(q, rotary, stops, here, latents.dtype), start_state(here, rank)))
        tile = 0
        for i in range(len(blocks)):
            block = load_cells(sources, (row, 0, index), i, blocks[i], live[:, tile : tile + blocks[i][2]])
            for group in groups:
                add_block(group[2], block, group[1], blocks[i], scale)
            tile = tile + blocks[i][2]
        for group in groups:
            finish(out, lse, group[0], group[2], scale)
    return out, lse


def load_queries(q, rotary, stops, here, work):
    """(q turned [R / pieces, pieces, n], rotary turned [r, 1, n], stops [n, 1]) in SBUF.

    here: (row, its first query, the one after the last).
    """
    row, first, stop = here
    loaded = nl.ndarray((stop - first, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=stops[row, first:stop])
    return turn_queries(q[row, first:stop], work), turn_queries(rotary[row, first:stop], work), loaded


def start_state(here, rank):
    """(top, total, sums) of no slots: the greatest score in units of the product [n, 1], the sum of probabilities [n,
    1], the sum of latents [n, R]."""
    queries = here[2] - here[1]
    top = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((queries, rank), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=top, value=FLOOR)
    nisa.memset(dst=total, value=1.0)
    nisa.memset(dst=sums, value=0.0)
    return top, total, sums


def load_cells(sources, place, i, block, live):
    """Block i of a row: (latents turned [R / pieces, pieces, tiles * 128], rotary keys turned [r, 1, tiles * 128],
    latents [128, tiles, R] with zeros where no query sees)."""
    latents = load_block(sources[0], place, i, block)
    keys = load_block(sources[1], place, i, block)
    values = nl.ndarray(latents.shape, dtype=latents.dtype, buffer=nl.sbuf)
    clear_unseen(values, latents, live)
    return turn_cells(latents), turn_cells(keys), values


def turn_cells(cells):
    """[128, tiles, h] -> [h / pieces, pieces, tiles * 128], bit by bit, so that garbage stays in its column."""
    tiles, size = cells.shape[1], cells.shape[2]
    pieces = (size + 127) // 128
    turned = nl.ndarray((size // pieces, pieces, tiles * 128), dtype=cells.dtype, buffer=nl.sbuf)
    group = keys_a_bank(cells, cells.dtype)
    for start in range(0, tiles, group):
        stop = min(tiles, start + group)
        turn_keys(turned[:, :, start * 128 : stop * 128], cells[:, start:stop, :], cells)
    return turned


def add_block(state, cells, query, block, scale):
    """Take a block into the state of up to 128 queries, one step of the online softmax."""
    top, total, sums = state
    queries = top.shape[0]
    scores = nl.ndarray((queries, block[2], 128), dtype=nl.float32, buffer=nl.sbuf)
    decay = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=decay, src=top)
    nisa.tensor_tensor(dst=top, data1=top, data2=score_block(scores, cells, query, block), op=nl.maximum)
    nisa.tensor_tensor(dst=decay, data1=decay, data2=top, op=nl.subtract)
    nisa.activation(dst=decay, op=nl.exp, data=decay, scale=scale)
    shift = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shift, data=top, op0=nl.multiply, operand0=-scale)
    weights = nl.ndarray(scores.shape, dtype=cells[2].dtype, buffer=nl.sbuf)
    added = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        scale=scale,
        bias=shift,
        reduce_op=nl.add,
        reduce_res=added,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    product = weigh(cells[2], weights)
    for pair in ((total, added), (sums, product)):
        nisa.scalar_tensor_tensor(
            dst=pair[0], data=pair[0], op0=nl.multiply, operand0=decay, op1=nl.add, operand1=pair[1]
        )


def score_block(scores, cells, query, block):
    """scores [n, tiles, 128] = queries times turned cells, the least float32 where a query does not see; their maxima
    [n, 1].

    Column p of tile t holds slot start + p * tiles + t, so that a query sees the columns below (stop - start - t) /
    tiles. The half that stops lack keeps the rounding of this quotient away from whole numbers.
    """
    start, _, tiles = block
    queries = scores.shape[0]
    ends = nl.ndarray((queries, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=ends, pattern=[[1, tiles]], offset=start, channel_multiplier=0)
    nisa.tensor_scalar(
        dst=ends, data=ends, op0=nl.subtract, operand0=query[2], reverse0=True, op1=nl.multiply, operand1=1.0 / tiles
    )
    zero = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zero, value=0.0)
    tops = nl.ndarray((queries, tiles), dtype=nl.float32, buffer=nl.sbuf)
    for first in range(0, tiles, 4):
        stop = min(tiles, first + 4)
        raw = nl.ndarray((queries, (stop - first) * 128), dtype=nl.float32, buffer=nl.psum)
        for side in range(2):
            for piece in range(query[side].shape[1]):
                nisa.nc_matmul(
                    dst=raw,
                    stationary=query[side][:, piece, :],
                    moving=cells[side][:, piece, first * 128 : stop * 128],
                    accumulate=side + piece > 0,
                )
        for t in range(first, stop):
            nisa.range_select(
                dst=scores[:, t, :],
                on_true_tile=raw[:, (t - first) * 128 : (t - first + 1) * 128],
                comp_op0=nl.greater_equal,
                comp_op1=nl.less,
                bound0=zero,
                bound1=ends[:, t : t + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
                reduce_res=tops[:, t : t + 1],
                reduce_op=nl.maximum,
                on_false_value=FP32_MIN,
            )
    greatest = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=greatest, op=nl.maximum, data=tops, axis=1)
    return greatest


def weigh(values, weights):
    """[n, R] in PSUM: weights [n, tiles, 128] times values [128, tiles, R]."""
    queries, tiles, _ = weights.shape
    product = nl.ndarray((queries, values.shape[2]), dtype=nl.float32, buffer=nl.psum)
    bank = 4
    if weights.dtype != nl.float32:
        bank = 8
    for first in range(0, tiles, bank):
        here = min(bank, tiles - first)
        moved = nl.ndarray((128, here, queries), dtype=weights.dtype, buffer=nl.psum)
        for i in range(here):
            nisa.nc_transpose(dst=moved[:, i, :], data=weights[:, first + i, :], engine=nisa.engine.tensor)
        turned = nl.ndarray((128, here, queries), dtype=weights.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=turned, src=moved, engine=nisa.engine.vector)
        for i in range(here):
            nisa.nc_matmul(
                dst=product, stationary=turned[:, i, :], moving=values[:, first + i, :], accumulate=first + i > 0
            )
    return product


def finish(out, lse, here, state, scale):
    """Merge both cores' states, divide, and write; of two cores the first writes `out`, the second `lse`."""
    row, first, stop = here
    top, total, sums = state
    cores = nl.num_programs()
    if cores == 2:
        top, total, sums = merge_cores(state, scale)
    if nl.program_id(0) == 0:
        share = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=share, data=total)
        rounded = nl.ndarray(sums.shape, dtype=out.dtype, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=rounded, data=sums, op0=nl.multiply, operand0=share)
        nisa.dma_copy(dst=out[row, first:stop], src=rounded)
    if nl.program_id(0) == cores - 1:
        logs = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logs, op=nl.log, data=total)
        nisa.scalar_tensor_tensor(dst=logs, data=top, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=logs)
        nisa.dma_copy(dst=lse[row, first:stop], src=logs)


def merge_cores(state, scale):
    """Both cores' states as one, on both: weighted by how far each maximum lies below the common one."""
    top, total, sums = state
    queries, rank = sums.shape
    mine = nl.ndarray((queries, rank + 2), dtype=nl.float32, buffer=nl.sbuf)
    other = nl.ndarray((queries, rank + 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mine[:, 0:rank], src=sums)
    nisa.tensor_copy(dst=mine[:, rank : rank + 1], src=total)
    nisa.tensor_copy(dst=mine[:, rank + 1 : rank + 2], src=top)
    peer = 1 - nl.program_id(0)
    nisa.sendrecv(src=mine, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
    common = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=common, data1=top, data2=other[:, rank + 1 : rank + 2], op=nl.maximum)
    for part in (mine, other):
        weight = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=weight, data1=part[:, rank + 1 : rank + 2], data2=common, op=nl.subtract)
        nisa.activation(dst=weight, op=nl.exp, data=weight, scale=scale)
        nisa.tensor_scalar(dst=part[:, 0 : rank + 1], data=part[:, 0 : rank + 1], op0=nl.multiply, operand0=weight)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=other, op=nl.add)
    return common, mine[:, rank : rank + 1], mine[:, 0:rank]
