"""Copies arrays from memory to a TPU's on-chip memory, where they stay for as long as something reads them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.generations_tpu import SCRATCH_BYTES, generation, on_chip_bytes

SPARE_BYTES = 4 << 20  # for the activations of a decode step, which then are not written to memory


def room() -> int:
    """Bytes of arrays that may stay on chip while other kernels and operations run."""
    return max(on_chip_bytes() - SCRATCH_BYTES.get(generation() or "", on_chip_bytes() // 2) - SPARE_BYTES, 0)


def copy_on_chip(arrays: Sequence[jax.Array], *, interpret: bool = False) -> list[jax.Array]:
    """Copies of the arrays in on-chip memory. All copies run at once.

    XLA alone decides by its estimates which arrays a loop carries on chip. Results of a kernel that are to be there are
    not moved away as long as there is room.
    """
    anywhere, on_chip = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    moved = 2 * sum(x.size * jax.dtypes.itemsize_bits(x.dtype) // 8 for x in arrays)
    if not interpret:  # otherwise XLA would bring small arrays to on-chip memory first
        arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
    return pl.pallas_call(
        _kernel,
        in_specs=[anywhere] * len(arrays),
        out_specs=[on_chip] * len(arrays),
        out_shape=[pltpu.VMEM(x.shape, x.dtype) if not interpret else jax.typeof(x) for x in arrays],
        scratch_shapes=[pltpu.SemaphoreType.DMA((len(arrays),))],
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="copy_on_chip",
    )(*arrays)


def _kernel(*refs) -> None:
    *arrays, semaphores = refs
    count = len(arrays) // 2
    pairs = zip(arrays[:count], arrays[count:], strict=True)
    copies = [pltpu.make_async_copy(*pair, semaphores.at[n]) for n, pair in enumerate(pairs)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
