"""A call of decode attention on TPUs: what the kernels for it take and give, as it lies in memory.

Shapes: B rows, C new tokens of each, K KV heads, G query heads of each, R = C * G, h head size; L layers, N pages of S
slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.attention_values import AttentionOptions, KvCache, NewCells
from inferlib.pallas_kernels.arithmetic_tpu import LANES, LOG2E
from inferlib.pallas_kernels.block_stream_tpu import Pages
from inferlib.pallas_kernels.cell_write_tpu import tile_of
from inferlib.pallas_kernels.row_stream_tpu import ALIKE, WRITTEN_ALIKE

MOST_MASKED = 32  # queries of a row with a mask: one bit of a word each


class Scalars(NamedTuple):
    """Scalar memory: lengths [B]; layer [1]; origin [B], the slot of the first position that is read; the page table
    [B * M]; written [B], how many of a row's new cells are. For a kernel that takes rows together, lengths are how many
    positions are read; it computes no more scalars than it must. `origin` is None if it is 0, and for a kernel that
    takes rows one by one also if they are no rings. traits: of each group of rows that are taken together, the sum of
    `ALIKE` and `WRITTEN_ALIKE` where they apply."""

    lengths: Any
    layer: Any
    origin: Any = None
    table: Any = None
    written: Any = None
    traits: Any = None


class Inputs(NamedTuple):
    """HBM: q [B, K, R, h] with R = C * G, and new cells behind the queries; k, v [L, N, K, S, h] (or only k), then
    their scales [L, N, K, S]. On chip: sinks [K, R, 128]; mask [rows of a step, R, 128] of bits; q of the rows of a
    step for a kernel that takes rows together."""

    q: Any
    cache: tuple
    sinks: Any = None
    mask: Any = None


class Outputs(NamedTuple):
    """HBM: out [B, K, R, o], whose size is `Call.result_size`, and lse [B, K, 128], unless `Kernel.together` says
    otherwise, and the cache's arrays if the kernel writes them."""

    out: Any
    lse: Any
    cache: tuple


def lay_out(
    q: jax.Array, arrays: Sequence[jax.Array], options: AttentionOptions, new: NewCells | None, mask: jax.Array | None
) -> Inputs:
    """The kernel's inputs, for the cache's arrays [L, N, K, S, ...]."""
    rows, queries, heads, group, _ = q.shape
    width, sinks = queries * group, options.sinks

    def packed(x: jax.Array) -> jax.Array:
        """[..., C, K, G, h] -> [..., K, C * G, h]."""
        return jnp.moveaxis(x, -4, -3).reshape(*x.shape[:-4], heads, width, x.shape[-1])

    def cells(x: jax.Array) -> jax.Array:
        """[B, C, K, h] -> [B, K, C, h]."""
        return jnp.moveaxis(x, 1, 2).astype(q.dtype)

    queries_and_cells = packed(q) if new is None else jnp.concatenate([packed(q), *map(cells, new.cells)], axis=2)
    inputs = Inputs(queries_and_cells, tuple(arrays))
    if sinks is not None:
        wide = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None] * LOG2E, (queries, heads, group, LANES))
        inputs = inputs._replace(sinks=packed(wide))
    if mask is not None:
        bits = jnp.sum(mask.astype(jnp.int32) << jnp.arange(queries), axis=-1)
        bits = jnp.broadcast_to(jnp.repeat(bits, group, axis=1)[:, :, None], (rows, width, LANES))
        inputs = inputs._replace(mask=bits)
    return inputs


@dataclass(frozen=True)
class Kernel:
    """A kernel that can run a call. body: a function of scalars, inputs, outputs and scratch. pages: how it reads the
    cache. scratch: its scratch, of q and the cache's arrays as `Inputs` has them. together: rows of a grid step, which
    are as more heads to it: outputs are [B / together, together * K, ...]. shares: equal parts of the KV heads, one for
    each core. If there are several, the grid is (shares, B), and lse [B, shares, K / shares, 128], as a part has to
    begin with a tile of memory; several shares and several rows of a step exclude each other."""

    body: Callable[..., None]
    pages: Pages
    scratch: Callable[[jax.Array, Sequence[jax.Array]], Any]
    together: int = 1
    shares: int = 1


@dataclass(frozen=True)
class Call:
    """One call of decode attention for queries of this shape, [B, C, K, G, h]. writes: new cells are written."""

    shape: tuple[int, ...]
    cache: KvCache
    options: AttentionOptions
    writes: bool
    interpret: bool | pltpu.InterpretParams

    @property
    def arrays(self) -> int:
        """2 if keys and values are apart, else 1."""
        return 1 if self.cache.v is None else 2

    @property
    def key_lanes(self) -> int:
        """How many numbers of a cell the queries are multiplied by, in whole tiles of lanes."""
        size = self.shape[-1]
        return min(pl.cdiv(self.options.key_size or size, LANES) * LANES, size)

    @property
    def result_size(self) -> int:
        """How many numbers of a query's result are stored, the last ones: not those before the values of a cell."""
        return self.shape[-1] - (self.options.key_size or 0)

    @property
    def slots(self) -> int:
        """How many slots a page has."""
        return self.cache.k.shape[-2]

    @property
    def seen(self) -> int | None:
        """How many positions a row's queries see together, None for all."""
        window = self.options.shared_window
        return window and window + self.shape[1] - 1

    def run(
        self, kernel: Kernel, q: jax.Array, lengths: jax.Array, new: NewCells | None, mask: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """Run a kernel; see `decode_attention`."""
        stacked = self.cache.k.ndim == 5
        arrays = [x if stacked else x[None] for x in self.cache.arrays]
        if not self.interpret:  # or XLA would bring a small cache to VMEM whole
            arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
        inputs = lay_out(q, arrays, self.options, new, mask)
        out, lse, written = self._outputs(kernel, self.scalars(kernel, lengths, new), inputs)
        rows, queries, heads, group, _ = self.shape
        out = out.reshape(rows, heads, queries, group, self.result_size)
        lse = lse.reshape(rows, heads, LANES)[:, :, : queries * group].reshape(rows, heads, queries, group)
        return jnp.moveaxis(out, 2, 1), jnp.moveaxis(lse, 2, 1), *(x if stacked else x[0] for x in written)

    def scalars(self, kernel: Kernel, lengths: jax.Array, new: NewCells | None) -> Scalars:
        cache, pages = self.cache, kernel.pages
        scalars = Scalars(lengths.astype(jnp.int32), jnp.asarray(cache.layer_or_first, jnp.int32).reshape(1))
        if kernel.together > 1:
            lengths = scalars.lengths if cache.ring else jnp.minimum(scalars.lengths, pages.capacity)
            first = pages.first(lengths)
            scalars = scalars._replace(lengths=lengths - first, origin=None if self.seen is None else first)
        elif cache.ring:
            scalars = scalars._replace(origin=pages.first(scalars.lengths))
        if cache.ring:  # divided here: the scalar unit is slow at it
            scalars = scalars._replace(origin=lax.rem(scalars.origin, pages.capacity))
        if cache.pages is not None:
            last = cache.k.shape[-4] - 1
            scalars = scalars._replace(table=jnp.clip(cache.pages.astype(jnp.int32), 0, last).reshape(-1))
        if new is not None and new.written is not None:
            scalars = scalars._replace(written=new.written)
        return self._of_groups(scalars, kernel) if kernel.together > 1 else scalars

    def _of_groups(self, scalars: Scalars, kernel: Kernel) -> Scalars:
        """The scalars, with those of a kernel that takes rows together."""
        pages, tile = kernel.pages, tile_of(5, self.cache.k.dtype)
        lengths, slot = scalars.lengths, 0 if scalars.origin is None else scalars.origin

        def grouped(x: jax.Array) -> jax.Array:
            return x.reshape(-1, kernel.together)

        def same(x: jax.Array) -> jax.Array:
            return jnp.all(grouped(x) == grouped(x)[:, :1], axis=1)

        traits = jnp.zeros(len(lengths) // kernel.together, jnp.int32)
        if pages.columns is None:
            alike = same(-(-lengths // pages.unit)) & same(jnp.broadcast_to(slot, lengths.shape))
            traits += jnp.where(alike, ALIKE, 0)
            if self.writes:
                there = lengths > 0 if scalars.written is None else (lengths > 0) & (scalars.written > 0)
                tiles = (jnp.maximum(lengths - self.shape[1], 0) + slot) // tile
                traits += jnp.where(same(tiles) & jnp.all(grouped(there), axis=1), WRITTEN_ALIKE, 0)
        return scalars._replace(traits=traits)

    def _outputs(self, kernel: Kernel, scalars: Scalars, inputs: Inputs) -> Outputs:
        rows, queries, heads, group, _ = self.shape
        width, in_hbm, some, shares = queries * group, pl.BlockSpec(memory_space=pl.ANY), kernel.together, kernel.shares
        split = shares > 1
        specs = Inputs(in_hbm, (in_hbm,) * len(inputs.cache))
        if some > 1:  # where XLA has brought the queries to VMEM, they are read in place
            specs = specs._replace(q=pl.BlockSpec((some, *inputs.q.shape[1:]), lambda b, _: (b, 0, 0, 0)))
        if inputs.sinks is not None:
            of_share = pl.BlockSpec((heads // shares, width, LANES), lambda *at: (at[0] if split else 0, 0, 0))
            specs = specs._replace(sinks=of_share)
        if inputs.mask is not None:
            specs = specs._replace(mask=pl.BlockSpec((some, width, LANES), lambda *at: (at[split], 0, 0)))
        targets = inputs.cache if self.writes else ()
        shapes = Outputs(
            jax.ShapeDtypeStruct((rows // some, some * heads, width, self.result_size), inputs.q.dtype),
            jax.ShapeDtypeStruct(
                (rows, shares, heads // shares, LANES) if split else (rows // some, some * heads, LANES), jnp.float32
            ),
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in targets),
        )
        first_target = len(jax.tree.leaves(scalars)) + 1
        (outputs,) = pl.pallas_call(
            kernel.body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(shares, rows) if split else (rows // some,),
                in_specs=(specs,),
                out_specs=(Outputs(in_hbm, in_hbm, (in_hbm,) * len(targets)),),
                scratch_shapes=[kernel.scratch(inputs.q, inputs.cache)],
            ),
            out_shape=(shapes,),
            input_output_aliases={first_target + n: 2 + n for n in range(len(targets))},
            # Checks triple what it takes to start a copy; streams and the clipped table keep copies in bounds.
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary")[1 - split :],
                disable_bounds_checks=True,
                disable_semaphore_checks=True,
            ),
            cost_estimate=self._cost(inputs),
            interpret=self.interpret,
            name="decode_attention",
        )(scalars, inputs)
        return outputs

    def _cost(self, inputs: Inputs) -> pl.CostEstimate:
        (rows, queries, heads, group, size), slots = self.shape, self.slots * (self.cache.columns or 1)
        live = rows * heads * min(slots, self.options.shared_window or slots)
        moved = live * sum(math.prod(x.shape[4:]) * x.dtype.itemsize for x in inputs.cache)
        moved += 2 * math.prod(self.shape) * inputs.q.dtype.itemsize
        for x in inputs.cache if self.writes else ():
            moved += rows * heads * tile_of(x.ndim, x.dtype) * math.prod(x.shape[4:]) * x.dtype.itemsize
        width = queries * group
        return pl.CostEstimate(flops=4 * live * size * width, bytes_accessed=moved, transcendentals=live * width)
