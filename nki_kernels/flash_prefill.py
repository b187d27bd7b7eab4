"""Flash prefill on Trainium: chunks of queries over their rows' cache, the chunk's own keys and values included.

Queries lie on partitions, 128 of one KV head at a time. Keys are transposed once for all of them, a step of the online
softmax takes 2048 slots, and `range_select` masks each query's own span while it finds the step's greatest score.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import nki
import nki.isa as nisa
import nki.language as nl

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.nki_kernels.attention_tiles import (
    FLOOR,
    FP32_MIN,
    NOWHERE,
    clear_unseen,
    guard_keys,
    identity,
    keys_a_bank,
    load_spans,
    mark_span,
    turn_keys,
    turn_queries,
    unit_of,
    work_dtype,
)
from inferlib.nki_kernels.call import call

# Tiles of 128 slots in a step, and columns of one product.
STEP_TILES, COLUMNS = 16, 512


def flash_prefill(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    options: AttentionOptions,
    *,
    lnc: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [P, C, K, G, h], h <= 256: chunk p holds the ascending positions[p], [P, C] int32, of row rows[p].

    The cache is one layer, without scales (float8 as in `flash_decode`), and has the chunks' own keys and values
    already. A ring has at least as many slots as the window and the span of a chunk. options.window: one for all
    queries, or [P, C] of each. Rows that do not exist (absent chunks) read nothing and give garbage that the caller
    ignores. lnc: physical cores, which take tiles of queries in turn. Slots that no query sees may hold anything.
    Returns out [P, C, K, G, h] in q's dtype, lse [P, C, K, G] float32. Raises ValueError for inputs that the kernel
    does not take.
    """
    chunks, width, kv_heads, group, size = q.shape
    k, v, ring, scale, softcap = cache.k, cache.values, cache.ring, options.scale, options.softcap or 0.0
    _check(q, cache, options)
    slots, table = cache.slots, _table(cache, rows)
    count = k.shape[0] if cache.pages is None else cache.pages.shape[0]
    positions = jnp.where(rows[:, None] < count, positions, -1)  # absent chunks read nothing
    bounds, spans = _bounds(positions, slots, options.window, ring)
    turned = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(chunks, kv_heads, group * width, size)
    bounds = jnp.tile(bounds, (1, group, 1))
    if options.sinks is None:
        sinks = jnp.full((kv_heads, group), FLOOR, jnp.float32)
    else:
        sinks = jnp.maximum(options.sinks.astype(jnp.float32) / unit_of(scale, softcap), FLOOR)
    sinks = jnp.repeat(sinks, width, axis=1)[..., None]
    results = (
        jax.ShapeDtypeStruct(turned.shape, q.dtype),
        jax.ShapeDtypeStruct((*turned.shape[:3], 1), jnp.float32),
    )
    static = dict(slots=slots, scale=float(scale), softcap=float(softcap))
    out, lse = call("flash_prefill", kernel, lnc, results, turned, k, v, table, bounds, spans, sinks, **static)
    out = out.reshape(chunks, kv_heads, group, width, size).transpose(0, 3, 1, 2, 4)
    return out, lse.reshape(chunks, kv_heads, group, width).transpose(0, 3, 1, 2)


def _table(cache: KvCache, rows: jax.Array) -> jax.Array:
    """The pages of the chunks' rows, [P, M] int32; row b's is page b without a table."""
    last = cache.k.shape[0] - 1
    if cache.pages is None:
        return jnp.minimum(rows, last).astype(jnp.int32)[:, None]
    return jnp.clip(cache.pages[jnp.minimum(rows, cache.pages.shape[0] - 1)], 0, last).astype(jnp.int32)


def _check(q: jax.Array, cache: KvCache, options: AttentionOptions) -> None:
    k, v, (kv_heads, _, size) = cache.k, cache.values, q.shape[2:]
    if k.shape != v.shape or k.dtype != v.dtype or (k.shape[1], k.shape[3]) != (kv_heads, size):
        raise ValueError(f"k {k.shape} {k.dtype} and v {v.shape} {v.dtype} must both be [N, {kv_heads}, S, {size}]")
    if size > 256 or size % (2 if size > 128 else 1) or size * k.dtype.itemsize % 4:
        raise ValueError(f"head size {size} in {k.dtype}: at most 256, and a multiple of 4 bytes")
    if cache.ring and options.window is None:
        raise ValueError("a ring cache forgets old positions: pass the layer's window")
    if options.scale <= 0 or (options.softcap is not None and options.softcap <= 0):
        raise ValueError(f"scale {options.scale} and softcap {options.softcap} must be positive")


def _bounds(positions, slots: int, window, ring: bool) -> tuple[jax.Array, jax.Array]:
    """[P, C, 2 or 4] float32: the interval of slots that each query sees, two in a ring; [P, 2, 1]: the span of all."""
    stop = positions + 1
    first = jnp.zeros_like(stop) if window is None else jnp.maximum(stop - window, 0)
    earliest = first.min(axis=1)
    stop = stop if ring else jnp.minimum(stop, slots)  # spans wrap, but not those of chunks that go beyond the cache
    count = jnp.maximum(stop[:, -1] - earliest, 0)
    if not ring:
        bounds = jnp.stack([first, stop], axis=-1)
        spans = jnp.stack([earliest, count], axis=1)
    else:
        start = first % slots
        end = start + stop - first
        # What wraps goes on from slot 0.
        bounds = jnp.stack([start, jnp.minimum(end, slots), jnp.zeros_like(start), end - slots], axis=-1)
        spans = jnp.stack([earliest % slots, count], axis=1)
    return bounds.astype(jnp.float32), spans[..., None].astype(jnp.float32)


@nki.jit
def kernel(q, k, v, table, bounds, spans, sinks, slots, scale, softcap):
    """Attention of R = G * C queries of each chunk and KV head over the first `slots` slots of its row's cache.

    q [P, K, R, h], query heads first; k, v [N, K, S, h]; table [P, M] int32, each chunk's pages; bounds [P, R, 2 or 4]
    float32: first slot and the one after the last of one interval or two; spans [P, 2, 1] as in flash_decode; sinks
    [K, R, 1] in units of the product. Returns out [P, K, R, h] in q's dtype, lse [P, K, R, 1].
    """
    chunks, kv_heads, queries, _ = q.shape
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((chunks, kv_heads, queries, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    positions = place_slots(slots)
    eye = identity(nl.bfloat16)
    unit = unit_of(scale, softcap)
    for chunk in range(chunks):
        pages = nl.ndarray((1, table.shape[1]), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=pages, src=table[chunk : chunk + 1, :])
        live = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
        mark_span(live, positions, load_spans(spans, chunk), 0, slots, 1.0)
        for head in range(kv_heads):
            states = []
            for first in range(0, queries, 128):
                if (head + first // 128) % nl.num_programs() == nl.program_id(0):
                    last = min(first + 128, queries)
                    states.append(start_state(q, bounds, sinks, chunk, head, first, last, work_dtype(k)))
            tiles = positions.shape[1]
            if len(states) == 0:
                tiles = 0
            for tile in range(0, tiles, STEP_TILES):
                here = min(STEP_TILES, tiles - tile)
                seen = live[:, tile : tile + here]
                keys = turn_step(k, pages, head, tile, here, slots, seen, eye)
                values = clear_step(v, pages, head, tile, here, slots, seen)
                for state in states:
                    step(state, keys, values, tile * 128, scale, softcap)
            for state in states:
                finish(out, lse, state, chunk, head, unit)
    return out, lse


def place_slots(slots):
    """[128, tiles] float32: lane p of tile t holds slot 128 t + p."""
    tiles = (slots + 127) // 128
    whole = slots // 128
    positions = nl.ndarray((128, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=positions, value=float(NOWHERE))
    if whole > 0:
        nisa.iota(dst=positions[:, 0:whole], pattern=[[128, whole]], offset=0, channel_multiplier=1)
    if whole < tiles:
        lanes = slots - whole * 128
        nisa.iota(dst=positions[0:lanes, whole : whole + 1], pattern=[[1, 1]], offset=whole * 128, channel_multiplier=1)
    return positions


def load_step(cache, pages, head, tile, tiles, slots):
    """[128, tiles, h] of the cache of one row, whose pages are chosen at run time, and KV head."""
    page, size = cache.shape[2], cache.shape[3]
    loaded = nl.ndarray((128, tiles, size), dtype=cache.dtype, buffer=nl.sbuf)
    first = tile * 128
    stop = min(slots, first + tiles * 128)
    if stop % 128 > 0:
        nisa.memset(dst=loaded[:, tiles - 1, :], value=0.0)
    slot = first
    while slot < stop:
        # Whole tiles of a page in one transfer, or what it has of one tile.
        column = slot // page
        here = min(page - slot % page, stop - slot)
        lane = slot % 128
        lanes = min(here, 128 - lane)
        whole = 1
        if lanes == 128:
            whole = here // 128
        at = (slot - first) // 128
        nisa.dma_copy(
            dst=loaded[lane : lane + lanes, at : at + whole, :],
            src=cache.ap(
                pattern=[[size, lanes], [128 * size, whole], [1, size]],
                offset=(head * page + slot % page) * size,
                scalar_offset=pages[:, column : column + 1],
                indirect_dim=0,
            ),
        )
        slot = slot + lanes * whole
    return loaded


def turn_step(k, pages, head, tile, tiles, slots, live, eye):
    """[h / pieces, pieces, tiles * 128]: the step's keys transposed."""
    size = k.shape[3]
    pieces = (size + 127) // 128
    work = work_dtype(k)
    keys = guard_keys(load_step(k, pages, head, tile, tiles, slots), live, work)
    group = keys_a_bank(keys, work)
    flipped = nl.ndarray((size // pieces, pieces, tiles * 128), dtype=work, buffer=nl.sbuf)
    for start in range(0, tiles, group):
        stop = min(start + group, tiles)
        turn_keys(flipped[:, :, start * 128 : stop * 128], keys[:, start:stop, :], eye)
    return flipped


def clear_step(v, pages, head, tile, tiles, slots, live):
    """[128, tiles, h]: the step's values, cleared where no query sees them."""
    loaded = load_step(v, pages, head, tile, tiles, slots)
    values = nl.ndarray(loaded.shape, dtype=loaded.dtype, buffer=nl.sbuf)
    clear_unseen(values, loaded, live)
    return values


def start_state(q, bounds, sinks, chunk, head, first, last, work):
    """(turned queries, bounds, top, total, sums, first) of up to 128 queries. A sink counts as a slot."""
    n = last - first
    limits = nl.ndarray((n, bounds.shape[2]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=limits, src=bounds[chunk, first:last, :])
    top = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=top, src=sinks[head, first:last, :])
    total = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((n, q.shape[3]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=1.0)
    nisa.memset(dst=sums, value=0.0)
    return turn_queries(q[chunk, head, first:last, :], work), limits, top, total, sums, first


def step(state, keys, values, start, scale, softcap):
    """Take the slots from `start` into the state."""
    turned, limits, top, total, sums, _ = state
    n, slots = top.shape[0], keys.shape[2]
    unit = unit_of(scale, softcap)
    scores = nl.ndarray((n, slots), dtype=nl.float32, buffer=nl.sbuf)
    greatest = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    score(scores, greatest, turned, limits, keys, start, scale, softcap)
    decay = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=decay, src=top)
    nisa.tensor_tensor(dst=top, data1=top, data2=greatest, op=nl.maximum)
    nisa.tensor_tensor(dst=decay, data1=decay, data2=top, op=nl.subtract)
    nisa.activation(dst=decay, op=nl.exp, data=decay, scale=unit)
    shift = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=shift, data=top, op0=nl.multiply, operand0=-unit)
    weights = nl.ndarray((n, slots), dtype=turned.dtype, buffer=nl.sbuf)
    added = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        scale=unit,
        bias=shift,
        reduce_op=nl.add,
        reduce_res=added,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.scalar_tensor_tensor(dst=total, data=total, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=added)
    product = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.psum)
    add_values(product, weights, values)
    nisa.scalar_tensor_tensor(dst=sums, data=sums, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=product)


def score(scores, greatest, turned, limits, keys, start, scale, softcap):
    """scores [n, slots]: products, the least float32 outside a query's bounds; greatest [n, 1] of each query."""
    pieces = turned.shape[1]
    n, slots = scores.shape
    for at in range(0, slots, COLUMNS):
        stop = min(at + COLUMNS, slots)
        raw = nl.ndarray((n, stop - at), dtype=nl.float32, buffer=nl.psum)
        for piece in range(pieces):
            nisa.nc_matmul(
                dst=raw, stationary=turned[:, piece, :], moving=keys[:, piece, at:stop], accumulate=piece > 0
            )
        if softcap > 0.0:
            capped = nl.ndarray((n, stop - at), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=capped, op=nl.tanh, data=raw, scale=scale / softcap)
            raw = capped
        command = nisa.reduce_cmd.reduce
        if at == 0:
            command = nisa.reduce_cmd.reset_reduce
        if limits.shape[1] == 4:
            # Both intervals of a ring; where neither keeps a score, both hold the least.
            other = nl.ndarray((n, stop - at), dtype=nl.float32, buffer=nl.sbuf)
            keep(other, raw, limits, 2, start + at, nisa.reduce_cmd.reset_reduce)
            keep(scores[:, at:stop], raw, limits, 0, start + at, nisa.reduce_cmd.reset_reduce)
            nisa.tensor_tensor(dst=scores[:, at:stop], data1=scores[:, at:stop], data2=other, op=nl.maximum)
        elif stop < slots:
            keep(scores[:, at:stop], raw, limits, 0, start + at, command)
        else:
            keep_and_read(scores[:, at:stop], raw, limits, start + at, command, greatest)
    if limits.shape[1] == 4:
        nisa.tensor_reduce(dst=greatest, op=nl.maximum, data=scores, axis=1)


def keep(dst, raw, limits, i, start, command):
    """dst = raw from slot limits[:, i] up to before slot limits[:, i + 1], the least float32 elsewhere."""
    nisa.range_select(
        dst=dst,
        on_true_tile=raw,
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=limits[:, i : i + 1],
        bound1=limits[:, i + 1 : i + 2],
        reduce_cmd=command,
        range_start=start,
        on_false_value=FP32_MIN,
    )


def keep_and_read(dst, raw, limits, start, command, greatest):
    """Keep what is within the only interval, and read the greatest number kept since the registers were reset."""
    nisa.range_select(
        dst=dst,
        on_true_tile=raw,
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=limits[:, 0:1],
        bound1=limits[:, 1:2],
        reduce_cmd=command,
        reduce_res=greatest,
        range_start=start,
        on_false_value=FP32_MIN,
    )


def add_values(product, weights, values):
    """product [n, h] = weights [n, slots] times values [128, tiles, h]; weights are transposed a bank at a time."""
    n, tiles = weights.shape[0], values.shape[1]
    group = 8
    if weights.dtype == nl.float32:
        group = 4
    for start in range(0, tiles, group):
        here = min(group, tiles - start)
        moved = nl.ndarray((128, here, n), dtype=weights.dtype, buffer=nl.psum)
        for i in range(here):
            column = (start + i) * 128
            nisa.nc_transpose(dst=moved[:, i, :], data=weights[:, column : column + 128], engine=nisa.engine.tensor)
        turned = nl.ndarray((128, here, n), dtype=weights.dtype, buffer=nl.sbuf)
        # Banks in turn: the Vector engine masks and the Scalar engine exponentiates as much.
        if start // group % 2 == 0:
            nisa.tensor_copy(dst=turned, src=moved, engine=nisa.engine.vector)
        else:
            nisa.tensor_copy(dst=turned, src=moved, engine=nisa.engine.scalar)
        for i in range(here):
            nisa.nc_matmul(
                dst=product, stationary=turned[:, i, :], moving=values[:, start + i, :], accumulate=start + i > 0
            )


def finish(out, lse, state, chunk, head, unit):
    """Divide and write one tile of queries."""
    _, _, top, total, sums, first = state
    n = top.shape[0]
    share = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=share, data=total)
    scaled = nl.ndarray(sums.shape, dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scaled, data=sums, op0=nl.multiply, operand0=share)
    nisa.dma_copy(dst=out[chunk, head, first : first + n, :], src=scaled)
    logs = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=logs, op=nl.log, data=total)
    nisa.scalar_tensor_tensor(dst=logs, data=top, op0=nl.multiply, operand0=unit, op1=nl.add, operand1=logs)
    nisa.dma_copy(dst=lse[chunk, head, first : first + n, :], src=logs)
