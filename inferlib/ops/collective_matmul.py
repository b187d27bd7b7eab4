"""Matrix products with a collective over one mesh axis: all-gather before, reduce-scatter after; inside `shard_map`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.choice import Choice
from inferlib.ops.read_whole import ReadWhole

# From this many rows on a device, a product in one step for each device takes little longer than in one step, by the
# TPU compiler's estimate. With fewer rows, the matrix unit waits for its weights in each step.
LEAST_ROWS = 128
# The same for a weight that does not stay on chip: with fewer rows, reading it in each step takes longer than the
# products.
LEAST_STREAMED_ROWS = 512


def choose(rows: int, shape: tuple[int, ...], dtype, backend: str, *, scatters: bool) -> Choice:
    """The implementation of `all_gather_matmul`, or of `matmul_reduce_scatter` if `scatters`, for `rows` rows of each
    device and a shard of a layer's weight with this shape. Below LEAST_ROWS rows it is "xla" without a reason: the
    kernel would not be faster."""
    if backend != "pallas_tpu" or rows < LEAST_ROWS:
        return Choice("xla")
    from inferlib.pallas_kernels.collective_matmul_tpu import stays, unsupported

    *lead, outer = shape
    parts, inner = (1, math.prod(lead)) if scatters else (math.prod(lead[1:]), lead[0])
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, inner), (1, parts, inner, outer)))
    if rows < LEAST_STREAMED_ROWS and not stays(rows, parts, inner, outer, w.dtype.itemsize, scatters):
        size = f"{parts * inner} x {outer}"
        return Choice("xla", f"{size} do not stay on chip, and {rows} rows take less time than reading them anew")
    return Choice.of(backend, unsupported(rows, x, w, scatters=scatters))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingWeight(ReadWhole):
    """A stack of weights [L, ...] of which `layer` is used, with a product that is fused with a collective over a mesh
    axis. It takes the place of a layer's matrix; `matmul` accepts it.

    scatters: a reduce-scatter follows the product; otherwise an all-gather precedes it. tokens: rows on all devices,
    which are padded to `padded`. ring, interpret: see `all_gather_matmul`.
    """

    values: jax.Array
    layer: jax.Array
    axis: str = field(metadata={"static": True})
    ring: tuple[int, ...] = field(metadata={"static": True})
    scatters: bool = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})
    padded: int = field(metadata={"static": True})
    interpret: bool = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def of_layer(self, layer: jax.Array) -> RingWeight:
        """One layer of the stack; nothing is copied."""
        return replace(self, layer=layer)

    def times(self, x: jax.Array) -> jax.Array:
        """The product with x by the kernel: a shard [padded / n, K] -> [tokens, *P, N], or with `scatters` [tokens, *K]
        -> a shard [padded / n, N]."""
        options: dict[str, Any] = dict(
            axis=self.axis, ring=self.ring, layer=self.layer, backend="pallas_tpu", interpret=self.interpret
        )
        if not self.scatters:
            return all_gather_matmul(x, self.values, **options)[: self.tokens]
        x = jnp.pad(x, [(0, self.padded - self.tokens), *[(0, 0)] * (x.ndim - 1)])
        return matmul_reduce_scatter(x, self.values, **options)


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: tuple[int, ...] | None = None,
    layer: jax.Array | int = 0,
    backend: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """x [T / n, K] of the n devices along `axis`, together [T, K], times this device's w [L, K, *P, N] of a layer ->
    [T, *P, N], accumulated in float32.

    ring: the devices on the axis, each near to the next (see `sharding.mesh.ring_of`). backend: "pallas_tpu" multiplies
    the rows that have arrived while others travel. interpret: the kernel is interpreted, on CPU devices.
    """
    if backend == "xla":
        return _dot(lax.all_gather(x, axis, tiled=True), lax.dynamic_index_in_dim(w, layer, keepdims=False))
    from inferlib.pallas_kernels import collective_matmul_tpu as kernels

    parts, outer = w.shape[2:-1], w.shape[-1]
    w = jnp.moveaxis(w, 1, -2).reshape(w.shape[0], math.prod(parts), w.shape[1], outer)
    y = kernels.all_gather_matmul(x, w, axis=axis, ring=ring, layer=layer, interpret=_how(interpret))
    return jnp.moveaxis(y.reshape(*parts, -1, outer), -2, 0)


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: tuple[int, ...] | None = None,
    layer: jax.Array | int = 0,
    backend: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """This device's x [T, *K] times its w [L, *K, N] of a layer, summed over the n devices along `axis`; each gets its
    shard [T / n, N] of the sum [T, N].

    Products are accumulated in float32; sums between devices have x's dtype. ring, backend, interpret: see
    `all_gather_matmul`.
    """
    if backend == "xla":
        y = _dot(x, lax.dynamic_index_in_dim(w, layer, keepdims=False))
        return lax.psum_scatter(y, axis, tiled=True)
    from inferlib.pallas_kernels import collective_matmul_tpu as kernels

    w = w.reshape(w.shape[0], -1, w.shape[-1])
    x = x.reshape(x.shape[0], -1)
    options: dict[str, Any] = dict(axis=axis, ring=ring, layer=layer, interpret=_how(interpret))
    return kernels.matmul_reduce_scatter(x, w, **options)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.tensordot(x, w, x.ndim - 1, precision=exact, preferred_element_type=x.dtype)


def _how(interpret: bool):
    """The interpreter with remote copies, if `interpret`."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams() if interpret else False
