"""Quantised weights, and their packed layout that TPU kernels read."""

from __future__ import annotations

import jax

from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.quantized import SCHEMES, QuantizedTensor, quantize

# One program instead of one for each operation.
quantized = jax.jit(quantize, static_argnums=(1, 2))


def packed(w: QuantizedTensor, scheme: str, *, float4: bool = False) -> PackedTensor:
    """Weights [..., I, O], quantised in groups along I, in the packed layout."""
    *lead, groups, group, outer = w.values.shape
    shape = (*lead, groups * group, outer)
    packing = Packing(SCHEMES[scheme], shape, (None,) * len(shape), (len(lead),), float4=float4)
    return packing.tensor(*jax.jit(packing.pack)(w.values, w.scales))
