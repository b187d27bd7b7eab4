"""Quantised weights with a branch of low rank beside them, which takes up part of their rounding error.

The branch is two thin matrices in bfloat16: y = x W + (x A) B (Zhang et al. 2024, "LQER",
https://arxiv.org/abs/2402.02446; Li et al. 2024, "SVDQuant", https://arxiv.org/abs/2411.05007).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from inferlib.ops.hadamard import rotated
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import QuantizedTensor
from inferlib.ops.read_whole import ReadWhole
from inferlib.ops.thin_products import thin_products

DTYPE = np.dtype("bfloat16")  # of the factors
Array = tuple[tuple[int, ...], tuple[str | None, ...], np.dtype]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankWeight(ReadWhole):
    """A quantised weight [*I, *O] and factors a [*I, R] and b [R, *O]. The factors are of the inputs that the weight
    multiplies: rotated ones, if it rotates them."""

    base: QuantizedTensor | PackedTensor
    a: jax.Array
    b: jax.Array

    def of_layer(self, layer: jax.Array) -> LowRankWeight:
        """One layer of stacked weights, which kernels read packed."""
        assert isinstance(self.base, PackedTensor)
        a, b = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (self.a, self.b))
        return LowRankWeight(self.base.of_layer(layer), a, b)

    def parted(self, x: Any) -> tuple[Any, QuantizedTensor | PackedTensor]:
        """The inputs [T, *I], rotated if the weight says so, and the weight that multiplies them as they are then.

        Inputs may be a `DeferredNorm` or `FusableNorm` if the weight rotates none: those that do never follow a norm.
        """
        rotation = self.base.rotation
        return (rotated(x, rotation), replace(self.base, rotation=0)) if rotation else (x, self.base)

    def branch(self, x: jax.Array, out_dtype: jax.typing.DTypeLike, backend: str | None = None) -> jax.Array:
        """What the factors add, [T, *O], of inputs that are rotated already. backend: as in `inferlib.ops.matmul`."""
        a, b = self.a.astype(x.dtype)[..., None, :], self.b.astype(x.dtype)[None]
        return thin_products(x, a, b, backend=backend)[:, 0].astype(out_dtype)


def factor_arrays(
    rank: int, shape: tuple[int, ...], names: tuple[str | None, ...], contracting: tuple[int, ...]
) -> dict[str, Array]:
    """Shape, axis names and dtype of the factors of a weight, which may be stacked: contracting dimensions are
    neighbours, and only that of layers comes before them. They are cut over devices as the weight is."""
    first, end = contracting[0], contracting[-1] + 1
    a = (*shape[:end], rank), (*names[:end], None)
    b = (*shape[:first], rank, *shape[end:]), (*names[:first], None, *names[end:])
    return {"factor_a": (*a, DTYPE), "factor_b": (*b, DTYPE)}
