"""Quantised weights, and those of experts as TPU kernels read them."""

from __future__ import annotations

import jax

from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.quantized import SCHEMES, QuantizedTensor, quantize

# One program, not one for each operation.
quantized = jax.jit(quantize, static_argnums=(1, 2))


def packed(w: QuantizedTensor, scheme: str, *, float4: bool = False) -> PackedTensor:
    """Of weights [..., I, O] that are quantised in groups."""
    *lead, groups, group, outer = w.values.shape
    shape = (*lead, groups * group, outer)
    packing = Packing(SCHEMES[scheme], shape, (None,) * len(shape), (len(lead),), float4=float4)
    return packing.tensor(*jax.jit(packing.pack)(w.values, w.scales))
