"""The cache as a plan: the arrays of every block. Attention has keys and values, or latents and rotary keys (MLA), in
int8 or fp8 with scales beside them, one for each position and head, made when the cell is written; or in four bits,
each cell bytes (see `inferlib.ops.int4_cells`). Recurrent layers have each row's state.

The cache of attention is a pool of pages of S positions for all rows of a replica, arrays [pages, K, S, h]. A table
says where the pages of each row lie, the same in all layers; or in all of a level, if a bounded cache keeps more of
lower layers (see `inferlib.models.cache_levels`). Layers with a sliding window or chunks keep a ring for each row if
that is smaller, [rows, K, S, h] with S the ring's capacity. If a mesh deals positions out to several
devices, each stores an equal number of slots of a page, its positions in order (see `inferlib.sharding.stripe`).

Rings and states are no other row's to read, so what prompts that begin alike share of them are snapshots: arrays like
theirs, with an entry for each snapshot in place of rows. Programs do not see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.buckets import rounded_up
from inferlib.config import EngineConfig, PoolSize
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import AttentionSpec, MlaSpec
from inferlib.models.layers.joint_cells import heads_of_a_cell
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.recurrent import Recurrent
from inferlib.ops import int4_cells
from inferlib.ops.quantized import nbytes
from inferlib.ops.selected_pages import PageSelection
from inferlib.option_checks import CALIBRATED_CACHE, KV_CACHE_DTYPES, PACKED_CACHES, ConfigurationError
from inferlib.programs.start_functions import run
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

T = TypeVar("T")
# The dtype of scales. A smaller one would save nothing on a TPU: the few heads of a device fill only a part of a tile.
_SCALES = np.dtype(np.float32)
ONE_DEVICE = Shards()
_WHOLE = PoolSize()
_TABLE_BYTES = 512 << 10  # of a TPU's scalar memory, for the table of pages
# Snapshots by default: one for each row, up to this number a replica, in at most this share of the memory that rows and
# one sequence leave; where the memory is not known, up to fewer.
_SNAPSHOTS, _OF_REST, _CAUTIOUS = 64, 0.25, 8


@dataclass(frozen=True)
class CacheArray:
    """One array of the cache: keys, values, latents, their scales, or states. fold: positions per row of the array."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: np.dtype
    fold: int = 1

    def nbytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes on one device."""
        return nbytes(shards.local_shape(self.axes, self.shape), self.dtype)

    def position_bytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes of one position in one layer, on a device that stores it; 0 for a state, which has no positions."""
        if axes.POSITIONS not in self.axes:
            return 0
        return self._bytes_without(shards, axes.LAYERS, axes.PAGES, axes.POSITIONS) // self.fold

    def row_bytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes of one row in one layer, on a device."""
        return self._bytes_without(shards, axes.LAYERS, axes.PAGES)

    def of(self, entries: int) -> CacheArray:
        """An array with `entries` pages or rows."""
        dim = self.axes.index(axes.PAGES)
        return replace(self, shape=(*self.shape[:dim], entries, *self.shape[dim + 1 :]))

    def _bytes_without(self, shards: Shards, *left_out: str) -> int:
        local = zip(self.axes, shards.local_shape(self.axes, self.shape), strict=True)
        return nbytes([size for name, size in local if name not in left_out], self.dtype)


@dataclass(frozen=True)
class BlockState:
    """The states of a block of recurrent layers, of one size for each row, however long the row: arrays [N, ...], or
    [L, N, ...] if the block is scanned."""

    arrays: tuple[CacheArray, ...]
    names: tuple[str, ...]

    ring: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    block: ClassVar[int | None] = None
    level: ClassVar[int] = 0
    massed: ClassVar[bool] = False
    queries: ClassVar[tuple[int, ...] | None] = None
    summarised: ClassVar[tuple[int, int] | None] = None

    @property
    def owned(self) -> tuple[CacheArray, ...]:
        return self.arrays

    @property
    def of_rows(self) -> tuple[bool, ...]:
        """For each of `owned`: True."""
        return (True,) * len(self.arrays)

    def row_bytes(self, shards: Shards = ONE_DEVICE) -> int:
        """Bytes of one row in one layer, on a device: what a step reads and writes."""
        return sum(array.row_bytes(shards) for array in self.arrays)


@dataclass(frozen=True)
class BlockCache:
    """The cache of a block of attention: the shapes of its values, [N, K, S, h], or [L, N, K, S, h] if it is scanned
    or looped.

    ring: N rows have a ring each; otherwise there are N pages. dtype: of the values; uint8: cells are packed, and
    `shapes` are those of the numbers in them. scaled: each array has scales [N, K, S] or [L, N, K, S]. latent: the
    arrays are latents and rotary keys of MLA, which may be folded (see `inferlib.ops.cache_write`). Otherwise two
    arrays are keys and values, and of a single array each cell has the keys of one or more KV heads, followed by their
    values (see `inferlib.models.layers.joint_cells`). shared: the block's
    layers attend to another block's arrays; the shapes are those that it would have. massed: there is the attention
    that each cell got beside the cells (see `inferlib.ops.attention_mass`). queries: the shape [R, K, W, G * h], or [L,
    R, ...], of the queries of each row's newest positions (see `inferlib.ops.recent_queries`); None: there are none.
    block: positions of the blocks of which there are summaries beside the cells (see `inferlib.ops.selected_pages`);
    None: there are none. summarised: rows, and pages of each, if rows have the summaries, as their pages may be in the
    host's memory; None: pages have them. directions: how many directions of keys these are of (see
    `inferlib.models.key_bases`); 0: of keys as they are. calibrated: packed cells are of keys that a calibration has
    turned. level: which of the plan's `bounds` is of its layers, whose pages are those of this level.
    """

    shapes: tuple[tuple[int, ...], ...]
    ring: bool
    dtype: np.dtype
    scaled: bool = False
    latent: bool = False
    shared: bool = False
    block: int | None = None
    massed: bool = False
    queries: tuple[int, ...] | None = None
    directions: int = 0
    calibrated: bool = False
    level: int = 0
    summarised: tuple[int, int] | None = None

    @property
    def paged(self) -> bool:
        return not self.ring

    @property
    def owned(self) -> tuple[CacheArray, ...]:
        """The arrays that no other block owns."""
        return () if self.shared else self.arrays

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """The arrays of values, then, if `scaled`, their scales, then summaries, the mass or queries: this block's or
        those it shares."""
        pairs = zip(self._stored, self.folds, strict=True)
        values = tuple(CacheArray(shape, self.axes, self.dtype, fold) for shape, fold in pairs)
        scales = tuple(CacheArray(shape[:-1], self.axes[:-1], _SCALES) for shape in self.shapes)
        mass = (CacheArray(self.shapes[0][:-1], self.axes[:-1], _SCALES),) * self.massed
        return values + (scales if self.scaled else ()) + self.summaries + mass + self._queries

    @property
    def _queries(self) -> tuple[CacheArray, ...]:
        if self.queries is None:
            return ()
        *names, heads, _, _ = self.axes
        return (CacheArray(self.queries, (*names, heads, None, None), self.dtype),)

    @property
    def of_rows(self) -> tuple[bool, ...]:
        """For each of `owned`: True if it has an entry per row in place of pages."""
        owned = len(self.owned)
        last = len(self._queries) + (len(self.summaries) if self.summarised else 0)
        return tuple(self.ring or i >= owned - last for i in range(owned))

    @property
    def packed(self) -> bool:
        """True if cells are bytes, of some bits for each number."""
        return self.dtype == int4_cells.DTYPE

    @property
    def _stored(self) -> tuple[tuple[int, ...], ...]:
        """The shapes with cells as they are stored."""
        if not self.packed:
            return self.shapes
        keys = int4_cells.CALIBRATED_KEYS if self.calibrated else int4_cells.KEYS
        pairs = zip(self.shapes, (keys, int4_cells.VALUES), strict=True)
        return tuple((*shape[:-1], cells.nbytes(shape[-1])) for shape, cells in pairs)

    @property
    def summaries(self) -> tuple[CacheArray, ...]:
        """[N, n, K, 2 * h] of the n blocks of a page, or [L, N, ...], if there are any; or of directions 2 * d."""
        if self.block is None:
            return ()
        *lead, heads, slots, size = self.shapes[0]
        *names, of_heads, positions, _ = self.axes
        dtype = _SCALES if self.scaled or self.packed else self.dtype
        shape = slots // self.block, heads, 2 * (self.directions or size)
        if self.summarised is None:
            return (CacheArray((*lead, *shape), (*names, positions, of_heads, None), dtype, self.block),)
        lead, fold = (*lead[:-1], *self.summarised), self.block * self.summarised[1]
        return (CacheArray((*lead, *shape), (*names, None, positions, of_heads, None), dtype, fold),)

    @property
    def names(self) -> tuple[str, ...]:
        """One name for each of `arrays`."""
        apart = ("latents", "rotary keys") if self.latent else ("k", "v")
        values = apart if len(self.shapes) == 2 else ("k and v",)
        names = values + tuple(f"{name} scales" for name in values if self.scaled)
        beside = ("summaries",) * len(self.summaries) + ("mass",) * self.massed
        return names + beside + ("queries",) * len(self._queries)

    @property
    def slots(self) -> int:
        return self.shapes[0][-2]

    @property
    def folds(self) -> tuple[int, ...]:
        """For each array of values, positions per row of the array."""
        return tuple(self.slots // shape[-2] for shape in self.shapes)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical axes of values."""
        heads, size = (None, axes.LATENT) if self.latent else (axes.KV_HEADS, axes.HEAD_DIM)
        names = (axes.PAGES, heads, axes.POSITIONS, size)
        return names if len(self.shapes[0]) == 4 else (axes.LAYERS, *names)


@dataclass(frozen=True)
class CachePlan:
    """rows: sequences that the cache has a row for; max_len: most tokens of a sequence; page: positions of a page, over
    all devices that share a row's; pages, snapshots: their number of all replicas. drafting: the blocks of a model that
    drafts, if there is one; all of them have the same pages as the others. bounds: most cells of a row whose cache is
    compacted, in layers of each level, the fewest first; (): as many as it has tokens. Of several levels each has its
    pages; `pages` are those of level 0, and the others have as many more as their rows."""

    rows: int
    max_len: int
    page: int
    pages: int
    blocks: tuple[BlockCache | BlockState, ...]
    snapshots: int = 0
    drafting: tuple[BlockCache | BlockState, ...] = ()
    bounds: tuple[int, ...] = ()

    @property
    def every_block(self) -> tuple[BlockCache | BlockState, ...]:
        """The blocks of the model and of one that drafts, whose arrays lie in this order."""
        return self.blocks + self.drafting

    @property
    def of_drafts(self) -> CachePlan:
        """The part of the model that drafts."""
        return replace(self, blocks=self.drafting, drafting=(), snapshots=0)

    @property
    def columns(self) -> int:
        """Pages of the longest sequence, M; those of level 0."""
        return self.columns_of(0)

    @property
    def level_columns(self) -> tuple[int, ...]:
        """Pages of the longest sequence in each level. Its row of the table has those of level 0 first."""
        return tuple(-(-bound // self.page) for bound in self.bounds or (self.max_len,))

    def columns_of(self, level: int) -> int:
        """Pages of the longest sequence in a level."""
        return self.level_columns[level if self.bounds else 0]

    def pages_of(self, level: int, replicas: int) -> int:
        """Pages of all replicas in a level: each has room for as many rows in all levels."""
        return self.pages // replicas * self.columns_of(level) // self.columns * replicas

    @property
    def tokens(self) -> int:
        """How many tokens the pages of all replicas hold."""
        return self.pages * self.page

    def tokens_in(self, memory: int, shards: Shards = ONE_DEVICE) -> int:
        """How many tokens the pages of all replicas hold if the cache has `memory` bytes on each device."""
        of_page, of_rows = self.bytes_of(shards)
        return max(memory - of_rows, 0) // of_page * self.page * shards.replicas if of_page else self.tokens

    def bytes_of(self, shards: Shards = ONE_DEVICE) -> tuple[int, int]:
        """Bytes on a device of a page, and of all rings and states, those of snapshots included."""
        of_rows = sum(array.nbytes(shards) for array in self.part(self.arrays, of_rows=True))
        of_rows += of_rows * self.snapshots // self.rows
        return -(-self._sequence_bytes(shards) // self.columns), of_rows

    def _sequence_bytes(self, shards: Shards) -> int:
        """Bytes on a device of all pages of the longest sequence."""
        total = 0
        for block in self.every_block:
            paged = (x for x, of_row in zip(block.owned, block.of_rows, strict=True) if not of_row)
            total += self.columns_of(block.level) * sum(x.of(shards.replicas).nbytes(shards) for x in paged)
        return total

    def slots(self, block: BlockCache) -> int:
        """The most slots of a row, over all devices that share its positions."""
        return block.slots if block.ring else block.slots * self.columns_of(block.level)

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """The arrays of each block in turn."""
        return tuple(array for block in self.every_block for array in block.owned)

    @property
    def of_rows(self) -> tuple[bool, ...]:
        """For each of `arrays`: True for rings, states and queries, which have an entry per row in place of pages."""
        return tuple(of_one for block in self.every_block for of_one in block.of_rows)

    def part(self, arrays: Sequence[T], *, of_rows: bool) -> tuple[T, ...]:
        """The items of rows, or the items of pages. arrays: an item for each array of the plan."""
        return tuple(x for x, of_one in zip(arrays, self.of_rows, strict=True) if of_one == of_rows)

    def with_part(self, arrays: Sequence[T], part: Sequence[T], *, of_rows: bool) -> tuple[T, ...]:
        """One for each of `arrays`, with others in place of those of rows, or of pages."""
        rest = iter(part)
        return tuple(next(rest) if x == of_rows else old for old, x in zip(arrays, self.of_rows, strict=True))

    def with_snapshots(self, pool: PoolSize, shards: Shards = ONE_DEVICE) -> CachePlan:
        """The plan with room for snapshots, if rows have rings or states that other rows could go on from.

        There are as many as `pool` asks for; see `_SNAPSHOTS` for the default.
        """
        if not any(self.of_rows) or self.bounds or self.pages_leave:
            return self
        rows, count = self.rows // shards.replicas, pool.snapshots
        if count is None:
            count = min(rows, _CAUTIOUS if pool.memory is None else _SNAPSHOTS)
            if pool.memory is not None:
                of_page, of_rows = replace(self, snapshots=0).bytes_of(shards)
                rest = max(pool.memory - of_rows - self.columns * of_page, 0)
                count = min(count, int(_OF_REST * rest) * rows // of_rows)
        return replace(self, snapshots=count * shards.replicas)

    @property
    def snapshot_arrays(self) -> tuple[CacheArray, ...]:
        """Like those of `arrays` that are `of_rows`, with snapshots in place of rows; none without snapshots."""
        return tuple(x.of(self.snapshots) for x in self.part(self.arrays, of_rows=True) if self.snapshots)

    @property
    def pages_leave(self) -> bool:
        """True if pages of rows may be in the host's memory, and their summaries are the rows'."""
        return any(block.summarised is not None for block in self.every_block)

    @property
    def exact_snapshots(self) -> bool:
        """True if a snapshot serves those alone that go on where it was saved: a state does not go back, as a ring does
        (see `Snapshots`)."""
        return any(isinstance(block, BlockState) and block.arrays for block in self.every_block)

    def no_prefix_caching(self, config: EngineConfig) -> str | None:
        """Why prompts that begin alike do not share pages; None if they do."""
        if not config.prefix_caching:
            return "prefix_caching is False"
        if config.compacted is not None:
            return f"cache_policy {str(config.compacted)!r} moves the cells of each row, which no other row can take"
        if config.propagation is not None:
            return f"sparse_prefill {str(config.propagation)!r} packs the cells of later layers, each row for itself"
        if config.resident is not None:
            return f"attention_pages {str(config.attention_pages)!r} brings pages of each row and sends others away"
        if not any(self.of_rows) or self.snapshots:
            return None
        what = "recurrent layers have a state" if self.exact_snapshots else "layers with a window or chunks have a ring"
        why = "snapshots is 0" if config.snapshots == 0 else "cache_memory leaves no room for snapshots"
        return f"{what} of each row, which no other row can take without a snapshot, and {why}"

    @property
    def nbytes(self) -> int:
        """Bytes of `arrays` on all devices, without snapshots."""
        return sum(array.nbytes() for array in self.arrays)

    def allocate(self, shards: Shards = ONE_DEVICE) -> tuple[jax.Array, ...]:
        """Zeroed `arrays`, each part on its device."""
        return _zeros(self.arrays, shards)

    def allocate_snapshots(self, shards: Shards = ONE_DEVICE) -> tuple[jax.Array, ...]:
        """Zeroed `snapshot_arrays`, each part on its device."""
        return _zeros(self.snapshot_arrays, shards)

    def view(self, arrays: Sequence[jax.Array]) -> tuple[LayerCache, ...]:
        """The flat arrays as one `LayerCache` per block, which is empty if the block shares another's arrays."""
        rest, caches = iter(arrays), []
        for block in self.every_block:
            there = {"summaries": block.block is not None, "mass": block.massed, "queries": block.queries is not None}
            names = [name for name, x in there.items() if x and block.owned]
            cells = tuple(islice(rest, len(block.owned) - len(names)))
            beside: Any = {name: next(rest) for name in names}
            caches.append(LayerCache(cells, block.ring, **beside))
        return tuple(caches)

    @staticmethod
    def flatten(caches: Sequence[LayerCache]) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(caches))


def _zeros(arrays: tuple[CacheArray, ...], shards: Shards) -> tuple[jax.Array, ...]:
    """All by one program: to compile one for each shape takes longer."""
    shapes = tuple((x.shape, x.dtype.name) for x in arrays)
    return run(_zeros_of, (shapes,), place=tuple(shards.sharding(x.axes) for x in arrays))


def _zeros_of(shapes: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(shape, dtype) for shape, dtype in shapes)


def plan_cache(
    model: AbstractModel,
    *,
    rows: int,
    max_len: int,
    chunk: int,
    dtype,
    platform: str = "cpu",
    pool: PoolSize = _WHOLE,
    drafting: AbstractModel | None = None,
) -> CachePlan:
    """Plan the cache of `rows` sequences of up to `max_len` tokens, prefilled in chunks of at most `chunk`.

    dtype: of keys and values, a float type or a name of KV_CACHE_DTYPES; states keep theirs. drafting: a model that
    drafts, whose cells lie in the same pages.

    Raises ConfigurationError for a name of KV_CACHE_DTYPES if no layer has keys and values, if a "tpu" needs other
    cells (see `_attention`), for a pool that cannot hold one sequence of `max_len`, and for blocks that no page divides
    into.
    """
    named = dtype if dtype in KV_CACHE_DTYPES else None
    if named and all(isinstance(layer.attention, Recurrent) for layer in model.config.layers):
        raise ConfigurationError(
            f"kv_cache_dtype {dtype!r} is of keys and values, and no layer of this model keeps any: leave it out"
        )
    dtype, shards = KV_CACHE_DTYPES[named] if named else np.dtype(dtype), model.layout.shards
    by_heads = bool(pool.bounds or pool.selection or pool.massed or pool.queries)
    beside: Any = dict(selection=pool.selection, massed=pool.massed, queries=pool.queries)
    kinds = [_Kind(model, platform, named, by_heads, **beside)]
    kinds += [] if drafting is None else [_Kind(drafting, platform, named, by_heads)]
    longest = max(pool.bounds, default=max_len)
    page = max(kind.page(pool.page, longest, rows // shards.replicas) for kind in kinds)
    of_model, *others = [kind.blocks(rows, max_len, chunk, page, dtype) for kind in kinds]
    of_drafts = others[0] if others else ()
    plan = CachePlan(rows, max_len, page, 1, of_model, drafting=of_drafts, bounds=pool.bounds)
    levels = {block.level for block in of_model}
    if pool.bounds and levels != set(range(len(pool.bounds))):
        raise ValueError(f"the model's layers are in the levels {levels}, and the cache has {len(pool.bounds)}")
    plan = plan.with_snapshots(pool, shards)
    return _with_pages(plan, shards, pool)


def _with_pages(plan: CachePlan, shards: Shards, pool: PoolSize) -> CachePlan:
    """A plan of one page, with as many pages as fit a device's memory, and no more than all rows can use.

    Where rows that decode keep some pages on the device, that holds these of one row at least; and by default those of
    all rows, and a prompt of `max_len`.
    """
    memory, rows, least = pool.memory, plan.rows // shards.replicas, plan.columns
    pages = most = rows * plan.columns
    if pool.selection is not None and pool.selection.resident is not None:
        least = min(plan.columns, pool.selection.resident)
        pages = (rows - 1) * least + plan.columns
    of_page, of_rows = plan.bytes_of(shards)
    if memory is not None and of_page:
        pages = min(most, max(memory - of_rows, 0) // of_page)
    if pages < least or (memory is not None and of_rows > memory):
        need = of_rows + least * of_page
        part = "" if least == plan.columns else f"{least} resident pages of "
        raise ConfigurationError(
            f"cache_memory of {memory} bytes on a device cannot hold {part}one sequence of max_len {plan.max_len}, "
            f"which takes {need} with what {plan.rows} rows{_and_snapshots(plan)} keep in any case: raise it to that, "
            f"lower max_len to {max(pages * plan.page, 0)} or less, or lower max_batch"
        )
    return _paged(replace(plan, pages=pages * shards.replicas), shards.replicas)


def _and_snapshots(plan: CachePlan) -> str:
    return f" and {plan.snapshots} snapshots" if plan.snapshots else ""


def _paged(plan: CachePlan, replicas: int) -> CachePlan:
    """A plan whose blocks have one page, with as many as it says."""

    def of(block: BlockCache | BlockState) -> BlockCache | BlockState:
        if isinstance(block, BlockState) or block.ring:
            return block
        pages = plan.pages_of(block.level, replicas)
        return replace(block, shapes=tuple((*shape[:-4], pages, *shape[-3:]) for shape in block.shapes))

    return replace(plan, blocks=tuple(map(of, plan.blocks)), drafting=tuple(map(of, plan.drafting)))


@dataclass(frozen=True)
class _Kind:
    """The form of cells on a platform.

    A TPU's memory is tiled by 128 numbers. Cells on a "tpu" are multiples of that: for other sizes the compiler would
    reorder the dimensions, and copy the cache at every step. So if heads have another size, mostly 64, one cell has a
    key and its value, or those of several heads; and rotary keys of latents, of 32 or 64 numbers, are folded. A
    device's slots are multiples of 128 too, because kernels read whole tiles. named: of KV_CACHE_DTYPES, if the cache
    is quantised. by_heads: KV heads share no cells, because a policy that bounds the cache or a selection of blocks
    tells them apart.
    """

    model: AbstractModel
    platform: str
    named: str | None
    by_heads: bool = False
    selection: PageSelection | None = None
    massed: bool = False
    queries: int = 0

    @property
    def scaled(self) -> bool:
        return self.named is not None and not self.packed

    @property
    def packed(self) -> bool:
        return self.named in PACKED_CACHES

    @property
    def calibrated(self) -> bool:
        return self.named == CALIBRATED_CACHE

    @property
    def lanes(self) -> int:
        return 128 if self.platform == "tpu" else 1

    def page(self, least: int, max_len: int, rows: int) -> int:
        """Positions of a page, over all devices that share a row's: at least `least` on each, or fewer if `max_len` is
        smaller. On a "tpu" they are so many that the table of pages fits the scalar memory, where kernels read it."""
        layout = self.model.layout
        specs = [layer.attention for layer in self.model.config.layers]
        tile = self.lanes * max([max(self.folds(spec)) for spec in specs if isinstance(spec, MlaSpec)], default=1)
        devices = layout.shards.size(axes.POSITIONS)
        least = min(least, 1 << (-(-max_len // devices) - 1).bit_length())
        page = layout.positions(least * devices, tile)
        while self.platform == "tpu" and 4 * rows * rounded_up(-(-max_len // page), 128) > _TABLE_BYTES:
            if page >= max_len:
                break
            page *= 2
        return page

    def blocks(
        self, rows: int, max_len: int, chunk: int, page: int, dtype: np.dtype
    ) -> tuple[BlockCache | BlockState, ...]:
        """The cache of each block of layers, with one page."""
        blocks, model = [], self.model
        for layers in model.blocks():
            runs = len(layers) * model.config.runs(layers[0])  # a loop has cells of each step
            spec, stack = model.config.layers[layers[0]].attention, (runs,) if runs > 1 else ()
            if isinstance(spec, Recurrent):
                blocks.append(_states(model, spec, (*stack, rows)))
                continue
            # A ring holds what a chunk's first query sees and the chunk itself.
            capacity = max_len if spec.reach is None else spec.reach + chunk
            ring = capacity < max_len
            shapes = self.cells(spec, capacity if ring else page)
            latent, shared = isinstance(spec, MlaSpec), spec.cache_of is not None
            count = rows if ring else 1  # pages: as many as fit, see `_with_pages`
            block = None if latent or spec.reach is not None else self.summarised(page)
            of_rows = None if ring else self.summarised_rows(spec, block, (rows, -(-max_len // page)))
            shapes = tuple((*stack, count, *x) for x in shapes)
            beside = self.massed, self.queries_of(spec, (*stack, rows)), self.directions_of(spec), self.calibrated
            level = spec.cache_level if isinstance(spec, AttentionSpec) else 0
            parts = BlockCache(shapes, ring, dtype, self.scaled, latent, shared, block, *beside, level)
            blocks.append(replace(parts, summarised=of_rows))
        return tuple(blocks)

    def summarised_rows(
        self, spec: AttentionSpec | MlaSpec, block: int | None, sizes: tuple[int, int]
    ) -> tuple[int, int] | None:
        """`BlockCache.summarised` of rows and pages of each, which are `sizes`. Raises ConfigurationError for layers
        that read all pages of a row, and for those that could not say which."""
        if self.selection is None or self.selection.resident is None:
            return None
        why = "latent attention and windows of nearly max_len read them all" if block is None else None
        if spec.cache_of is not None:
            why = "layers that read the cache of another layer do not tell which ones they want"
        if why:
            raise ConfigurationError(
                f"attention_pages {str(self.selection)!r} keeps some pages of a row on the device, and {why}: leave "
                "resident out"
            )
        return sizes

    def queries_of(self, spec: AttentionSpec | MlaSpec, lead: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the newest queries of rows; None if there are none. Raises ConfigurationError where devices do
        not have whole groups of query heads, whose attention counts for their KV head."""
        if not self.massed and not self.queries:
            return None
        heads = self.model.layout.heads(spec)
        if heads.copies > 1 or heads.groups * heads.queries != spec.heads:
            raise ConfigurationError(
                f"cache_policy by attention counts that of whole groups of heads, and {spec.heads} query heads do not "
                "share out evenly over these devices with their KV heads: lower tp, or take a policy by keys"
            )
        if not self.queries:
            return None
        return (*lead, heads.groups, self.queries, heads.queries * spec.cache_sizes[0])

    def directions_of(self, spec: AttentionSpec | MlaSpec) -> int:
        """How many directions of keys a layer's blocks are selected by; 0: blocks are selected by whole keys."""
        by_bases = self.selection is not None and self.selection.by_bases
        return spec.key_basis if by_bases and isinstance(spec, AttentionSpec) else 0

    def summarised(self, page: int) -> int | None:
        """Positions of a block that has a summary; None if none has. Raises ConfigurationError."""
        if self.selection is None:
            return None
        size = self.selection.size or page
        if page % size:
            raise ConfigurationError(
                f"attention_pages {str(self.selection)!r} selects blocks of {size} positions, and a page has {page}: "
                f"take blocks of {page} or less"
            )
        return size

    def folds(self, spec: AttentionSpec | MlaSpec) -> list[int]:
        """Positions of a row of each array."""
        latent, lanes = isinstance(spec, MlaSpec), self.lanes
        return [lanes // size if latent and size in (lanes // 2, lanes // 4) else 1 for size in spec.cache_sizes]

    def cells(self, spec: AttentionSpec | MlaSpec, capacity: int) -> list[tuple[int, ...]]:
        """The shapes [K, S, h] of a layer's arrays, without layers and pages, with room for `capacity` positions."""
        latent, sizes, folds, lanes = isinstance(spec, MlaSpec), spec.cache_sizes, self.folds(spec), self.lanes
        if self.packed:
            self._check_packed(spec)
        if self.platform == "tpu" and self.scaled and (latent or any(size % lanes for size in sizes)):
            what = "latent attention" if latent else f"attention with heads of {spec.head_dim}"
            raise ConfigurationError(
                f"{what} keeps its cache in the model's dtype on TPUs, whose compiler would copy one of int8 or fp8 at "
                "every layer: leave kv_cache_dtype out"
            )
        layout, joint = self.model.layout, 1
        if not latent and any(size % lanes for size in sizes):
            joint = self.joint_heads(spec)
            sizes, folds = (joint * sum(sizes),), [1]
        slots, heads = layout.positions(capacity, lanes * max(folds)), layout.cache_heads(spec) // joint
        pairs = zip(sizes, folds, strict=True)
        return [(heads, slots // fold, -(-size * fold // lanes) * lanes) for size, fold in pairs]

    def joint_heads(self, spec: AttentionSpec | MlaSpec) -> int:
        """How many KV heads share a cell of a key and a value each."""
        if self.by_heads:
            return 1
        layout = self.model.layout
        heads = layout.cache_heads(spec) // layout.shards.size(axes.KV_HEADS)
        return heads_of_a_cell(heads, layout.heads(spec).queries, sum(spec.cache_sizes), self.lanes)

    def _check_packed(self, spec: AttentionSpec | MlaSpec) -> None:
        """Raise ConfigurationError for cells that cannot have four bits."""
        why = next((why for size in spec.cache_sizes if (why := int4_cells.unsupported(size))), None)
        if isinstance(spec, MlaSpec):
            why = "latent attention keeps latents, which have no heads to rotate"
        elif self.platform == "tpu":
            why = "no kernel for TPUs reads such cells"
        if why:
            raise ConfigurationError(
                f"kv_cache_dtype {self.named!r} is not for this model: {why}; take int8, or leave it out"
            )


def _states(model: AbstractModel, spec: Recurrent, rows: tuple[int, ...]) -> BlockState:
    """rows: the leading dimensions, [N] or [L, N]."""
    states, names = spec.states(model.layout.heads(spec)), (axes.LAYERS, axes.PAGES)[-len(rows) :]
    wide = np.dtype(np.float32)
    arrays = (CacheArray((*rows, *x.shape), (*names, *x.axes), wide if x.wide else model.dtype) for x in states)
    return BlockState(tuple(arrays), tuple(x.name for x in states))
