"""Matrix products with a collective over one mesh axis: all-gather before, reduce-scatter after; inside `shard_map`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Backend = Literal["xla", "pallas_tpu"]


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: tuple[int, ...] | None = None,
    layer: jax.Array | int = 0,
    backend: Backend = "xla",
) -> jax.Array:
    """x [T / n, K] of the n devices along `axis`, together [T, K], times this device's w [L, K, *P, N] of a layer ->
    [T, *P, N], accumulated in float32.

    ring: the devices on the axis, each near to the next (see `sharding.mesh.ring_of`). The kernel makes the product of
    the rows that have come while others are on their way; it takes what `collective_matmul_tpu.unsupported` allows, and
    is interpreted on CPU.
    """
    if backend == "xla":
        return _dot(lax.all_gather(x, axis, tiled=True), lax.dynamic_index_in_dim(w, layer, keepdims=False), 1)
    from inferlib.pallas_kernels import collective_matmul_tpu as kernels

    parts, outer = w.shape[2:-1], w.shape[-1]
    w = jnp.moveaxis(w, 1, -2).reshape(w.shape[0], math.prod(parts), w.shape[1], outer)
    y = _by_kernel(partial(kernels.all_gather_matmul, axis=axis, ring=ring), x, w, layer)
    return jnp.moveaxis(y.reshape(*parts, -1, outer), -2, 0)


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: tuple[int, ...] | None = None,
    layer: jax.Array | int = 0,
    backend: Backend = "xla",
) -> jax.Array:
    """This device's x [T, *K] times its w [L, *K, N] of a layer, summed over the n devices along `axis`; each gets its
    share [T / n, N] of the sum [T, N].

    Products are accumulated in float32; between devices sums are of x's dtype. ring, backend: as of `all_gather_matmul`.
    """
    if backend == "xla":
        y = _dot(x, lax.dynamic_index_in_dim(w, layer, keepdims=False), x.ndim - 1)
        return lax.psum_scatter(y, axis, tiled=True)
    from inferlib.pallas_kernels import collective_matmul_tpu as kernels

    w = w.reshape(w.shape[0], -1, w.shape[-1])
    run = partial(kernels.matmul_reduce_scatter, axis=axis, ring=ring)
    return _by_kernel(run, x.reshape(x.shape[0], -1), w, layer)


def _dot(x: jax.Array, w: jax.Array, contract: int) -> jax.Array:
    from inferlib.ops.matmul import matmul

    return matmul(x, w, contract=contract)


def _by_kernel(run, x: jax.Array, w: jax.Array, layer: jax.Array | int) -> jax.Array:
    from jax.experimental.pallas import tpu as pltpu

    def interpreted(x, w, layer):
        return run(x, w, layer=layer, interpret=pltpu.InterpretParams())

    def compiled(x, w, layer):
        return run(x, w, layer=layer)

    return lax.platform_dependent(x, w, jnp.asarray(layer, jnp.int32), cpu=interpreted, default=compiled)
