"""Weighted sums over segments of rows: the experts' outputs for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import Shaped
from inferlib.ops.by_platform import by_platform
from inferlib.ops.choice import Choice
from inferlib.ops.loops import expected_trips

if TYPE_CHECKING:
    from inferlib.pallas_kernels.segment_sum_tpu import Sizes

TILE = 256  # segments summed together: enough that loops cost little, and few enough to stay on chip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """T segments of unequal length. Segment t has the rows `places[p]` times `factors[p]`, in this order, for counts[t]
    values of p from starts[t] on.

    T is a multiple of `TILE`; places [M] int32, factors [M] float32 (None: ones), starts and counts [T] int32.
    """

    places: jax.Array
    factors: jax.Array | None
    starts: jax.Array
    counts: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Runs:
    """Where rows lie that are sorted by group, then by segment: the rows of a piece of consecutive segments are one run
    of each group.

    groups, segments [M] int32: the group and the segment of each p, anything for values of no segment. starts, sizes
    [pieces, E] int32: the first row and the number of rows of each run. most: no segment has more rows. expected:
    number of rows under balanced load.
    """

    groups: jax.Array
    segments: jax.Array
    starts: jax.Array
    sizes: jax.Array
    most: int = field(metadata=dict(static=True))
    expected: float = field(metadata=dict(static=True))


@dataclass(frozen=True)
class Pieces:
    """How many rows of E groups pieces of `height` segments have: sizes [pieces, E]. most, expected: see `Runs`."""

    sizes: jax.Array
    height: int
    most: int
    expected: float

    @staticmethod
    def of(ids: jax.Array, groups: int, rows: Shaped, expected: float, backend: str) -> Pieces | None:
        """The pieces for the kernel, None if `choose` chooses none. ids [T, k]: the groups of segments' rows, `groups`
        for none; rows [M, *D]."""
        segments, chosen = -(-ids.shape[0] // TILE) * TILE, ids.shape[1]
        if choose(rows, segments, groups, chosen, backend).name == "xla":
            return None
        from inferlib.pallas_kernels.segment_sum_tpu import height_of

        height = height_of(_sizes(rows, segments, groups, chosen))
        assert height is not None
        numbers = jnp.arange(groups, dtype=jnp.int32)
        ids = jnp.pad(ids, ((0, segments - ids.shape[0]), (0, 0)), constant_values=groups)
        sizes = jnp.sum(ids.reshape(-1, height * chosen)[:, :, None] == numbers, axis=1, dtype=jnp.int32)
        return Pieces(sizes, height, min(chosen, groups), expected)

    def runs(self, tile: jax.Array, groups: jax.Array, segments: jax.Array, sizes: jax.Array) -> Runs:
        """The runs of rows of the segments from a tile of `TILE` on. groups, segments: see `Runs`; sizes [E]: number of
        these rows in each group."""
        before = jnp.cumsum(self.sizes, axis=0) - self.sizes
        first = before[tile * (TILE // self.height)]
        return Runs(
            groups, segments, before + (jnp.cumsum(sizes) - sizes - first), self.sizes, self.most, self.expected
        )


def choose(rows: Shaped, segments: int, groups: int, most: int, backend: str) -> Choice:
    """The implementation that sums `rows` [M, D] of E = `groups` groups, sorted by group, to T = `segments` segments.
    most: see `Runs`."""
    if backend != "pallas_tpu":
        return Choice("xla")
    if len(rows.shape) > 2:
        return Choice("xla", "the kernel takes no rows in parts")
    from inferlib.pallas_kernels.segment_sum_tpu import unsupported

    return Choice.of("pallas_tpu", unsupported(_sizes(rows, segments, groups, most), rows.dtype))


def _sizes(rows: Shaped, segments: int, groups: int, most: int) -> Sizes:
    from inferlib.pallas_kernels.segment_sum_tpu import Sizes

    return Sizes(rows.shape[0], rows.shape[0], segments, groups, min(most, groups), rows.shape[1])


def segment_sum(
    into: jax.Array,
    rows: jax.Array,
    segments: Segments,
    first: jax.Array | int,
    stop: jax.Array | int,
    *,
    tiles: float,
    longest: float,
    runs: Runs | None = None,
) -> jax.Array:
    """into [T, *D], rows [M, *E] -> [T, *D]: `into` with the sums of the segments in tiles `first` to `stop` - 1, each
    of `TILE` segments, accumulated in float32 and reshaped.

    Rows of no segment may hold anything. tiles, longest: the number of tiles, and the length of a tile's longest
    segment, if load is balanced; only reports of compiled programs use them. runs: with them, TPUs take the kernel, for
    which `choose` must have chosen the pieces; other platforms do not read them.
    """
    by_tiles = partial(_by_tiles, tiles=tiles, longest=longest)
    if runs is None:
        return by_tiles(into, rows, segments, None, first, stop)
    bounds = jnp.asarray(first, jnp.int32), jnp.asarray(stop, jnp.int32)
    return by_platform(into, rows, segments, runs, *bounds, default=by_tiles, tpu=_by_kernel)


def _by_kernel(
    into: jax.Array, rows: jax.Array, segments: Segments, runs: Runs, first: jax.Array, stop: jax.Array
) -> jax.Array:
    from inferlib.pallas_kernels import segment_sum_tpu

    places, (pieces, groups) = segments.places, runs.sizes.shape
    factors = jnp.ones(places.shape, jnp.float32) if segments.factors is None else segments.factors
    sizes = _sizes(rows, into.shape[0], groups, runs.most)
    scalars = segment_sum_tpu.Scalars(
        jnp.stack([first, stop]) * (pieces * TILE // into.shape[0]),
        jnp.append(segments.starts[:: into.shape[0] // pieces], segments.starts[-1] + segments.counts[-1]),
        segment_sum_tpu.key_of(runs.groups, places),
        segment_sum_tpu.line_of(runs.segments),
        factors,
        runs.starts,
        runs.sizes,
    )
    return segment_sum_tpu.segment_sum(into, rows, scalars, sizes, runs.expected)


def _by_tiles(
    into: jax.Array,
    rows: jax.Array,
    segments: Segments,
    runs: Runs | None,
    first: jax.Array | int,
    stop: jax.Array | int,
    *,
    tiles: float,
    longest: float,
) -> jax.Array:
    """XLA: a loop of tiles, and one of the rows of the longest segment of each."""
    places, factors, starts, counts = segments.places, segments.factors, segments.starts, segments.counts
    each = (TILE, *[1] * (rows.ndim - 1))

    def tile(i: jax.Array, into: jax.Array) -> jax.Array:
        start, count = (lax.dynamic_slice_in_dim(a, i * TILE, TILE) for a in (starts, counts))

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            inside = (j < count).reshape(each)
            p = jnp.where(j < count, start + j, 0)
            row = rows[places[p]].astype(jnp.float32)
            row = row if factors is None else row * factors[p].reshape(each)
            return total + jnp.where(inside, row, 0)

        with expected_trips(longest):
            total = lax.fori_loop(0, jnp.max(count), add, jnp.zeros((TILE, *rows.shape[1:]), jnp.float32))
        total = total.astype(into.dtype).reshape(TILE, *into.shape[1:])
        return lax.dynamic_update_slice_in_dim(into, total, i * TILE, 0)

    with expected_trips(tiles):
        return lax.fori_loop(first, stop, tile, into)
