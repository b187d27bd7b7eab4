"""Decode attention on TPUs over short rows: several rows in one straight line of code.

A short row's chain of products, maximum, exponentials and sums takes hundreds of cycles, of which few are work. Here a
grid step has the chains of some rows side by side, without a branch, and the compiler fills the gaps of one with the
others. Copies are started without a branch too, one for each page of a row, as long as what is live of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import LANES, LOG2E, MASKED, folded, seldom, wide
from inferlib.pallas_kernels.block_stream_tpu import Pages, span
from inferlib.pallas_kernels.cell_write_tpu import CellWriter, fields, tile_of, tiles_of, until, writer_scratch
from inferlib.pallas_kernels.decode_call_tpu import MOST_MASKED, Call, Inputs, Kernel, Outputs, Scalars
from inferlib.pallas_kernels.generations_tpu import generation
from inferlib.pallas_kernels.row_results_tpu import RowResults
from inferlib.pallas_kernels.row_stream_tpu import RowStream

# Chosen by `benchmarks/kernels.py` on v5e, v6e and v7x.
POSITIONS = 8192  # of all rows and heads of a step, times tiles of queries
MOST_POSITIONS = {64: 9216}  # the same of so many rows: with windows of 128, rows have up to 144
TOGETHER = (16, 8, 4)  # two rows leave more gaps than the other kernel, which makes the next row's logits early
MANY = 16  # rows of a step that keep the matrix unit busy, so that two rows' products had better be one
MORE = {"v6e": (32,), "v7x": (64, 32)}  # taken together if they fit, as products take longer to arrive than elsewhere
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
    for together in (*MORE.get(generation() or "", ()), *TOGETHER):
        fits = together * work <= MOST_POSITIONS.get(together, POSITIONS)
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
    _, queries, heads, group, _ = call.shape
    width, buffers = queries * group, PLACES * together
    scratch = _Scratch(
        cache=tuple((pltpu.VMEM((together, heads, pages.block, *x.shape[4:]), x.dtype),) * PLACES for x in cache),
        results=(
            pltpu.VMEM((RESULTS, together * heads, width, call.result_size), q.dtype),
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
        scalars.traits,
        outputs.cache if call.writes else inputs.cache,  # the same memory
        scratch.cache,
        scratch.sums,
        scratch.semaphores,
        in_tiles=call.interpret is True,
    )
    beside, more = 2 if together >= MANY else 1, stream.groups > stream.ahead  # than are started at first
    clean = _trimmed(call, pages, beside)
    writer = _writer(call, scalars, stream, scratch, clean)
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
    sides = [_Side(call, pages, inputs, stream, group, range(n, n + beside)) for n in range(0, together, beside)]
    each = [(side, head) for side in sides for head in range(heads)]
    if not call.writes:  # or the writer does it
        for block, at, tile in [end for side in sides for end in side.trimmed(clean)]:
            block[at] = tile
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
    dead = [live == 0 for side in sides for live in side.live for _ in range(heads)]
    results.put(group, [taken[at] for at in sorted(taken)], dead)
    if more:
        stream.started(following, positions)
    results.send(group)
    if call.writes:
        writer.sent(place, sent)
        writer.send(group, place)

    def end():
        if call.writes:
            writer.end()
        results.end(stream.groups)

    seldom(group == stream.groups - 1, end)


def _trimmed(call: Call, pages: Pages, beside: int) -> Sequence[int]:
    """The arrays of cells in whose blocks zeros follow a row's last position in its tile.

    Products of values, and of keys side by side, meet what no query sees as zeros, and zero times NaN is not zero. int8
    is never NaN. Where cells take the places of others, their words of 32 bits hold no others.
    """
    behind = pages.size < pages.block
    if call.cache.k.dtype == jnp.int8 and not behind:
        return ()
    return range(0 if beside > 1 or behind else call.arrays - 1, call.arrays)


def _writer(call: Call, scalars: Scalars, stream: RowStream, scratch: _Scratch, clean: Sequence[int]) -> CellWriter:
    (_, queries, _, group, _), scaled = call.shape, call.cache.scaled
    copies, later = (scratch.staged, scratch.write_semaphores, scratch.pending), stream.together > MANY
    return CellWriter(stream, queries, queries * group, scaled, scalars.written, *copies, clean, later)


class _Side:
    """Rows in buffers, of these numbers in their group, whose products are made together.

    The cells of n rows lie side by side in the matrix unit, and their queries below one another, n * R. Logits are in
    units of log 2, as exponentials have base 2. Within a window a row has W = `pages.size` positions here: those behind
    take the places of as many first ones, which have left the window.
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
        self.seen = self._seen([] if inputs.mask is None else [inputs.mask[n] for n in numbers])

    def _seen(self, masks: Sequence[jax.Array]) -> jax.Array:
        """Which positions the queries see, [n * R, W] or, if those of one row see the same, [1, W]."""
        (_, queries, _, group, _), pages, count = self.call.shape, self.pages, len(self.rows)
        shape = 1 if queries == count == 1 else count * self.width, pages.size
        live = wide(self._stacked([jnp.full((1, LANES), x) for x in self.live]), pages.size)
        position = lax.broadcasted_iota(jnp.int32, shape, 1)
        if queries == 1 and self.call.seen == pages.size:  # only of a row that is shorter are there places without any
            return position < live
        query = live - queries
        if queries > 1:
            number = lax.div(lax.broadcasted_iota(jnp.int32, (self.width, LANES), 0), group)
            query += wide(self._stacked([number] * count), pages.size)
        if pages.size < pages.block:
            position += jnp.where(position < live - pages.size, pages.size, 0)
        seen = position <= query
        if (window := self.call.options.shared_window) is not None:
            seen &= position > query - window
        if masks:
            bits, new = wide(self._stacked(masks), pages.size), position - (live - queries)
            bit = lax.shift_right_logical(bits, jnp.clip(new, 0, MOST_MASKED - 1)) & 1
            seen &= (new < 0) | (bit == 1)
        return seen

    def _stacked(self, each: Sequence[jax.Array]) -> jax.Array:
        """[R, n] or [1, n] of each row, below one another."""
        if len(each) == 1:
            return each[0]
        return jnp.concatenate([jnp.broadcast_to(x, (self.width, x.shape[1])) for x in each], axis=0)

    def trimmed(self, clean: Sequence[int]) -> Iterator[tuple[Any, Any, jax.Array]]:
        """Blocks, places there, and the tiles of the rows' last positions there with zeros behind these."""
        tile = tile_of(5, self.call.cache.k.dtype)
        for live, blocks in zip(self.live, self.blocks, strict=True):
            start = pl.multiple_of(jnp.maximum(live - 1, 0) & -tile, tile)
            for block in [blocks[n] for n in clean]:
                for at in [(head, pl.ds(start, tile)) for head in range(block.shape[0])]:
                    yield block, at, until(block[at], live - 1 - start)

    def logits(self, head: int) -> jax.Array:
        """[n * R, W], masked."""
        softcap, scale = self.call.options.softcap, self.call.options.scale * LOG2E
        lanes = slice(self.call.key_lanes)
        q = _diagonal([self.q[n, head, : self.width, lanes] for n in self.numbers])
        # A row's queries meet the keys beside its own as zeros.
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
        p = jnp.exp2(logits - wide(top, self.pages.size))
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
        """The n-th row's cells [W, h] in an array, for the matrix unit; clean: those that no query sees are zeros."""
        cells, live, pages = self.blocks[n][array][head, :, lanes], self.live[n], self.pages
        if clean and cells.dtype != jnp.int8:  # which is never NaN
            cells = _until(cells, live)
        if pages.seen is not None and (clean or pages.size < pages.block):
            cells = _within_window(cells, live, pages)
        return self._operand(cells)

    def _sinks(self, head: int) -> jax.Array:
        return self._stacked([self.sinks[head]] * len(self.rows))

    def _scaled(self, x: jax.Array, n: int, head: int) -> jax.Array:
        return x * self._stacked(self._scales(n, head)) if self.call.cache.scaled else x

    def _scales(self, n: int, head: int) -> list[jax.Array]:
        """The scales [1, W] of each row's keys (n = 0) or values."""
        each = [blocks[self.call.arrays + n][pl.ds(head, 1)] for blocks in self.blocks]
        size, unit = self.pages.size, self.pages.unit
        if size == self.pages.block:
            return each
        lane = lax.broadcasted_iota(jnp.int32, (1, unit), 1)
        starts = [jnp.where(lane < e - size, x[:, size:], x[:, :unit]) for x, e in zip(each, self.live, strict=True)]
        return [jnp.concatenate([start, x[:, unit:size]], 1) for start, x in zip(starts, each, strict=True)]

    def _operand(self, x: jax.Array) -> jax.Array:
        """The matrix unit takes fp8 beside bfloat16."""
        return x if self.q.dtype == jnp.bfloat16 and x.dtype == jnp.float8_e4m3fn else x.astype(self.q.dtype)


def _diagonal(parts: Sequence[jax.Array]) -> jax.Array:
    """Arrays [R, h] as blocks of [n * R, n * h], with zeros elsewhere."""
    zeros, places = jnp.zeros_like(parts[0]), range(len(parts))
    return jnp.concatenate([jnp.concatenate([x if n == m else zeros for m in places], 1) for n, x in enumerate(parts)])


def _until(cells: jax.Array, end: jax.Array) -> jax.Array:
    """cells [T, h] with zeros in the tiles behind that of the position before `end`, which has zeros behind it."""
    words = pltpu.bitcast(cells, jnp.int32)
    position = cells.shape[0] // words.shape[0] * lax.broadcasted_iota(jnp.int32, words.shape, 0)
    return pltpu.bitcast(jnp.where(position < end, words, 0), cells.dtype)


def _within_window(cells: jax.Array, end: jax.Array, pages: Pages) -> jax.Array:
    """cells [T, h] of a row that ends at `end`, as the W positions of a window: in place of the first ones, which have
    left it, are those behind W, or zeros."""
    words = pltpu.bitcast(cells, jnp.int32)
    packed = cells.shape[0] // words.shape[0]
    size, unit = pages.size // packed, pages.unit // packed
    words, behind = words[:size], words[size:]
    first = end - (pages.seen or 0)
    head = words[:unit] & fields((unit, words.shape[1]), packed, lambda position: position >= first)
    if behind.shape[0]:  # zeros follow the end in its tile
        position = packed * lax.broadcasted_iota(jnp.int32, behind.shape, 0)
        head |= jnp.where(position + pages.size < end, behind, 0)
    words = jnp.concatenate([head, words[unit:]]) if unit < size else head
    return pltpu.bitcast(words, cells.dtype)
