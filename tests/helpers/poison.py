"""NaN in everything that is not valid.

Invalid are cells that no token was written to, cells beyond a row's length, cells that left the window, all cells of
rows without a sequence unless a prompt to come can take them, and what the device remembers of such rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from inferlib import LLM, SamplingParams
from inferlib.cache.plan import BlockState
from inferlib.engine.engine import Engine
from inferlib.programs.row_state import RowState
from inferlib.sharding import axes
from tests.helpers.cached_pages import nodes_of
from tests.helpers.llms import new_engine


def valid_cells(engine: Engine) -> list[np.ndarray]:
    """For each block that has a cache, which slots [N, S] of which pages, or rows with a ring, the next steps may read;
    of states which rows, [R, 1]."""
    lengths = {row: s.prefilled for row, s in engine.scheduler.running.items()}
    active, length = np.asarray(engine.state.active), np.asarray(engine.state.length)
    lengths |= {row: length[row] for row in lengths if active[row]}
    masks = []
    for layers, block in zip(engine.model.blocks(), engine.plan.blocks, strict=True):
        if block.shared:
            continue
        if isinstance(block, BlockState):
            masks.append(np.array([[bool(lengths.get(row))] for row in range(engine.plan.rows)]))
            continue
        spec, slots = engine.model.config.layers[layers[0]].attention, block.slots
        devices = engine.config.shards.size(axes.POSITIONS)
        mask = np.zeros((engine.plan.pages if block.paged else engine.plan.rows, slots), bool)
        slots //= devices
        for row, stop in lengths.items():
            # The next query stands at `stop` and sees its run of a chunk, or window - 1 positions before it.
            chunk = getattr(spec, "chunk", None)
            first = stop - stop % chunk if chunk else 0 if spec.reach is None else max(stop - spec.reach + 1, 0)
            number, device = np.divmod(np.arange(first, stop), devices)
            page = pages_of(engine, row)[number // slots] if block.paged else row
            mask[page, device * slots + number % slots] = True
        for page, count in cached_pages(engine) if block.paged else ():
            number, device = np.divmod(np.arange(count), devices)
            mask[page, device * slots + number] = True
        masks.append(mask)
    return masks


def pages_of(engine: Engine, row: int) -> np.ndarray:
    """A row's pages among those of all replicas."""
    replica = row // engine.config.rows
    first = replica * engine.plan.pages // engine.config.shards.replicas
    return first + np.array(engine.scheduler.running[row].pages, int)


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
    masks = valid_cells(engine)
    blocks = (block for block in engine.plan.blocks if not block.shared)
    of_arrays = [(mask, x.axes) for mask, block in zip(masks, blocks, strict=True) for x in block.owned]
    spoiled = []
    for (mask, names), array in zip(of_arrays, engine.cache, strict=True):
        cells = mask[:, None] if names[-1] == axes.POSITIONS else mask[:, None, :, None]
        if axes.POSITIONS not in names:
            cells = mask.reshape(-1, *(1,) * (array.ndim - names.index(axes.PAGES) - 1))
        bad = 99 if jnp.issubdtype(array.dtype, jnp.integer) else np.nan
        spoiled.append(_where(cells, array, bad))
    engine.cache = tuple(spoiled)
    idle = ~np.asarray(engine.state.active)
    huge = 1 << 30
    garbage = RowState(huge, huge, False, huge, huge, huge, np.nan, huge, huge)
    state = (
        _where(~idle.reshape(-1, *(1,) * (old.ndim - 1)), old, bad)
        for old, bad in zip(engine.state, garbage, strict=True)
    )
    # Tokens of a prompt that goes on are counted already, and it has its pages.
    running = np.isin(np.arange(len(idle)), list(engine.scheduler.running))
    counts = _where(running[:, None], engine.state.counts, huge)
    granted = np.zeros(engine.state.pages.shape, bool)
    for row, s in engine.scheduler.running.items():
        granted[row, : len(s.pages)] = True
    pages = _where(granted, engine.state.pages, huge)
    engine.state = RowState(*state)._replace(counts=counts, pages=pages)
    return float(np.mean([mask.mean() for mask in masks]))


def _where(valid: np.ndarray, array: jax.Array, bad: float) -> jax.Array:
    """`array` with `bad` where it is not valid. On the host: a program for every shape and mesh takes longer."""
    return jnp.array(np.where(valid, np.asarray(array), np.asarray(bad).astype(array.dtype)))


@contextlib.contextmanager
def before_each_dispatch(llm: LLM, act: Callable[[Engine], None]) -> Iterator[None]:
    """`llm` with a new engine, one dispatch at a time, and `act` before each."""
    with new_engine(llm, in_flight=1) as engine:
        advance = engine.advance

        def acting(**options):
            act(engine)
            return advance(**options)

        engine.advance = acting
        yield


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
