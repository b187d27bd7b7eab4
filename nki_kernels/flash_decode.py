"""Flash decoding on Trainium: a few query tokens of each row attend to the live part of its cache, which is read once.

Scores have slots on partitions, so that the softmax uses every lane however few query heads share a KV head. The Tensor
engine transposes keys, a tile's scores are one product of 128 slots by all queries, and the same layout feeds the
product with the values, in which a column of ones sums the probabilities. A chunk of up to 8192 slots is one step
of the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.nki_kernels.attention_tiles import (
    BLOCK_TILES,
    FLOOR,
    FP32_MIN,
    clear_unseen,
    cut_pages,
    cut_slots,
    guard_keys,
    identity,
    keys_a_bank,
    load_spans,
    mark_span,
    slot_positions,
    spread,
    turn_keys,
    turn_queries,
    unit_of,
    work_dtype,
)
from inferlib.nki_kernels.call import call

CHUNK_TILES = 64
# An index that no cache reaches: its transfer is skipped.
SKIPPED = 1073741824.0


def flash_decode(
    q: jax.Array, cache: KvCache, lengths: jax.Array, options: AttentionOptions, *, lnc: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [B, Q, K, G, h]: query i of row b stands at position lengths[b] - Q + i; Q * G <= 128, h <= 256.

    The cache has the queries' own keys and values already; it is one layer, whose pages have a power of two slots if
    there is a page table. It has no scales: the scale of float8 keys belongs in `options.scale`, that of float8 values
    in the result. `cache.limit` is not read with a page table. lengths [B] int32 counts the visible positions; 0 marks
    an inactive row. A query before position 0 sees nothing. lnc: physical cores that share the work, by default the
    host's. Slots that no query sees may hold anything.
    Returns out [B, Q, K, G, h] in q's dtype, lse [B, Q, K, G] float32. Raises ValueError for inputs that the kernel
    does not take.
    """
    rows, tokens, kv_heads, group, size = q.shape
    k, v, table = cache.k, cache.values, cache.pages
    window, softcap, sinks = options.shared_window, options.softcap or 0.0, options.sinks
    _check(q, cache, options)
    paged = table is not None
    slots = k.shape[2] * (table.shape[1] if paged else 1)
    if cache.limit is not None and not cache.ring and not paged:
        slots = min(cache.limit, slots)
    spans = _spans(lengths, tokens, slots, window, cache.ring)
    known = spans[:, 1, :tokens] > 0 if sinks is None else lengths[:, None] > 0  # else there is nothing to sum
    turned = jnp.transpose(q, (0, 2, 1, 3, 4)).reshape(rows, kv_heads, tokens * group, size)
    if sinks is None:
        sinks = jnp.full((kv_heads, group), FLOOR, jnp.float32)
    else:
        sinks = jnp.maximum(sinks.astype(jnp.float32) / unit_of(options.scale, softcap), FLOOR)
    sinks = jnp.tile(sinks, (1, tokens))
    results = (jax.ShapeDtypeStruct(turned.shape, q.dtype), jax.ShapeDtypeStruct(turned.shape[:3], jnp.float32))
    table = table if paged else jnp.zeros((rows, 1), jnp.int32)
    static = dict(slots=slots, scale=float(options.scale), softcap=float(softcap), paged=paged)
    out, lse = call("flash_decode", kernel, lnc, results, turned, k, v, spans, sinks, table, **static)
    out = out.reshape(rows, kv_heads, tokens, group, size).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(rows, kv_heads, tokens, group).transpose(0, 2, 1, 3)
    return out, jnp.where(known[..., None, None], lse, -jnp.inf)


def _check(q: jax.Array, cache: KvCache, options: AttentionOptions) -> None:
    _, tokens, kv_heads, group, size = q.shape
    k, v, table, ring = cache.k, cache.values, cache.pages, cache.ring
    window, softcap, scale = options.shared_window, options.softcap, options.scale
    if k.shape != v.shape or k.dtype != v.dtype or (k.shape[1], k.shape[3]) != (kv_heads, size):
        raise ValueError(f"k {k.shape} {k.dtype} and v {v.shape} {v.dtype} must both be [N, {kv_heads}, S, {size}]")
    if tokens * group > 128:
        raise ValueError(f"{tokens} tokens x {group} queries a KV head: at most 128 together; split the tokens")
    if size > 256 or size % (2 if size > 128 else 1) or size * k.dtype.itemsize % 4:
        raise ValueError(f"head size {size} in {k.dtype}: at most 256, and a multiple of 4 bytes")
    if ring and (window is None or table is not None):
        raise ValueError("a ring cache is contiguous and forgets old positions: pass the layer's window, and no table")
    if ring and window is not None and window + tokens - 1 > k.shape[2]:
        raise ValueError(f"a ring of {k.shape[2]} slots cannot hold a window of {window} for {tokens} tokens")
    if scale <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"scale {scale} and softcap {softcap} must be positive")
    if table is not None:
        page = k.shape[2]
        if page & (page - 1):
            raise ValueError(f"pages of {page} slots: the kernel takes powers of two")
        if k.shape[0] * kv_heads * max(page // BLOCK_TILES, 1) >= 2**24:
            raise ValueError(f"{k.shape[0]} pages of {kv_heads} heads: rows are found in float32, exact below 2**24")
    elif k.shape[0] < q.shape[0]:
        raise ValueError(f"{q.shape[0]} rows and a cache of {k.shape[0]}: without a table, row b's page is b")


def _spans(lengths: jax.Array, tokens: int, slots: int, window: int | None, ring: bool) -> jax.Array:
    """[B, 2, Q + 1] float32: the first slot and the count that each query sees, then those that any of them sees."""
    stop = lengths[:, None] - tokens + 1 + jnp.arange(tokens, dtype=jnp.int32)
    count = jnp.clip(stop, 0, slots if window is None else min(window, slots))
    first = jnp.maximum(stop, 0) - count
    everything = jnp.maximum(lengths, 0) - first[:, 0]
    first = jnp.concatenate([first, first[:, :1]], axis=1)
    count = jnp.concatenate([count, everything[:, None]], axis=1)
    return jnp.stack([first % slots if ring else first, count], axis=1).astype(jnp.float32)


@nki.jit
def kernel(q, k, v, spans, sinks, table, slots, scale, softcap, paged):
    """Attention of Q query tokens of each row over `slots` slots of its cache.

    q [B, K, R, h], R = Q * G queries of a KV head, query tokens first; k, v [N, K, S, h]; spans [B, 2, Q + 1] float32:
    first slot and number of slots that each query token sees, wrapping at `slots`, and last what any of them sees;
    sinks [K, R] float32 in units of the product, FLOOR for none. paged: table [B, pages] int32 gives the pages of each
    row; else row b's page is b and the table is not read. softcap: 0 for none.
    Returns out [B, K, R, h] in q's dtype, lse [B, K, R] float32. Of two cores each reads half of the blocks.
    """
    rows, kv_heads, queries, _ = q.shape
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((rows, kv_heads, queries), dtype=nl.float32, buffer=nl.shared_hbm)
    run = min(BLOCK_TILES, k.shape[2])
    blocks = cut_cache(slots, run, paged)
    positions = slot_positions(blocks)
    steps = cut_steps(blocks)
    eye = identity(nl.bfloat16)
    keys = (k, two_buffers(k, blocks, paged), paged)
    values = (v, two_buffers(v, blocks, paged), paged)
    unit = unit_of(scale, softcap)
    tokens = spans.shape[2] - 1
    for row in range(rows):
        span = load_spans(spans, row)
        seen = nl.ndarray((128, positions.shape[1], tokens), dtype=nl.uint8, buffer=nl.sbuf)
        live = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
        for i in range(tokens):
            mark_span(seen[:, :, i], positions, span, i, slots, 1.0)
        mark_span(live, positions, span, tokens, slots, 1.0)
        index = live
        if paged:
            index = find_pages(table, row, blocks, k.shape[2] // run, kv_heads, live)
        for head in range(kv_heads):
            if paged and head > 0:
                index = next_head(index, k.shape[2] // run)
            place = (row, head, index)
            state = start_state(sinks, head, q.shape)
            turned = turn_queries(q[row, head], work_dtype(k))
            for step in steps:
                scores = score_step(keys, place, step, (turned, scale, softcap), (seen, live), eye)
                add_step(state, scores, values, place, step, live, unit)
            finish(out, lse, state, row, head, unit)
    return out, lse


def cut_cache(slots, run, paged):
    """[(start, partitions, tiles)]: the blocks of a row's cache that this core reads; run: slots of a page side by side
    in a partition."""
    if paged:
        return cut_pages(slots, run, nl.num_programs(), nl.program_id(0))
    return cut_slots(slots, nl.num_programs(), nl.program_id(0))


def cut_steps(blocks):
    """The steps of the online softmax, each a list of (number, first tile, block) with at most CHUNK_TILES tiles
    together."""
    steps = []
    step = []
    tile = 0
    start = 0
    for i in range(len(blocks)):
        if tile + blocks[i][2] - start > CHUNK_TILES:
            steps.append(step)
            step = []
            start = tile
        step.append((i, tile, blocks[i]))
        tile = tile + blocks[i][2]
    if len(step) > 0:
        steps.append(step)
    return steps


def two_buffers(cache, blocks, paged):
    """Two tiles that the blocks fill in turn. If blocks leave lanes out, the tiles are cleared once, so that every lane
    is written."""
    tiles = 1
    whole = not paged
    for block in blocks:
        tiles = max(tiles, block[2])
        whole = whole and block[1] == 128
    made = []
    for _ in range(2):
        tile = nl.ndarray((128, tiles, cache.shape[3]), dtype=cache.dtype, buffer=nl.sbuf)
        if not whole:
            nisa.memset(dst=tile.view(nl.int32), value=0, engine=nisa.engine.gpsimd)
        made.append(tile)
    return made


def find_pages(table, row, blocks, per_page, kv_heads, live):
    """[128, blocks] int32: first cache row of each lane's page, out of reach where the lane holds no live slot."""
    n = max(1, len(blocks))
    ids = nl.ndarray((128, n), dtype=nl.int32, buffer=nl.sbuf)
    within = nl.ndarray((128, n), dtype=nl.int32, buffer=nl.sbuf)
    dead = nl.ndarray((128, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=ids, value=0)
    nisa.memset(dst=dead, value=0)
    nisa.memset(dst=within, value=0)
    tile = 0
    for i in range(len(blocks)):
        start, lanes, tiles = blocks[i]
        first = start // tiles
        # Lanes of one page repeat its entry of the table.
        repeat = min(lanes, per_page)
        nisa.dma_copy(
            dst=ids[0:lanes, i : i + 1],
            src=table.ap(pattern=[[1, lanes // repeat], [0, repeat]], offset=row * table.shape[1] + first // per_page),
        )
        nisa.iota(dst=within[:, i : i + 1], pattern=[[1, 1]], offset=first, channel_multiplier=1)
        alive = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=alive, op=nl.maximum, data=live[:, tile : tile + tiles], axis=1)
        nisa.tensor_scalar(
            dst=dead[:, i : i + 1], data=alive, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=SKIPPED
        )
        tile = tile + tiles
    nisa.tensor_scalar(dst=within, data=within, op0=nl.bitwise_and, operand0=per_page - 1)
    nisa.tensor_scalar(dst=ids, data=ids, op0=nl.multiply, operand0=float(kv_heads * per_page))
    nisa.tensor_tensor(dst=ids, data1=ids, data2=within, op=nl.add)
    nisa.tensor_tensor(dst=ids, data1=ids, data2=dead, op=nl.add)
    return ids


def next_head(index, per_page):
    """The indices of these rows for the next KV head. The integers are exact, and skipped rows stay skipped."""
    step = nl.ndarray(index.shape, dtype=nl.int32, buffer=nl.sbuf)
    made = nl.ndarray(index.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=step, value=per_page)
    nisa.tensor_tensor(dst=made, data1=index, data2=step, op=nl.add)
    return made


def load_block(source, place, i, block):
    """[128, tiles, h]: block i of the cache of one row and KV head.

    source: (cache, two buffers, whether it is paged); place: (row, KV head, `find_pages` of them if paged).
    """
    cache, buffers, paged = source
    row, head, index = place
    start, lanes, tiles = block
    pages, kv_heads, page, size = cache.shape
    tile = buffers[i % 2]
    if paged:
        runs = cache.reshape((pages * kv_heads * (page // tiles), tiles * size))
        nisa.dma_copy(
            dst=tile[0:lanes, 0:tiles, :],
            src=runs.ap(
                pattern=[[tiles * size, lanes], [1, tiles * size]],
                vector_offset=index[0:lanes, i : i + 1],
                indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )
    else:
        run = cache[row, head, start : start + lanes * tiles, :]
        nisa.dma_copy(dst=tile[0:lanes, 0:tiles, :], src=run.reshape((lanes, tiles, size)))
    return tile[:, 0:tiles, :]


def start_state(sinks, head, shape):
    """(top, total, sums) of no slots. All lie as [128 lanes, ..., R]: the greatest score in units of the product and
    the sum of probabilities, the same in every lane; sums of values [h / pieces, pieces, R]. A sink counts as a slot.
    """
    queries, size = shape[2], shape[3]
    pieces = (size + 127) // 128
    top = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((size // pieces, pieces, queries), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=1.0)
    nisa.memset(dst=sums, value=0.0)
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=top, src=sinks.ap(pattern=[[0, 128], [1, queries]], offset=head * queries))
    else:
        nisa.memset(dst=top, value=FLOOR)
    return top, total, sums


def score_step(source, place, step, query, masks, eye):
    """[128, tiles, R] float32: keys of a step's slots times queries, the least float32 where a query does not see.

    query: (queries [h / pieces, pieces, R], scale, softcap); masks: (slots that each token sees [128, tiles of all
    blocks, Q], slots that any sees [128, tiles of all blocks]).
    """
    turned, _, _ = query
    seen, live = masks
    start = step[0][1]
    scores = nl.ndarray((128, stop_of(step) - start, turned.shape[2]), dtype=nl.float32, buffer=nl.sbuf)
    for part in step:
        i, tile, block = part
        stop = tile + block[2]
        loaded = guard_keys(load_block(source, place, i, block), live[:, tile:stop], turned.dtype)
        score_block(scores[:, tile - start : stop - start, :], loaded, query, seen[:, tile:stop, :], eye)
    return scores


def stop_of(step):
    """The tile after the last of a step."""
    _, tile, block = step[len(step) - 1]
    return tile + block[2]


def score_block(scores, keys, query, seen, eye):
    """scores [128, tiles, R] = keys [128, tiles, h] times queries, the least float32 where a query does not see."""
    turned, scale, softcap = query
    tiles = keys.shape[1]
    part, pieces, queries = turned.shape
    tokens = seen.shape[2]
    group = max(1, min(keys_a_bank(keys, turned.dtype), 512 // queries))
    for start in range(0, tiles, group):
        n = min(group, tiles - start)
        flipped = nl.ndarray((part, pieces, n * 128), dtype=turned.dtype, buffer=nl.sbuf)
        turn_keys(flipped, keys[:, start : start + n, :], eye)
        raw = nl.ndarray((128, n, queries), dtype=nl.float32, buffer=nl.psum)
        for i in range(n):
            for piece in range(pieces):
                nisa.nc_matmul(
                    dst=raw[:, i, :],
                    stationary=flipped[:, piece, i * 128 : (i + 1) * 128],
                    moving=turned[:, piece, :],
                    accumulate=piece > 0,
                )
        if softcap > 0.0:
            capped = nl.ndarray((128, n, queries), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=capped, op=nl.tanh, data=raw, scale=scale / softcap)
            raw = capped
        shape = (tokens, queries // tokens)
        nisa.select_reduce(
            dst=scores[:, start : start + n, :].reshape_dim(2, shape),
            predicate=seen[:, start : start + n, :].expand_dim(3).broadcast(3, shape[1]),
            on_true=raw.reshape_dim(2, shape),
            on_false=FP32_MIN,
        )


def add_step(state, scores, source, place, step, live, unit):
    """Take a step's scores [128, tiles, R] and values into the state, one step of the online softmax."""
    top, total, sums = state
    cache, _, _ = source
    weights = nl.ndarray(scores.shape, dtype=work_dtype(cache), buffer=nl.sbuf)
    decay = weigh(weights, scores, top, total, unit)
    product = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.psum)
    start = step[0][1]
    for part in step:
        i, tile, block = part
        stop = tile + block[2]
        loaded = load_block(source, place, i, block)
        add_values(product, loaded, weights[:, tile - start : stop - start, :], live[:, tile:stop], tile == start)
    fade(sums, decay)
    nisa.tensor_tensor(dst=sums, data1=sums, data2=product, op=nl.add)


def weigh(weights, scores, top, total, unit):
    """weights = exp(unit * (scores - new maximum)), [128, tiles, R]; raise `top`, take their sum into `total`.

    Returns the decay [128, R] of what was summed before, the same in every lane.
    """
    tiles, queries = scores.shape[1], scores.shape[2]
    lanes = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=lanes, op=nl.maximum, data=scores.permute((0, 2, 1)), axis=2)
    moved = nl.ndarray((queries, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=moved, data=lanes, engine=nisa.engine.tensor)
    greatest = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=greatest, op=nl.maximum, data=moved, axis=1)
    everywhere = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=everywhere, data=spread(greatest, 128), engine=nisa.engine.tensor)
    decay = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=decay, src=top)
    nisa.tensor_tensor(dst=top, data1=top, data2=everywhere, op=nl.maximum)
    nisa.tensor_tensor(dst=decay, data1=decay, data2=top, op=nl.subtract)
    nisa.activation(dst=decay, op=nl.exp, data=decay, scale=unit)
    nisa.tensor_tensor(dst=scores, data1=scores, data2=top.expand_dim(1).broadcast(1, tiles), op=nl.subtract)
    nisa.activation(dst=weights, op=nl.exp, data=scores, scale=unit)
    nisa.tensor_reduce(dst=lanes, op=nl.add, data=weights.permute((0, 2, 1)), axis=2)
    # A product with ones sums over lanes, and leaves the sum in every one.
    ones = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0, engine=nisa.engine.gpsimd)
    added = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=added, stationary=ones, moving=lanes, accumulate=False)
    nisa.tensor_tensor(dst=total, data1=total, data2=decay, op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=added, op=nl.add)
    return decay


def add_values(product, loaded, weights, live, first):
    """product [h / pieces, pieces, R] += values [128, tiles, h] times weights [128, tiles, R]."""
    part, pieces, _ = product.shape
    values = nl.ndarray(loaded.shape, dtype=loaded.dtype, buffer=nl.sbuf)
    clear_unseen(values, loaded, live)
    for i in range(loaded.shape[1]):
        for piece in range(pieces):
            nisa.nc_matmul(
                dst=product[:, piece, :],
                stationary=values[:, i, piece * part : (piece + 1) * part],
                moving=weights[:, i, :],
                accumulate=i > 0 or not first,
            )


def fade(sums, decay):
    """sums [h / pieces, pieces, R] *= decay [128, R]."""
    part, pieces, _ = sums.shape
    nisa.tensor_tensor(dst=sums, data1=sums, data2=decay[0:part].expand_dim(1).broadcast(1, pieces), op=nl.multiply)


def finish(out, lse, state, row, head, unit):
    """Merge both cores' states, divide, and write; of two cores the first writes `out`, the second `lse`."""
    top, total, sums = state
    part, pieces, queries = sums.shape
    cores = nl.num_programs()
    if cores == 2:
        top, total, sums = merge_cores(top, total, sums, unit)
    if nl.program_id(0) == 0:
        share = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=share, data=total)
        fade(sums, share)
        turned = nl.ndarray((queries, pieces * part), dtype=out.dtype, buffer=nl.sbuf)
        for piece in range(pieces):
            moved = nl.ndarray((queries, part), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_transpose(dst=moved, data=sums[:, piece, :], engine=nisa.engine.tensor)
            nisa.tensor_copy(dst=turned[:, piece * part : (piece + 1) * part], src=moved)
        nisa.dma_copy(dst=out[row, head], src=turned)
    if nl.program_id(0) == cores - 1:
        logs = nl.ndarray((1, queries), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logs, op=nl.log, data=total[0:1])
        nisa.scalar_tensor_tensor(dst=logs, data=top[0:1], op0=nl.multiply, operand0=unit, op1=nl.add, operand1=logs)
        nisa.dma_copy(dst=lse[row, head : head + 1], src=logs)


def merge_cores(top, total, sums, unit):
    """Both cores' states as one, on both: weighted by how far each maximum lies below the common one."""
    part, pieces, queries = sums.shape
    mine = nl.ndarray((128, pieces + 2, queries), dtype=nl.float32, buffer=nl.sbuf)
    other = nl.ndarray((128, pieces + 2, queries), dtype=nl.float32, buffer=nl.sbuf)
    # Lanes beyond the head size carry nothing, but must be written to be sent.
    nisa.memset(dst=mine, value=0.0)
    nisa.tensor_copy(dst=mine[0:part, 0:pieces, :], src=sums)
    nisa.tensor_copy(dst=mine[:, pieces, :], src=total)
    nisa.tensor_copy(dst=mine[:, pieces + 1, :], src=top)
    peer = 1 - nl.program_id(0)
    nisa.sendrecv(src=mine, dst=other, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
    common = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=common, data1=top, data2=other[:, pieces + 1, :], op=nl.maximum)
    for state in (mine, other):
        weight = nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=weight, data1=state[:, pieces + 1, :], data2=common, op=nl.subtract)
        nisa.activation(dst=weight, op=nl.exp, data=weight, scale=unit)
        fade(state[:, 0 : pieces + 1, :], weight)
    nisa.tensor_tensor(dst=mine, data1=mine, data2=other, op=nl.add)
    return common, mine[:, pieces, :], mine[0:part, 0:pieces, :]
