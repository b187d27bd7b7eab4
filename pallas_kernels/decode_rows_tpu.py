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
from inferlib.pallas_kernels.generations_tpu import generation
from inferlib.pallas_kernels.row_results_tpu import RowResults
from inferlib.pallas_kernels.row_stream_tpu import RowStream

# Chosen by `benchmarks/kernels.py` on v5e, v6e and v7x.
POSITIONS = 8192  # of all rows and heads of a step, times tiles of queries
TOGETHER = (16, 8, 4)  # two rows leave more gaps than the other kernel, which makes the next row's logits early
MANY = 16  # rows of a step that keep the matrix unit busy, so that two rows' products had better be one
MORE = ("v6e", "v7x")  # take 32 rows together if they fit, as products take longer to arrive than elsewhere
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
    for together in (32, *TOGETHER) if generation() in MORE else TOGETHER:
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
    """cache, sums, semaphores: see `RowStream`. results: of `RESULTS` groups. The fields from `staged` on belong to a
    `CellWriter`."""

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
        cache=tuple((pltpu.VMEM((together, heads, pages.block, *x.shape[4:]), x.dtype),) * PLACES for x in cache),
        results=(
            pltpu.VMEM((RESULTS, together * heads, width, size), q.dtype),
            pltpu.VMEM((RESULTS, together * heads, LANES), jnp.float32),
        ),
        result_semaphores=pltpu.SemaphoreType.DMA((2, RESULTS)),
        sums=pltpu.SMEM((PLACES,), jnp.int32),
        semaphores=pltpu.SemaphoreType.DMA((len(cache), PLACES)),
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
        scalars.alike,
        outputs.cache if call.writes else inputs.cache,  # the same memory
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
    beside, more = 2 if together >= MANY else 1, stream.groups > stream.ahead  # than are started at first
    sides = [_Side(call, pages, inputs, stream, group, range(n, n + beside)) for n in range(0, together, beside)]
    each = [(side, head) for side in sides for head in range(heads)]
    logits, taken = [], {}
    sent: Any = 0
    positions: Any = 0
    for side in sides:  # products start while the scalar unit computes where the next rows' cells go
        if call.writes:
            for row, number, blocks in zip(side.rows, side.numbers, side.blocks, strict=True):
                sent += writer.put(place, number, inputs.q.at[number], blocks, writer.of_row(row))
        logits += [side.logits(head) for head in range(heads)]
    tops = [side.top(head, s) for (side, head), s in zip(each, logits, strict=True)]
    for (side, head), s, top in zip(each, logits, tops, strict=True):
        for number, result in zip(side.numbers, side.take(head, s, top), strict=True):
            taken[number, head] = result
        if head == heads - 1 and more:  # the rows' cells have been read, and the copies of later ones may follow
            for number in side.numbers:
                positions += stream.start_row(following, number)
    if call.writes:
        writer.sent(place, sent)
    dead = [live == 0 for side in sides for live in side.live for _ in range(heads)]
    results.put(group, [taken[at] for at in sorted(taken)], dead)
    if more:
        stream.started(following, positions)
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


class _Side:
    """Rows in buffers, of these numbers in their group, whose products are made together.

    The cells of n rows lie side by side in the matrix unit, and their queries below one another, n * R. Logits are in
    units of log 2, as exponentials have base 2.
    """

    def __init__(
        self,
        call: Call,
        pages: Pages,
        inputs: Inputs,
        stream: RowStream,
        group: Any,
        numbers: Sequence[int],
    ):
        self.call, self.pages, self.numbers, place = call, pages, numbers, stream.place(group)
        self.rows = [group * stream.together + n for n in numbers]
        self.live = [stream.live[row] for row in self.rows]
        self.blocks = [[stream.block(x, place, n) for x in range(len(stream.arrays))] for n in numbers]
        self.q, self.sinks = inputs.q, inputs.sinks
        _, queries, _, group, _ = call.shape
        self.width, self.exact = queries * group, lax.Precision.HIGHEST if self.q.dtype == jnp.float32 else None
        masks = [None if inputs.mask is None else inputs.mask[n] for n in numbers]
        self.seen = self._stacked([self._seen(live, mask) for live, mask in zip(self.live, masks, strict=True)])

    def _seen(self, live: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Which positions the queries of a row see, [R, T] or, if all see the same, [1, T]."""
        _, queries, _, group, _ = self.call.shape
        query: Any = live - queries
        if queries > 1:
            query += lax.div(lax.broadcasted_iota(jnp.int32, (self.width, 1), 0), group)
        position = lax.broadcasted_iota(jnp.int32, (1 if queries == 1 else self.width, self.pages.block), 1)
        seen = position <= query
        if (window := self.call.options.shared_window) is not None:
            seen &= position > query - window
        if mask is not None:
            bits, new = wide(mask, self.pages.block), position - (live - queries)
            bit = lax.shift_right_logical(bits, jnp.clip(new, 0, MOST_MASKED - 1)) & 1
            seen &= (new < 0) | (bit == 1)
        return seen

    def _stacked(self, each: Sequence[jax.Array]) -> jax.Array:
        """[R, n] or [1, n] of each row, below one another."""
        if len(each) == 1:
            return each[0]
        if each[0].dtype == jnp.bool:
            return self._stacked([x.astype(jnp.int32) for x in each]) != 0
        return jnp.concatenate([jnp.broadcast_to(x, (self.width, x.shape[1])) for x in each], axis=0)

    def logits(self, head: int) -> jax.Array:
        """[n * R, T], masked."""
        softcap, scale = self.call.options.softcap, self.call.options.scale * LOG2E
        lanes = slice(self.call.key_lanes)
        q = _diagonal([self.q[n, head, : self.width, lanes] for n in self.numbers])
        # A row's queries meet the keys beside its own as zeros, and zero times NaN is not zero.
        clean = len(self.rows) > 1
        keys = jnp.concatenate([self._cells(n, 0, head, lanes, clean) for n in range(len(self.rows))], axis=1)
        s = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), self.exact, preferred_element_type=jnp.float32)
        s = s * (scale if softcap is None else scale / (softcap * LOG2E))
        s = self._scaled(s, 0, head)
        return jnp.where(self.seen, s if softcap is None else softcap * LOG2E * jnp.tanh(s), MASKED)

    def top(self, head: int, logits: jax.Array) -> jax.Array:
        """The maximum of each query's logits [n * R, 128], lanes alike."""
        top = jnp.max(logits, axis=1, keepdims=True)
        least = jnp.full((logits.shape[0], LANES), MASKED) if self.sinks is None else self._sinks(head)
        return jnp.maximum(top, least)

    def take(self, head: int, logits: jax.Array, top: jax.Array) -> list[tuple[jax.Array, ...]]:
        """The maximum, the sum [R, 128] and the accumulator [R, h] of each row."""
        p = jnp.exp2(logits - wide(top, self.pages.block))
        total = jnp.broadcast_to(jnp.sum(folded(p), axis=1, keepdims=True), top.shape)
        if self.sinks is not None:
            total = total + jnp.exp2(self._sinks(head) - top)
        if self.call.cache.scaled:
            p = jnp.where(self.seen, self._scaled(p, 1, head), 0.0)
        values = [self._cells(n, self.call.arrays - 1, head) for n in range(len(self.rows))]
        product = functools.partial(jnp.dot, precision=self.exact, preferred_element_type=jnp.float32)
        acc = product(p.astype(self.q.dtype), jnp.concatenate(values, axis=1))
        width, size = self.width, self.call.shape[-1]
        parts = [slice(n * width, (n + 1) * width) for n in range(len(values))]
        return [(top[at], total[at], acc[at, n * size : (n + 1) * size]) for n, at in enumerate(parts)]

    def _cells(self, n: int, array: int, head: int, lanes: slice = slice(None), clean: bool = True) -> jax.Array:
        """The n-th row's cells in an array, for the matrix unit; clean: those that no query sees are zeros."""
        cells, live = self.blocks[n][array][head, :, lanes], self.live[n]
        if clean and cells.dtype != jnp.int8:  # which is never NaN
            first = None if self.call.seen is None else live - self.call.seen
            cells = _zero_outside(cells, first, live, self.pages.unit)
        return self._operand(cells)

    def _sinks(self, head: int) -> jax.Array:
        return self._stacked([self.sinks[head]] * len(self.rows))

    def _scaled(self, x: jax.Array, n: int, head: int) -> jax.Array:
        if not self.call.cache.scaled:
            return x
        return x * self._stacked([blocks[self.call.arrays + n][pl.ds(head, 1)] for blocks in self.blocks])

    def _operand(self, x: jax.Array) -> jax.Array:
        """The matrix unit takes fp8 beside bfloat16."""
        return x if self.q.dtype == jnp.bfloat16 and x.dtype == jnp.float8_e4m3fn else x.astype(self.q.dtype)


def _diagonal(parts: Sequence[jax.Array]) -> jax.Array:
    """Arrays [R, h] as blocks of [n * R, n * h], with zeros elsewhere."""
    zeros, places = jnp.zeros_like(parts[0]), range(len(parts))
    return jnp.concatenate([jnp.concatenate([x if n == m else zeros for m in places], 1) for n, x in enumerate(parts)])


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
