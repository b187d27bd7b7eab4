"""Copies of weights to a TPU's on-chip memory that other operations run beside: one kernel starts them, another waits.

The first returns the buffers and a semaphore for each copy, the second takes both. See "Async Operations" in the
documentation of Pallas for TPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.expert_weights_tpu import in_hbm
from inferlib.pallas_kernels.generations_tpu import cores, on_chip_bytes
from inferlib.pallas_kernels.on_chip_tpu import SPARE_BYTES

START, FINISH = "start_fetch", "finish_fetch"  # the kernels' names
_ON_CHIP, _SEMAPHORES = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)
_EFFECTS = pltpu.CompilerParams(has_side_effects=True, vmem_limit_bytes=1 << 20)


def room() -> int:
    """Bytes of copies and kernels that there may be at once, beside the arrays that XLA keeps on chip. The compiler
    fails if it has no place for all of them. None where a device has two cores: only one of them would start copies,
    and other operations run on both."""
    return max(on_chip_bytes() - SPARE_BYTES, 0) if cores() == 1 else 0


class Fetching(NamedTuple):
    """Copies under way. buffers: the copies, [1, ...] each, in on-chip memory. semaphores: one for each; none if the
    copies have arrived."""

    buffers: list[jax.Array]
    semaphores: list[Any]


def start_fetch(stacks: Sequence[jax.Array], layer: jax.Array, *, interpret: bool = False) -> Fetching:
    """Start to copy one layer of stacks [L, ...]. An interpreted kernel has no semaphores to return: it also waits."""
    count, anywhere = len(stacks), pl.BlockSpec(memory_space=pl.ANY)
    shapes: list[Any] = [(1, *stack.shape[1:]) for stack in stacks]
    semaphores = [pltpu.SemaphoreType.DMA((1,))] * count
    moved = 2 * sum(x.size // x.shape[0] * jax.dtypes.itemsize_bits(x.dtype) // 8 for x in stacks)
    buffer: Any = jax.ShapeDtypeStruct if interpret else pltpu.VMEM
    buffers = [buffer(shape, stack.dtype) for shape, stack in zip(shapes, stacks, strict=True)]
    results = pl.pallas_call(
        _whole_kernel if interpret else _start_kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[anywhere] * count],
        out_specs=[_ON_CHIP] * count + [_SEMAPHORES] * (0 if interpret else count),
        out_shape=buffers + (semaphores if not interpret else []),
        scratch_shapes=semaphores if interpret else [],
        compiler_params=_EFFECTS,
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name=START,
    )(jnp.asarray(layer, jnp.int32).reshape(1), *in_hbm(list(stacks), interpret))
    return Fetching(results[:count], results[count:])


def finish_fetch(fetching: Fetching) -> list[jax.Array]:
    """Wait for all copies, and return them."""
    buffers, semaphores = fetching
    if not semaphores:
        return buffers
    count = len(buffers)
    return pl.pallas_call(
        _finish_kernel,
        in_specs=[_ON_CHIP] * count + [_SEMAPHORES] * count,
        out_specs=[_ON_CHIP] * count,
        out_shape=[pltpu.VMEM(buffer.shape, buffer.dtype) for buffer in buffers],
        input_output_aliases={n: n for n in range(count)},
        compiler_params=_EFFECTS,
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=0, transcendentals=0),
        name=FINISH,
    )(*buffers, *semaphores)


def _start_kernel(layer_ref, *refs) -> None:
    count = len(refs) // 3
    copies = zip(refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True)
    for stack, buffer, semaphore in reversed(list(copies)):  # gate and up, the last of their names, are read first
        pltpu.make_async_copy(stack.at[layer_ref[0]], buffer.at[0], semaphore.at[0]).start()


def _finish_kernel(*refs) -> None:
    count = len(refs) // 3
    for semaphore, buffer in zip(refs[count : 2 * count], refs[2 * count :], strict=True):
        pltpu.make_async_copy(buffer, buffer, semaphore.at[0]).wait()


def _whole_kernel(layer_ref, *refs) -> None:
    """Both kernels, one after the other."""
    count = len(refs) // 3
    buffers, semaphores = refs[count : 2 * count], refs[2 * count :]
    _start_kernel(layer_ref, *refs)
    _finish_kernel(*buffers, *semaphores, *buffers)
