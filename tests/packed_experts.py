"""Experts' weights as TPU kernels read them."""

from __future__ import annotations

from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.quantized import SCHEMES, QuantizedTensor


def packed(w: QuantizedTensor, scheme: str, *, float4: bool = False) -> PackedTensor:
    """Of weights [..., I, O] that are quantised in groups."""
    *lead, groups, group, outer = w.values.shape
    shape = (*lead, groups * group, outer)
    packing = Packing(SCHEMES[scheme], shape, (None,) * len(shape), (len(lead),), float4=float4)
    return packing.tensor(*packing.pack(w.values, w.scales))
