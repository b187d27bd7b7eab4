"""Decode attention on TPUs: flash decoding over a paged cache, one read of each visible key and value.

The live parts of all rows are one stream of blocks (see `block_stream_tpu`). Copies from HBM run ahead of the
computation and across rows, and so do logits: while the softmax of one part waits for its maximum, the matrix unit
computes the logits of the next part, which may be the first part of the next row. Positions that no query sees are read
at most to the end of a unit (a page, or 64 or 128 positions) and never change a result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import AttentionOptions, KvCache, NewCells, Shaped
from inferlib.pallas_kernels.arithmetic_tpu import LANES, LOG2E, MASKED, div, folded, seldom, wide
from inferlib.pallas_kernels.block_stream_tpu import SCALARS, BlockStream, Pages, span, unit_of, zero_outside
from inferlib.pallas_kernels.cell_write_tpu import CellWriter, tile_of, tiles_of, writer_scratch
from inferlib.pallas_kernels.decode_call_tpu import MOST_MASKED, Call, Inputs, Kernel, Outputs, Scalars
from inferlib.pallas_kernels.decode_rows_tpu import rows_kernel
from inferlib.pallas_kernels.generations_tpu import cores, generation, untaken
from inferlib.pallas_kernels.row_results_tpu import RowResults
from inferlib.pallas_kernels.tuned_tpu import tuned

SUBLANES = 8
# Chosen by `benchmarks/kernels.py` on v5e, v5p, v6e and v7x.
# Of a block's keys, or half of its cells that are key and value at once. With smaller blocks waits show, with larger
# ones short rows compute padding.
BLOCK_BYTES = 1 << 20
PART = 4096  # positions times heads times tiles of queries that are computed at once
FAST = (
    "v5p",
    "v7x",
)  # memory waits for computation: parts are twice as large, though short rows fill them less
MOST_QUERIES = 128  # of a KV head: their LSEs fill one row of lanes
VMEM_BYTES = 14 << 20  # of the 16 MiB that the compiler gives a kernel on v5e and v5p by default
AHEAD = 4096  # bytes of one dimension of the keys that are multiplied while the softmax takes its maxima
RESULTS = 4  # rows whose results are being copied to memory
SMEM_BYTES = 512 << 10  # of 1 MiB
QUANTISED = (jnp.int8, jnp.float8_e4m3fn)


@dataclass(frozen=True)
class Blocks:
    """block: positions of a row, of all its KV heads, that are copied together. part: positions of a block that are
    computed at once. buffers: blocks on chip; the kernel adds one if it quantises new cells."""

    block: int
    part: int
    buffers: int = 4

    def __post_init__(self):
        if self.part < 1 or self.block % self.part or self.buffers < 3:
            raise ValueError(f"a block is a number of parts, and there are three or more on chip: {self}")


@tuned("decode_attention", Blocks)
def default_blocks(
    q: tuple[int, ...], cache: tuple[int, ...], arrays: int, itemsize: int, pages: int | None, seen: int | None
) -> Blocks:
    """Block sizes for queries [B, C, K, G, h] and a cache of 1 or 2 `arrays` of shape [K, S, h].

    pages: columns of the table. seen: number of positions that a row's queries see together, None for all. A block
    has as many positions as are seen, or an equal part of them that fits; if all are seen, a power of two units.
    """
    heads, slots, size = cache
    unit = _unit(slots, pages, seen, itemsize == 1)
    most = max(2 * BLOCK_BYTES // (arrays * heads * pl.cdiv(size, LANES) * LANES * itemsize * unit), 1)
    most = min(most, pl.cdiv(slots * (pages or 1), unit))
    if seen is None:
        block = unit << (most.bit_length() - 1)
    else:
        units = span(seen, unit) // unit
        block = pl.cdiv(units, pl.cdiv(units, most)) * unit
    part, work = block, heads * pl.cdiv(q[1] * q[3], SUBLANES)
    # More queries need more room for the state of a part.
    while part * work > (2 * PART if q[1] == 1 and generation() in FAST else PART) and part % (2 * LANES) == 0:
        part //= 2
    return Blocks(block, part)


def _shares(heads: int, scaled: bool) -> int:
    """How many cores share the KV heads. A share of their scales would begin within a tile of memory."""
    return 1 if scaled else math.gcd(heads, cores())


def _part(shape: tuple[int, ...], dim: int, shares: int) -> tuple[int, ...]:
    """The shape of a core's share of the heads, which lie along `dim`."""
    return (*shape[:dim], shape[dim] // shares, *shape[dim + 1 :])


def _unit(slots: int, columns: int | None, seen: int | None, scaled: bool) -> int:
    """Scales are tiled by 128 positions."""
    return unit_of(slots, columns, LANES if seen is None or scaled else LANES // 2)


def unsupported(
    q: Shaped,
    cache: KvCache,
    *,
    window: int | None = None,
    mask: bool = False,
    new: bool = False,
    blocks: Blocks | None = None,
) -> str | None:
    """Why the kernel cannot run q [B, C, K, G, h] on a cache, or None if it can. The cache's arrays may be shapes.

    mask: a mask says which new tokens a query sees. new: the kernel writes the new tokens' cells.
    """
    k, v, scales, columns = cache.k, cache.v, cache.scaled, cache.columns
    dtype, slots, queries = jnp.dtype(k.dtype), k.shape[-2], q.shape[1]
    if v is not None and v.shape != k.shape:
        return f"values of size {v.shape[-1]} are apart from keys of size {k.shape[-1]}"
    if q.dtype not in (jnp.bfloat16, jnp.float32) or (dtype not in QUANTISED if scales else dtype != q.dtype):
        stored = "int8 or float8_e4m3fn" if scales else "their type"
        return f"it takes queries of bfloat16 or float32 and a cache of {stored}, not {q.dtype} and {dtype}"
    if reason := untaken(dtype):
        return reason
    tile = LANES if scales else SUBLANES * 4 // dtype.itemsize
    if slots % tile:
        return f"pages of {slots} positions do not divide into tiles of {tile}"
    if queries * q.shape[3] > MOST_QUERIES:
        return f"{queries} x {q.shape[3]} queries of a KV head exceed {MOST_QUERIES}"
    if mask and queries > MOST_MASKED:
        return f"a mask of {queries} new tokens exceeds {MOST_MASKED}"
    table = 4 * q.shape[0] * (columns or 0)
    if table > SMEM_BYTES:
        return f"a table of {q.shape[0]} x {columns} pages needs {table} bytes of scalar memory, more than {SMEM_BYTES}"
    arrays, seen, shares = 1 if v is None else 2, window and window + queries - 1, _shares(q.shape[2], scales)
    q = jax.ShapeDtypeStruct(_part(q.shape, 2, shares), q.dtype)
    blocks = blocks or default_blocks(q.shape, _part(k.shape[-3:], 0, shares), arrays, dtype.itemsize, columns, seen)
    if blocks.block % (unit := _unit(slots, columns, window, scales)):
        return f"blocks of {blocks.block} positions do not divide into units of {unit}"
    need = _vmem_bytes(q, k, arrays, scales, new, blocks)
    if need > VMEM_BYTES:
        return f"{k.shape[-3]} KV heads of size {k.shape[-1]} need {need} of {VMEM_BYTES} bytes of on-chip memory"
    return None


def _vmem_bytes(q: Shaped, k: Shaped, arrays: int, scales: bool, new: bool, blocks: Blocks) -> int:
    _, queries, heads, group, size = q.shape
    buffers = blocks.buffers + (scales and new)
    size, rows = pl.cdiv(size, LANES) * LANES, pl.cdiv(queries * group, SUBLANES) * SUBLANES
    position = arrays * size * k.dtype.itemsize + (2 * 4 if scales else 0)
    state = heads * rows * (4 * (size + 4 * LANES) + (RESULTS + buffers) * 4 * size + 2 * 4 * blocks.part)
    need = buffers * heads * blocks.block * position + state + 3 * rows * blocks.part * 4
    if new:
        tiles = arrays * tiles_of(queries, tile := tile_of(5, k.dtype)) * tile * size * k.dtype.itemsize
        need += buffers * heads * (tiles + 4 * size * arrays * queries + (8 * 2 * LANES * 4 if scales else 0))
    return need


def decode_attention(
    q: jax.Array,
    cache: KvCache,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    new: NewCells | None = None,
    mask: jax.Array | None = None,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, ...]:
    """Attend with q [B, C, K, G, h]: row b's queries stand at the last C of its lengths[b] positions.

    The cache has all of a row's positions but those of `new`; `cache.limit` is not read. A ring has at least
    window + C - 1 slots. lengths [B] int32; 0 marks an inactive row (out 0, lse -inf). new: cells of the last C
    positions, [B, C, K, h] for each array of cells, which the kernel writes in place. mask [B, C, C] bool: which of the
    new tokens, up to its own, a query sees. blocks: sizes, by default those of `default_blocks`. Only live pages are
    read.
    Returns out [B, C, K, G, h] in q's dtype, without the numbers before `options.key_size`, and the log of the
    softmax's denominator, lse [B, C, K, G] float32; with `new` also the cache's arrays, in the buffers of those
    passed in.
    Raises ValueError with the reason of `unsupported`, and for a ring without a window.
    """
    window = options.shared_window
    if reason := unsupported(q, cache, window=window, mask=mask is not None, new=new is not None, blocks=blocks):
        raise ValueError(f"the TPU kernel does not run this decode attention: {reason}")
    if cache.ring and window is None:
        raise ValueError("a ring cache forgets old positions: pass the layer's window")
    call = Call(q.shape, cache, options, writes=new is not None, interpret=interpret)
    return call.run(kernel_of(call, blocks), q, lengths, new, mask)


def kernel_of(call: Call, blocks: Blocks | None = None) -> Kernel:
    """The kernel of a call: several rows at a time if they are short and blocks are not given."""
    together = rows_kernel(call) if blocks is None else None
    return together or _stream_kernel(call, blocks)


def _stream_kernel(call: Call, blocks: Blocks | None) -> Kernel:
    """The kernel that runs row by row."""
    (_, queries, heads, group, _), cache = call.shape, call.cache
    shares = _shares(heads, cache.scaled)
    shape, cells = _part(call.shape, 2, shares), _part(cache.k.shape[-3:], 0, shares)
    blocks = blocks or default_blocks(shape, cells, call.arrays, cache.k.dtype.itemsize, cache.columns, call.seen)
    unit = _unit(call.slots, cache.columns, call.seen, cache.scaled)
    place = Pages(call.slots, cache.columns, cache.ring, call.seen, unit, blocks.block)
    softcap = call.options.softcap
    body = functools.partial(
        _kernel,
        place=place,
        part=blocks.part,
        arrays=call.arrays,
        key_lanes=call.key_lanes,
        scaled=cache.scaled,
        writes=call.writes,
        shares=shares,
        queries=queries,
        group=group,
        scale=call.options.scale * LOG2E,
        window=call.options.shared_window,
        softcap=softcap and softcap * LOG2E,
    )
    return Kernel(
        body,
        place,
        functools.partial(_scratch, call=call, blocks=blocks, shares=shares),
        shares=shares,
    )


class _Scratch(NamedTuple):
    """q, cache: the copies in each buffer. products [2, K, R, P]: queries times keys of this part and of the next one.
    top, sum [K, R, 128]: the running maximum and sum, equal in all lanes. acc [K, R, h]: the accumulator. results: of
    `RESULTS` rows. counts: units in each buffer. state: the stream's state, then the index of this part's products.
    following: for each row, the next row that is not empty. The fields from `staged` on belong to a `CellWriter`."""

    q: Any
    cache: tuple
    products: Any
    top: Any
    sum: Any
    acc: Any
    results: tuple
    result_semaphores: Any
    counts: Any
    state: Any
    following: Any
    semaphores: Any
    staged: tuple = ()
    owners: Any = None
    pending: Any = None
    write_semaphores: Any = None


def _scratch(
    q: Shaped,
    cache: Sequence[Shaped],
    *,
    call: Call,
    blocks: Blocks,
    shares: int,
):
    """The kernel's scratch for inputs q and cache, of which a core takes a share of the heads."""
    _, queries, _, group, _ = call.shape
    width, writes = queries * group, call.writes
    q = jax.ShapeDtypeStruct(_part(q.shape, 1, shares), q.dtype)
    cache = [jax.ShapeDtypeStruct(_part(x.shape, 2, shares), x.dtype) for x in cache]
    rows, heads, _, size = q.shape
    scaled = cache[-1].ndim < cache[0].ndim
    buffers = blocks.buffers + (scaled and writes)
    scratch = _Scratch(
        q=pltpu.VMEM((buffers, *q.shape[1:]), q.dtype),
        cache=tuple(pltpu.VMEM((buffers, heads, blocks.block, *x.shape[4:]), x.dtype) for x in cache),
        products=pltpu.VMEM((2, heads, width, blocks.part), jnp.float32),
        top=pltpu.VMEM((heads, width, LANES), jnp.float32),
        sum=pltpu.VMEM((heads, width, LANES), jnp.float32),
        acc=pltpu.VMEM((heads, width, size), jnp.float32),
        results=(
            pltpu.VMEM((RESULTS, heads, width, call.result_size), q.dtype),
            pltpu.VMEM((RESULTS, heads, LANES), jnp.float32),
        ),
        result_semaphores=pltpu.SemaphoreType.DMA((2, RESULTS)),
        counts=pltpu.SMEM((buffers,), jnp.int32),
        state=pltpu.SMEM((SCALARS + 1,), jnp.int32),
        following=pltpu.SMEM((rows + 1,), jnp.int32),
        semaphores=pltpu.SemaphoreType.DMA((1 + len(cache), buffers)),
    )
    if not writes:
        return scratch
    owners = (pltpu.SMEM((buffers,), jnp.int32),) * 2
    return scratch._replace(owners=owners, **writer_scratch(cache, buffers, queries))


def _of_core(inputs: Inputs, outputs: Outputs, core: jax.Array, heads: int) -> tuple[Inputs, Outputs]:
    """What a core reads and writes: its share of `heads` KV heads."""
    share = pl.ds(core * heads, heads)
    caches = [tuple(x.at[:, :, share] for x in part.cache) for part in (inputs, outputs)]
    return (
        inputs._replace(q=inputs.q.at[:, share], cache=caches[0]),
        Outputs(outputs.out.at[:, share], outputs.lse.at[:, core], caches[1]),
    )


def _kernel(
    scalars: Scalars,
    inputs: Inputs,
    outputs: Outputs,
    scratch: _Scratch,
    *,
    place,
    part,
    arrays,
    key_lanes,
    scaled,
    writes,
    shares,
    queries,
    group,
    scale,
    window,
    softcap,
):
    """One row. Logits are in units of log 2, as exponentials are taken with base 2."""
    if shares > 1:
        inputs, outputs = _of_core(inputs, outputs, pl.program_id(0), scratch.acc.shape[0])
    in_hbm = outputs.cache if writes else inputs.cache  # the same memory
    sinks_ref, mask_ref, q_buf, counts, state = inputs.sinks, inputs.mask, scratch.q, scratch.counts, scratch.state
    products_ref, top_ref, sum_ref, acc_ref = scratch.products, scratch.top, scratch.sum, scratch.acc
    k_buf, v_buf, scales = scratch.cache[0], scratch.cache[arrays - 1], scratch.cache[arrays:]
    results = RowResults((outputs.out, outputs.lse), scratch.results, scratch.result_semaphores)
    stream = BlockStream(
        place,
        *scalars[:4],
        inputs.q,
        in_hbm,
        q_buf,
        scratch.cache,
        counts,
        state,
        scratch.following,
        scratch.semaphores,
        scratch.owners,
    )
    writer = CellWriter(
        stream,
        queries,
        queries * group,
        scaled,
        scalars.written,
        scratch.staged,
        scratch.write_semaphores,
        scratch.pending,
    )
    (heads, width, size), buffers = acc_ref.shape, counts.shape[0]
    # Blocks behind this one that have arrived: cells of the second are quantised while products are made.
    ahead = 2 if writes and scaled else 1
    exact = lax.Precision.HIGHEST if q_buf.dtype == jnp.float32 else None
    row, rows = pl.program_id(int(shares > 1)), stream.rows
    length = stream.length(row)
    dead = [length == 0] * heads

    whole = part == place.block and place.most == 1  # a row is one part
    most = AHEAD // k_buf.dtype.itemsize
    tasks = [(head, at, min(part - at, most)) for head in range(heads) for at in range(0, part, most)]
    early = max(most // part, 1)  # of them, while this part's maxima are found

    def operand(x):
        """The matrix unit takes fp8 beside bfloat16."""
        return x if q_buf.dtype == jnp.bfloat16 and x.dtype == jnp.float8_e4m3fn else x.astype(q_buf.dtype)

    def multiply(tasks, buf, offset, into):
        """Products of queries and keys of a part of a buffer, for some of `tasks`."""
        for head, at, count in tasks:
            q = q_buf[buf, head, :width, :key_lanes]
            keys = operand(k_buf[buf, head, pl.ds(offset + at, count), :key_lanes])
            s = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), exact, preferred_element_type=jnp.float32)
            products_ref[into, head, :, pl.ds(at, count)] = s

    def later(buf, count):
        return jnp.where(buf >= buffers - count, buf + count - buffers, buf + count)

    def arrive(buf):
        stream.wait(buf)
        if writes:
            writer.wait(buf)
        if writes and ahead == 1:
            put(buf)

    def write(buf, at):
        writer.sent(buf, writer.put(buf, 0, q_buf.at[buf], [copies.at[buf] for copies in scratch.cache], at))

    def put(buf):
        at = writer.of_buffer(buf)
        pl.when(at.there)(lambda: write(buf, at))

    @pl.when(row == 0)
    def _():
        stream.begin()
        if writes:
            writer.begin()
        for buf in range(ahead):
            arrive(buf)
            if ahead > 1:
                put(buf)
        multiply(tasks, 0, 0, 0)
        state[SCALARS] = 0

    def initial(head):
        """Maximum, sum and accumulator of a row of which nothing is taken in."""
        top = jnp.full((width, LANES), MASKED) if sinks_ref is None else sinks_ref[head]
        return top, jnp.full((width, LANES), 0.0 if sinks_ref is None else 1.0), jnp.zeros((width, size))

    # [R, 1] position of each query; of all, if there is one to a row.
    query = length - queries
    if queries > 1:
        query = query + lax.div(lax.broadcasted_iota(jnp.int32, (width, 1), 0), group)
    first = 0 if window is None else length - queries + 1 - window  # that any query sees

    def seen_from(start):
        """[R, P] or [1, P]: which positions of a part each query sees."""
        position = start + lax.broadcasted_iota(jnp.int32, (1 if queries == 1 else width, part), 1)
        seen = position <= query
        if window is not None:
            seen &= position > query - window
        if mask_ref is not None:
            new = position - (length - queries)
            bit = lax.shift_right_logical(wide(mask_ref[0], part), jnp.clip(new, 0, MOST_MASKED - 1)) & 1
            seen &= (new < 0) | (bit == 1)
        return seen

    def take_in(buf, offset, start, this, next_buf, next_offset):
        """Take in the part of a buffer that begins with position `start`, while the next part's products are made."""
        seen = seen_from(start)

        def scaled_by(x, n, head):
            return x * scales[n][buf, pl.ds(head, 1), pl.ds(offset, part)] if scaled else x

        def logits_of(head):
            s = scaled_by(products_ref[this, head] * (scale if softcap is None else scale / softcap), 0, head)
            return jnp.where(seen, s if softcap is None else softcap * jnp.tanh(s), MASKED)

        taken, ps = [], []
        for head in range(heads):
            s = logits_of(head)
            old, total, acc = initial(head) if whole else (top_ref[head], sum_ref[head], acc_ref[head])
            top = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
            p, decay = jnp.exp2(s - wide(top, part)), jnp.exp2(old - top)
            total = total * decay + jnp.sum(folded(p), axis=1, keepdims=True)
            taken.append((top, total, acc * wide(decay, size)))
            ps.append(jnp.where(seen, scaled_by(p, 1, head), 0.0) if scaled else p)
        # The matrix unit has work while the maxima are taken, and again while the last products with values arrive.
        multiply(tasks[:early], next_buf, next_offset, 1 - this)
        for head in range(heads):
            values = operand(v_buf[buf, head, pl.ds(offset, part)])
            product = jnp.dot(ps[head].astype(q_buf.dtype), values, precision=exact, preferred_element_type=jnp.float32)
            top, total, acc = taken[head]
            taken[head] = top, total, acc + product
        multiply(tasks[early:], next_buf, next_offset, 1 - this)
        if whole:
            results.put(row, taken, dead)
        else:
            for head in range(heads):
                top_ref[head], sum_ref[head], acc_ref[head] = taken[head]

    def take_block(index, buf):
        behind = later(buf, 1)
        begin = place.first(length) + index * place.block
        parts = div(jnp.minimum(length - begin, place.block) + part - 1, part) if part < place.block else 1

        def take_part(i, this):
            start, ends = begin + i * part, i + 1 == parts
            pl.when(ends)(lambda: arrive(later(buf, ahead)))
            offset = pl.multiple_of(i * part, part)
            if v_buf.dtype != jnp.int8:  # which is never NaN
                values, unseen = v_buf.at[buf, :, pl.ds(offset, part)], None if window is None else first - start
                clean = functools.partial(zero_outside, values, unseen, length - start, place.unit)
                # With a window, a part is hardly ever seen as a whole.
                clean() if window is not None else pl.when(start + part > length)(clean)
            next_offset = pl.multiple_of(jnp.where(ends, 0, offset + part), part)
            take_in(buf, offset, start, this, jnp.where(ends, behind, buf), next_offset)
            if part == place.block:
                if ahead > 1:
                    write(later(buf, ahead), writer.of_buffer(later(buf, ahead)))
                stream.start_next(buf)
            if whole:
                results.send(row)
            return 1 - this

        if part == place.block:
            state[SCALARS] = take_part(0, state[SCALARS])
        else:
            state[SCALARS] = lax.fori_loop(0, parts, take_part, state[SCALARS])
            if ahead > 1:
                put(later(buf, ahead))
            stream.start_next(buf)
        return behind

    if whole:

        @pl.when(length > 0)
        def _():
            results.make_room(row)
            state[2] = take_block(0, state[2])

        @pl.when(length == 0)
        def _():
            results.make_room(row)
            results.put(row, [initial(head) for head in range(heads)], dead)
            results.send(row)
    else:
        for head in range(heads):
            top_ref[head], sum_ref[head], acc_ref[head] = initial(head)
        state[2] = lax.fori_loop(0, stream.blocks(length), take_block, state[2])
        results.make_room(row)
        results.put(row, [(top_ref[head], sum_ref[head], acc_ref[head]) for head in range(heads)], dead)
        results.send(row)

    def end():
        stream.end(ahead)
        if writes:
            writer.end()
        results.end(rows)

    seldom(row == rows - 1, end)
