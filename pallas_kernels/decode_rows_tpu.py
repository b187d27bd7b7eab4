"""Decode attention on TPUs over short rows: several rows in one straight line of code.

A short row's chain of products, maximum, exponentials and sums takes hundreds of cycles, of which few are work. Here a
grid step has the chains of some rows side by side, without a branch, and the compiler fills the gaps of one with the
others. Copies are started without a branch too, one for each page of a row, as long as what is live of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import LANES, LOG2E, MASKED, folded, seldom, wide
from inferlib.pallas_kernels.block_stream_tpu import Pages, span
from inferlib.pallas_kernels.cell_write_tpu import CellWriter, tile_of, tiles_of, writer_scratch
from inferlib.pallas_kernels.decode_call_tpu import MOST_MASKED, Call, Inputs, Kernel, Outputs, Scalars
from inferlib.pallas_kernels.row_results_tpu import RowResults
from inferlib.pallas_kernels.row_stream_tpu import RowStream

# Chosen by `benchmarks/kernels.py` on v5e, v6e and v7x.
POSITIONS = 8192  # of all rows and heads of a step, times tiles of queries
TOGETHER = (16, 8, 4)  # two rows leave more gaps than the other kernel, which makes the next row's logits early
PLACES = 4  # groups of rows on chip, a power of two
MOST_PAGES = 8  # of a row: the copies of each are started in line
RESULTS = 4  # groups whose results are being copied to memory
VMEM_BYTES = 14 << 20
SUBLANES = 8


def rows_kernel(call: Call) -> Kernel | None:
    """The kernel of a call, or None if fewer than four rows fit a step."""
    rows, queries, heads, group, _ = call.shape
    cache = call.cache
    tile = LANES if cache.scaled else tile_of(5, cache.k.dtype)
    capacity = call.slots * (cache.columns or 1)
    block = capacity if call.seen is None else span(call.seen, tile)
    pages = Pages(call.slots, cache.columns, cache.ring, call.seen, tile, min(block, capacity + tile * cache.ring))
    if cache.columns is not None and pl.cdiv(pages.block, call.slots) > MOST_PAGES:
        return None
    work = heads * pages.block * pl.cdiv(queries * group, SUBLANES)
    for together in TOGETHER:
        fits = together * work <= POSITIONS
        if rows % together == 0 and fits and together * _row_bytes(call, pages.block) <= VMEM_BYTES:
            scratch = functools.partial(_scratch, call=call, pages=pages, together=together)
            body = functools.partial(_kernel, call=call, pages=pages, together=together)
            return Kernel(body, pages, scratch, together)
    return None


def _row_bytes(call: Call, block: int) -> int:
    """On-chip memory of the copies and the results of a row."""
    (_, queries, heads, group, size), cache = call.shape, call.cache
    size, width = pl.cdiv(size, LANES) * LANES, pl.cdiv(queries * group, SUBLANES) * SUBLANES
    cells = call.arrays * cache.k.dtype.itemsize * size
    need = block * cells + (2 * 4 * block if cache.scaled else 0) + 4 * size * (width + queries * call.arrays)
    if call.writes:
        tile = tile_of(5, cache.k.dtype)
        need += tiles_of(queries, tile) * tile * cells + (2 * 4 * 2 * LANES if cache.scaled else 0)
    return heads * (PLACES * need + RESULTS * 4 * width * (size + LANES))


class _Scratch(NamedTuple):
    """q, cache, sums, semaphores: see `RowStream`. results: of `RESULTS` groups. The fields from `staged` on belong to
    a `CellWriter`."""

    q: Any
    cache: tuple
    results: tuple
    result_semaphores: Any
    sums: Any
    semaphores: Any
    staged: tuple = ()
    pending: Any = None
    write_semaphores: Any = None


def _scratch(q: jax.Array, cache: Sequence[jax.Array], *, call: Call, pages: Pages, together: int) -> _Scratch:
    _, queries, heads, group, size = call.shape
    width, buffers = queries * group, PLACES * together
    scratch = _Scratch(
        q=pltpu.VMEM((buffers, *q.shape[1:]), q.dtype),
        cache=tuple((pltpu.VMEM((together, heads, pages.block, *x.shape[4:]), x.dtype),) * PLACES for x in cache),
        results=(
            pltpu.VMEM((RESULTS, together * heads, width, size), q.dtype),
            pltpu.VMEM((RESULTS, together * heads, LANES), jnp.float32),
        ),
        result_semaphores=pltpu.SemaphoreType.DMA((2, RESULTS)),
        sums=pltpu.SMEM((PLACES,), jnp.int32),
        semaphores=pltpu.SemaphoreType.DMA((1 + len(cache), PLACES)),
    )
    return scratch._replace(**writer_scratch(cache, buffers, queries, together)) if call.writes else scratch


def _kernel(
    scalars: Scalars,
    inputs: Inputs,
    outputs: Outputs,
    scratch: _Scratch,
    *,
    call: Call,
    pages: Pages,
    together: int,
):
    """One group of rows."""
    stream = RowStream(
        pages,
        together,
        *scalars[:4],
        inputs.q,
        outputs.cache if call.writes else inputs.cache,  # the same memory
        scratch.q,
        scratch.cache,
        scratch.sums,
        scratch.semaphores,
        in_tiles=call.interpret is True,
    )
    writer = _writer(call, scalars, stream, scratch)
    results = RowResults((outputs.out, outputs.lse), scratch.results, scratch.result_semaphores)
    group, heads = pl.program_id(0), call.shape[2]

    @pl.when(group == 0)
    def _():
        stream.begin()
        if call.writes:
            writer.begin()

    place, following = stream.place(group), group + stream.ahead
    stream.wait(group)
    if call.writes:
        writer.wait(place)
    results.make_room(group)
    rows = [_Row(call, pages, inputs, scratch, stream, group, number) for number in range(together)]
    each = [(row, head) for row in rows for head in range(heads)]
    logits, taken = [], []
    sent: Any = 0
    positions: Any = 0
    for row in rows:  # a row's products start while the scalar unit computes where the next row's cells go
        if call.writes:
            sent += writer.put(place, row.number, row.blocks, writer.of_row(row.row))
        logits += [row.logits(head) for head in range(heads)]
    tops = [row.top(head, s) for (row, head), s in zip(each, logits, strict=True)]
    for (row, head), s, top in zip(each, logits, tops, strict=True):
        taken.append(row.take(head, s, top))
        if head == heads - 1:  # the row's cells have been read, and the copies of later ones may follow
            positions += stream.start_row(following, row.number)
    if call.writes:
        writer.sent(place, sent)
    results.put(group, taken, [row.live == 0 for row, _ in each])
    stream.end_start(following, positions)
    results.send(group)

    def end():
        if call.writes:
            writer.end()
        results.end(stream.groups)

    seldom(group == stream.groups - 1, end)


def _writer(call: Call, scalars: Scalars, stream: RowStream, scratch: _Scratch) -> CellWriter:
    (_, queries, _, group, _), scaled = call.shape, call.cache.scaled
    copies = scratch.staged, scratch.write_semaphores, scratch.pending
    return CellWriter(stream, queries, queries * group, scaled, scalars.written, *copies)


class _Row:
    """A row in a buffer, the `number`-th of its group. Logits are in units of log 2, as exponentials have base 2."""

    def __init__(
        self, call: Call, pages: Pages, inputs: Inputs, scratch: _Scratch, stream: RowStream, group: Any, number: int
    ):
        self.call, self.pages, self.number, place = call, pages, number, stream.place(group)
        self.row = group * stream.together + number
        self.live = stream.live[self.row]
        self.q, self.buffer = scratch.q, place * stream.together + number
        self.blocks = [stream.block(n, place, number) for n in range(len(scratch.cache))]
        self.cells, self.scales, self.sinks = self.blocks[: call.arrays], self.blocks[call.arrays :], inputs.sinks
        _, queries, _, group, _ = call.shape
        self.width, self.exact = queries * group, lax.Precision.HIGHEST if self.q.dtype == jnp.float32 else None
        query: Any = self.live - queries
        if queries > 1:
            query += lax.div(lax.broadcasted_iota(jnp.int32, (self.width, 1), 0), group)
        shape = (1 if queries == 1 else self.width, pages.block)
        position = lax.broadcasted_iota(jnp.int32, shape, 1)
        self.seen = position <= query
        if (window := call.options.shared_window) is not None:
            self.seen &= position > query - window
        if inputs.mask is not None:
            bits, new = wide(inputs.mask[number], pages.block), position - (self.live - queries)
            bit = lax.shift_right_logical(bits, jnp.clip(new, 0, MOST_MASKED - 1)) & 1
            self.seen &= (new < 0) | (bit == 1)

    def logits(self, head: int) -> jax.Array:
        """[R, T], masked."""
        softcap, scale = self.call.options.softcap, self.call.options.scale * LOG2E
        q = self.q[self.buffer, head, : self.width, : self.call.key_lanes]
        keys = self._operand(self.cells[0][head, :, : self.call.key_lanes])
        s = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), self.exact, preferred_element_type=jnp.float32)
        s = s * (scale if softcap is None else scale / (softcap * LOG2E))
        s = self._scaled(s, 0, head)
        return jnp.where(self.seen, s if softcap is None else softcap * LOG2E * jnp.tanh(s), MASKED)

    def top(self, head: int, logits: jax.Array) -> jax.Array:
        """The maximum of each query's logits [R, 128], lanes alike."""
        top = jnp.max(logits, axis=1, keepdims=True)
        return jnp.maximum(top, jnp.full((self.width, LANES), MASKED) if self.sinks is None else self.sinks[head])

    def take(self, head: int, logits: jax.Array, top: jax.Array) -> tuple[jax.Array, ...]:
        """Maximum, sum [R, 128] and accumulator [R, h]."""
        p = jnp.exp2(logits - wide(top, self.pages.block))
        total = jnp.broadcast_to(jnp.sum(folded(p), axis=1, keepdims=True), top.shape)
        if self.sinks is not None:
            total = total + jnp.exp2(self.sinks[head] - top)
        if self.scales:
            p = jnp.where(self.seen, self._scaled(p, 1, head), 0.0)
        values = self.cells[-1][head]
        if values.dtype != jnp.int8:  # which is never NaN
            values = _zero_outside(values, self._first_seen, self.live, self.pages.unit)
        product = functools.partial(jnp.dot, precision=self.exact, preferred_element_type=jnp.float32)
        return top, total, product(p.astype(self.q.dtype), self._operand(values))

    @property
    def _first_seen(self) -> jax.Array | None:
        """Where in the block the first position is that any query sees; None: it is the block's first."""
        return None if self.call.seen is None else self.live - self.call.seen

    def _scaled(self, x: jax.Array, n: int, head: int) -> jax.Array:
        return x * self.scales[n][pl.ds(head, 1)] if self.scales else x

    def _operand(self, x: jax.Array) -> jax.Array:
        """The matrix unit takes fp8 beside bfloat16."""
        return x if self.q.dtype == jnp.bfloat16 and x.dtype == jnp.float8_e4m3fn else x.astype(self.q.dtype)


def _zero_outside(values: jax.Array, first: jax.Array | None, end: jax.Array, unit: int) -> jax.Array:
    """values [T, h] with zeros before position `first` and from `end` on, in words of 32 bits.

    `first` is None or less than `unit`, so that only so many positions are compared with it.
    """
    words = pltpu.bitcast(values, jnp.int32)
    packed = values.shape[0] // words.shape[0]
    words &= _fields(words.shape, packed, lambda position, n: position < end - n)
    if first is not None:
        head = words[: unit // packed]
        head &= _fields(head.shape, packed, lambda position, n: position >= first - n)
        words = jnp.concatenate([head, words[unit // packed :]]) if unit < values.shape[0] else head
    return pltpu.bitcast(words, values.dtype)


def _fields(shape: tuple[int, ...], packed: int, chosen: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """A mask of words, `packed` positions each: chosen(p, n) says of the word that begins at p if its n-th is in it."""
    position, bits = packed * lax.broadcasted_iota(jnp.int32, shape, 0), 32 // packed
    mask = jnp.zeros(shape, jnp.int32)
    for n in range(packed):
        field = ((1 << bits) - 1) << n * bits
        field = jnp.int32(field - (1 << 32) if field >> 31 else field)
        mask |= jnp.where(chosen(position, n), field, 0)
    return mask
