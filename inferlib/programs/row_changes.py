"""What changes on the device between two programs: the pages of rows and what is in them, which row a sequence has, and
which tokens a row has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.by_platform import by_platform
from inferlib.programs.row_state import STATE_AXES, RowState, axes_of, map_state
from inferlib.sampling.sampler import Vocabulary
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class Grant(NamedTuple):
    """Page `page` of the row's replica becomes page `column` of a row."""

    row: int
    column: int
    page: int


class Move(NamedTuple):
    """The sequence of row `source` is now in row `target` of the same replica."""

    source: int
    target: int


class Copy(NamedTuple):
    """Page `target` gets the cells of page `source` of the same replica, whose pages follow those of the one before."""

    source: int
    target: int


class Count(NamedTuple):
    """What a row has of a token, see `inferlib.sampling.sampler.mark_prompt`; before that of token -1, it has none."""

    row: int
    token: int
    count: int


class Save(NamedTuple):
    """Snapshot `number` of the row's replica gets the row's rings and states."""

    row: int
    number: int


class Restore(NamedTuple):
    """A row gets the rings and states of snapshot `number` of its replica."""

    row: int
    number: int


class Past(NamedTuple):
    """Token `token` stands at a position of a row, see `RowState.history`."""

    row: int
    position: int
    token: int


class Adapt(NamedTuple):
    """A row's adapter is the one in slot `slot`, see `RowState.adapter`."""

    row: int
    slot: int


class Deepen(NamedTuple):
    """A row takes another number of steps of a loop's core, see `RowState.depth`."""

    row: int
    steps: int


class Exit(NamedTuple):
    """Tokens of a row leave a loop's core by a threshold, see `RowState.threshold`."""

    row: int
    threshold: int


class Compact(NamedTuple):
    """A row's cache is compacted, see `inferlib.programs.compaction`. cells: how many it has; 0: as many as its state
    says, if these are as many as rows that decode may have."""

    row: int
    cells: int


Change: TypeAlias = Grant | Move | Copy | Count | Save | Restore | Past | Adapt | Deepen | Exit | Compact
# How many changes of each replica one call makes. A move copies rings and states of a row, and so do snapshots.
_MOST: dict[type[Change], int] = {
    Grant: 256,
    Move: 8,
    Copy: 16,
    Count: 1024,
    Save: 8,
    Restore: 8,
    Past: 1024,
    Adapt: 64,
    Deepen: 64,
    Exit: 64,
    Compact: 8,
}


@dataclass
class Changes:
    """What happens before a program: moves, then what compacts rows, as their pages may be granted to others, then
    copies, all others behind them. copies: the source by the target. snapshots: in this order, as one's place may be
    another's next. adapters: the slot by the row. depths, thresholds: by the row. compacted: the cells by
    the row."""

    moves: list[Move] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    grants: list[Grant] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    past: list[Past] = field(default_factory=list)
    snapshots: list[Save | Restore] = field(default_factory=list)
    adapters: dict[int, int] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)
    thresholds: dict[int, int] = field(default_factory=dict)
    compacted: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, kind.name) for kind in fields(self))

    def leave_out(self, row: int) -> None:
        """Give a row nothing: its sequence lost it. Another one may get it before these changes are made, and in one
        call they have no order."""
        self.grants = [grant for grant in self.grants if grant.row != row]
        self.counts = [count for count in self.counts if count.row != row]
        self.snapshots = [x for x in self.snapshots if isinstance(x, Save) or x.row != row]
        self.past = [token for token in self.past if token.row != row]
        self.adapters.pop(row, None)
        self.depths.pop(row, None)
        self.thresholds.pop(row, None)
        self.compacted.pop(row, None)

    def copy(self, source: int, target: int) -> None:
        """Copy a page once all copies so far are made. What the target was to get before, nobody reads any more."""
        self.copies.pop(target, None)
        self.copies[target] = source


def packed(changes: Sequence[Change], replicas: int, each: int) -> Iterator[np.ndarray]:
    """The changes as the arguments of calls: [replicas * U, 2 or 3] int32, with the numbers of rows or pages as
    replicas of `each` rows or pages number their own. A row or target `each` is padding."""
    first = changes[0]
    most, numbers = _MOST[type(first)], 2 if isinstance(first, Move | Copy) else 1
    rest: list[list[list[int]]] = [[] for _ in range(replicas)]
    for change in changes:
        rest[change[0] // each].append([n % each if i < numbers else n for i, n in enumerate(change)])
    while any(rest):
        call = np.zeros((replicas, most, len(first)), np.int32)
        call[:, :, numbers - 1] = each
        for replica, changes_of_one in enumerate(rest):
            now, rest[replica] = changes_of_one[:most], changes_of_one[most:]
            call[replica, : len(now)] = np.array(now, np.int32).reshape(-1, len(first))
        yield call.reshape(-1, len(first))


def arguments(kind: type[Change], shards: Shards) -> tuple[int, int]:
    """The shape of what `packed` makes."""
    return _MOST[kind] * shards.replicas, len(kind._fields)


def give_pages(shards: Shards, table: jax.Array, grants: jax.Array) -> jax.Array:
    """The table [R, M] of `RowState.pages` with the pages of grants (see `packed`)."""

    def local(table: jax.Array, grants: jax.Array) -> jax.Array:
        row, column, page = grants.T
        return table.at[row, column].set(page, mode="drop")

    return _on_each(shards, local, STATE_AXES.pages, table, grants)


def set_counts(shards: Shards, counts: jax.Array, entries: jax.Array) -> jax.Array:
    """`RowState.counts` [R, V] with entries of `Count`, see `packed`."""

    def local(counts: jax.Array, entries: jax.Array) -> jax.Array:
        row, token, count = entries.T
        rows, vocab = counts.shape
        counts = counts.at[jnp.where(token < 0, row, rows)].set(0, mode="drop")
        return counts.at[row, Vocabulary(shards).columns(token, vocab)].set(count, mode="drop")

    return _on_each(shards, local, STATE_AXES.counts, counts, entries)


def set_history(shards: Shards, history: jax.Array, entries: jax.Array) -> jax.Array:
    """`RowState.history` [R, max_len] with entries of `Past`, see `packed`."""

    def local(history: jax.Array, entries: jax.Array) -> jax.Array:
        row, position, token = entries.T
        return history.at[row, position].set(token, mode="drop")

    return _on_each(shards, local, STATE_AXES.history, history, entries)


def set_numbers(shards: Shards, numbers: jax.Array, entries: jax.Array) -> jax.Array:
    """A field of `NUMBERS` [R] with entries of `Adapt`, `Deepen` or `Exit`, see `packed`."""

    def local(numbers: jax.Array, entries: jax.Array) -> jax.Array:
        row, number = entries.T
        return numbers.at[row].set(number, mode="drop")

    return _on_each(shards, local, STATE_AXES.adapter, numbers, entries)


def _on_each(shards: Shards, local: Callable, names: tuple[str | None, ...], x: jax.Array, calls: jax.Array):
    """local(x, calls) of each device's part of them. names: the logical axes of x and of the result."""
    if shards.rules is None:
        return local(x, calls)
    spec = shards.rules.spec(names)
    taken = spec, shards.rules.spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=spec, check_vma=False)(x, calls)


Arrays: TypeAlias = tuple[jax.Array, ...]
Names: TypeAlias = tuple[tuple[str | None, ...], ...]


def move_rows(
    shards: Shards, names: Names, arrays: tuple[Arrays, RowState], moves: jax.Array
) -> tuple[Arrays, RowState]:
    """Move rows: their rings, the states of recurrent layers, and their row state. Their old places become inactive.

    names: the logical axes of rings and states. moves: see `packed`.
    """

    def local(arrays: tuple[Arrays, RowState], moves: jax.Array) -> tuple[Arrays, RowState]:
        (of_rows, state), (source, target) = arrays, moves.T
        pairs = zip(of_rows, names, strict=True)
        of_rows = tuple(moved(x, of_one.index(axes.PAGES), source, target) for x, of_one in pairs)
        rows = state.token.shape[0]
        state = jax.tree.map(lambda x: moved(x, 0, source, target), state)
        left = jnp.where(target < rows, source, rows)
        return of_rows, state._replace(active=state.active.at[left].set(False, mode="drop"))

    if shards.rules is None:
        return local(arrays, moves)
    spec = shards.rules.spec
    of_state = axes_of(arrays[1])
    specs = tuple(map(spec, names)), map_state(spec, of_state)
    taken = specs, spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)(arrays, moves)


def copy_pages(shards: Shards, names: Names, arrays: Arrays, copies: jax.Array) -> Arrays:
    """Arrays of pages, of these logical axes, with pages copied in the order of the copies."""

    def local(arrays: Arrays, copies: jax.Array) -> Arrays:
        source, target = copies.T
        return tuple(
            _copied(x, of_one.index(axes.PAGES), source, target) for x, of_one in zip(arrays, names, strict=True)
        )

    if shards.rules is None:
        return local(arrays, copies)
    specs = tuple(map(shards.rules.spec, names))
    taken = specs, shards.rules.spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)(arrays, copies)


def _copied(x: jax.Array, dim: int, source: jax.Array, target: jax.Array) -> jax.Array:
    """x with its parts `source` [U] along a dimension copied to `target`, but to those that it does not have.

    All are read before any is written. On CPUs one follows the other, as XLA would copy an array of bfloat16 twice: a
    source that is a target too is copied before it is given away.
    """
    return by_platform(x, source, target, cpu=partial(_one_by_one, dim), default=partial(_at_once, dim))


def _one_by_one(dim: int, x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    return moved(x, dim, source, target)


def _at_once(dim: int, x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """The dimensions before it are merged with it: a TPU's compiler would copy stacked latents as a whole. No part is
    written twice, which GPUs are told: else they write atomically."""
    count, last = x.shape[dim], math.prod(x.shape[: dim + 1])
    first = jnp.arange(0, last, count)[:, None]
    read = (first + jnp.minimum(source, count - 1)).reshape(-1)
    beyond = last + jnp.arange(read.size)  # padding, in places of its own as well
    written = jnp.where(target < count, first + target, beyond.reshape(-1, target.size)).reshape(-1)
    flat = x.reshape(-1, *x.shape[dim + 1 :])
    cells = flat.at[read].get(mode="clip")
    return flat.at[written].set(cells, mode="drop", unique_indices=True).reshape(x.shape)


def moved(x: jax.Array, dim: int, source: jax.Array, target: jax.Array, of: jax.Array | None = None) -> jax.Array:
    """x with parts `source` [U] along a dimension, its own or those of another array, copied to its parts `target` [U],
    one after the other and in place. Targets beyond the last are padding."""

    def one(i, x):
        at = jnp.minimum(target[i], x.shape[dim] - 1)
        old = lax.dynamic_index_in_dim(x, at, dim)
        new = lax.dynamic_index_in_dim(x if of is None else of, source[i], dim)
        return lax.dynamic_update_index_in_dim(x, jnp.where(target[i] < x.shape[dim], new, old), at, dim)

    return lax.fori_loop(0, source.size, one, x)
