"""A step's attention: new cells are written, then chunks and decode rows attend to their rows' cache.

Positions of a row may be striped over several devices (see `inferlib.sharding.stripe`). Then each device attends to its
part of the cache, and the parts' results merge exactly by their log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepContext
from inferlib.models.layers.kv_cache import Chunks, LayerCache
from inferlib.ops.attention import merge_attention
from inferlib.ops.cache_write import folded_rows
from inferlib.ops.kv_cache import gather_pages
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.sharding.stripe import Stripe

Arrays: TypeAlias = tuple[jax.Array, ...]  # the arrays of a layer's cache, with one device's positions
Attended: TypeAlias = tuple[jax.Array, jax.Array]  # out [..., K, G, h] and log-sum-exps [..., K, G]


class ChunkPlaces(NamedTuple):
    """The rows [P] of chunks, and the rows' pages [R, M]; None: they are pages themselves."""

    rows: jax.Array
    table: jax.Array | None


@dataclass(frozen=True)
class StepPlan:
    """Who does what in a layer's step.

    stripe: this device's positions. rows_write: decode attention writes the cells of decode rows itself, where they
    lie. chunks_in_place: attention of chunks reads one layer of a stacked cache where it lies. Where only chunks are
    written: run, how many consecutive tokens go to one page together; chunk_writer, the implementation that writes
    whole chunks, None if cells are written one by one. sinks [K, G]: a logit that joins the denominator once the parts
    of striped positions are merged; None where the parts have it.
    """

    stripe: Stripe
    rows_write: bool
    chunks_in_place: bool
    run: int = 1
    chunk_writer: str | None = None
    sinks: jax.Array | None = None


class RowQueries(NamedTuple):
    """Queries of decode rows, of leading dimensions `shape`: [B], or [B, N] at the last positions of each row. lengths
    [B]: positions of a row on this device, up to the last query's. pages [B, M]: None: row b's cache is page b."""

    shape: tuple[int, ...]
    lengths: jax.Array
    pages: jax.Array | None

    @staticmethod
    def of(ctx: StepContext, stripe: Stripe, pages: jax.Array | None) -> RowQueries:
        """The queries of a step's rows.

        Each of several queries of a row sees another number of a stripe's positions, and these numbers do not ascend by
        one. So where positions are striped, each query is a row of its own, [B * N].
        """
        batch, (rows, count) = ctx.batch, ctx.batch.decode_tokens.shape
        if stripe.count > 1 and count > 1:
            pages = jnp.arange(rows, dtype=jnp.int32)[:, None] if pages is None else pages
            lengths = stripe.number(batch.decode_positions.reshape(-1)) + 1
            return RowQueries((rows * count,), lengths, jnp.repeat(pages, count, axis=0))
        return RowQueries((rows, count) if count > 1 else (rows,), stripe.number(batch.decode_lengths - 1) + 1, pages)


class LayerStep(Protocol):
    """One kind of attention's part of a step: its queries, and how they attend."""

    @property
    def ctx(self) -> StepContext: ...

    def chunks(self, cache: LayerCache, arrays: Arrays, places: ChunkPlaces, stripe: Stripe, which: slice) -> Attended:
        """Attention of `which` chunks to the positions of a stripe, which are in `arrays`: out [P, C, K, G, h] and
        log-sum-exps."""
        ...

    def rows(self, cache: LayerCache, new: Sequence[jax.Array] | None) -> tuple[Attended, LayerCache]:
        """Attention of decode rows to this device's positions, out [B * N, K, G, h] and log-sum-exps, and the cache.
        new: their cells [B * N, K, h], if they are to be written."""
        ...


def attend(
    step: LayerStep, plan: StepPlan, new: Sequence[jax.Array], cache: LayerCache
) -> tuple[jax.Array, LayerCache]:
    """Attention of all tokens [T, K, G, h], and the cache with their cells `new`, [T, K, h] each or none.

    Where the output projection's inputs are split over devices, this device's part of h. Rows that write their own
    cells do so before chunks read the cache, so that it is written in place.
    """
    ctx, rows = step.ctx, None
    new, cache = cache.latest(new, plan.run, plan.chunk_writer)
    split = math.prod(ctx.batch.chunk_tokens.shape)
    if new and plan.rows_write and split < ctx.tokens:
        cells, new = [x[split:] for x in cache.cells(new)], [x[:split] for x in new]
        cache = write_cells(new, cache, ctx, plan)
        rows, cache = step.rows(cache, cells)
        cache = summarised(cache, ctx)
    elif new:
        cache = summarised(write_cells(new, cache, ctx, plan), ctx)
    united, parts = [], []
    if split and ctx.shards.size(axes.TOKENS) > 1:
        united.append(_flat(_around_ring(step, cache, plan)))
    elif split:
        parts += [(_flat(out), _flat(lse)) for out, lse in attend_chunks(step, cache, plan)]
    if ctx.batch.decode_tokens.shape[0]:
        if rows is None:
            rows, cache = step.rows(cache, None)
        parts.append(rows)
    if parts:
        out, lse = (_joined(x) for x in zip(*parts, strict=True))
        united.append(_merged(out, lse, ctx.shards, plan.sinks) if ctx.shards.size(axes.POSITIONS) > 1 else out)
    return _joined(united), cache


def summarised(cache: LayerCache, ctx: StepContext) -> LayerCache:
    """The cache with the summaries of the blocks whose last cells the step wrote."""
    if cache.summaries is None or ctx.table is None:
        return cache
    batch, size = ctx.batch, cache.slots // cache.summaries.shape[-3]
    width, (rows, count) = batch.chunk_tokens.shape[1], batch.decode_tokens.shape
    most = (size - 1 + width) // size  # blocks that end in a chunk
    ends = (batch.chunk_starts[:, None] // size + 1 + jnp.arange(most, dtype=jnp.int32)) * size - 1
    ends = jnp.where(ends < (batch.chunk_starts + batch.chunk_lengths)[:, None], ends, -1)
    positions = batch.decode_positions
    ends = jnp.concatenate([ends.reshape(-1), jnp.where(positions % size == size - 1, positions, -1).reshape(-1)])
    of_rows = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), count)
    return cache.with_summaries(jnp.concatenate([jnp.repeat(batch.chunk_rows, most), of_rows]), ends, ctx.table)


def write_cells(new: Sequence[jax.Array], cache: LayerCache, ctx: StepContext, plan: StepPlan) -> LayerCache:
    """The cache with the cells of the step's first tokens, as many as `new` has."""
    if not new or not (count := new[0].shape[0]):
        return cache
    batch = ctx.batch
    only_chunks = count == math.prod(batch.chunk_tokens.shape)
    if only_chunks and plan.chunk_writer is not None:
        cells = [x.reshape(*batch.chunk_tokens.shape, *x.shape[1:]) for x in new]
        chunks = Chunks(batch.chunk_rows, batch.chunk_starts, batch.chunk_lengths)
        return cache.write_chunks(cells, chunks, ctx.table, ctx.run, plan.chunk_writer)
    run = plan.run if only_chunks else 1
    return cache.write(new, ctx.rows[:count], ctx.written[:count], plan.stripe, ctx.table, run)


def attend_chunks(step: LayerStep, cache: LayerCache, plan: StepPlan) -> list[Attended]:
    """Attention of chunks to this device's positions, together or chunk by chunk.

    From a stack of rings that is not read in place, each chunk reads its row in one slice: the rows of several would be
    copied to memory.
    """
    ctx, everyone = step.ctx, slice(None)
    stripe, rows = plan.stripe, ctx.batch.chunk_rows
    limit = limit_of(ctx, stripe)
    table = cache.table_of(ctx.table, limit)
    if plan.chunks_in_place or table is not None or cache.layer is None:
        return [step.chunks(cache, cache.arrays, ChunkPlaces(rows, table), stripe, everyone)]
    firsts = jnp.minimum(rows, cache.pages - 1)
    first = ChunkPlaces(jnp.zeros(1, jnp.int32), None)
    return [
        step.chunks(cache, cache.read(1, limit, firsts[i]), first, stripe, slice(i, i + 1))
        for i in range(rows.shape[0])
    ]


def limit_of(ctx: StepContext, stripe: Stripe) -> int | None:
    """The static limit of the step in positions of one device; no such position reaches it."""
    return ctx.limit and stripe.max_positions(ctx.limit)


def _around_ring(step: LayerStep, cache: LayerCache, plan: StepPlan) -> jax.Array:
    """Ring attention (Liu et al. 2023): queries are those of this device's tokens of the chunks; the devices' parts of
    the chunks' rows are passed from device to device. -> out [P, C, K, G, h]."""
    ctx, slots = step.ctx, cache.slots
    shards, limit = ctx.shards, limit_of(ctx, plan.stripe)
    if (table := cache.table_of(ctx.table, limit)) is not None:
        slots *= table.shape[1]
    if limit is not None and not cache.ring:
        slots = min(slots, limit)
    passing = tuple(
        x[:, :, : folded_rows(slots, fold)]
        for x, fold in zip(_cells_of_chunks(cache, ctx, slots), cache.folds, strict=True)
    )
    places = ChunkPlaces(jnp.arange(ctx.batch.chunk_rows.size), None)
    parts = []
    for passed in range(count := shards.size(axes.POSITIONS)):
        arrays = passing
        if passed < count - 1:  # asked for before the computation that hides it
            passing = tuple(shards.pass_on(x, axes.POSITIONS) for x in passing)
        stripe = shards.stripe(axes.POSITIONS, behind=passed)
        parts.append(step.chunks(cache, arrays, places, stripe, slice(None)))
    outs, lses = zip(*parts, strict=True)
    return merge_attention(jnp.stack(outs), jnp.stack(lses), sinks=plan.sinks)[0]


def _cells_of_chunks(cache: LayerCache, ctx: StepContext, slots: int) -> list[jax.Array]:
    """The cells of the chunks' rows in each of the cache's arrays, [P, K, S, ...] with at least `slots` positions."""
    rows = ctx.batch.chunk_rows
    if (table := cache.table_of(ctx.table, slots)) is not None:
        pages = table[jnp.minimum(rows, table.shape[0] - 1)]
        return [gather_pages(x, pages, cache.layer) for x in cache.arrays]
    rows = jnp.minimum(rows, cache.pages - 1)
    return [x[rows] for x in cache.read(cache.pages, slots)]


def _merged(out: jax.Array, lse: jax.Array, shards: Shards, sinks: jax.Array | None) -> jax.Array:
    """Attention of T tokens to all positions, from every device's part, out [T, K, G, h] and lse [T, K, G].

    Where the output projection's inputs are split over devices, each exchanges its parts for the others' of its part of
    h: [T, K, G, h / n]; else all get [T, K, G, h].
    """
    lses = shards.stack(lse, axes.POSITIONS)
    if shards.size(axes.HEAD_OUT) > 1:
        return merge_attention(shards.exchange(out, axes.HEAD_OUT), lses, sinks=sinks)[0]
    total = jax.nn.logsumexp(lses, axis=0)
    total = total if sinks is None else jnp.logaddexp(total, sinks.astype(jnp.float32))
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))
    return shards.sum((out * weight[..., None]).astype(out.dtype), axes.POSITIONS)


def _flat(x: jax.Array) -> jax.Array:
    """[P, C, ...] -> [P * C, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
