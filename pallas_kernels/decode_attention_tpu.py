"""Decode attention on TPUs: flash decoding over a paged cache, one read of each visible key and value.

The live parts of all rows are one stream of blocks. Copies from HBM run several blocks ahead of the computation and
across rows, so that a row's first block is there when the row before it ends. What a block holds that a query does
not see is read at most to the end of a unit (a page, or 128 positions) and never changes a result.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite, so that differences are
LOG2E = math.log2(math.e)
# Chosen by `benchmarks/kernels.py` on v5e, v5p, v6e and v7x.
BLOCK_BYTES = 1 << 20  # most keys of a block: fewer, and waits show; more, and short rows compute what they do not have
BUFFERS = 3
UNROLL = 16  # copies of pages that are started together
PART, EDGE = 2048, 1024  # positions times heads computed at once; positions, where some are masked
MOST_QUERIES = 128  # of a KV head: their LSEs are one row of lanes
VMEM_BYTES = 14 << 20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p unless told otherwise
SMEM_BYTES = 512 << 10  # of 1 MiB


def unsupported(
    q: jax.ShapeDtypeStruct,
    k: jax.ShapeDtypeStruct,
    v: jax.ShapeDtypeStruct | None = None,
    *,
    window: int | None = None,
    pages: int | None = None,
    block: int | None = None,
) -> str | None:
    """Why the kernel cannot run q [B, C, K, G, h] on a cache k, v [..., S, h], or None if it can.

    v: None if keys are values too. pages: columns of the page table, None if rows are pages.
    """
    dtype, slots = jnp.dtype(k.dtype), k.shape[-2]
    if v is not None and v.shape != k.shape:
        return f"values of size {v.shape[-1]} are apart from keys of size {k.shape[-1]}"
    if dtype not in (jnp.bfloat16, jnp.float32) or q.dtype != dtype:
        return f"it takes queries and a cache of bfloat16 or float32, both alike, not {q.dtype} and {dtype}"
    tile = SUBLANES * 4 // dtype.itemsize
    if slots % tile:
        return f"pages of {slots} positions do not divide into tiles of {tile}"
    if q.shape[1] * q.shape[3] > MOST_QUERIES:
        return f"{q.shape[1]} x {q.shape[3]} queries of a KV head exceed {MOST_QUERIES}"
    table = 4 * q.shape[0] * pl.cdiv(pages or 0, LANES) * LANES
    if table > SMEM_BYTES:
        return f"a table of {q.shape[0]} x {pages} pages needs {table} bytes of scalar memory, more than {SMEM_BYTES}"
    arrays = 1 if v is None else 2
    block = block or _block(k.shape, dtype.itemsize, pages, window and window + q.shape[1] - 1)
    need = _vmem_bytes(q.shape, k.shape, arrays, dtype.itemsize, block)
    if need > VMEM_BYTES:
        heads = f"{k.shape[-3]} KV heads of size {k.shape[-1]}"
        return f"{heads} need {need} bytes of on-chip memory, and there are {VMEM_BYTES}"
    return None


def _unit(slots: int, pages: int | None) -> int:
    """Positions that are copied together: a small page, else what divides a page, 128 at most."""
    return slots if pages is not None and slots <= 2 * LANES else math.gcd(slots, LANES)


def _block(cache: tuple[int, ...], itemsize: int, pages: int | None, seen: int | None) -> int:
    """Positions of a block: all that a row's queries see together, if that is bounded and fits, or a power of two
    units."""
    *_, heads, slots, size = cache
    unit = _unit(slots, pages)
    row = heads * pl.cdiv(size, LANES) * LANES * itemsize
    most = min(max(BLOCK_BYTES // (row * unit), 1), pl.cdiv(slots * (pages or 1), unit))
    if seen is not None and (span := _span(seen, unit)) <= most * unit:
        return span
    return unit << (most.bit_length() - 1)


def _vmem_bytes(q: tuple[int, ...], cache: tuple[int, ...], arrays: int, itemsize: int, block: int) -> int:
    _, queries, heads, group, size = q
    size, rows = pl.cdiv(size, LANES) * LANES, pl.cdiv(queries * group, SUBLANES) * SUBLANES
    kept = heads * rows * (4 * (size + 2 * LANES) + 4 * size * itemsize)
    return arrays * BUFFERS * heads * block * size * itemsize + kept + 3 * rows * block * 4


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    ring: bool = False,
    layer: jax.Array | int = 0,
    pages: jax.Array | None = None,
    block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """q [B, C, K, G, h]: row b's queries stand at the last C of its lengths[b] positions, all written in the cache.

    k, v: [N, K, S, h], or [L, N, K, S, h] of which `layer` is read; v None: keys are values too. Position p of row b
    lives in page pages[b, p // S], slot p mod S; pages [B, M] int32; without, row b is page b. ring: the positions of a
    row wrap around its pages; then there are at least window + C - 1 slots. window: a query sees only the last `window`
    positions up to its own. lengths [B] int32, 0 marks an inactive row (out 0, lse -inf). sinks [K, G]: a logit that
    joins the softmax's denominator. block: positions that are computed together. Only live pages are read.
    Returns out [B, C, K, G, h] in q's dtype and the log of the softmax's denominator, lse [B, C, K, G] float32.
    Raises ValueError where `unsupported` says why.
    """
    rows, queries, heads, group, size = q.shape
    columns = None if pages is None else pages.shape[1]
    if reason := unsupported(q, k, v, window=window, pages=columns, block=block):
        raise ValueError(f"the TPU kernel does not run this decode attention: {reason}")
    if ring and window is None:
        raise ValueError("a ring cache forgets old positions: pass the layer's window")
    cache = [x if x.ndim == 5 else x[None] for x in (k, v) if x is not None]
    slots, width = k.shape[-2], queries * group
    seen = window and window + queries - 1  # by a row's queries together
    block = block or _block(k.shape, k.dtype.itemsize, columns, seen)

    def packed(x: jax.Array) -> jax.Array:
        """[..., C, K, G, h] -> [..., K, C * G, h]."""
        return jnp.moveaxis(x, -4, -3).reshape(*x.shape[:-4], heads, width, x.shape[-1])

    if not interpret:  # or XLA would bring a small cache to VMEM whole
        cache = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in cache]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    inputs, specs = [packed(q)], [pl.BlockSpec((None, heads, width, size), lambda b, *_: (b, 0, 0, 0))]
    if sinks is not None:
        wide = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None] * LOG2E, (queries, heads, group, LANES))
        inputs.append(packed(wide))
        specs.append(pl.BlockSpec((heads, width, LANES), lambda b, *_: (0, 0, 0)))
    scalars = [lengths.astype(jnp.int32), jnp.asarray(layer, jnp.int32).reshape(1)]
    if ring:  # divided here: the scalar unit is slow at it
        first = _first(scalars[0], queries, window, _unit(slots, columns))
        scalars.append(lax.rem(first, slots * (columns or 1)))
    if pages is not None:
        scalars.append(jnp.clip(pages.astype(jnp.int32), 0, cache[0].shape[1] - 1).reshape(-1))
    kernel = functools.partial(
        _kernel,
        columns=columns,
        has_sinks=sinks is not None,
        arrays=len(cache),
        queries=queries,
        group=group,
        scale=scale * LOG2E,
        window=window,
        softcap=softcap and softcap * LOG2E,
        ring=ring,
        unit=_unit(slots, columns),
        block=block,
    )
    seen = rows * heads * min(slots * (columns or 1), window or slots * (columns or 1))
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows,),
            in_specs=[*specs, *[whole] * len(cache)],
            out_specs=[specs[0], pl.BlockSpec((None, heads, LANES), lambda b, *_: (b, 0, 0))],
            scratch_shapes=[
                *[pltpu.VMEM((BUFFERS, heads, block, size), k.dtype)] * len(cache),
                pltpu.VMEM((heads, width, LANES), jnp.float32),
                pltpu.VMEM((heads, width, LANES), jnp.float32),
                pltpu.VMEM((heads, width, size), jnp.float32),
                pltpu.SMEM((3,), jnp.int32),
                pltpu.SemaphoreType.DMA((len(cache), BUFFERS)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, width, size), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, LANES), jnp.float32),
        ],
        # Checks triple what it takes to start a copy; `start_copy` and `length_of` keep them in bounds.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=4 * seen * size * queries * group,
            bytes_accessed=len(cache) * seen * size * k.dtype.itemsize + 2 * q.size * q.dtype.itemsize,
            transcendentals=seen * queries * group,
        ),
        interpret=interpret,
        name="decode_attention",
    )(*scalars, *inputs, *cache)
    out = out.reshape(rows, heads, queries, group, size)
    lse = lse[:, :, :width].reshape(rows, heads, queries, group)
    return jnp.moveaxis(out, 2, 1), jnp.moveaxis(lse, 2, 1)


def _kernel(*refs, columns, has_sinks, arrays, queries, group, scale, window, softcap, ring, unit, block):
    """One row. Logits are in units of log 2, as exponentials are taken with base 2.

    Scalars: lengths [B], layer [1]; of a ring the slot that the first position is in [B]; pages [B * M]. q, out
    [K, R, h] with R = C * G, sinks [K, R, 128], k, v [L, N, K, S, h] in HBM, or k alone (`arrays`), lse [K, 128].
    Scratch: copies of their blocks [BUFFERS, K, T, h]; the running maximum and sum [K, R, 128] (the sum's lanes add up,
    the maximum's are alike) and accumulator [K, R, h]; the row and block to be copied next and the buffer to be read
    next; semaphores.
    """
    refs, paged = list(refs), columns is not None
    lengths_ref, layer_ref = refs.pop(0), refs.pop(0)
    origin_ref = refs.pop(0) if ring else None
    table = refs.pop(0) if paged else None
    q_ref = refs.pop(0)
    sinks_ref = refs.pop(0) if has_sinks else None
    in_hbm, (out_ref, lse_ref), in_vmem = refs[:arrays], refs[arrays : arrays + 2], refs[arrays + 2 : 2 * arrays + 2]
    top_ref, sum_ref, acc_ref, state, sems = refs[2 * arrays + 2 :]
    k_buf, v_buf = in_vmem[0], in_vmem[-1]
    row, rows = pl.program_id(0), pl.num_programs(0)
    heads, width, size = acc_ref.shape
    slots = in_hbm[0].shape[3]
    # Positions that are computed at once, of a block that all queries see and of others; few enough for registers.
    most = max(PART // pl.cdiv(width, SUBLANES), LANES)
    edge = min(EDGE, most) if block % min(EDGE, most) == 0 else block
    exact = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    capacity = slots * (columns or 1)
    in_one_block = window is not None and block >= _span(window + queries - 1, unit)

    def length_of(row):
        return lengths_ref[row] if ring else jnp.minimum(lengths_ref[row], capacity)

    def first_of(length):
        """The first position that is read of a row."""
        return _first(length, queries, window, unit)

    def blocks_of(length):
        return jnp.minimum(length, 1) if in_one_block else _div(length - first_of(length) + block - 1, block)

    # ---- copies

    def slot_of(row, offset):
        """Where the position that is `offset` after the first of a row lies among its slots."""
        if not ring:
            return first_of(length_of(row)) + offset
        slot = origin_ref[row] + offset
        return jnp.where(slot >= capacity, slot - capacity, slot)

    def start_copy(row, index, offset, count, buf):
        """Start the copies that bring `count` positions of a page to `offset` in a buffer."""
        page, slot = row, slot_of(row, index * block + offset)
        if paged:
            page, slot = table[row * columns + _div(slot, slots)], _rem(slot, slots)
        at, into = pl.ds(pl.multiple_of(slot, unit), count), pl.ds(pl.multiple_of(offset, unit), count)
        for n, (hbm, vmem) in enumerate(zip(in_hbm, in_vmem, strict=True)):
            source = hbm.at[layer_ref[0], page, :, at]
            pltpu.make_async_copy(source, vmem.at[buf, :, into], sems.at[n, buf]).start()

    def units_of(row, index):
        """How many units of a row's block there are."""
        length = length_of(row)
        return jnp.minimum(_div(length - first_of(length) - index * block + unit - 1, unit), block // unit)

    def start_block(row, index, buf):
        units = units_of(row, index)
        if slots >= block:
            whole = units == block // unit
            if paged or ring:
                slot = slot_of(row, index * block)
                whole &= (_rem(slot, slots) if paged else slot) + block <= slots
            pl.when(whole)(lambda: start_copy(row, index, 0, block, buf))
            units = jnp.where(whole, 0, units)

        def start_pages(at, count):
            """Those of `count` pages, from number `at` of the block on."""
            first = row * columns + _div(slot_of(row, index * block), slots) + at
            into = pl.ds(pl.multiple_of(at * unit, count * unit), count * unit)
            parts = [vmem.at[buf, :, into] for vmem in in_vmem]
            for n in range(count):
                entry = first + n
                if ring:
                    entry = jnp.where(entry >= (row + 1) * columns, entry - columns, entry)
                page = table[entry]
                for m, (hbm, part) in enumerate(zip(in_hbm, parts, strict=True)):
                    source = hbm.at[layer_ref[0], page]
                    pltpu.make_async_copy(source, part.at[:, pl.ds(n * unit, unit)], sems.at[m, buf]).start()

        def start_units(first, stop, count):
            def start_some(i, _):
                if paged and unit == slots:
                    return start_pages(first + i * count, count)
                for n in range(count):
                    start_copy(row, index, (first + i * count + n) * unit, unit, buf)

            lax.fori_loop(0, _div(stop - first, count), start_some, None)

        count = min(UNROLL, 1 << (block // unit).bit_length() - 1)
        together = units & -count
        start_units(0, together, count)
        start_units(together, units, 1)

    def wait_block(row, index, buf):
        units = units_of(row, index)

        def wait(i, count):
            """A wait takes only the number of bytes from its copy."""
            for n, vmem in enumerate(in_vmem):
                part = vmem.at[buf, :, pl.ds(pl.multiple_of(i * unit, unit), count)]
                pltpu.make_async_copy(part, part, sems.at[n, buf]).wait()

        whole = units == block // unit
        pl.when(whole)(lambda: wait(0, block))
        lax.fori_loop(0, jnp.where(whole, 0, units), lambda i, _: wait(i, unit), None)

    def start_next(buf):
        """Start the copies of the block whose turn it is, if any is left."""
        at, index = state[0], state[1]

        @pl.when(at < rows)
        def _():
            start_block(at, index, buf)
            ends = index + 1 == blocks_of(length_of(at))
            state[0] = lax.while_loop(is_empty, lambda at: at + 1, at + ends.astype(jnp.int32))
            state[1] = jnp.where(ends, 0, index + 1)

    def is_empty(at):
        return (at < rows) & (lengths_ref[jnp.minimum(at, rows - 1)] == 0)

    @pl.when(row == 0)
    def _():
        state[0] = lax.while_loop(is_empty, lambda at: at + 1, 0)
        state[1] = 0
        state[2] = 0
        lax.fori_loop(0, BUFFERS - 1, lambda buf, _: start_next(buf), None)

    # ---- computation

    length = length_of(row)
    top_ref[...] = jnp.full_like(top_ref, MASKED) if sinks_ref is None else sinks_ref[...]
    lanes = lax.broadcasted_iota(jnp.int32, sum_ref.shape, 2)
    sum_ref[...] = jnp.where(lanes == 0, 0.0 if sinks_ref is None else 1.0, 0.0)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    # [R, 1] position of each query; of all, if there is one to a row.
    query = length - queries
    if queries > 1:
        query = query + lax.div(lax.broadcasted_iota(jnp.int32, (width, 1), 0), group)

    def scores(buf, head, at):
        """Logits [R, n] of the positions `at` in a buffer."""
        keys = k_buf[buf, head, at]
        s = lax.dot_general(q_ref[head], keys, (((1,), (1,)), ((), ())), exact, preferred_element_type=jnp.float32)
        return s * scale if softcap is None else softcap * jnp.tanh(s * (scale / softcap))

    def take_in(buf, parts, count, start=None):
        """Take `count` positions in of each of `parts` of a buffer, (head, offset); those that are not seen are masked
        if `start`, the buffer's first position, is given. Logits are a group of parts ahead, so that the matrix unit
        has work while softmaxes are taken."""
        together = min(max(most // count, 1), heads)
        groups = [parts[at : at + together] for at in range(0, len(parts), together)]

        def ahead_of(group):
            return [scores(buf, head, pl.ds(offset, count)) for head, offset in group]

        ahead = ahead_of(groups[0])
        for n, group in enumerate(groups):
            logits = ahead
            values = [v_buf[buf, head, pl.ds(offset, count)] for head, offset in group]
            if start is not None:
                logits = [masked(s, start + offset) for s, (_, offset) in zip(logits, group, strict=True)]
            old = [top_ref[head] for head, _ in group]
            tops = [jnp.maximum(o, jnp.max(s, axis=1, keepdims=True)) for o, s in zip(old, logits, strict=True)]
            if n + 1 < len(groups):
                ahead = ahead_of(groups[n + 1])
            ps = [jnp.exp2(s - _wide(top, count)) for s, top in zip(logits, tops, strict=True)]
            products = [
                jnp.dot(p.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32)
                for p, v in zip(ps, values, strict=True)
            ]
            for (head, _), o, top, p, product in zip(group, old, tops, ps, products, strict=True):
                decay = jnp.exp2(o - top)
                top_ref[head] = top
                sum_ref[head] = sum_ref[head] * decay + _folded(p)
                acc_ref[head] = acc_ref[head] * _wide(decay, size) + product

    def masked(logits, start):
        position = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        seen = position <= query
        if window is not None:
            seen &= position > query - window
        return jnp.where(seen, logits, MASKED)

    def clean(buf, start, count):
        """Zero the values of a buffer's first `count` positions that no query sees: 0 * NaN is NaN."""
        some = math.gcd(edge, LANES)

        def zero(i, _):
            v_buf[buf, :, pl.ds(pl.multiple_of(i * some, some), some)] = jnp.zeros((heads, some, size), v_buf.dtype)

        def trim(i):
            at = pl.ds(pl.multiple_of(i * some, some), some)
            position = start + i * some + lax.broadcasted_iota(jnp.int32, (heads, some, size), 1)
            held = (position >= first) & (position < length)
            v_buf[buf, :, at] = jnp.where(held, v_buf[buf, :, at].astype(jnp.float32), 0).astype(v_buf.dtype)

        first = 0 if window is None else length - queries + 1 - window
        if window is not None:
            before = jnp.clip(_div(jnp.maximum(first - start, 0), some), 0, _div(count, some) - 1)
            lax.fori_loop(0, before, zero, None)
            trim(before)
        after = jnp.minimum(_div(length - start, some), _div(count, some) - 1)
        trim(after)
        lax.fori_loop(after + 1, _div(count, some), zero, None)

    def step(index, buf):
        start_next(jnp.where(buf == 0, BUFFERS - 1, buf - 1))
        wait_block(row, index, buf)
        start = first_of(length) + index * block
        whole = start + block <= length - queries + 1
        if window is not None:
            whole &= start >= length - window

        def take_whole():
            part = most if block % most == 0 else block
            take_in(buf, [(head, at) for at in range(0, block, part) for head in range(heads)], part)

        def take_parts():
            parts = 1 if edge == block else _div(jnp.minimum(length - start, block) + edge - 1, edge)
            clean(buf, start, parts * edge)

            def take_part(i, _):
                take_in(buf, [(head, pl.multiple_of(i * edge, edge)) for head in range(heads)], edge, start)

            lax.fori_loop(0, parts, take_part, None)

        if in_one_block:  # there is more in it than any query sees
            take_parts()
        else:
            pl.when(whole)(take_whole)
            pl.when(~whole)(take_parts)
        return jnp.where(buf == BUFFERS - 1, 0, buf + 1)

    state[2] = lax.fori_loop(0, blocks_of(length), step, state[2])

    diagonal = lax.broadcasted_iota(jnp.int32, (width, LANES), 0) == lax.broadcasted_iota(jnp.int32, (width, LANES), 1)
    for head in range(heads):
        top = top_ref[head]
        total = jnp.sum(sum_ref[head], axis=1, keepdims=True)
        empty = (top <= MASKED / 2) | (length == 0)
        total = jnp.where(empty, 1.0, jnp.broadcast_to(total, top.shape))
        out = acc_ref[head] * _wide(jnp.where(empty, 0.0, 1.0 / total), size)
        out_ref[head] = out.astype(out_ref.dtype)
        lse = jnp.where(empty, -jnp.inf, top / LOG2E + jnp.log(total))
        lse_ref[head] = jnp.sum(jnp.where(diagonal, lse, 0.0), axis=0)


def _first(length: jax.Array, queries: int, window: int | None, unit: int) -> jax.Array | int:
    """The first position that is read of a row of this length."""
    return 0 if window is None else _div(jnp.maximum(length - queries + 1 - window, 0), unit) * unit


def _span(seen: int, unit: int) -> int:
    """Positions of all units that any run of `seen` positions touches."""
    return (pl.cdiv(seen - 1, unit) + 1) * unit


def _div(x: jax.Array, by: int) -> jax.Array:
    """x // by, x >= 0."""
    return lax.shift_right_logical(x, by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def _rem(x: jax.Array, by: int) -> jax.Array:
    """x mod by, x >= 0."""
    return x & (by - 1) if by & (by - 1) == 0 else lax.rem(x, by)


def _wide(x: jax.Array, count: int) -> jax.Array:
    """[R, 128], all lanes alike -> [R, count]."""
    tiles, rest = divmod(count, LANES)
    parts = [x] * tiles + ([x[:, :rest]] if rest else [])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _folded(x: jax.Array) -> jax.Array:
    """[R, n] -> [R, 128] with the same sum over lanes."""
    size = x.shape[1]
    if size % LANES:
        x = jnp.concatenate([x, jnp.zeros((x.shape[0], -size % LANES), x.dtype)], axis=1)
    return sum(x[:, at : at + LANES] for at in range(0, size, LANES))
