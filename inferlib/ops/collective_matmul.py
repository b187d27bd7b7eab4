"""Matrix products with a collective over one mesh axis: all-gather before, reduce-scatter after; inside `shard_map`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Backend = Literal["xla", "pallas_tpu"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingWeight:
    """A stack of weights [L, ...] of which `layer` is used, and whose product takes place with its collective over a
    mesh axis: it stands where layers have a matrix, and `matmul` knows it. scatters: whether a reduce-scatter follows,
    or an all-gather precedes. tokens: rows of the whole, which are `padded` to so many. ring, interpret: see
    `all_gather_matmul`."""

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

    def __getitem__(self, index) -> RingWeight:
        """As `nnx.Param` asks for its value: `w[...]`."""
        if index is not Ellipsis:
            raise TypeError("a RingWeight is read whole, as w[...]")
        return self

    def of_layer(self, layer: jax.Array) -> RingWeight:
        """Of the stack, the weight of one layer; nothing is copied."""
        return replace(self, layer=layer)

    def times(self, x: jax.Array) -> jax.Array:
        """The product with x by the kernel: of a share [padded / n, K] -> [tokens, *P, N], or of [tokens, *K] -> a
        share [padded / n, N]."""
        kind = dict(axis=self.axis, ring=self.ring, layer=self.layer, backend="pallas_tpu", interpret=self.interpret)
        if not self.scatters:
            return all_gather_matmul(x, self.values, **kind)[: self.tokens]
        x = jnp.pad(x, [(0, self.padded - self.tokens), *[(0, 0)] * (x.ndim - 1)])
        return matmul_reduce_scatter(x, self.values, **kind)


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str,
    ring: tuple[int, ...] | None = None,
    layer: jax.Array | int = 0,
    backend: Backend = "xla",
    interpret: bool = False,
) -> jax.Array:
    """x [T / n, K] of the n devices along `axis`, together [T, K], times this device's w [L, K, *P, N] of a layer ->
    [T, *P, N], accumulated in float32.

    ring: the devices on the axis, each near to the next (see `sharding.mesh.ring_of`). The kernel makes the product of
    the rows that have come while others are on their way; it takes what `collective_matmul_tpu.unsupported` allows.
    interpret: it, for CPU devices that stand for others.
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
    backend: Backend = "xla",
    interpret: bool = False,
) -> jax.Array:
    """This device's x [T, *K] times its w [L, *K, N] of a layer, summed over the n devices along `axis`; each gets its
    share [T / n, N] of the sum [T, N].

    Products are accumulated in float32; between devices sums are of x's dtype. ring, backend, interpret: as of
    `all_gather_matmul`.
    """
    if backend == "xla":
        y = _dot(x, lax.dynamic_index_in_dim(w, layer, keepdims=False))
        return lax.psum_scatter(y, axis, tiled=True)
    from inferlib.pallas_kernels import collective_matmul_tpu as kernels

    w = w.reshape(w.shape[0], -1, w.shape[-1])
    x, kind = x.reshape(x.shape[0], -1), dict(axis=axis, ring=ring, layer=layer, interpret=_how(interpret))
    return kernels.matmul_reduce_scatter(x, w, **kind)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.tensordot(x, w, x.ndim - 1, precision=exact, preferred_element_type=x.dtype)


def _how(interpret: bool):
    """Remote copies are known to this interpreter only."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams() if interpret else False
