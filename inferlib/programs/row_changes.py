"""What changes on the device between two programs: the pages of rows, and which row a sequence has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.programs.row_state import STATE_AXES, RowState
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

GRANTS = 256  # pages of each replica that one call gives to rows
MOVES = 8  # rows of each replica that one call moves: it copies their rings and states


class Grant(NamedTuple):
    """Page `page` of the row's replica becomes page `column` of a row."""

    row: int
    column: int
    page: int


class Move(NamedTuple):
    """The sequence of row `source` is now in row `target` of the same replica."""

    source: int
    target: int


def packed(changes: Sequence[Grant] | Sequence[Move], replicas: int, rows: int) -> Iterator[np.ndarray]:
    """The changes as the arguments of calls: [replicas * U, 3] int32 of grants, or [replicas * U, 2] of moves. Rows are
    numbered within a replica of `rows` rows; row `rows` is padding."""
    first = changes[0]
    most, of_rows = (GRANTS, first[:1]) if isinstance(first, Grant) else (MOVES, first)
    rest: list[list[list[int]]] = [[] for _ in range(replicas)]
    for change in changes:
        numbers = [n % rows if i < len(of_rows) else n for i, n in enumerate(change)]
        rest[change[0] // rows].append(numbers)
    while any(rest):
        call = np.zeros((replicas, most, len(first)), np.int32)
        call[:, :, 0 if isinstance(first, Grant) else 1] = rows
        for replica, changes_of_one in enumerate(rest):
            now, rest[replica] = changes_of_one[:most], changes_of_one[most:]
            call[replica, : len(now)] = np.array(now, np.int32).reshape(-1, len(first))
        yield call.reshape(-1, len(first))


def give_pages(shards: Shards, table: jax.Array, grants: jax.Array) -> jax.Array:
    """The table [R, M] of `RowState.pages` with the pages of grants (see `packed`)."""

    def local(table: jax.Array, grants: jax.Array) -> jax.Array:
        row, column, page = grants.T
        return table.at[row, column].set(page, mode="drop")

    if shards.rules is None:
        return local(table, grants)
    spec = shards.rules.spec
    names = spec(STATE_AXES.pages)
    taken = names, spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=names, check_vma=False)(table, grants)


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
        of_rows = tuple(_moved(x, of_one.index(axes.PAGES), source, target) for x, of_one in pairs)
        rows = state.token.shape[0]
        state = RowState(*(_moved(x, 0, source, target) for x in state))
        left = jnp.where(target < rows, source, rows)
        return of_rows, state._replace(active=state.active.at[left].set(False, mode="drop"))

    if shards.rules is None:
        return local(arrays, moves)
    spec = shards.rules.spec
    specs = tuple(map(spec, names)), RowState._make(map(spec, STATE_AXES))
    taken = specs, spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)(arrays, moves)


def _moved(x: jax.Array, dim: int, source: jax.Array, target: jax.Array) -> jax.Array:
    """x with its parts `source` [U] along a dimension copied to `target`, in place."""

    def one(i, x):
        at = jnp.minimum(target[i], x.shape[dim] - 1)
        old = lax.dynamic_index_in_dim(x, at, dim)
        new = lax.dynamic_index_in_dim(x, source[i], dim)
        return lax.dynamic_update_index_in_dim(x, jnp.where(target[i] < x.shape[dim], new, old), at, dim)

    return lax.fori_loop(0, source.size, one, x)
