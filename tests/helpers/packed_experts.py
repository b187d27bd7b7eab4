"""Quantised weights, and their packed layout that TPU kernels read."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.quantized import SCHEMES, QuantizedTensor, Scheme, quantize

# One program instead of one for each operation.
quantized = jax.jit(quantize, static_argnums=(1, 2))


@partial(jax.jit, static_argnums=0)
def rounded(scheme: Scheme, x: jax.Array) -> tuple[QuantizedTensor, jax.Array]:
    """x [..., h] with a scale for each h numbers, and the numbers that it then stands for."""
    cells = quantize(x, (x.ndim - 1,), scheme)
    return cells, cells.dequantized((x.ndim - 1,), jnp.float32)


@partial(jax.jit, static_argnums=1)
def dequantized(w: QuantizedTensor, contracting: tuple[int, ...]) -> jax.Array:
    """The float32 values that are meant."""
    return w.dequantized(contracting, jnp.float32)


def with_nan(x: jax.Array, index: Any) -> jax.Array:
    """`x` with NaN at an index, by NumPy, so that nothing is compiled."""
    changed = np.array(x)
    changed[index] = np.nan
    return jnp.asarray(changed)


def packed(w: QuantizedTensor, scheme: str, *, float4: bool = False) -> PackedTensor:
    """Weights [..., I, O], quantised in groups along I, in the packed layout."""
    *lead, groups, group, outer = w.values.shape
    shape = (*lead, groups * group, outer)
    packing = Packing(SCHEMES[scheme], shape, (None,) * len(shape), (len(lead),), float4=float4)
    return packing.tensor(*_pack(packing, w.values, w.scales))


@partial(jax.jit, static_argnums=0)
def _pack(packing: Packing, values: jax.Array, scales: jax.Array) -> tuple[jax.Array, ...]:
    return packing.pack(values, scales)
