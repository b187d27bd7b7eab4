"""The part of nki.language that kernels use."""

from __future__ import annotations

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.machine import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS, current
from inferlib.nki_kernels.simulator.operators import OPERATORS
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor import MemoryRegion, NkiTensor, allocate
from inferlib.nki_kernels.simulator.tensor_engine import MOVING_MAX, STATIONARY_MAX


class _TileSize:
    """Sizes of the hardware."""

    pmax = PARTITIONS
    psum_bank_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    gemm_stationary_fmax = STATIONARY_MAX
    gemm_moving_fmax = MOVING_MAX
    psum_num_banks = PSUM_BANKS


def ndarray(shape, dtype, buffer=MemoryRegion.sbuf, name="", address=None) -> NkiTensor:
    """A tensor that holds nothing yet."""
    require(address is None, "subset", "ndarray at an address")
    return allocate(current(), shape, dtype, buffer, name)


def program_id(axis=0) -> int:
    return current().index


def num_programs(axes=0) -> int:
    return current().count


NAMES = {
    **{name: name for name in dtypes.STORAGE},
    **OPERATORS,
    "MemoryRegion": MemoryRegion,
    "NkiTensor": NkiTensor,
    "sbuf": MemoryRegion.sbuf,
    "psum": MemoryRegion.psum,
    "hbm": MemoryRegion.private_hbm,
    "private_hbm": MemoryRegion.private_hbm,
    "shared_hbm": MemoryRegion.shared_hbm,
    "tile_size": _TileSize(),
    "ndarray": ndarray,
    "program_id": program_id,
    "num_programs": num_programs,
}
