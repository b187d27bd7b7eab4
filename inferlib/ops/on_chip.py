"""Weights that a loop reads at every trip, in on-chip memory from before the loop to its end.

The XLA form leaves them in memory, from which every trip reads them again. The kernel copies them once, and kernels of
products read them where they are; see `PackedTensor.on_chip`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.packed import MEMORY_BOUND_ROWS, PackedTensor

# A compiler option of programs with such loops. XLA:TPU moves an array to memory and back, in every trip, that is on
# chip for much longer than its copy takes; this is how much longer it may be.
OPTIONS: dict[str, str | bool] = {"xla_msa_max_overlap_to_mem_size_async_copy_ratio": "100000"}


def choose(weights: Sequence[Any], backend: Backend) -> Choice:
    """Whether all weights [*I, *O] that a loop multiplies by, arrays or shapes of one device, stay on chip in decode
    steps."""
    from inferlib.pallas_kernels.generations_tpu import planning_for
    from inferlib.pallas_kernels.mx_matmul_tpu import unsupported

    if backend.loop_weights == "xla" or backend.matmul == "xla":
        return Choice("xla")
    packed = [weight for weight in weights if isinstance(weight, PackedTensor)]
    if not weights:
        return Choice("xla")  # the loop runs once
    if len(packed) < len(weights):
        return Choice("xla", "the kernel of products does not read all weights of the loop")
    with planning_for(backend.generation):
        stacks = [jax.eval_shape(lambda w: w.stack, replace(weight, on_chip=True)) for weight in packed]
        reasons = (unsupported(MEMORY_BOUND_ROWS, jnp.bfloat16, stack) for stack in stacks)
        reason = next(filter(None, reasons), None) or _too_large(sum(stack.whole_bytes for stack in stacks))
    return Choice.of("pallas_tpu", reason)


def loop_weights(weights: Any, rows: int, backend: Backend) -> Any:
    """A tree of weights as products of `rows` rows take them in a loop. What is no `PackedTensor` stays as it is."""
    leaves, tree = jax.tree.flatten(weights, is_leaf=_is_packed)
    packed = [leaf for leaf in leaves if _is_packed(leaf)]
    if rows > MEMORY_BOUND_ROWS or not packed or choose(packed, backend).name == "xla":
        return weights
    arrays, form = jax.tree.flatten(packed)
    moved = iter(jax.tree.unflatten(form, _copied(arrays)))
    leaves = [replace(next(moved), on_chip=True) if _is_packed(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, leaves)


def _too_large(size: int) -> str | None:
    from inferlib.pallas_kernels.generations_tpu import generation
    from inferlib.pallas_kernels.on_chip_tpu import room

    if size <= (have := room()):
        return None
    where = f"on-chip memory of {generation() or 'all TPUs from v5e on'}"
    return f"the loop's weights take {size / 1e6:.1f} MB, {(size - have) / 1e6:.1f} MB more than fit in {where}"


def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    from inferlib.pallas_kernels.on_chip_tpu import copy_on_chip

    return run_kernel(copy_on_chip, arrays)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedTensor)
