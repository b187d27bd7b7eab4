"""quantize_mx of the Vector engine."""

from __future__ import annotations

import numpy as np

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.access import SBUF, busy, free_size, operand, read, write_raw
from inferlib.nki_kernels.simulator.machine import Engine, current
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor_engine import SCALE_DTYPES, scale_rows

# Greatest exponent of the packed formats.
GREATEST_EXPONENT = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}


def quantize_mx(dst, src, dst_scale, name=None):
    """src [P, 4 F] in 16 bit -> dst [P, F] packed float8, a scale for every 8 partitions x 4 elements.

    The scale is 2**(floor(log2(amax)) - (greatest exponent - 1)), twice that of the OCP sample algorithm.
    """
    core, what = current(), "quantize_mx"
    require(core.generation.number >= 4, "generation", f"{core.generation.name} has no {what}")
    operand(core, f"{what} src", src, SBUF, ("bfloat16", "float16"))
    operand(core, f"{what} dst", dst, SBUF, tuple(GREATEST_EXPONENT))
    operand(core, f"{what} dst_scale", dst_scale, SBUF, SCALE_DTYPES)
    p, f = src.shape[0], free_size(src)
    require(p % 32 == 0 and f % 4 == 0, "mx-layout", f"{what} of {src}: a multiple of 32 by a multiple of 4")
    require((dst.shape[0], 4 * free_size(dst)) == (p, f), "shape", f"{what} of {src} into {dst}")
    wanted = {p // 8, p} if p == 32 else {p}
    fits = dst_scale.shape[0] in wanted and free_size(dst_scale) == f // 4
    require(fits, "mx-layout", f"{what}: scales {dst_scale} of {dst} must be {sorted(wanted)} x {f // 4}")
    values = read(core, what, src).reshape(p // 8, 8, f // 4, 4)
    require(bool(np.isfinite(values).all()), "argument", f"{what} of {src}, which is not finite")
    greatest = np.abs(values).max(axis=(1, 3))
    exponents = np.where(greatest > 0, np.frexp(greatest)[1] - 1 - (GREATEST_EXPONENT[dst.dtype] - 1), -127)
    exponents = np.clip(exponents, -127, 127)
    scaled = values * np.ldexp(np.float32(1), -exponents)[:, None, :, None]
    write_raw(core, what, dst, dtypes.pack_float8(scaled.reshape(p, f // 4, 4), dst.dtype))
    codes = (exponents + 127).astype(np.uint8)
    for group, row in enumerate(scale_rows(p)):
        part = dst_scale[row : row + 4]
        write_raw(core, what, part, codes[4 * group : 4 * group + 4].view(dtypes.storage_dtype(part.dtype)))
    busy(core, Engine.vector, f / 4)
