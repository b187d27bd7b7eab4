"""Weights of stacked layers that arrive in on-chip memory while other operations run, collectives above all.

Memory is idle during a collective. XLA fetches weights meanwhile if each is an array of its own. Of stacks, one kernel
starts copies of a layer's weights, another waits for them where they are needed, and kernels of products read them
where they are (`PackedTensor.on_chip`). The XLA form leaves them in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.backend import Backend
from inferlib.ops.packed import MEMORY_BOUND_ROWS, PackedTensor
from inferlib.ops.read_whole import ReadWhole

_USUAL = 32 << 20  # bytes of 64 MiB, see `by_vmem`, that products with weights and attention work in, at most
# The share of the free on-chip memory that copies take. Each takes one piece of it, and the compiler fails where none
# of what is left is large enough for another.
_SHARE = 0.75


def fits(weight: PackedTensor, rows: int, backend: Backend, free: int) -> bool:
    """Whether a stacked weight, of arrays or shapes of one device, can be fetched ahead for products of `rows` rows,
    where `free` bytes of on-chip memory are free for it."""
    from inferlib.pallas_kernels.generations_tpu import planning_for
    from inferlib.pallas_kernels.mx_matmul_tpu import unsupported

    with planning_for(backend.generation):
        layer = _of_one_layer(weight)
        refused = rows > MEMORY_BOUND_ROWS or unsupported(rows, jnp.bfloat16, layer, normed=True)
        return not refused and layer.whole_bytes <= free


def free_bytes(backend: Backend, *, latent: bool, experts: int) -> int:
    """Bytes of on-chip memory for copies beside the kernels of a layer, which run one after the other. latent:
    attention is to latents. experts: bytes that their kernel works in."""
    from inferlib.pallas_kernels.fetch_ahead_tpu import room
    from inferlib.pallas_kernels.generations_tpu import by_vmem, planning_for
    from inferlib.pallas_kernels.mla_decode_attention_tpu import VMEM_BYTES

    with planning_for(backend.generation):
        kernels = max(by_vmem(VMEM_BYTES if latent else _USUAL), experts)
        return int(_SHARE * max(room() - kernels, 0))


def bytes_of(weight: PackedTensor) -> int:
    """Bytes of one layer of a stacked weight."""
    return _of_one_layer(weight).whole_bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ArrivingWeight(ReadWhole):
    """A layer of a stacked weight on its way to on-chip memory. weight: its buffers, which nothing may read yet.
    semaphores: see `Fetching`."""

    weight: PackedTensor
    semaphores: Any

    def of_layer(self, layer: jax.Array) -> ArrivingWeight:
        """The weight as products of this layer take it."""
        return replace(self, weight=self.weight.of_layer(layer))

    def arrived(self, x: jax.Array) -> tuple[jax.Array, PackedTensor]:
        """x, which is computed before the wait, and the weight behind it."""
        weight, x = arrived(replace(self, weight=replace(self.weight, layer=None)), x)
        return x, weight.of_layer(self.weight.layer)


def fetching(weights: Any, layer: jax.Array, operand: Any, *, interpret: bool) -> tuple[Any, Any]:
    """A layer of stacked weights, as `ArrivingWeight`s, and `operand`: what takes it runs after the copies have
    started.

    weights: a tree of `PackedTensor`s. operand: a tree of arrays.
    """
    from inferlib.pallas_kernels.fetch_ahead_tpu import start_fetch

    if not jax.tree.leaves(weights):
        return weights, operand
    leaves, tree = jax.tree.flatten(weights, is_leaf=_is_packed)
    arrays, form = jax.tree.flatten(leaves)
    started, operand = lax.optimization_barrier((start_fetch(arrays, layer, interpret=interpret), operand))
    buffers, semaphores = jax.tree.unflatten(form, started.buffers), iter(started.semaphores)
    arriving = [
        ArrivingWeight(replace(buffer, on_chip=True), [next(semaphores, None) for _ in jax.tree.leaves(buffer)])
        for buffer in buffers
    ]
    return jax.tree.unflatten(tree, arriving), operand


def arrived(arriving: Any, operand: Any) -> tuple[Any, Any]:
    """The weights of a tree of `ArrivingWeight`s on chip, and `operand`, which is computed before the wait for them."""
    from inferlib.pallas_kernels.fetch_ahead_tpu import Fetching, finish_fetch

    leaves, tree = jax.tree.flatten(arriving, is_leaf=_is_arriving)
    if not leaves:
        return arriving, operand
    buffers, form = jax.tree.flatten([leaf.weight for leaf in leaves])
    semaphores = [semaphore for leaf in leaves for semaphore in leaf.semaphores if semaphore is not None]
    started, operand = lax.optimization_barrier((Fetching(buffers, semaphores), operand))
    return jax.tree.unflatten(tree, jax.tree.unflatten(form, finish_fetch(started))), operand


def _of_one_layer(weight: PackedTensor) -> Any:
    one = replace(weight, layer=None, on_chip=True)
    return jax.eval_shape(lambda w: jax.tree.map(lambda array: array[:1], w).stack, one)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedTensor)


def _is_arriving(leaf: Any) -> bool:
    return isinstance(leaf, ArrivingWeight)
