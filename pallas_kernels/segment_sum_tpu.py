"""Weighted sums of rows on TPUs: the experts' outputs of each token.

Rows lie in order of their group (expert), and within a group in order of their segment (token). So the rows of a piece
of consecutive segments are one run of each group. A piece's runs are copied on chip while the piece before it is
summed. A row is then read from every column's tile at once, by a load with a stride. The sum so far of a segment stays
in registers, and is stored after each row, so that nothing waits for what was stored.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import div
from inferlib.pallas_kernels.expert_weights_tpu import in_hbm
from inferlib.pallas_kernels.generations_tpu import by_vmem, vmem_limit

LANES, ROWS = 128, 8  # of a tile in memory
HALF = 16  # bits: of the two rows that share 32-bit words
TOGETHER = 8  # pairs in a row of code without branches
PLACE_BITS, GROUP_BITS = 21, 10  # of a key
HEIGHTS = (256, 128, 64, 32, 16)  # segments of a piece
VMEM_BYTES = 28 << 20
MARGIN_BYTES = 3 << 20
SCALAR_BYTES = 640 << 10


class Sizes(NamedTuple):
    """rows, pairs, segments, groups: how many there are; most: pairs of a segment at most; width: numbers of a row."""

    rows: int
    pairs: int
    segments: int
    groups: int
    most: int
    width: int

    @property
    def columns(self) -> int:
        """Tiles side by side."""
        return self.width // LANES

    def room(self, height: int) -> int:
        """Tiles that the runs of a piece can touch: a run's first and last are seldom whole."""
        pairs = height * self.most
        return pl.cdiv(pairs, ROWS) + 2 * min(self.groups, pairs)

    def vmem_bytes(self, height: int) -> int:
        return (2 * self.room(height) * ROWS * 2 + height * (2 * 2 + 4)) * self.width

    def scalar_bytes(self, height: int) -> int:
        return 4 * (3 * self.pairs + 2 * self.segments // height * pl.cdiv(self.groups, LANES) * LANES)


def height_of(sizes: Sizes) -> int | None:
    """Segments of a piece: as many as fit; None if none do."""
    fits = (n for n in HEIGHTS if sizes.vmem_bytes(n) <= by_vmem(VMEM_BYTES) and sizes.segments % n == 0)
    return next(fits, None)


def unsupported(sizes: Sizes, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernel cannot sum such segments, or None if it can."""
    if dtype != jnp.bfloat16:
        return f"rows are {jnp.dtype(dtype)}, not bfloat16"
    if sizes.width % LANES or sizes.rows % ROWS:
        return f"{sizes.rows} rows of {sizes.width} numbers are no whole tiles"
    if sizes.rows > 1 << PLACE_BITS or sizes.groups >= 1 << GROUP_BITS:
        return f"keys have no room for {sizes.rows} rows of {sizes.groups} groups"
    if (height := height_of(sizes)) is None:
        return f"the rows of {HEIGHTS[-1]} segments have no room on chip"
    if sizes.scalar_bytes(height) > SCALAR_BYTES:
        return f"{sizes.pairs} pairs of {sizes.segments} segments have no room in scalar memory"
    return None


class Scalars(NamedTuple):
    """bounds [2]: the first piece, and the one behind the last. first_pairs [pieces + 1]: the first pair of a piece.
    keys, lines [P], factors [P] float32: of pairs, those of a segment one after the other; see `key_of`, `line_of`.
    run_starts, run_sizes [pieces, G]: the rows of a piece's runs."""

    bounds: Any
    first_pairs: Any
    keys: Any
    lines: Any
    factors: Any
    run_starts: Any
    run_sizes: Any


def key_of(groups: jax.Array, places: jax.Array) -> jax.Array:
    """A pair's key: the group of its row, and the row."""
    return groups << PLACE_BITS | places


def line_of(segments: jax.Array) -> jax.Array:
    """A pair's segment, and whether it is not the segment of the pair before."""
    return segments << 1 | (segments != jnp.roll(segments, 1)).astype(jnp.int32)


def segment_sum(
    into: jax.Array,
    rows: jax.Array,
    scalars: Scalars,
    sizes: Sizes,
    expected: float,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """into [T, D], rows [M, D] bfloat16 -> [T, D]: `into` with the sums of the pieces that `scalars.bounds` names.

    A sum is float32, in the order of the segment's pairs. Rows of no pair may hold anything. expected: number of pairs
    under balanced load, for estimates.
    """
    height, columns = height_of(sizes), sizes.columns
    assert height is not None
    tile, tiled = columns * ROWS, (-1, columns * ROWS, LANES)
    room = 2 * sizes.room(height) * tile
    on_chip = _OnChip(  # interpreters know no refs of another type
        pltpu.VMEM((room, LANES), rows.dtype) if interpret else pltpu.VMEM((room // 2, LANES), jnp.int32),
        pltpu.VMEM((height // ROWS * tile, LANES), jnp.float32),
        pltpu.VMEM((2 * height // ROWS * tile, LANES), into.dtype),
        pltpu.SMEM((2 * (sizes.groups + 1),), jnp.int32),
        pltpu.SemaphoreType.DMA((2, 2)),
    )
    out = pl.pallas_call(
        functools.partial(_kernel, height=height, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=list(on_chip),
        ),
        out_shape=jax.ShapeDtypeStruct((into.shape[0] // ROWS, tile, LANES), into.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit(sizes.vmem_bytes(height) + by_vmem(MARGIN_BYTES)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * int(expected) * sizes.width,
            bytes_accessed=2 * sizes.width * (int(expected) + sizes.segments),
            transcendentals=0,
        ),
        interpret=interpret,
        name="segment_sum",
    )(*scalars, *in_hbm([_in_tiles(x).reshape(tiled) for x in (rows, into)], interpret))
    return out.reshape(-1, columns, ROWS, LANES).swapaxes(1, 2).reshape(into.shape)


def _in_tiles(x: jax.Array) -> jax.Array:
    """x [N, D] -> [N / 8, D / 128, 8, 128]: as it lies in memory."""
    return x.reshape(x.shape[0] // ROWS, ROWS, -1, LANES).swapaxes(1, 2)


class _OnChip(NamedTuple):
    """room: rows of two pieces, in tiles, as words, which loads with a stride take; sums: those of a piece, in tiles;
    out: rounded sums of two pieces. apart [2 * (G + 1)]: for each group the distance of its rows on chip from those in
    HBM, and the number of tiles. semaphores [to and fro, 2]."""

    room: Any
    sums: Any
    out: Any
    apart: Any
    semaphores: Any


def _kernel(*refs, height, sizes: Sizes):
    """Scalars; rows [M / 8, C * 8, 128] and `into`, out [T / 8, C * 8, 128] in HBM; scratch."""
    scalars, (rows_ref, _, out_ref), chip = Scalars(*refs[:7]), refs[7:10], _OnChip(*refs[10:])
    groups, tile, chunks, room = sizes.groups, sizes.columns * ROWS, height // ROWS, sizes.room(height)
    as_words = chip.room.dtype == jnp.int32

    def at(ref, number, size=tile):
        return ref.at[pl.ds(pl.multiple_of(number * size, size), size)]

    def arriving(number):
        """The place of a tile on chip."""
        return at(chip.room, number, tile // 2).bitcast(rows_ref.dtype) if as_words else at(chip.room, number)

    def start(piece: jax.Array) -> None:
        """Start the copies of a piece's runs."""
        turn = piece & 1

        def run(group: jax.Array, filled: jax.Array) -> jax.Array:
            first, size = (ref[piece, group] for ref in (scalars.run_starts, scalars.run_sizes))
            count = jnp.where(size > 0, (first + size - 1 >> 3) - (first >> 3) + 1, 0)
            chip.apart[turn * (groups + 1) + group] = (filled - (first >> 3)) * ROWS

            def copy(n: jax.Array, _: None) -> None:
                here, there = rows_ref.at[(first >> 3) + n], arriving(filled + n)
                pltpu.make_async_copy(here, there, chip.semaphores.at[0, turn]).start()

            lax.fori_loop(0, count, copy, None)
            return filled + count

        chip.apart[turn * (groups + 1) + groups] = lax.fori_loop(0, groups, run, turn * room)

    def wait(piece: jax.Array) -> None:
        turn = piece & 1

        def one(n: jax.Array, _: None) -> None:
            here = arriving(n)
            pltpu.make_async_copy(here, here, chip.semaphores.at[0, turn]).wait()

        lax.fori_loop(turn * room, chip.apart[turn * (groups + 1) + groups], one, None)

    def sent(piece: jax.Array, n: jax.Array):
        turn = piece & 1
        here, there = at(chip.out, turn * chunks + n), out_ref.at[piece * chunks + n]
        return pltpu.make_async_copy(here, there, chip.semaphores.at[1, turn])

    def each(act) -> None:
        lax.fori_loop(0, chunks, lambda n, _: act(n), None)

    def take(piece: jax.Array, _: None) -> None:
        @pl.when(piece + 1 < stop)
        def _():
            start(piece + 1)

        @pl.when(piece - 2 >= first)
        def _():
            each(lambda n: sent(piece - 2, n).wait())

        def clear(n: jax.Array) -> None:
            sums = at(chip.sums, n)
            sums[...] = jnp.zeros_like(sums)

        def send(n: jax.Array) -> None:
            at(chip.out, (piece & 1) * chunks + n)[...] = at(chip.sums, n)[...].astype(out_ref.dtype)
            sent(piece, n).start()

        each(clear)
        wait(piece)
        _sum(piece, height, scalars, sizes, chip)
        each(send)

    first, stop = scalars.bounds[0], scalars.bounds[1]

    @pl.when(first < stop)
    def _():
        start(first)

    lax.fori_loop(first, stop, take, None)
    for late in (2, 1):

        @pl.when(stop - late >= first)
        def _(late=late):
            each(lambda n: sent(stop - late, n).wait())


def _sum(piece: jax.Array, height: int, scalars: Scalars, sizes: Sizes, chip: _OnChip) -> None:
    """Sum the segments of a piece, whose rows are on chip."""
    columns, apart = sizes.columns, (piece & 1) * (sizes.groups + 1)

    def words(slot: jax.Array) -> jax.Array:
        """The words [C, 128] that hold a row and its neighbour."""
        half = ROWS // 2
        if chip.room.dtype == jnp.int32:
            return chip.room[pl.ds((slot >> 3) * (columns * half) + (slot >> 1 & half - 1), columns, stride=half)]
        tile = chip.room[pl.ds((slot >> 3) * (columns * ROWS), columns * ROWS)]
        return lax.dynamic_index_in_dim(
            pltpu.bitcast(tile, jnp.int32).reshape(columns, half, LANES), slot >> 1 & half - 1, 1, keepdims=False
        )

    def add(pair: jax.Array, total: jax.Array) -> jax.Array:
        key, line = scalars.keys[pair], scalars.lines[pair]
        slot = (key & ((1 << PLACE_BITS) - 1)) + chip.apart[apart + (key >> PLACE_BITS)]
        row = lax.bitcast_convert_type(words(slot) << (~slot & 1) * HALF & (-1 << HALF), jnp.float32)
        total = jnp.where((line & 1) == 1, 0.0, total) + row * scalars.factors[pair]
        segment = line >> 1 & height - 1
        chip.sums[pl.ds((segment >> 3) * (columns * ROWS) + (segment & ROWS - 1), columns, stride=ROWS)] = total
        return total

    def add_some(n: jax.Array, total: jax.Array) -> jax.Array:
        for pair in range(TOGETHER):
            total = add(first + n * TOGETHER + pair, total)
        return total

    first, stop = scalars.first_pairs[piece], scalars.first_pairs[piece + 1]
    whole = div(stop - first, TOGETHER)
    total = lax.fori_loop(0, whole, add_some, jnp.zeros((columns, LANES), jnp.float32))
    lax.fori_loop(first + whole * TOGETHER, stop, add, total)
