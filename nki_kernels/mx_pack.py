"""MX formats on the host, in numpy: quantise, pack for the kernels, and convert float8 for trn2."""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 32
# Greatest exponent and greatest value of each element.
_LIMITS = {"float8_e4m3fn": (8, 448.0), "float8_e5m2": (15, 57344.0), "float4_e2m1fn": (2, 6.0)}


def quantise(values: np.ndarray, element: str, headroom: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """values [K, N] -> elements [K, N], scales [K / 32, N] uint8 of 2**(s - 127), by the OCP sample algorithm.

    headroom: powers of two by which the scale is greater; trn3's quantize_mx has 1. Elements saturate.
    """
    greatest, limit = _LIMITS[element]
    groups = np.asarray(values, np.float32).reshape(-1, GROUP, values.shape[1])
    amax = np.abs(groups).max(axis=1)
    exponents = np.where(amax > 0, np.frexp(amax)[1] - 1 - greatest + headroom, -127).clip(-127, 127)
    scaled = groups * np.exp2(-exponents.astype(np.float32))[:, None]
    elements = scaled.clip(-limit, limit).astype(getattr(ml_dtypes, element))
    return elements.reshape(values.shape), (exponents + 127).astype(np.uint8)


def dequantise(elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of elements [K, N] with scales [K / 32, N], as [K, N] float64."""
    factors = np.exp2(np.repeat(scales, GROUP, axis=0).astype(np.float64) - 127)
    return elements.astype(np.float64) * factors


def pack(elements: np.ndarray) -> np.ndarray:
    """[K, N] -> [K / 4, N]: four neighbours along K, the first lowest, in uint32 (float8) or uint16 (float4)."""
    codes = elements.view(np.uint8).reshape(-1, 4, elements.shape[1])
    width, kind = (4, np.uint16) if elements.dtype == ml_dtypes.float4_e2m1fn else (8, np.uint32)
    return np.bitwise_or.reduce([codes[:, i].astype(kind) << kind(width * i) for i in range(4)])


def for_trn2(elements: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float8_e4m3fn [K, N] and scales as trn2 reads them: its e4m3 ends at 240 and has infinities.

    Groups with a value beyond 240 are halved and their scales doubled; their elements below 2**-6 may lose one bit.
    Other groups do not change.
    """
    if elements.dtype != ml_dtypes.float8_e4m3fn:
        return elements, scales
    groups = elements.astype(np.float32).reshape(-1, GROUP, elements.shape[1])
    high = np.abs(groups).max(axis=1) > 240
    halved = np.where(high[:, None], groups / 2, groups).astype(ml_dtypes.float8_e4m3)
    return halved.reshape(elements.shape), scales + high.astype(np.uint8)
