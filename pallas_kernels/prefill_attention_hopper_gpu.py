"""Prefill attention on NVIDIA's Hopper GPUs: chunks of queries over the visible part of their rows' cache.

FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608) over pages. A program has three warpgroups. One
copies blocks of keys and values from pages to shared memory; the two others compute with 64 query rows each, and take
turns: while one multiplies, the other one computes its softmax. A row is a query of one of the heads that share a KV
head, and a program's rows belong to the same tokens, so both read the same blocks.

A query sees a range of positions, so only the ends of a program's range are masked. They come first, so that the
kernel has the code for them once: its size is what programs with the kernel take to compile. Cells there may be NaN,
and 0 * NaN is NaN: the warpgroup that copies makes such values 0 before the others may read them. Where a list of
blocks restricts what queries see, the same holds for the list in ascending order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from inferlib.attention_values import AttentionOptions, KvCache, Shaped
from inferlib.pallas_kernels.decode_attention_gpu import merge
from inferlib.pallas_kernels.lowered_once import call_lowered
from inferlib.pallas_kernels.prefill_attention_gpu import LOG2E, NOTHING, pages_of, seen
from inferlib.pallas_kernels.processors_gpu import PROCESSORS

ROWS = 64  # query rows of a warpgroup: what an instruction multiplies
GROUPS = 2  # warpgroups that compute
KEYS = 128  # positions of a block
STAGES = 2  # blocks in shared memory
PROGRAMS = PROCESSORS  # programs that run at once
LEAST_PROGRAMS = 32  # with fewer, even of those that share ranges, the other kernel keeps more processors busy
LEAST_BLOCKS = 4  # least blocks of the longest range, for each of the programs that share it
LEAST_USED = 0.75  # least share of a program's rows that is used
_REGISTERS = 216, 72  # registers of a thread that computes, and of a thread that copies: 65536 in all
_F32 = jnp.float32


@dataclass(frozen=True)
class ListShape:
    """Lists of up to `most` blocks of `keys` positions, for each tile of `queries` tokens of a chunk and KV head."""

    queries: int
    keys: int
    most: int


@dataclass(frozen=True)
class Shape:
    """P chunks of C tokens, K KV heads of G query heads of size h, and N pages of S slots, of which a row has M.

    ring: slots of a row that positions go round; None: position p lives in the row's slot p. splits: programs that
    share a range. lists: None, or lists of blocks restrict what queries see.
    """

    chunks: int
    width: int
    kv_heads: int
    group: int
    size: int
    page_slots: int
    columns: int
    ring: int | None
    dtype: Any
    splits: int = 1
    lists: ListShape | None = None

    @staticmethod
    def of(q: Shaped, cache: KvCache, splits: int | None = None, lists: ListShape | None = None) -> Shape:
        """splits: by default as many as keep a GPU busy."""
        ring = cache.slots if cache.ring else None
        chunks, width, kv_heads, group, size = q.shape
        pages = cache.k.shape[-2], cache.columns or 1
        shape = Shape(chunks, width, kv_heads, group, size, *pages, ring, q.dtype, lists=lists)
        return replace(shape, splits=splits or shape.best_splits)

    @property
    def tokens(self) -> int:
        """How many tokens a program has."""
        return min(self.width, ROWS)

    @property
    def parts(self) -> int:
        """Programs that share a chunk's tokens."""
        return self.width // self.tokens

    @property
    def heads(self) -> int:
        """Query heads of a warpgroup."""
        return ROWS // self.tokens

    @property
    def shares(self) -> int:
        """Programs that share a KV head's query heads."""
        return pl.cdiv(self.group, GROUPS * self.heads)

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        return self.kv_heads, self.shares, self.splits, self.parts, self.chunks

    @property
    def best_splits(self) -> int:
        """A power of two, of at most 8."""
        longest = self.columns * self.page_slots // KEYS if self.lists is None else self.lists.most
        programs = self.kv_heads * self.shares * self.parts * self.chunks
        most = min(PROGRAMS // programs, longest // LEAST_BLOCKS, 8)
        return 1 << max(most, 1).bit_length() - 1

    def list_start(self, chunk, head, part) -> Any:
        """Where the list of a program's tile begins in all lists, one after another."""
        assert self.lists is not None
        tile = lax.div(part * self.tokens, jnp.int32(self.lists.queries))
        tiles = pl.cdiv(self.width, self.lists.queries)
        return ((chunk * self.kv_heads + head) * tiles + tile) * self.lists.most

    def page_and_slots_of(self, place) -> tuple[Any, Any]:
        """The page and the slots of a block at a place in k and v, in units of KEYS slots."""
        per_page = jnp.int32(self.page_slots // KEYS)
        return lax.div(place, per_page), pl.ds(lax.rem(place, per_page) * KEYS, KEYS)

    def page_and_slots(self, table, chunk, block) -> tuple[Any, Any]:
        """The page of a block of a chunk's row, and which of its slots. table: a ref [P * M]."""
        per_page = self.page_slots // KEYS
        block = block if self.ring is None else lax.rem(block, jnp.int32(self.ring // KEYS))
        column = jnp.minimum(lax.div(block, jnp.int32(per_page)), self.columns - 1)
        return table[chunk * self.columns + column], pl.ds(lax.rem(block, jnp.int32(per_page)) * KEYS, KEYS)


class Seen(NamedTuple):
    """What queries see: positions from `first` to `last`, [P, C] each. visits: None, or in these only the blocks of the
    lists [P, K, T, most]."""

    first: jax.Array
    last: jax.Array
    visits: jax.Array | None = None


class _Range(NamedTuple):
    """The blocks that a program reads, from `begin` to `end`; all its queries see those from `inner` to `outer`. These
    are numbers of blocks, or, where there are lists, places in the program's list."""

    begin: Any
    inner: Any
    outer: Any
    end: Any

    @property
    def count(self):
        return self.end - self.begin

    @property
    def ends(self):
        """How many blocks are masked: those that the program reads first."""
        return self.inner - self.begin + self.end - self.outer

    def nth(self, i):
        """The block that is read i-th."""
        behind = self.outer - self.inner + self.begin + i  # of those at the upper end
        at_end = jnp.where(i < self.inner - self.begin, self.begin + i, behind)
        return jnp.where(i < self.ends, at_end, self.inner + i - self.ends)


class _Inputs(NamedTuple):
    """first, last [P, parts, ROWS]: what a warpgroup's rows see. ranges [P * parts * splits * 4]. table [P * M].
    queries [P, C, K * G, h]. k, v [N, K, S, h]. listed: None, or the numbers of lists' blocks [P * K * T * most], in
    ascending order; places: the same blocks' places in k and v, in units of KEYS slots. Then ranges has a part for each
    KV head, [P * parts * K * splits * 4]."""

    first: Any
    last: Any
    ranges: Any
    table: Any
    queries: Any
    k: Any
    v: Any
    listed: Any = None
    places: Any = None


class _Shared(NamedTuple):
    """Shared memory and barriers. queries [GROUPS, ROWS, h] become the results. k, v [STAGES, KEYS, h]. seen
    [GROUPS, 2, ROWS], the first and the last positions that rows see. lse [GROUPS, ROWS]. *_ready and *_free: of the
    blocks of k and v. turn: which of the warpgroups multiplies. unmasked: a block of values that is not clean yet."""

    queries: Any
    k: Any
    v: Any
    seen: Any
    lse: Any
    queries_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    unmasked: Any


@functools.cache
def is_hopper() -> bool:
    """True if this process has GPUs, and all have the instructions of compute capability 9.0."""
    devices = jax.local_devices() if jax.default_backend() == "gpu" else ()
    return bool(devices) and all(device.compute_capability == "9.0" for device in devices)


def unsupported(q: Shaped, cache: KvCache, options: AttentionOptions, *, lists: ListShape | None = None) -> str | None:
    """Why the kernel does not run queries [P, C, K, G, h] over this cache; None: it does. Arrays may be shapes.

    No other kernel for GPUs takes lists, so with lists it also runs where it leaves much of a GPU idle.
    """
    if any(x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != q.dtype for x in cache.arrays):
        cells = " and ".join(sorted({x.dtype.name for x in cache.arrays}))
        return f"queries of {q.dtype.name} and cells of {cells}, where it takes bfloat16 or float16 for all"
    if q.shape[-1] not in (64, 128) or cache.values.shape[-1] != q.shape[-1]:
        return f"heads of size {q.shape[-1]} and values of {cache.values.shape[-1]}, where it takes 64 and 128"
    if options.softcap is not None or options.sinks is not None:
        return "capped logits and sinks"
    if cache.k.shape[-2] % KEYS or (cache.ring and cache.slots % KEYS):
        return f"pages or rings that are no multiple of {KEYS} positions"
    shape = Shape.of(q, cache, lists=lists)
    if shape.width % shape.tokens or ROWS % shape.tokens or shape.tokens % 8:
        return f"chunks of {shape.width} tokens"
    if lists is not None:
        if lists.keys == KEYS and lists.queries % shape.tokens == 0:
            return None
        return f"lists of blocks of {lists.keys} positions for tiles of {lists.queries} tokens"
    if shape.group < LEAST_USED * GROUPS * shape.heads * shape.shares:
        return f"{shape.group} query heads of a KV head, which leave rows idle"
    if math.prod(shape.grid) < LEAST_PROGRAMS:
        return f"{math.prod(shape.grid)} programs, which leave most processors idle"
    return None


def prefill_attention(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    options: AttentionOptions,
    *,
    visits: jax.Array | None = None,
    lists: ListShape | None = None,
    splits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `inferlib.ops.prefill_attention`; each query may have its own window.

    visits [P, K, T, M] int32, of the shape `lists`: the queries of tile t see only positions of these blocks, each of
    them once; block n begins at position n * lists.keys, and negative numbers are no block. splits: programs that share
    a range; by default as many as keep a GPU busy. Returns out [P, C, K, G, h] in q's dtype and lse [P, C, K, G]
    float32. Raises ValueError for what `unsupported` names, and for visits without `lists`.
    """
    if (visits is None) != (lists is None):
        raise ValueError("visits are numbers of blocks: pass `lists` with them, which says of what size")
    if reason := unsupported(q, cache, options, lists=lists):
        other = "pallas_gpu or xla" if lists is None else "xla"
        raise ValueError(f"the kernel of prefill attention for Hopper does not take {reason}; use {other}")
    k, v, table = pages_of(cache, rows)
    shape = Shape.of(q, cache, splits, lists)
    of_queries = Seen(*seen(cache, rows, positions, options.window), visits)
    outs, lses = attend_shares(shape, options.scale, q, k, v, table, of_queries)
    lses = jnp.moveaxis(lses.reshape(*lses.shape[:2], *q.shape[2:4], -1), -1, 2)
    return (outs[0], lses[0]) if shape.splits == 1 else merge(outs, lses, q.dtype, interpret=False)


@functools.partial(jax.jit, static_argnums=(0, 1))  # layers that are alike are traced and lowered once
def attend_shares(shape: Shape, scale: float, q, k, v, table, of_queries: Seen) -> tuple[jax.Array, jax.Array]:
    """The results of the programs that share a range: out [splits, P, C, K, G, h] in q's dtype and lse [splits, P, K *
    G, C] float32. table [P, M]: pages in k and v."""
    return call_lowered(_attend_shares, (shape, scale), q, k, v, table, of_queries)


def _attend_shares(shape: Shape, scale: float, q, k, v, table, of_queries: Seen) -> tuple[jax.Array, jax.Array]:
    chunks, width, kv_heads, group, size = q.shape
    of_parts = [x.reshape(chunks, shape.parts, shape.tokens) for x in of_queries[:2]]
    of_rows = [jnp.tile(x, (1, 1, shape.heads)) for x in of_parts]
    heads, splits = kv_heads * group, shape.splits
    bounds, lists = _bounds(*of_parts), ()
    if (visits := of_queries.visits) is not None:
        ordered = jnp.sort(jnp.where(visits < 0, jnp.iinfo(jnp.int32).max, visits), axis=-1)
        bounds, lists = _bounds_in_lists(shape, bounds, ordered), _flat_lists(shape, table, ordered)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, shape, scale),
        out_type=[
            jax.ShapeDtypeStruct((splits, chunks, width, heads, size), q.dtype),
            jax.ShapeDtypeStruct((splits, chunks, heads, width), _F32),
        ],
        grid=shape.grid,
        grid_names=("head", "share", "split", "part", "chunk"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*of_rows, _ranges(splits, *bounds), table.reshape(-1), q.reshape(chunks, width, heads, size), k, v, *lists)
    return out.reshape(splits, *q.shape), lse


def _bounds(first: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
    """The fields of `_Range` for the tokens of each program, first and last [P, parts, tokens]; [P, parts] each.
    Positions that are seen begin at 0; -1 is the last one of a query that sees none."""
    blocks = lambda positions: lax.div(positions, jnp.int32(KEYS))  # noqa: E731
    begin, end = blocks(first.min(axis=2)), blocks(last.max(axis=2) + KEYS)
    end = jnp.maximum(begin, end)
    inner = jnp.clip(blocks(first.max(axis=2) + KEYS - 1), begin, end)
    outer = jnp.clip(blocks(last.min(axis=2) + 1), inner, end)
    return begin, inner, outer, end


def _bounds_in_lists(shape: Shape, bounds: tuple[jax.Array, ...], ordered: jax.Array) -> tuple[jax.Array, ...]:
    """The fields of `_Range` as places in lists [P, K, T, most] that ascend; [P, parts, K] each."""
    assert shape.lists is not None
    tiles = jnp.arange(shape.parts) * shape.tokens // shape.lists.queries
    of_parts = jnp.moveaxis(ordered[:, :, tiles], 2, 1)  # [P, parts, K, most]
    return tuple(jnp.sum(of_parts < x[..., None, None], axis=-1) for x in bounds)


def _flat_lists(shape: Shape, table: jax.Array, ordered: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`listed` and `places` of `_Inputs`, of lists [P, K, T, most]. What is no block has some place."""
    chunks = jnp.arange(shape.chunks)[:, None, None, None]
    page, slots = shape.page_and_slots(table.reshape(-1), chunks, ordered)
    places = page * (shape.page_slots // KEYS) + slots.start // KEYS
    return ordered.reshape(-1), places.astype(jnp.int32).reshape(-1)


def _ranges(splits: int, begin: jax.Array, inner: jax.Array, outer: jax.Array, end: jax.Array) -> jax.Array:
    """The fields of `_Range` for each share of ranges, all of them in a row."""
    begin, inner, outer, end = (x[..., None] for x in (begin, inner, outer, end))
    count, share = lax.div(end - begin + splits - 1, jnp.int32(splits)), jnp.arange(splits, dtype=jnp.int32)
    starts, stops = (jnp.minimum(begin + count * n, end) for n in (share, share + 1))
    fields = starts, jnp.clip(inner, starts, stops), jnp.clip(outer, starts, stops), stops
    return jnp.stack(fields, axis=-1).astype(jnp.int32).reshape(-1)


def _kernel(shape: Shape, scale: float, *refs) -> None:
    """refs: those of `_Inputs`, out [splits, P, C, K * G, h] and lse [splits, P, K * G, C]."""
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = lambda *of: plgpu.SMEM(of, shape.dtype, transforms=swizzled)  # noqa: E731
    blocks = functools.partial(plgpu.Barrier, num_barriers=STAGES)
    scratch = _Shared(
        queries=smem(GROUPS, ROWS, shape.size),
        k=smem(STAGES, KEYS, shape.size),
        v=smem(STAGES, KEYS, shape.size),
        seen=plgpu.SMEM((GROUPS, 2, ROWS), jnp.int32),
        lse=plgpu.SMEM((GROUPS, ROWS), _F32),
        queries_ready=plgpu.Barrier(num_barriers=GROUPS, num_arrivals=2 + shape.heads),
        k_ready=blocks(),
        v_ready=blocks(),
        k_free=blocks(num_arrivals=GROUPS),
        v_free=blocks(num_arrivals=GROUPS),
        turn=plgpu.Barrier(num_arrivals=GROUPS),
        unmasked=plgpu.Barrier(),
    )
    inputs, outputs = _Inputs(*refs[:-2]), refs[-2:]

    def run(*scratch) -> None:
        shared, number = _Shared(*scratch), lax.axis_index("group")
        chunk, part = shape.chunks - 1 - lax.axis_index("chunk"), lax.axis_index("part")  # the longest come first
        program = chunk * shape.parts + part
        if shape.lists is not None:
            program = program * shape.kv_heads + lax.axis_index("head")
        at = (program * shape.splits + lax.axis_index("split")) * 4
        blocks = _Range(*(inputs.ranges[at + i] for i in range(4)))

        @pl.when(number < GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            _compute(shape, scale, inputs, outputs, shared, blocks, chunk)

        @pl.when(number == GROUPS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            _fetch(shape, inputs, shared, blocks, chunk)

    pl.run_scoped(run, *scratch, collective_axes="group")


def _fetch(shape: Shape, inputs: _Inputs, shared: _Shared, blocks: _Range, chunk) -> None:
    """Copy the blocks to shared memory, one after the other."""
    head = lax.axis_index("head")
    start = None if shape.lists is None else shape.list_start(chunk, head, lax.axis_index("part"))

    @pl.loop(0, blocks.count)
    def _(i) -> None:
        block, stage, reused = blocks.nth(i), lax.rem(i, jnp.int32(STAGES)), i >= STAGES
        if start is None:
            page, slots = shape.page_and_slots(inputs.table, chunk, block)
        else:
            page, slots = shape.page_and_slots_of(inputs.places[start + block])
        pl.when(reused)(lambda: plgpu.barrier_wait(shared.k_free.at[stage]))
        plgpu.copy_gmem_to_smem(inputs.k.at[page, head, slots], shared.k.at[stage], shared.k_ready.at[stage])
        pl.when(reused)(lambda: plgpu.barrier_wait(shared.v_free.at[stage]))
        values, target = inputs.v.at[page, head, slots], shared.v.at[stage]

        @pl.when(i >= blocks.ends)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values, target, shared.v_ready.at[stage])

        @pl.when(i < blocks.ends)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values, target, shared.unmasked)
            plgpu.barrier_wait(shared.unmasked)
            _clean(target)
            plgpu.barrier_arrive(shared.v_ready.at[stage])


def _clean(values) -> None:
    """Make numbers that are not finite 0, in a ref [KEYS, h]; a part at a time, as a thread has few registers."""
    for row in range(0, KEYS, ROWS):
        for column in range(0, values.shape[1], 64):
            part = values.at[pl.ds(row, ROWS), pl.ds(column, 64)]
            x = _load(part, plgpu.Layout.WGMMA).astype(_F32)
            x = jnp.where(x < jnp.inf, x, 0.0)
            part[...] = jnp.where(x > -jnp.inf, x, 0.0).astype(part.dtype)
    plgpu.commit_smem()


def _compute(shape: Shape, scale: float, inputs: _Inputs, outputs, shared: _Shared, blocks: _Range, chunk) -> None:
    """The rows of one warpgroup."""
    number, layout = lax.axis_index("group"), plgpu.Layout.WGMMA
    start, listed = None, inputs.listed
    if listed is not None:
        start = shape.list_start(chunk, lax.axis_index("head"), lax.axis_index("part"))
    step = _Step(scale * LOG2E, shared, blocks, number, *_queries(shape, inputs, shared, chunk), listed, start)
    full = lambda value, *of: jnp.full(of, value, _F32)  # noqa: E731
    top, total = (plgpu.layout_cast(full(value, ROWS), layout.reduce(1)) for value in (NOTHING, 0))
    carry = plgpu.layout_cast(full(0, ROWS, shape.size), layout), top, total
    pl.when(blocks.count > 0)(lambda: plgpu.barrier_wait(shared.k_ready.at[0]))
    pl.when(number == 1)(step.next_turn)
    carry = lax.fori_loop(0, blocks.ends, functools.partial(step, masked=True), carry)
    acc, top, total = lax.fori_loop(blocks.ends, blocks.count, functools.partial(step, masked=False), carry)
    pl.when(number == 0)(step.next_turn)
    some = total > 0
    inverse = jnp.where(some, 1 / jnp.where(some, total, 1.0), 0.0)
    results = shared.queries.at[number]
    results[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(shape.dtype)
    lse = top * (1 / LOG2E) + jnp.log(jnp.where(some, total, 1.0))
    shared.lse[number] = jnp.where(some, lse, -jnp.inf)
    plgpu.commit_smem()
    split = lax.axis_index("split")
    for i, head, tokens in _heads(shape):
        mine, head_of_all = pl.ds(i * shape.tokens, shape.tokens), lax.axis_index("head") * shape.group + head
        copies = (
            (results.at[mine], outputs[0].at[split, chunk, tokens, head_of_all]),
            (shared.lse.at[number, mine], outputs[1].at[split, chunk, head_of_all, tokens]),
        )
        pl.when(head < shape.group)(functools.partial(_store, copies))
    plgpu.wait_smem_to_gmem(0)


def _store(copies) -> None:
    for source, target in copies:
        plgpu.copy_smem_to_gmem(source, target)


def _heads(shape: Shape) -> list[tuple[int, Any, Any]]:
    """The query heads of this warpgroup: each one's number, its number in the KV head, and the chunk's tokens."""
    first = (lax.axis_index("share") * GROUPS + lax.axis_index("group")) * shape.heads
    tokens = pl.ds(lax.axis_index("part") * shape.tokens, shape.tokens)
    return [(i, first + i, tokens) for i in range(shape.heads)]


def _queries(shape: Shape, inputs: _Inputs, shared: _Shared, chunk) -> tuple[Any, Any, Any]:
    """A ref of this warpgroup's queries [ROWS, h], and the first and last position that each sees, [ROWS] int32."""
    number, part = lax.axis_index("group"), lax.axis_index("part")
    ready, queries = shared.queries_ready.at[number], shared.queries.at[number]
    for i, source in enumerate((inputs.first, inputs.last)):
        plgpu.copy_gmem_to_smem(source.at[chunk, part], shared.seen.at[number, i], ready)
    for i, head, tokens in _heads(shape):
        head = lax.axis_index("head") * shape.group + jnp.minimum(head, shape.group - 1)
        target = queries.at[pl.ds(i * shape.tokens, shape.tokens)]
        plgpu.copy_gmem_to_smem(inputs.queries.at[chunk, tokens, head], target, ready)
    plgpu.barrier_wait(ready)
    first, last = (_load(shared.seen.at[number, i], plgpu.Layout.WGMMA.reduce(1)) for i in range(2))
    return queries, first, last


@dataclass(frozen=True)
class _Step:
    """A warpgroup's queries and the block that is read i-th. factor: of logits, to base 2. listed: all lists, or None;
    start: where the program's list begins in it."""

    factor: float
    shared: _Shared
    blocks: _Range
    number: Any
    queries: Any
    first: Any
    last: Any
    listed: Any
    start: Any

    def next_turn(self) -> None:
        plgpu.barrier_arrive(self.shared.turn)
        plgpu.barrier_wait(self.shared.turn)

    def __call__(self, i, carry, *, masked: bool):
        """carry: the sum of values [ROWS, h], the largest logit in base 2 and the sum of weights [ROWS]."""
        (acc, top, total), shared = carry, self.shared
        stage = lax.rem(i, jnp.int32(STAGES))
        logits = pl.run_scoped(functools.partial(self._logits, stage), plgpu.WGMMAAccumulatorRef((ROWS, KEYS), _F32))
        plgpu.barrier_arrive(shared.k_free.at[stage])
        logits = self._masked(logits, i) if masked else logits
        new_top = jnp.maximum(top, logits.max(axis=1) * self.factor)
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(logits * self.factor - lax.broadcast_in_dim(new_top, logits.shape, [0]))
        acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + weights.sum(axis=1)
        half = weights.astype(shared.v.dtype)
        # All of this happens while the other warpgroup multiplies.
        acc, total, new_top, half = lax.optimization_barrier((acc, total, new_top, half))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.v_ready.at[stage])
        plgpu.barrier_wait(shared.turn)
        acc = pl.run_state(functools.partial(self._add_values, half, i))(plgpu.WGMMAAccumulatorRef.init(acc))
        plgpu.barrier_arrive(shared.v_free.at[stage])
        return acc, new_top, total

    def _logits(self, stage, acc):
        plgpu.wgmma(acc, self.queries, _transposed(self.shared.k.at[stage]))
        self.next_turn()
        return acc[...]

    def _masked(self, logits, i):
        """The logits, -inf where a query does not see the position."""
        block = self.blocks.nth(i)
        if self.listed is not None:
            block = self.listed[self.start + block]
        across = lambda x: lax.broadcast_in_dim(x, logits.shape, [0])  # noqa: E731
        position = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA) + block * KEYS
        logits = jnp.where(position <= across(self.last), logits, -jnp.inf)
        return jnp.where(position >= across(self.first), logits, -jnp.inf)

    def _add_values(self, weights, i, acc) -> None:
        plgpu.wgmma(acc, weights, self.shared.v.at[lax.rem(i, jnp.int32(STAGES))])
        following = lax.rem(i + 1, jnp.int32(STAGES))
        pl.when(i + 1 < self.blocks.count)(lambda: plgpu.barrier_wait(self.shared.k_ready.at[following]))


def _load(ref, layout):
    """All of a ref in shared memory. Before jax 0.11 an index is asked for."""
    load: Any = plgpu.load
    return load(ref, layout=layout) if jax.__version_info__ >= (0, 11) else load(ref, (), layout=layout)


def _transposed(ref):
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))
