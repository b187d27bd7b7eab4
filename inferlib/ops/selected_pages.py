"""Decode attention that reads only those blocks of a row's cache whose keys may matter most to its query.

All cells stay. Beside them the cache has a summary of each block of positions and KV head: the smallest and the largest
number of its keys in each dimension. From both follows an upper bound of a query's products with all keys of the block,
and the blocks of the highest bounds are read, with the first and the newest one in any case (Tang et al. 2024, "Quest",
https://arxiv.org/abs/2406.10774). With bases of keys, summaries and bounds are of their leading directions alone: of
the largest part of each product, from fewer bytes (Singhania et al. 2024, "Loki", https://arxiv.org/abs/2406.02542,
which ranks single positions so).

Each KV head of a row has its own selection. A block of one head is consecutive in memory, so a pool of pages
[N, K, S, h] is also a pool of N * K * S / s pages of one head and s positions. In that form the selection is a page
table, with a row for each row and KV head, and decode attention runs as it is.

A row's table may lack pages, whose cells are in the host's memory; summaries of all are here. Queries read the best of
the blocks that are here, and `wanted_pages` counts those that they would have read. So the host can bring them before
later steps, whose queries are much like these, as Lee et al. 2024, "InfiniGen", https://arxiv.org/abs/2406.19707,
brings those of a layer by the input of the layer before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions, KvCache, NewCells, Shaped
from inferlib.ops.attention import merge_attention
from inferlib.ops.choice import Choice
from inferlib.ops.decode_attention import IN_PLACE, decode_attention, write_new
from inferlib.ops.decode_attention import choose as choose_decode
from inferlib.ops.int4_cells import decoded_keys
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.option_text import read_option
from inferlib.ops.precision import precision_of

METHODS = ("quest", "loki")
# The most blocks of a row that are compared with one another, in a fraction of the time that a TPU takes to sort them.
_COUNTED = 512
_TEXT = re.compile(r"([a-z]+):(\d{1,6})(?::(\d{1,6}))?(?::resident=(\d{1,6}))?")


@dataclass(frozen=True)
class PageSelection:
    """Which part of a row's cache a decode step reads.

    method: "quest", or "loki" by bases of keys. count: blocks of a row and KV head that are read, the first and the
    newest included. size: positions of a block, a power of two that divides a page; None: a page. resident: the most
    pages that a row which decodes keeps on the device, with the others in the host's memory; None: all. Raises
    ValueError for others.
    """

    method: str
    count: int
    size: int | None = None
    resident: int | None = None

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"attention_pages has the methods {', '.join(METHODS)}, got {self.method!r:.100}")
        if type(self.count) is not int or self.count < 2:
            raise ValueError(
                f"attention_pages reads 2 pages or more, the first and the newest among them, got {self.count!r:.100}"
            )
        size = self.size
        if size is not None and (type(size) is not int or size < 1 or size & (size - 1)):
            raise ValueError(f"a block of attention_pages has a power of two positions, got {size!r:.100}")
        if self.resident is not None and (type(self.resident) is not int or self.resident < 2):
            raise ValueError(f"attention_pages keeps 2 resident pages or more, got {self.resident!r:.100}")

    @staticmethod
    def read(value: Any) -> PageSelection | None:
        """The selection that an option stands for: a `PageSelection`, text such as "quest:64" or "quest:64:16", or
        None. Raises ValueError for anything else."""
        usage = (
            "attention_pages is text such as 'quest:64', the pages that a step reads of a row, or 'quest:64:16', as "
            "many blocks of 16 positions; ':resident=96' behind either keeps 96 pages of a row on the device"
        )
        make = lambda x: PageSelection(x[1], int(x[2]), *(int(n) if n else None for n in x.group(3, 4)))  # noqa: E731
        return read_option(value, PageSelection, _TEXT, make, usage)

    @property
    def by_bases(self) -> bool:
        """Whether a model needs bases of keys for it, see `inferlib.models.key_bases`."""
        return self.method == "loki"

    def __str__(self) -> str:
        text = ":".join(str(x) for x in (self.method, self.count, self.size) if x is not None)
        return text if self.resident is None else f"{text}:resident={self.resident}"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selector:
    """How decode rows select blocks. summaries: [N, n, K, 2 * h] of the n blocks of a page, or [L, N, ...]; count:
    blocks that are read; basis [K, h, d]: the directions that summaries are of, which then have 2 * d numbers.

    places [B, M] int32: where the summaries of rows' pages lie, if rows' tables may lack pages, which are negative
    there; None: where the pages lie, and none is missing."""

    summaries: jax.Array
    count: int = field(metadata={"static": True})
    basis: jax.Array | None = None
    places: jax.Array | None = None


def projected(x: jax.Array, basis: jax.Array | None) -> jax.Array:
    """x [..., K, G, h] in the directions of a basis [K, h, d], [..., K, G, d]; without one as it is. Numbers behind h,
    of cells that hold a value too, are left out."""
    if basis is None:
        return x
    dtype = jnp.promote_types(x.dtype, basis.dtype)
    more: Any = dict(precision=precision_of(dtype), preferred_element_type=jnp.float32)
    x = x[..., : basis.shape[1]].astype(dtype)
    return jnp.einsum("...kgh,khd->...kgd", x, basis.astype(dtype), **more)


def summary_of(keys: jax.Array) -> jax.Array:
    """The summaries [..., 2 * h] of blocks of keys [..., s, h]: the smallest numbers, then the largest."""
    return jnp.concatenate([jnp.min(keys, axis=-2), jnp.max(keys, axis=-2)], axis=-1)


def upper_bounds(q: jax.Array, summaries: jax.Array) -> jax.Array:
    """Upper bounds [B, C, K, m] float32 of the products of queries and keys: q [B, C, K, G, h], of which the group's
    highest counts, and summaries [B, m, K, 2 * h].

    A positive number of a query meets the largest of a dimension, a negative one the smallest. So the bound, the sum of
    max(q * smallest, q * largest), is one product.
    """
    dtype = jnp.promote_types(q.dtype, summaries.dtype)
    parts = jnp.concatenate([jnp.minimum(q, 0), jnp.maximum(q, 0)], axis=-1).astype(dtype)
    more: Any = dict(precision=precision_of(dtype), preferred_element_type=jnp.float32)
    return jnp.max(jnp.einsum("bckgh,bmkh->bckgm", parts, summaries.astype(dtype), **more), axis=3)


def selected_blocks(
    bounds: jax.Array, lengths: jax.Array, size: int, count: int, resident: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The blocks that queries read, by their bounds [..., m] float32, of which there are more than `count`.

    lengths [...] int32: positions that a query sees, its own the last; 0: none. Bounds of blocks that hold the newest
    position or none that is seen may be anything. resident [..., m] bool: blocks that can be read, the first and the
    newest among them; None: all. Returns blocks [..., count] int32, ascending up to the newest, which is repeated where
    a query sees fewer; and how many positions they have, up to the newest.
    """
    newest = jnp.maximum(lengths - 1, 0) // size
    number = jnp.arange(bounds.shape[-1], dtype=jnp.int32)
    able, older = number < newest[..., None], newest
    if resident is not None:
        able &= resident
        older = jnp.sum(able, axis=-1, dtype=jnp.int32)
    bounds = jnp.where(able, bounds, -jnp.inf)
    bounds = jnp.where(number == 0, jnp.inf, bounds)
    older = jnp.minimum(older, count - 1)
    choose_best = _by_counting if bounds.shape[-1] <= _COUNTED else _by_sorting
    blocks = choose_best(bounds, jnp.arange(count, dtype=jnp.int32), older[..., None])
    blocks = jnp.where(jnp.arange(count) < older[..., None], blocks, newest[..., None])
    return blocks, jnp.where(lengths > 0, older * size + (lengths - 1) % size + 1, 0)


def _by_counting(bounds: jax.Array, places: jax.Array, older: jax.Array) -> jax.Array:
    """The numbers [..., count] of the `older` [..., 1] highest of bounds [..., m], ascending, and behind them anything;
    of equal bounds the first."""
    number = jnp.arange(bounds.shape[-1], dtype=jnp.int32)
    one, other = bounds[..., None, :], bounds[..., :, None]
    before = number[:, None] < number
    higher = (other > one) | ((other == one) & before)  # [..., m, m], which is never written to memory
    chosen = jnp.sum(higher, axis=-2, dtype=jnp.int32) < older
    place = jnp.sum(chosen[..., :, None] & before, axis=-2, dtype=jnp.int32)
    at = chosen[..., None, :] & (place[..., None, :] == places[:, None])
    return jnp.sum(jnp.where(at, number, 0), axis=-1, dtype=jnp.int32)


def _by_sorting(bounds: jax.Array, places: jax.Array, older: jax.Array) -> jax.Array:
    """The selection by sorting, which is faster where there are many bounds."""
    best = lax.top_k(bounds, places.size - 1)[1]
    best = jnp.where(places[:-1] < older, best, bounds.shape[-1])
    return jnp.pad(jnp.sort(best, axis=-1), [(0, 0)] * (best.ndim - 1) + [(0, 1)])


def write_summaries(
    summaries: jax.Array,
    keys: Sequence[jax.Array],
    pages: jax.Array,
    places: jax.Array,
    layer: jax.Array | int | None = None,
    basis: jax.Array | None = None,
    targets: jax.Array | None = None,
) -> jax.Array:
    """The summaries [N, n, K, 2 * h], or [L, N, ...], with those of block places[u] of page pages[u], [U] int32 each,
    by the keys that are in the cache now; so a summary does not depend on what a page had before. basis: see
    `Selector`. targets [U]: where the summaries of these pages lie; None: where the pages lie.

    keys: [N, K, S, h], or [L, N, ...], and their scales, without h, if they are quantised; or packed. Pages or targets
    that do not exist are dropped; all are distinct.
    """
    count, blocks = keys[0].shape[-4], summaries.shape[-3]
    targets = pages if targets is None else targets

    def cells(x: jax.Array, last: int) -> jax.Array:
        """[U, K, s, ...], of an array with `last` dimensions behind the positions."""
        dim = x.ndim - 1 - last
        x = x.reshape(*x.shape[:dim], blocks, x.shape[dim] // blocks, *x.shape[dim + 1 :])
        at = (jnp.minimum(pages, count - 1), slice(None), places)
        return x.at[at if layer is None else (layer, *at)].get(mode="clip")

    new = decoded_keys(cells(keys[0], 1), summaries.dtype)
    if len(keys) > 1:
        new = new.astype(jnp.float32) * cells(keys[1], 0)[..., None]
    new = projected(new, basis)
    at = (targets, places) if layer is None else (layer, targets, places)
    return summaries.at[at].set(summary_of(new).astype(summaries.dtype), mode="drop", unique_indices=True)


def selects(columns: int, summaries: Shaped, count: int) -> bool:
    """True if rows of `columns` pages have more than `count` blocks, which are all that is read."""
    return columns * summaries.shape[-3] > count


def choose(q: Shaped, cache: KvCache, size: int, count: int, backend: str, *, new: bool) -> Choice:
    """The implementation for queries [B, C, K, G, h] and a cache's arrays, all of which may be shapes.

    new: it writes new cells.
    """
    rows, queries, heads, group, width = q.shape
    table = jax.ShapeDtypeStruct((rows * queries * heads, count), jnp.int32)
    view = replace(jax.eval_shape(partial(_by_block, size=size), cache), pages=table)
    one = jax.ShapeDtypeStruct((rows * queries * heads, 1, 1, group, width), q.dtype)
    return choose_decode(view, None, backend, one, new=new and queries == 1)


def selected_attention(
    q: jax.Array,
    cache: KvCache,
    selector: Selector,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    new: NewCells | None = None,
    backend: str = "xla",
) -> tuple[jax.Array, jax.Array, KvCache]:
    """`decode_attention` of as many blocks of each row and KV head as are selected, with the same results.

    q [B, K, G, h] or [B, C, K, G, h]; cache: with a page table, and no window; selector: with summaries that are up to
    date but for the block that a query stands in. Each of several queries of a row makes a
    selection of its own, as if it came alone. new: of one query of a row; cells of several are in the cache already.
    Raises ValueError for rows without pages, and for new cells of several queries.
    """
    single, of_rows = q.ndim == 4, lengths
    q = q[:, None] if single else q
    rows, queries, heads, group, _ = q.shape
    if new is not None and queries > 1:
        raise ValueError(
            "several queries of a row select blocks by the summaries of their own cells: write these first"
        )
    if new is not None and backend not in IN_PLACE:
        cache, new = write_new(cache, new, lengths), None
    lengths = jnp.maximum(lengths[:, None] - queries + 1 + jnp.arange(queries, dtype=jnp.int32), 0)
    lengths = jnp.where(of_rows[:, None] > 0, lengths, 0)
    table, seen = _selection(q, cache, selector, lengths, backend)
    view = replace(_by_block(cache, cache.k.shape[-2] // selector.summaries.shape[-3]), pages=table)
    if new is not None:  # a row's newest block is the last of each of its heads
        cells = [x.reshape(rows * heads, 1, x.shape[-1]) for x in new.cells]
        new = NewCells(cells, None if new.written is None else jnp.repeat(new.written, heads))
    alone, weighing = q.reshape(-1, 1, group, q.shape[-1]), replace(options, sinks=None)
    out, lse, view = decode_attention(alone, view, seen, weighing, new=new, backend=backend)
    out, lse = out.reshape(*q.shape[:-1], out.shape[-1]), lse.reshape(q.shape[:-1])
    if options.sinks is not None:
        active = (lengths > 0)[..., None, None]
        out, total = merge_attention(out[None], lse[None], sinks=options.sinks)
        lse = jnp.where(active, total, lse)
    if new is not None:
        pairs = zip(view.arrays, cache.arrays, strict=True)
        cache = cache.with_arrays([x.reshape(old.shape) for x, old in pairs])
    return (out[:, 0], lse[:, 0], cache) if single else (out, lse, cache)


def _selection(
    q: jax.Array, cache: KvCache, selector: Selector, lengths: jax.Array, backend: str
) -> tuple[jax.Array, jax.Array]:
    """The table [B * C * K, count] of pages of one head that queries q [B, C, K, G, h] read, and how many positions of
    these they see. lengths [B, C]: positions of the row that they see."""
    summaries, count, pages = selector.summaries, selector.count, _table(cache)
    q, (rows, queries, heads), (total, _, slots) = projected(q, selector.basis), q.shape[:3], cache.k.shape[-4:-1]
    size, each = slots // summaries.shape[-3], summaries.shape[-3]
    if backend == "pallas_gpu" and cache.layer is None and selector.places is None:
        from inferlib.pallas_kernels.selected_pages_gpu import select_blocks, unsupported

        if unsupported(pages.shape[1] * each) is None:
            kernel = partial(select_blocks, size=size, count=count)
            inputs = q.reshape(-1, *q.shape[2:]), summaries, jnp.repeat(pages, queries, axis=0), lengths.reshape(-1)
            return run_kernel(kernel, *inputs)
    bounds = _bounds(q, cache, selector)
    lengths = jnp.broadcast_to(lengths[..., None], (rows, queries, heads))
    resident = None if selector.places is None else jnp.repeat(pages >= 0, each, axis=1)[:, None, None]
    blocks, seen = selected_blocks(bounds, lengths, size, count, resident)
    numbers = jnp.take_along_axis(pages[:, None, None], blocks // each, axis=-1)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    table = (jnp.clip(numbers, 0, total - 1) * heads + head) * each + blocks % each
    return table.reshape(-1, count), seen.reshape(-1)


def wanted_pages(q: jax.Array, cache: KvCache, selector: Selector, lengths: jax.Array) -> jax.Array:
    """How often one query of each row [B, K, G, h] would read each page if all were here, [B, M + 1] int32: the sum
    over KV heads and blocks, the first and the newest block left out; behind it, how often pages that are not here.

    Others as in `selected_attention`. The compiler computes what both have in common once.
    """
    pages, count, each = _table(cache), selector.count, selector.summaries.shape[-3]
    bounds = _bounds(projected(q[:, None], selector.basis), cache, selector)
    of_heads = jnp.broadcast_to(lengths[:, None, None], bounds.shape[:-1])
    size = cache.k.shape[-2] // each
    blocks, _ = selected_blocks(bounds, of_heads, size, count)
    older = (blocks > 0) & (blocks < (jnp.maximum(of_heads, 1)[..., None] - 1) // size)
    columns = jnp.arange(pages.shape[1], dtype=jnp.int32)
    counts = jnp.sum((blocks[..., None] // each == columns) & older[..., None], axis=(1, 2, 3), dtype=jnp.int32)
    absent = jnp.sum(jnp.where(pages < 0, counts, 0), axis=1, keepdims=True)
    return jnp.concatenate([counts, absent], axis=1)


def _bounds(q: jax.Array, cache: KvCache, selector: Selector) -> jax.Array:
    """The bounds [B, C, K, m] of queries [B, C, K, G, h], or of directions, for all blocks of their rows."""
    places = _table(cache) if selector.places is None else selector.places
    of_row = selector.summaries.at[places if cache.layer is None else (cache.layer, places)].get(mode="clip")
    return upper_bounds(q, of_row.reshape(q.shape[0], -1, *of_row.shape[3:]))


def _by_block(cache: KvCache, size: int) -> KvCache:
    """A cache [N, K, S, h] as [N * K * S / s, 1, s, h], without a table; likewise a stack of layers."""
    lead = cache.k.ndim - 4
    arrays = [x.reshape(*x.shape[:lead], -1, 1, size, *x.shape[lead + 3 :]) for x in cache.arrays]
    return replace(cache.with_arrays(arrays), pages=None, limit=None)


def _table(cache: KvCache) -> jax.Array:
    if cache.pages is None or cache.ring:
        raise ValueError("rows without pages select none")
    return cache.pages
