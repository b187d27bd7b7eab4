"""The Tensor engine: matrix products, MX matrix products, transposes."""

from __future__ import annotations

from enum import Enum

import numpy as np

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.access import (
    EITHER,
    LEAST_CYCLES,
    PSUM,
    SBUF,
    busy,
    check_written,
    choose,
    free_size,
    operand,
    read,
    read_raw,
    write,
    write_raw,
)
from inferlib.nki_kernels.simulator.machine import PARTITIONS, PSUM_BANK_BYTES, Core, Engine, current
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor import NkiTensor

STATIONARY_MAX, MOVING_MAX, VECTOR_TRANSPOSE_MAX = 128, 512, 32
MATMUL_DTYPES = ("float32", "bfloat16", "float16", *dtypes.FLOAT8)
SCALE_DTYPES = ("uint8", "float8_e8m0fnu")
# Stationary columns are loaded four a cycle, while the product before them runs.
LOADED_A_CYCLE = 4


class matmul_perf_mode(Enum):
    """Whether float8 operands are taken two a cycle."""

    none = "none"
    double_row = "double_row"


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=matmul_perf_mode.none,
    name=None,
):
    """dst [M, N] = stationary [K, M].T @ moving [K, N]."""
    core, what = current(), "nc_matmul"
    default_mode = not is_transpose and not tile_position and not tile_size and perf_mode.name == "none"
    require(default_mode, "subset", f"{what} in a transpose, tiling or performance mode")
    for side, tensor in (("stationary", stationary), ("moving", moving)):
        operand(core, f"{what} {side}", tensor, SBUF, MATMUL_DTYPES)
    kinds = {stationary.dtype, moving.dtype}
    require("float32" not in kinds or len(kinds) == 1, "fp32-pair", f"{what} of {stationary} and {moving}")
    clash = {"float8_e4m3", "float8_e4m3fn"} <= kinds
    require(not clash, "dtype", f"{what} of {stationary} and {moving}: one of both e4m3 formats")
    _limits(what, stationary, moving)
    a, b = read(core, what, stationary), read(core, what, moving)
    with np.errstate(all="ignore"):
        _accumulate(core, what, dst, a.T @ b, accumulate)
    rate = 4 if kinds == {"float32"} else 1
    _count(core, a.shape[0], a.shape[1], b.shape[1], rate, 1)


def nc_matmul_mx(
    dst,
    stationary,
    moving,
    stationary_scale,
    moving_scale,
    tile_position=None,
    tile_size=None,
    accumulate=None,
    name=None,
):
    """dst [M, N] = stationary.T @ moving over K = 4 * partitions, each scaled by 2**(scale - 127)."""
    core, what = current(), "nc_matmul_mx"
    require(core.generation.number >= 4, "generation", f"{core.generation.name} has no {what}")
    require(tile_position is None and tile_size is None, "subset", f"{what} in a tiling mode")
    values = []
    for tensor, scale in ((stationary, stationary_scale), (moving, moving_scale)):
        operand(core, f"{what} data", tensor, SBUF, tuple(dtypes.PACKED))
        operand(core, f"{what} scale", scale, SBUF, SCALE_DTYPES)
        values.append(_dequantised(core, what, tensor, scale))
    _limits(what, stationary, moving)
    require(free_size(stationary) % 2 == 0, "mx-layout", f"{what}: stationary {stationary} has an odd size")
    a, b = values
    with np.errstate(all="ignore"):
        _accumulate(core, what, dst, a.T @ b, accumulate)
    _count(core, stationary.shape[0], free_size(stationary), free_size(moving), 1, 4)


def _dequantised(core: Core, what: str, tensor: NkiTensor, scale: NkiTensor) -> np.ndarray:
    """[P, F] packed and its scales -> [4 P, F] float32; scales of quadrant q lie in its first four partitions."""
    p, f = tensor.shape[0], free_size(tensor)
    require(p % 32 == 0, "mx-layout", f"{what}: {tensor} has {p} partitions, not a multiple of 32")
    rows = scale_rows(p)
    wanted = {p // 8, p} if p == 32 else {p}
    fits = scale.shape[0] in wanted and free_size(scale) == f
    require(fits, "mx-layout", f"{what}: scales {scale} of {tensor} must be {sorted(wanted)} x {f}")
    used = [scale[r : r + 4] for r in rows]
    exponents = np.concatenate([read_raw(core, f"{what} scale", part).view(np.uint8) for part in used])
    require(not (exponents == 255).any(), "mx-layout", f"{what}: a scale of {scale} is NaN")
    factors = np.repeat(np.ldexp(np.float32(1), exponents.astype(np.int32) - 127), 8, axis=0)
    elements = dtypes.unpack(read_raw(core, what, tensor), tensor.dtype) * factors[..., None]
    return elements.transpose(0, 2, 1).reshape(4 * p, f)


def scale_rows(partitions: int) -> range:
    """First scale partition of every quadrant."""
    return range(0, partitions, 32)


def _limits(what: str, stationary: NkiTensor, moving: NkiTensor) -> None:
    k, m, n = stationary.shape[0], free_size(stationary), free_size(moving)
    require(moving.shape[0] == k, "shape", f"{what} contracts {stationary} with {moving}")
    inside = k <= PARTITIONS and m <= STATIONARY_MAX and n <= MOVING_MAX
    require(inside, "matmul-limits", f"{what} of {k} x {m} by {k} x {n}")


def _accumulate(core: Core, what: str, dst: NkiTensor, product: np.ndarray, accumulate: bool | None) -> None:
    kinds = ("float32",) if core.generation.number < 4 else ("float32", "bfloat16")
    operand(core, f"{what} dst", dst, PSUM, kinds)
    _one_bank(what, dst)
    require((dst.shape[0], free_size(dst)) == product.shape, "shape", f"{what} of {list(product.shape)} into {dst}")
    if accumulate is not False:
        started = dst.flags(dst.storage.by_matmul) != 0
        foreign = (dst.flags(dst.storage.written) != 0) & ~started
        require(not foreign.any(), "accumulate", f"{what} onto {dst}, initialised by another instruction")
        require(accumulate is None or bool(started.all()), "accumulate", f"{what} onto {dst}, which holds no product")
        if started.any():
            before = np.where(started, dst.raw().astype(np.float32), 0).reshape(product.shape)
            product = product + before
    write(core, what, dst, product, by_matmul=True)


def _one_bank(what: str, dst: NkiTensor) -> None:
    size = dtypes.itemsize(dst.dtype)
    first = dst.offset % dst.row * size
    last = first + sum(step * (n - 1) for step, n in zip(dst.strides[1:], dst.shape[1:], strict=True)) * size + size - 1
    alike = first // PSUM_BANK_BYTES == last // PSUM_BANK_BYTES
    require(alike, "psum-bank", f"{what} into bytes {first} to {last} of {dst}")


def _count(core: Core, k: int, m: int, n: int, slowdown: int, depth: int) -> None:
    cycles = max(n, m / LOADED_A_CYCLE, LEAST_CYCLES)
    core.counters.matmuls += 1
    core.counters.matmul_slots += PARTITIONS * STATIONARY_MAX * depth * max(n, LEAST_CYCLES)
    core.counters.matmul_useful += k * m * n * depth
    busy(core, Engine.tensor, cycles * slowdown)


def nc_transpose(dst, data, engine=Engine.unknown, name=None):
    """dst [F, P] = data [P, F].T: Tensor engine from SBUF to PSUM, or Vector engine up to 32 x 32."""
    core, what = current(), "nc_transpose"
    p, f = data.shape[0], free_size(data)
    small = max(p, f) <= VECTOR_TRANSPOSE_MAX
    chosen = choose(what, engine, (Engine.tensor, Engine.vector))
    tensor = chosen is Engine.tensor
    operand(core, f"{what} data", data, SBUF if tensor else EITHER)
    operand(core, f"{what} dst", dst, PSUM if tensor else EITHER)
    require(tensor or small, "shape", f"{what} of {data} on the Vector engine, which takes 32 x 32")
    require(f <= PARTITIONS, "shape", f"{what} of {data}: at most 128 x 128")
    require(dst.dtype == data.dtype, "dtype", f"{what} of {data} into {dst}")
    require((dst.shape[0], free_size(dst)) == (f, p), "shape", f"{what} of {data} into {dst}")
    # Trn2's transposes of float8 write 16-bit elements, which no dtype of NKI describes.
    require(dst.dtype in ("float32", "bfloat16", "float16"), "subset", f"{what} of {data.dtype}")
    if tensor:
        _one_bank(what, dst)
    check_written(data, what, core)
    write_raw(core, what, dst, np.ascontiguousarray(read_raw(core, what, data).T))
    if tensor:
        core.counters.matmuls += 1
        busy(core, Engine.tensor, max(p, LEAST_CYCLES))
    else:
        busy(core, Engine.vector, f)
