"""Grouped-query attention over the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from inferlib.models.batch import StepContext
from inferlib.models.config import AttentionSpec, NormSpec, OutputGate, QueryTemperature
from inferlib.models.layers.joint_cells import joint_queries, outputs_of_heads
from inferlib.models.layers.kv_cache import LayerCache, widened
from inferlib.models.layers.norm import rms_norm, scale_norm
from inferlib.models.layers.param import param
from inferlib.models.layers.rope import apply_rope
from inferlib.models.layers.step_attention import (
    Arrays,
    Attended,
    ChunkPlaces,
    RowQueries,
    StepPlan,
    attend,
    limit_of,
)
from inferlib.models.layers.value_embedding import ValueEmbeddings
from inferlib.models.layout import HeadLayout
from inferlib.ops import (
    cache_write,
    cascade_attention,
    decode_attention,
    prefill_attention,
    project_and_attend,
    selected_pages,
    sparse_prefill,
)
from inferlib.ops.attention import AttentionOptions
from inferlib.ops.choice import Choice
from inferlib.ops.hadamard import rotated
from inferlib.ops.kv_cache import KvCache, NewCells
from inferlib.ops.matmul import Activations, as_array, choose, matmul_partials
from inferlib.ops.partial_sums import PartialSums
from inferlib.ops.project_and_attend import HeadTransforms, QkvPartials
from inferlib.ops.residual_norm import DeferredNorm
from inferlib.ops.selected_pages import Selector
from inferlib.ops.sparse_prefill import Listing, SparsePrefill
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.sharding.stripe import Stripe


def scale_by_temperature(q: jax.Array, temperature: QueryTemperature | None, ctx: StepContext) -> jax.Array:
    """Queries [T, ...] times the temperature at their positions."""
    if temperature is None:
        return q
    positions = jnp.maximum(ctx.positions, 0) + temperature.first
    factor = 1.0 + temperature.beta * jnp.log1p(positions // temperature.context)
    return (q * factor.reshape(-1, *(1,) * (q.ndim - 1))).astype(q.dtype)


class Attention(nnx.Module):
    """x [T, D] -> [T, D]: this device's part of the sum over heads, without `o_bias`.

    One matrix makes the G queries, the key and, if it has the key's size, the value of each KV head: one launch reads x
    once, and a split over KV heads keeps every group whole. K and G are as laid out (see `HeadLayout`). A layer that
    attends to another layer's cache makes only queries. inputs: the size of x, if it is another than D.
    """

    def __init__(
        self, spec: AttentionSpec, layout: HeadLayout, norm: NormSpec, dim: int, dtype, *, inputs: int | None = None
    ):
        self.spec, self.layout, self.norm = spec, layout, norm
        (h, value), k, g = spec.cache_sizes, layout.groups, layout.queries
        heads = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_DIM)
        slots = g + spec.fused_heads
        inputs = inputs or dim
        self.qkv = param((inputs, k, slots, h), (axes.EMBED, *heads), dtype, contracting=(0,))
        outputs = (axes.KV_HEADS, axes.QUERIES, axes.HEAD_OUT)
        self.o = param((k, g, value, dim), (*outputs, axes.EMBED), dtype, contracting=(0, 1, 2))
        if spec.separate_values:
            self.v = param((inputs, k, value), (axes.EMBED, axes.KV_HEADS, axes.HEAD_DIM), dtype, contracting=(0,))
        if spec.qkv_bias:
            self.qkv_bias = param((k, slots, h), heads, dtype, "zeros")
            if spec.separate_values:
                self.v_bias = param((k, value), (axes.KV_HEADS, axes.HEAD_DIM), dtype, "zeros")
        if spec.gate is not None:
            size, names, sums = ((), (), ()) if spec.gate.per_head else ((value,), (axes.HEAD_OUT,), (0,))
            names = (axes.EMBED, axes.KV_HEADS, axes.QUERIES, *names)
            self.gate = param((inputs, k, g, *size), names, dtype, contracting=sums)
        if spec.value_embedding is not None:
            self.value_embedding = ValueEmbeddings(spec.value_embedding, k, value, dtype)
        if spec.sinks:
            self.sinks = param((k, g), (axes.KV_HEADS, axes.QUERIES), dtype, "zeros")
        if spec.key_basis:
            shape = (k, h, spec.key_basis)
            self.key_basis = param(shape, (axes.KV_HEADS, axes.HEAD_DIM, None), dtype)
        if spec.key_turns:
            shape = (k, 2, h, h)
            self.key_turns = param(shape, (axes.KV_HEADS, None, axes.HEAD_DIM, None), jnp.float32)
        if spec.o_bias:
            self.o_bias = param((dim,), (axes.EMBED,), dtype, "zeros")
        neutral = "zeros" if norm.unit_offset else "ones"
        if spec.qk_norm == "head":
            self.q_norm = param((h,), (axes.HEAD_DIM,), dtype, neutral)
            if spec.cache_of is None:
                self.k_norm = param((h,), (axes.HEAD_DIM,), dtype, neutral)
        elif spec.qk_norm == "full":
            self.q_norm = param((k, g, h), heads, dtype, neutral)
            if spec.cache_of is None:
                self.k_norm = param((k, h), (axes.KV_HEADS, axes.HEAD_DIM), dtype, neutral)

    def __call__(
        self, x: Activations, ctx: StepContext, cache: LayerCache, *, partials: bool = False
    ) -> tuple[jax.Array | PartialSums, LayerCache]:
        """partials: return the output projection's partial sums."""
        product: Callable[..., Any] = matmul_partials if partials else ctx.matmul
        out, cache = self.attended(x, ctx, cache)
        return product(out, self.o[...], contract=3), cache

    def attended(self, x: Activations, ctx: StepContext, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """What the output projection takes, [T, K, G, h], and the cache."""
        cells = ctx.of_level(self.spec.cache_level)
        if self.fuses(cells, cache):
            out, cache = self.attend_fused(self.project_partially(x, ctx), cache, cells)
        else:
            q, new = self.project(x, ctx)
            out, cache = self.attend(q, new, cache, cells)
        if self.spec.gate is not None:
            out = self.gated(self.spec.gate, out, x, ctx)
        return out, cache

    def fuses(self, ctx: StepContext, cache: LayerCache) -> bool:
        """True if one kernel takes the step's decode rows from their projections on."""
        spec, unfit = self.spec, ""
        if math.prod(ctx.batch.chunk_tokens.shape) or ctx.shards.size(axes.POSITIONS) > 1:
            unfit = "prompt chunks or striped positions"
        elif ctx.prefixes is not None:
            unfit = "prefixes that rows share"
        elif cache.summaries is not None:
            unfit = "pages that its queries select"
        elif cache.mass is not None or cache.queries is not None:
            unfit = "attention by which cells stay"
        elif cache.left is not None:
            unfit = "tokens that left a loop"
        elif spec.temperature is not None or spec.value_norm or spec.value_scale != 1.0 or spec.chunk is not None:
            unfit = "query temperatures, value norms, value scales or chunks"
        elif spec.value_embedding is not None:
            unfit = "value embeddings"
        elif spec.key_turns:
            unfit = "turned keys"
        elif spec.qk_norm not in (None, "head") or spec.qk_norm_after_rope or spec.fused_heads != 2:
            unfit = "other norms, or values that are projected apart"
        cells = cache.keys_and_values(pages=cache.table_of(ctx.table, ctx.limit))
        queries = ctx.batch.decode_tokens.shape[1] * self.layout.queries
        choice = project_and_attend.choose(cells, ctx.backend.qkv_attention, queries, unfit=unfit)
        return choice.name != "xla"

    def project_partially(self, x: Activations, ctx: StepContext) -> jax.Array | QkvPartials:
        """Queries, keys and values of decode rows' tokens, [T, K, G + 2, h], as projected, or their partial sums."""
        w: Any = self.qkv[...]
        choice = choose(w, x.shape[0], x.dtype, backend=ctx.backend.matmul, partials=True)
        if ctx.shards.size(axes.EMBED) > 1 or choice.name == "xla":
            return ctx.shards.sum(ctx.matmul(x, w), axes.EMBED)
        norm = x if isinstance(x, DeferredNorm) else None
        sums = matmul_partials(as_array(x) if norm is None else norm.y, w)
        qkv = QkvPartials(sums.splits, x.dtype, addend=sums.addend)
        return qkv if norm is None else replace(qkv, squares=norm.squares, inputs=x.shape[1], eps=norm.eps)

    def attend_fused(
        self, qkv: jax.Array | QkvPartials, cache: LayerCache, ctx: StepContext
    ) -> tuple[jax.Array, LayerCache]:
        """The attention of decode rows' tokens [T, K, G, h], and the cache with their cells."""
        spec = self.spec
        transforms = HeadTransforms(
            bias=self.qkv_bias[...] if spec.qkv_bias else None,
            norms=(self.q_norm[...], self.k_norm[...]) if spec.qk_norm else None,
            rope=None if spec.rope is None else ctx.rope[spec.rope],
            eps=self.norm.eps,
            offset=float(self.norm.unit_offset),
        )
        sinks = self.sinks[...] if spec.sinks else None
        options = AttentionOptions(spec.scale, spec.window, spec.softcap, sinks)
        lengths, table = ctx.batch.decode_lengths, cache.table_of(ctx.table, ctx.limit)
        pages = None if table is None else table[: lengths.shape[0]]
        arrays = cache.keys_and_values(limit=ctx.limit, pages=pages)
        counts = ctx.batch.decode_counts
        out, arrays = project_and_attend.project_and_attend(qkv, arrays, lengths, transforms, options, counts)
        return out, replace(cache, arrays=arrays.arrays)

    def gated(self, spec: OutputGate, out: jax.Array, x: Activations, ctx: StepContext) -> jax.Array:
        """Attention's output [T, K, G, h], or this device's part of h, times the gate of x [T, D]."""
        gate = ctx.shards.sum(ctx.matmul(x, self.gate[...], out_dtype=jnp.float32), axes.EMBED)
        gate = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}[spec.activation](gate)
        return out * gate.reshape(*out.shape[:3], -1).astype(out.dtype)

    def project(self, x: Activations, ctx: StepContext) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Queries [T, K, G, h], normed, rotated and scaled by temperature; and the cells to be cached, [T, K, h] each:
        keys, normed and rotated, and values."""
        return self.finished(ctx.shards.sum(ctx.matmul(x, self.qkv[...]), axes.EMBED), x, ctx)

    def finished(self, qkv: jax.Array, x: Activations, ctx: StepContext) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """What `project` returns, from what the fused matrix makes of x, [T, K, G + 2, h]."""
        spec, g = self.spec, self.layout.queries
        if spec.qkv_bias:
            qkv = qkv + self.qkv_bias[...]
        rotated = spec.rope is not None and not spec.qk_norm
        if spec.rope is not None and rotated:
            # Queries and keys are rotated at once: head by head, each would be a kernel of its own.
            turns = np.arange(qkv.shape[2]) < g + (spec.cache_of is None)
            qkv = jnp.where(turns[:, None], apply_rope(qkv, *ctx.rope[spec.rope]), qkv)
        finish = (lambda x, *_: x) if rotated else self.norm_and_rotate
        q = scale_by_temperature(finish(qkv[:, :, :g], "q", ctx), spec.temperature, ctx)
        if spec.cache_of is not None:
            return q, ()
        k = v = qkv[:, :, g]
        if spec.fused_heads == 2:
            v = qkv[:, :, g + 1]
        elif spec.separate_values:
            v = ctx.shards.sum(ctx.matmul(x, self.v[...]), axes.EMBED)
            v = v + self.v_bias[...] if spec.qkv_bias else v
        if spec.value_norm:
            v = rms_norm(v, jnp.ones(spec.cache_sizes[1:]), self.norm.eps)
        if spec.value_embedding is not None:
            v = v + self.value_embedding(as_array(x), ctx).astype(v.dtype)
        v = v if spec.value_scale == 1.0 else v * jnp.asarray(spec.value_scale, v.dtype)
        return q, (finish(k, "k", ctx), v)

    def norm_and_rotate(self, x: jax.Array, which: Literal["q", "k"], ctx: StepContext) -> jax.Array:
        """Queries or keys after their norm and their rotary embedding, in the layer's order."""
        spec = self.spec
        if spec.qk_norm and not spec.qk_norm_after_rope:
            x = self.qk_norm(x, which, ctx.shards)
        x = x if spec.rope is None else apply_rope(x, *ctx.rope[spec.rope])
        return self.qk_norm(x, which, ctx.shards) if spec.qk_norm and spec.qk_norm_after_rope else x

    def qk_norm(self, x: jax.Array, which: Literal["q", "k"], shards: Shards) -> jax.Array:
        spec, offset = self.spec, self.norm.unit_offset
        eps = self.norm.eps if spec.qk_norm_eps is None else spec.qk_norm_eps
        if spec.qk_norm == "unit":
            return rms_norm(x, jnp.ones((spec.head_dim,)), eps)
        weight = (self.q_norm if which == "q" else self.k_norm)[...]
        if spec.qk_norm == "head":
            return rms_norm(x, weight, eps, unit_offset=offset)
        y = x.astype(jnp.float32)
        squares = jnp.sum(y * y, axis=tuple(range(1, y.ndim)), keepdims=True)
        heads = spec.heads if which == "q" else spec.kv_heads * self.layout.copies
        mean = shards.sum(squares, axes.KV_HEADS) / (heads * spec.head_dim)
        return scale_norm(y, mean, weight, eps, offset).astype(x.dtype)

    def attend(
        self, q: jax.Array, new: Sequence[jax.Array], cache: LayerCache, ctx: StepContext
    ) -> tuple[jax.Array, LayerCache]:
        """The attention of all tokens [T, K, G, h], and the cache with their cells `new`, [T, K, h] each. Where the
        inputs of the output projection are split over devices, it is this device's part of h."""
        joint, key_size = q.shape[1] // cache.heads, None
        if len(cache.sizes) == 1:  # a cell has keys and values, and the values meet zeros
            q, key_size = widened(joint_queries(q, joint), cache.sizes[0]), joint * self.spec.cache_sizes[0]
        if self.spec.key_turns:
            q, new = self.turned(q, new)
        if cache.packed:
            q, new = self.rotated(q, new)
        if self.spec.key_basis and cache.summaries is not None:
            cache = replace(cache, basis=self.key_basis[...])
        step = GroupedStep(self.spec, ctx, q, self.sinks[...] if self.spec.sinks else None, joint, key_size)
        out, cache = attend(step, step.plan(cache), new, cache)
        return out, replace(step.with_queries(step.with_mass(cache)), basis=None)

    def rotated(self, q: jax.Array, new: Sequence[jax.Array]) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Queries, and keys and values if there are new ones, rotated as a cache of few bits has them. Turned keys are
        not rotated again."""
        if self.spec.key_turns:
            k, v = new
            return q, (k, rotated(v, v.shape[-1]))
        q, *new = (rotated(x, x.shape[-1]) for x in (q, *new))
        return q, new

    def turned(self, q: jax.Array, new: Sequence[jax.Array]) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Queries and keys times the turns of keys, in float32. Products of both stay what they were."""
        (k, v), turns = new, self.key_turns[...]
        turn = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        keys = turn("tkh,khi->tki", k.astype(jnp.float32), turns[:, 0]).astype(k.dtype)
        queries = turn("tkgh,khi->tkgi", q.astype(jnp.float32), turns[:, 1]).astype(q.dtype)
        return queries, (keys, v)


@dataclass(frozen=True)
class GroupedStep:
    """Grouped-query attention in one step. queries [T, J, n * G, h], of n = `joint` heads to a cell, as wide as the
    cache's keys; sinks [K, G]. key_size: see `AttentionOptions`."""

    spec: AttentionSpec
    ctx: StepContext
    queries: jax.Array
    sinks: jax.Array | None
    joint: int = 1
    key_size: int | None = None

    @cached_property
    def stripe(self) -> Stripe:
        """This device's positions."""
        return self.ctx.shards.stripe(axes.POSITIONS)

    @property
    def striped(self) -> bool:
        """True if a row's positions are split over devices."""
        return self.ctx.shards.size(axes.POSITIONS) > 1

    def plan(self, cache: LayerCache) -> StepPlan:
        decode, ctx = self.choose_decode(cache), self.ctx
        # The later ones of several queries of a row ask for the summary of a block that the step ends, or are rows of
        # their own.
        several = (cache.summaries is not None or self.striped) and ctx.batch.decode_tokens.shape[1] > 1
        prefill = self.choose_prefill(cache, self.options(self.stripe, ctx.chunk_positions))
        in_place = prefill.name in prefill_attention.IN_PLACE
        runs = in_place or decode.name in decode_attention.IN_PLACE
        return StepPlan(
            self.stripe,
            rows_write=decode.name in decode_attention.IN_PLACE and not several,
            chunks_in_place=in_place,
            run=self.run(cache) if runs else 1,
            chunk_writer=self.choose_chunk_writer(cache, prefill.name),
            sinks=self.sinks if self.striped else None,
        )

    def run(self, cache: LayerCache) -> int:
        """How many of a chunk's tokens on this device are in one page together."""
        width, devices = self.ctx.batch.chunk_tokens.shape[1], self.ctx.shards.size(axes.TOKENS)
        run = cache.run(width * devices, None if self.ctx.table is None else self.ctx.run)
        return run // devices if run % devices == 0 else 1

    def table(self, cache: LayerCache, stripe: Stripe) -> jax.Array | None:
        """The pages of all rows that this step may read."""
        return cache.table_of(self.ctx.table, limit_of(self.ctx, stripe))

    def choose_chunk_writer(self, cache: LayerCache, backend: str) -> str | None:
        """The implementation that writes whole chunks, if the implementation `backend` attends to them; None if cells
        are written one by one."""
        width = self.run(cache)
        if width <= 1 or self.striped:
            return None
        writer = cache_write.choose_chunk_write(cache.arrays, width, ring=cache.ring, backend=backend)
        return None if writer.name == "xla" else writer.name

    @cached_property
    def row_options(self) -> AttentionOptions:
        """How the queries of decode rows weigh this device's positions."""
        positions = self.ctx.batch.decode_positions
        return self.options(self.stripe, positions.reshape(-1) if self.striped else positions)

    def row_queries(self, cache: LayerCache) -> RowQueries:
        """The queries of decode rows."""
        table, (rows, _) = self.table(cache, self.stripe), self.ctx.batch.decode_tokens.shape
        return RowQueries.of(self.ctx, self.stripe, None if table is None else table[:rows])

    def options(self, stripe: Stripe, positions: jax.Array) -> AttentionOptions:
        """How queries at these positions weigh the positions of a stripe. If the number of devices does not divide the
        window, it covers one position more on some devices: then each query has a window."""
        spec = self.spec
        window = spec.window if spec.chunk is None else positions % spec.chunk + 1
        window = stripe.window(positions, window)
        sinks = None if self.striped or self.sinks is None else self.sinks.reshape(self.queries.shape[1:3])
        return AttentionOptions(spec.scale, window, spec.softcap, sinks, self.key_size)

    def choose_decode(self, cache: LayerCache) -> Choice:
        window, backend = self.row_options.window, self.ctx.backend.decode_attention
        several, of_rows = self.ctx.batch.decode_tokens.shape[1] > 1, self.row_queries(cache)
        new = self.spec.cache_of is None and not (several and self.striped)
        cells, shape = cache.keys_and_values(pages=of_rows.pages), (*of_rows.shape, 1)[:2]
        q = jax.ShapeDtypeStruct((*shape, *self.queries.shape[1:]), self.queries.dtype)
        if (selection := self.selection(cache, cells)) is not None:
            size = cache.slots // selection.summaries.shape[-3]
            return selected_pages.choose(q, cells, size, selection.count, backend, new=new)
        # Of one query of a row `program_set` has asked, and says so if it falls back.
        return decode_attention.choose(cells, window, backend, q if several else None, new=new)

    def selection(self, cache: LayerCache, cells: KvCache) -> Selector | None:
        """How decode rows select blocks; None if they read all."""
        summaries, count = cache.summaries, self.ctx.selected
        if summaries is None or count is None or cells.columns is None:
            return None
        if not selected_pages.selects(cells.columns, summaries, count):
            return None
        places = None
        if cache.summaries_of_rows and cells.pages is not None:
            rows, columns = (jnp.arange(n, dtype=jnp.int32) for n in cells.pages.shape)
            places = cache.summary_places(rows[:, None], columns)
        return Selector(cache.flat_summaries, count, cache.basis, places)

    def choose_prefill(self, cache: LayerCache, options: AttentionOptions) -> Choice:
        cells, shape = cache.keys_and_values(pages=self.table(cache, self.stripe)), self.ctx.batch.chunk_tokens.shape
        q = jax.ShapeDtypeStruct((*shape, *self.queries.shape[1:]), self.queries.dtype) if math.prod(shape) else None
        sparse, listed = self.sparse, None
        if sparse is not None and q is not None:
            listed = sparse_prefill.shape_of_list(q, sparse.max_blocks(self.ctx.max_len, cells.slots))
        capped, backend = options.softcap is not None or options.sinks is not None, self.ctx.backend.prefill_attention
        return prefill_attention.choose(
            cells, options.window, backend, q, listed=listed, capped=capped, key_size=options.key_size
        )

    @property
    def sparse(self) -> SparsePrefill | None:
        """How chunks list the blocks that they attend to; None where they attend to all."""
        return None if self.spec.reach is not None else self.ctx.sparse

    def chunks(self, cache: LayerCache, arrays: Arrays, places: ChunkPlaces, stripe: Stripe, which: slice) -> Attended:
        """See `step_attention.LayerStep`."""
        ctx, shape = self.ctx, self.ctx.batch.chunk_tokens.shape
        queries = self.queries[: math.prod(shape)].reshape(*shape, *self.queries.shape[1:])[which]
        positions = ctx.chunk_positions[which]
        options = self.options(stripe, positions)
        backend = self.choose_prefill(cache, options).name
        cells, numbers = cache.keys_and_values(arrays, limit_of(ctx, stripe), places.table), stripe.number(positions)
        listed = None
        if (sparse := self.sparse) is not None:
            places_of = places.rows, numbers, ctx.batch.chunk_lengths[which]
            listing = Listing(sparse, sparse.max_blocks(ctx.max_len, cells.slots), backend)
            listed = sparse_prefill.block_list(queries, cells, *places_of, options, listing)
        out = prefill_attention.prefill_attention(
            queries, cells, places.rows, numbers, options, listed=listed, backend=backend
        )
        return self.values(cache, *out)

    def rows(self, cache: LayerCache, new: Sequence[jax.Array] | None) -> tuple[Attended, LayerCache]:
        """See `step_attention.LayerStep`."""
        ctx, stripe, (shape, lengths, pages) = self.ctx, self.stripe, self.row_queries(cache)
        queries = self.queries[math.prod(ctx.batch.chunk_tokens.shape) :].reshape(*shape, *self.queries.shape[1:])
        limit, backend = limit_of(ctx, stripe), self.choose_decode(cache).name
        in_place = backend in decode_attention.IN_PLACE or self.table(cache, stripe) is not None
        arrays = cache.arrays if in_place else cache.read(ctx.batch.decode_tokens.shape[0], limit)
        cells, written = cache.keys_and_values(arrays, limit, pages), ctx.batch.decode_counts
        written = stripe.owns(ctx.batch.decode_lengths - 1).astype(jnp.int32) if self.striped else written
        writes = None if new is None else NewCells([x.reshape(*shape, *x.shape[1:]) for x in new], written)
        options, how = self.row_options, {"new": writes, "backend": backend}
        if (selection := self.selection(cache, cells)) is not None:
            if cache.wanted is not None:
                cache = cache.with_wanted(selected_pages.wanted_pages(queries, cells, selection, lengths))
            attended = selected_pages.selected_attention(queries, cells, selection, lengths, options, **how)
        elif ctx.prefixes is not None and not self.striped and cascade_attention.takes(cells, options):
            attended = cascade_attention.cascade_attention(queries, cells, lengths, options, ctx.prefixes, **how)
        else:
            attended = decode_attention.decode_attention(queries, cells, lengths, options, **how)
        out, lse, cells = attended
        out, lse = out.reshape(-1, *out.shape[len(shape) :]), lse.reshape(-1, *lse.shape[len(shape) :])
        return self.values(cache, out, lse), cache if new is None else replace(cache, arrays=cells.arrays)

    def with_mass(self, cache: LayerCache) -> LayerCache:
        """The cache with what the step's queries attend to, if that is counted and the cache is the layer's own. Chunks
        go one after the other, as several may be of one row."""
        if cache.mass is None or self.spec.cache_of is not None:
            return cache
        batch, table, options = self.ctx.batch, self.table(cache, self.stripe), self.row_options
        (count, width), (rows, _) = batch.chunk_tokens.shape, batch.decode_tokens.shape
        of_chunks, of_rows = jnp.split(self.queries, [count * width])

        def one(i: jax.Array, mass: jax.Array | None) -> jax.Array | None:
            queries = of_chunks.reshape(count, width, *of_chunks.shape[1:])
            parts = queries, batch.chunk_starts, batch.chunk_lengths, batch.chunk_rows
            q, start, length, row = (lax.dynamic_slice_in_dim(x, i, 1) for x in parts)
            return replace(cache, mass=mass).with_mass((q, start, length), row, table, options).mass

        cache = replace(cache, mass=lax.fori_loop(0, count, one, cache.mass)) if count else cache
        if not rows:
            return cache
        lengths = batch.decode_lengths
        queries = of_rows[:, None], lengths - 1, (lengths > 0).astype(jnp.int32)
        return cache.with_mass(queries, jnp.arange(rows, dtype=jnp.int32), table, options)

    def with_queries(self, cache: LayerCache) -> LayerCache:
        """The cache with the queries of the rows' newest positions, if it has any and is the layer's own. Of a chunk
        only the last ones can be among these."""
        if cache.queries is None or self.spec.cache_of is not None:
            return cache
        batch, (count, width) = self.ctx.batch, self.ctx.batch.chunk_tokens.shape
        parts = self.queries[..., : self.spec.cache_sizes[0]], self.ctx.positions, self.ctx.rows
        of_chunks, of_rows = zip(*(jnp.split(x, [count * width]) for x in parts), strict=True)
        if not count * width:
            return cache.with_queries(of_rows[0], of_rows[2], of_rows[1])
        last = min(width, cache.queries.shape[-2])
        number = batch.chunk_lengths[:, None] + jnp.arange(-last, 0, dtype=jnp.int32)
        chosen = (jnp.arange(count, dtype=jnp.int32)[:, None] * width + jnp.maximum(number, 0)).reshape(-1)
        queries, positions, rows = (x[chosen] for x in of_chunks)
        positions = jnp.where(number.reshape(-1) < 0, -1, positions)
        new = [jnp.concatenate(pair) for pair in zip((queries, positions, rows), of_rows, strict=True)]
        return cache.with_queries(new[0], new[2], new[1])

    def values(self, cache: LayerCache, out: jax.Array, lse: jax.Array) -> Attended:
        """Attention's output of each head, without the part of the keys, where cells have keys and values; rotated
        back, where values are rotated."""
        if cache.packed:
            return rotated(out, out.shape[-1], back=True), lse
        if self.key_size is None:
            return out, lse
        values = self.joint * self.spec.value_dim
        return outputs_of_heads(out[..., self.key_size : self.key_size + values], lse, self.joint)
