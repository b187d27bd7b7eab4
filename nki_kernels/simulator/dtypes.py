"""NKI's dtypes as the stand-in stores them: conversions from and to float32, and the packed MX types."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from inferlib.nki_kernels.simulator.rules import RuleError, require

# A dtype of NKI is its name; packed types are stored as the integer they occupy.
STORAGE = {
    "bool_": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "float16": np.float16,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float8_e4m3fn_x4": np.uint32,
    "float8_e5m2_x4": np.uint32,
    "float4_e2m1fn_x4": np.uint16,
}
PACKED = {
    "float8_e4m3fn_x4": ml_dtypes.float8_e4m3fn,
    "float8_e5m2_x4": ml_dtypes.float8_e5m2,
    "float4_e2m1fn_x4": ml_dtypes.float4_e2m1fn,
}
INTEGERS = ("bool_", "int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")
FLOAT8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
ONLY_GEN4 = ("float8_e4m3fn", "float8_e8m0fnu", *PACKED)
FP32_MIN = float(np.finfo(np.float32).min)


def storage_dtype(dtype: str) -> np.dtype:
    if dtype not in STORAGE:
        raise RuleError("subset", f"dtype {dtype!r} is not implemented by the stand-in")
    return np.dtype(STORAGE[dtype])


def itemsize(dtype: str) -> int:
    return storage_dtype(dtype).itemsize


def name_of(dtype: np.dtype) -> str:
    """NKI's dtype of a kernel's input."""
    name = "bool_" if dtype == np.bool_ else dtype.name
    if name not in STORAGE:
        raise RuleError("dtype", f"a kernel's input is {dtype}, which NKI does not have")
    return name


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """What an engine computes with: every element cast to float32."""
    require(dtype not in PACKED, "dtype", f"{dtype} is packed: only MX matrix products read it")
    return np.asarray(raw, np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """What an engine writes: rounded to nearest even; integers saturate."""
    require(dtype not in PACKED, "dtype", f"{dtype} is packed: only quantize_mx writes it")
    kind = storage_dtype(dtype)
    with np.errstate(all="ignore"):
        if dtype in INTEGERS:
            limits = np.iinfo(kind)
            # float32 cannot hold the greatest int32, so saturate in float64.
            return np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(kind)
        written = values.astype(kind)
    if dtype in FLOAT8:
        lost = np.isfinite(values) & ~np.isfinite(written.astype(np.float32))
        if lost.any():
            raise RuleError("fp8-overflow", f"{float(values[lost].flat[0])} does not fit {dtype}")
    return written


def unpack(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of packed values, [...] -> [..., 4] float32, element 0 in the low bits."""
    width = 8 * raw.dtype.itemsize // 4
    shifts = np.arange(4, dtype=raw.dtype) * raw.dtype.type(width)
    parts = (raw[..., None] >> shifts) & raw.dtype.type((1 << width) - 1)
    table = np.arange(1 << width, dtype=np.uint8).view(PACKED[dtype]).astype(np.float32)
    return table[parts]


def pack_float8(values: np.ndarray, dtype: str) -> np.ndarray:
    """[..., 4] float32 -> [...] packed float8, rounded to nearest even."""
    codes = np.ascontiguousarray(values.astype(PACKED[dtype])).view(np.uint8)
    return codes.view("<u4")[..., 0]
