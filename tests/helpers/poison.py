"""NaN in everything that is not valid.

Invalid are cells that no token was written to, cells beyond a row's length, cells that left the window, all cells of
rows without a sequence unless a prompt to come can take them, what no snapshot has, and what the device remembers of
such rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib import LLM, SamplingParams
from inferlib.cache.plan import BlockState
from inferlib.engine.engine import Engine
from inferlib.programs.row_changes import Restore, Save
from inferlib.programs.row_state import RowState
from inferlib.sharding import axes
from tests.helpers.cached_pages import nodes_of
from tests.helpers.llms import new_engine


def valid_cells(engine: Engine) -> list[np.ndarray]:
    """For each block that has a cache, which slots [N, S] of which pages, or rows with a ring, the next steps may read;
    of states which rows, [R, 1]."""
    lengths = {row: s.prefilled - s.dropped for row, s in engine.scheduler.running.items()}
    active, length = np.asarray(engine.state.active), np.asarray(engine.state.length)
    if engine.state.taken is not None:  # of a token that is in a loop's core, the prelude has written cells
        length = length + (np.asarray(engine.state.taken) >= 0)
    lengths |= {row: length[row] for row in lengths if active[row]}
    snapshots, to_save, to_restore = snapshots_of(engine)
    spans = {row: (first_of(engine, row, stop), stop) for row, stop in lengths.items() if row not in to_restore}
    of_rows = [spans, {row: snapshots[number] for row, number in to_save}]
    masks = []
    for layer, (spec, block) in enumerate(blocks_of(engine)):
        if not block.paged:
            masks.append(np.any([_entries(engine, block, spec, engine.plan.rows, x) for x in of_rows], axis=0))
            continue
        devices, slots = engine.config.shards.size(axes.POSITIONS), block.slots
        replicas = engine.config.shards.replicas
        mask = np.zeros((engine.plan.pages_of(block.level, replicas), slots), bool)
        slots //= devices
        for row, stop in lengths.items():
            stop += cells_ahead(engine, row, block.level) - cells_skipped(engine, row, stop, layer)
            number, device = np.divmod(np.arange(stop), devices)
            pages = pages_of(engine, row, block.level)[number // slots]
            mask[pages[pages >= 0], (device * slots + number % slots)[pages >= 0]] = True
        for page, count in cached_pages(engine):
            number, device = np.divmod(np.arange(count), devices)
            mask[page, device * slots + number] = True
        masks.append(mask)
    return masks


def blocks_of(engine: Engine) -> list[tuple[Any, Any]]:
    """The mixer and the cache of each block that has one, of the model and of one that drafts."""
    mixers = [m.config.layers[layers[0]].attention for m in engine.programs.models for layers in m.blocks()]
    return [(spec, block) for spec, block in zip(mixers, engine.plan.every_block, strict=True) if not block.shared]


def first_of(engine: Engine, row: int, stop: int) -> int:
    """Where a sequence can go on from a row that has so many tokens, at the earliest: from a snapshot, if any is taken,
    which has what left the window a while ago."""
    snapshots = engine.scheduler.pages[row // engine.config.rows].snapshots
    if snapshots is None:
        return stop
    return min(stop, max(engine.scheduler.running[row].serves, snapshots.first(stop)))


def valid_snapshots(engine: Engine) -> list[np.ndarray]:
    """The same of the snapshots of blocks with rings or states, but for those that are to be saved yet."""
    snapshots, to_save, _ = snapshots_of(engine)
    waiting = {number for _, number in to_save}
    spans = {number: span for number, span in snapshots.items() if number not in waiting}
    leaving = getattr(engine.source, "_leaving", {}).values()
    spans |= {x.number: (x.first, x.last) for x in leaving}  # which are read before the next program
    blocks = blocks_of(engine)
    return [_entries(engine, b, spec, engine.plan.snapshots, spans) for spec, b in blocks if not b.paged]


def _entries(engine: Engine, block: Any, spec: Any, count: int, spans: dict[int, tuple[int, int]]) -> np.ndarray:
    """Which slots [count, S] of rings, or which states [count, 1], those sequences read that have `first` to `last`
    tokens, by the number of the ring."""
    if isinstance(block, BlockState):
        return np.array([[bool(spans.get(i, (0, 0))[1])] for i in range(count)])
    mask, devices = np.zeros((count, block.slots), bool), engine.config.shards.size(axes.POSITIONS)
    slots, chunk = block.slots // devices, getattr(spec, "chunk", None)
    for i, (first, last) in spans.items():
        # The next query stands there and sees its run of a chunk, or window - 1 positions before it.
        first = first - first % chunk if chunk else max(first - spec.reach + 1, 0)
        number, device = np.divmod(np.arange(first, last), devices)
        mask[i, device * slots + number % slots] = True
    return mask


def snapshots_of(engine: Engine) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]], set[int]]:
    """The first and last place that each snapshot serves, by its number among those of all replicas; rows and snapshots
    that are to be saved from them, and rows that are to be restored, before the next dispatch."""
    scheduler, rows, replicas = engine.scheduler, engine.config.rows, engine.config.shards.replicas
    each, saved = engine.plan.snapshots // replicas, {}
    for replica, pages in enumerate(scheduler.pages):
        for snapshot in pages.snapshots._saved if pages.snapshots else ():
            saved[replica * each + snapshot.number] = snapshot.first, snapshot.last
    changes = [*scheduler._saves, *scheduler.changes.snapshots]
    saves = [(x.row, x.row // rows * each + x.number) for x in changes if isinstance(x, Save)]
    restored = {x.row for x in changes if isinstance(x, Restore)}
    return saved, [(row, number) for row, number in saves if number in saved], restored


def pages_of(engine: Engine, row: int, level: int = 0) -> np.ndarray:
    """A row's pages in a level among those of all replicas."""
    replica, replicas, s = row // engine.config.rows, engine.config.shards.replicas, engine.scheduler.running[row]
    first = replica * engine.plan.pages_of(level, replicas) // replicas
    return first + np.array(s.level_pages[level - 1] if level else s.pages, int)


def cells_ahead(engine: Engine, row: int, level: int) -> int:
    """How many cells more a row has in a level than in level 0: while it is prefilled, once it was compacted."""
    s, ahead = engine.scheduler.running[row], engine.state.ahead
    return int(ahead[row, level - 1]) if level and ahead is not None and s.prefilled else 0


def cells_skipped(engine: Engine, row: int, stop: int, layer: int) -> int:
    """How many of a row's first `stop` positions a layer lacks, as it sees fewer tokens of prompts."""
    how = engine.config.propagation
    if how is None or layer < how.layer:
        return 0
    active = bool(engine.state.active[row])
    return int(engine.state.skipped[row]) if active else how.skipped(stop)


def cached_pages(engine: Engine) -> Iterator[tuple[int, int]]:
    """Pages among those of all replicas that other sequences can take, and how many cells of each."""
    for replica, pages in enumerate(engine.scheduler.pages):
        for node in nodes_of(pages.tree):
            if not node.pending:
                yield replica * pages.pool.count + node.page, node.count


def poison(engine: Engine) -> float:
    """Fill what is not valid with NaN, integers with another number, with nothing in flight; returns the share of cells
    that stay."""
    assert not engine._in_flight
    masks, blocks = valid_cells(engine), [block for _, block in blocks_of(engine)]
    if engine.snapshots:
        pairs = zip(valid_snapshots(engine), (block for block in blocks if not block.paged), strict=True)
        engine.snapshots = _spoiled(engine.snapshots, [(mask, x.axes) for mask, block in pairs for x in block.owned])
    pairs = zip(masks, blocks, strict=True)
    engine.cache = _spoiled(engine.cache, [x for mask, block in pairs for x in _of_arrays(engine, mask, block)])
    idle = ~np.asarray(engine.state.active)
    huge = 1 << 30
    garbage = RowState(huge, huge, False, huge, huge, huge, np.nan, huge, huge)
    if engine.state.history is not None:
        garbage = garbage._replace(history=huge)
    if engine.state.adapter is not None:
        garbage = garbage._replace(adapter=huge)
    if engine.state.features is not None:
        garbage = garbage._replace(features=np.nan)
    if engine.state.first is not None:
        garbage = garbage._replace(first=huge)
    if engine.state.dropped is not None:
        garbage = garbage._replace(dropped=huge)
    if engine.state.ahead is not None:
        garbage = garbage._replace(ahead=huge)
    if engine.state.skipped is not None:
        garbage = garbage._replace(skipped=huge)
    if engine.state.depth is not None:
        garbage = garbage._replace(depth=huge)
    if engine.state.threshold is not None:
        garbage = garbage._replace(threshold=huge)
    if engine.state.taken is not None:
        garbage = garbage._replace(taken=huge, core=np.nan)
    state = jax.tree.map(
        lambda old, bad: _where(~idle.reshape(-1, *(1,) * (old.ndim - 1)), old, bad), engine.state, garbage
    )
    # Tokens of a prompt that goes on are counted already, and it has its pages and its adapter.
    running = np.isin(np.arange(len(idle)), list(engine.scheduler.running))
    counts = _where(running[:, None], engine.state.counts, huge)
    granted = np.zeros(engine.state.pages.shape, bool)
    for row, s in engine.scheduler.running.items():
        granted[row, : len(s.pages)] = True
        for level, of_level in enumerate(s.level_pages, 1):
            first = sum(engine.plan.level_columns[:level])
            granted[row, first : first + len(of_level)] = True
    pages = _where(granted, engine.state.pages, huge)
    if engine.state.history is not None:
        state = state._replace(history=_where(running[:, None], engine.state.history, huge))
    if engine.state.adapter is not None:
        state = state._replace(adapter=_where(running, engine.state.adapter, huge))
    if engine.state.dropped is not None:
        state = state._replace(dropped=_where(running, engine.state.dropped, huge))
    if engine.state.ahead is not None:
        state = state._replace(ahead=_where(running[:, None], engine.state.ahead, huge))
    if engine.state.skipped is not None:
        state = state._replace(skipped=_where(running, engine.state.skipped, huge))
    if engine.state.depth is not None:
        state = state._replace(depth=_where(running, engine.state.depth, huge))
    if engine.state.threshold is not None:
        state = state._replace(threshold=_where(running, engine.state.threshold, huge))
    engine.state = state._replace(counts=counts, pages=pages)
    return float(np.mean([mask.mean() for mask in masks]))


def _of_arrays(engine: Engine, mask: np.ndarray, block: Any) -> list[tuple[np.ndarray, Any]]:
    """The mask and the logical axes of each array of a block, whose cells have this mask: of queries, those of the
    newest positions of each row."""
    pairs = [(mask, x.axes) for x in block.owned]
    if block.summarised is not None:  # of rows, whose pages may be elsewhere
        rows, columns = block.summarised
        running = [engine.scheduler.running.get(row) for row in range(rows)]
        stop = np.array([0 if s is None else s.prefilled for s in running])
        stop = np.where(np.asarray(engine.state.active), np.asarray(engine.state.length), stop)
        of_rows = np.arange(columns * block.slots) < stop[:, None]
        pairs[-1] = of_rows.reshape(rows, columns, -1), pairs[-1][1]
    if block.queries is not None and block.owned:
        window = block.queries[-2]
        newest, active = np.zeros((engine.plan.rows, window), bool), np.asarray(engine.state.active)
        positions = np.asarray(engine.state.length) + np.asarray(engine.state.dropped)
        for row, s in engine.scheduler.running.items():
            last = positions[row] if active[row] else s.prefilled
            newest[row, np.arange(max(last - window, 0), last) % window] = True
        pairs[-1] = newest, pairs[-1][1]
    return pairs


def _spoiled(arrays: tuple[jax.Array, ...], valid: list[tuple[np.ndarray, Any]]) -> tuple[jax.Array, ...]:
    """The arrays without what is not valid. valid: the mask and the logical axes of each."""
    spoiled = []
    for (mask, names), array in zip(valid, arrays, strict=True):
        cells = mask[:, None] if names[-1] == axes.POSITIONS else mask[:, None, :, None]
        if names[-2:] == (axes.KV_HEADS, None):  # summaries of blocks, of all whose cells are valid
            cells = mask.reshape(*mask.shape[:-1], array.shape[-3], -1).all(axis=-1)[..., None, None]
        if axes.POSITIONS not in names and names[-3:] != (axes.KV_HEADS, None, None):  # states
            cells = mask.reshape(-1, *(1,) * (array.ndim - names.index(axes.PAGES) - 1))
        bad = 99 if jnp.issubdtype(array.dtype, jnp.integer) else np.nan
        bad = 255 if array.dtype == jnp.uint8 else bad  # a packed cell whose largest magnitude is NaN
        spoiled.append(_where(cells, array, bad))
    return tuple(spoiled)


def _where(valid: np.ndarray, array: jax.Array, bad: float) -> jax.Array:
    """`array` with `bad` where it is not valid. On the host: a program for every shape and mesh takes longer."""
    return jnp.array(np.where(valid, np.asarray(array), np.asarray(bad).astype(array.dtype)))


@contextlib.contextmanager
def before_each_dispatch(llm: LLM, act: Callable[[Engine], object], *, pages: int | None = None) -> Iterator[None]:
    """`llm` with a new engine, one dispatch at a time, and `act` before each. Without snapshots, whatever left a window
    is not valid. pages: see `new_engine`."""
    with new_engine(llm, pages=pages, in_flight=1, prefix_caching=False) as engine:
        advance = engine.advance

        def acting(**options):
            act(engine)
            return advance(**options)

        engine.advance = acting
        yield


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
