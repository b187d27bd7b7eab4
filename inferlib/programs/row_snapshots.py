"""Saves rings and states of rows as snapshots, and restores them (see `inferlib.cache.snapshots`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.programs.row_changes import Arrays, Names, moved
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def save_rows(shards: Shards, names: Names, snapshots: Arrays, of_rows: Arrays, saves: jax.Array) -> Arrays:
    """The arrays of snapshots, of these logical axes, with rings and states of rows. saves: `Save`, as `packed` has
    them."""

    def local(snapshots: Arrays, of_rows: Arrays, saves: jax.Array) -> Arrays:
        row, number = saves.T
        rows = _entries(names, of_rows)
        return _copied(names, snapshots, of_rows, row, jnp.where(row < rows, number, _entries(names, snapshots)))

    return _on_each(shards, names, local)(snapshots, of_rows, saves)


def restore_rows(shards: Shards, names: Names, of_rows: Arrays, snapshots: Arrays, restores: jax.Array) -> Arrays:
    """Rings and states of rows, of these logical axes, with those of snapshots. restores: `Restore`, as `packed` has
    them."""

    def local(of_rows: Arrays, snapshots: Arrays, restores: jax.Array) -> Arrays:
        row, number = restores.T
        return _copied(names, of_rows, snapshots, number, row)

    return _on_each(shards, names, local)(of_rows, snapshots, restores)


def _on_each(shards: Shards, names: Names, local):
    """`local` on each device's part."""
    if shards.rules is None:
        return local
    specs = tuple(map(shards.rules.spec, names))
    taken = specs, specs, shards.rules.spec((axes.ROWS, None))
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)


def _entries(names: Names, arrays: Arrays) -> int:
    """How many rows or snapshots arrays have."""
    return arrays[0].shape[names[0].index(axes.PAGES)]


def _copied(names: Names, targets: Arrays, sources: Arrays, source: jax.Array, target: jax.Array) -> Arrays:
    """The targets with entries `source` [U] of the sources as their entries `target` [U], see `moved`."""
    every = zip(targets, sources, names, strict=True)
    return tuple(moved(to, of_one.index(axes.PAGES), source, target, of) for to, of, of_one in every)
