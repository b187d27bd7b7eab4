"""DMA: copies between HBM and SBUF, gathers by index, and exchanges between the cores of a logical core."""

from __future__ import annotations

from enum import Enum

import numpy as np

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.access import check_written, mark_written
from inferlib.nki_kernels.simulator.machine import PARTITIONS, Core, Engine, current
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor import MemoryRegion, NkiTensor, check_generation

SHORT_BYTES = 512


class oob_mode(Enum):
    """What an index out of bounds does."""

    error = 0
    skip = 1


class dge_mode(Enum):
    """Who makes the DMA's descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class dma_engine(Enum):
    """Who moves a tile from core to core."""

    dma = 1
    gpsimd_dma = 2


def dma_copy(
    dst,
    src,
    priority=None,
    oob_mode=oob_mode.error,
    dge_mode=dge_mode.unknown,
    engine=Engine.unknown,
    name=None,
):
    """dst = src, elements in order; dtypes convert through float32."""
    core, what = current(), "dma_copy"
    require(priority is None and engine is Engine.unknown, "subset", f"{what} with a priority or an engine")
    for tensor in (dst, src):
        require(isinstance(tensor, NkiTensor), "argument", f"{what} of {type(tensor).__name__}")
        require(tensor.buffer is not MemoryRegion.psum, "dma-psum", f"{what} of {tensor}")
        require(not tensor.on_chip or tensor.shape[0] <= PARTITIONS, "partitions", f"{what} of {tensor}")
        check_generation(core.generation, tensor.dtype)
    require(dst.size == src.size, "element-count", f"{what} of {src} to {dst}")
    require(not (dst.is_indirect() and src.is_indirect()), "subset", f"{what} from and to indices")
    alike = dst.dtype == src.dtype
    raw_bytes = dge_mode.name == "hwdge"
    require(alike or not raw_bytes, "dtype", f"{what} of {src} to {dst}: hwdge moves bytes and does not convert")
    if not (src.is_indirect() or dst.is_indirect()):
        _move(core, what, dst, src)
        return
    indirect, plain = (src, dst) if src.is_indirect() else (dst, src)
    require(not raw_bytes or not indirect.index[3], "dtype", f"{what} by a vector of indices: hwdge cannot")
    offsets, step, bound, per_row = indirect.index
    check_written(offsets, what, core)
    indices = offsets.raw()[:, 0].astype(np.int64)
    if not per_row:
        _guard(what, indirect, indices, bound, oob_mode)
        _move(
            core, what, dst, src, int(indices[0]) * step * (indirect is src), int(indices[0]) * step * (indirect is dst)
        )
        return
    inside = (indices >= 0) & (indices < bound)
    require(
        oob_mode.name == "skip" or bool(inside.all()), "out-of-bounds", f"{what}: {indices[~inside]} of {bound} rows"
    )
    rows = indirect.shape[0]
    require(plain.shape[0] == rows, "shape", f"{what} of {plain} by {rows} indices")
    for row in np.flatnonzero(inside):
        one = NkiTensor(
            indirect.storage, indirect.dtype, (1, *indirect.shape[1:]), indirect.strides,
            indirect.offset + int(indices[row]) * step, indirect.name,
        )  # fmt: skip
        part = NkiTensor(
            plain.storage, plain.dtype, (1, *plain.shape[1:]), plain.strides,
            plain.offset + int(row) * plain.strides[0], plain.name,
        )  # fmt: skip
        _move(core, what, *((part, one) if indirect is src else (one, part)), count=row == np.flatnonzero(inside)[0])


def _guard(what: str, tensor: NkiTensor, indices: np.ndarray, bound: int, mode) -> None:
    inside = bool(((indices >= 0) & (indices < bound)).all())
    require(inside, "out-of-bounds", f"{what}: index {indices} of {bound} rows of {tensor}")
    require(mode.name == "error", "subset", f"{what} that skips a scalar index")


def _move(core: Core, what: str, dst: NkiTensor, src: NkiTensor, src_at=0, dst_at=0, count=True) -> None:
    check_written(src, what, core, src_at)
    mark_written(dst, what, core, dst_at)
    values = src.raw(src_at)
    if dst.dtype != src.dtype:
        values = dtypes.from_float32(dtypes.to_float32(values, src.dtype), dst.dtype)
    dst.raw(dst_at)[...] = values.reshape(dst.shape)
    counters, moved = core.counters, dst.size * dtypes.itemsize(dst.dtype)
    read = src.size * dtypes.itemsize(src.dtype)
    if not src.on_chip:
        counters.hbm_read += read
    if not dst.on_chip:
        counters.hbm_written += moved
    if min(_run(src), _run(dst)) < SHORT_BYTES:
        counters.short_dma += max(moved, read)
    microseconds = max(moved, read) / core.generation.dma_rate / 1000
    if count:
        counters.issue(Engine.dma, microseconds)
    else:
        counters.busy_us["dma"] += microseconds


def _run(tensor: NkiTensor) -> int:
    """Bytes that lie side by side; a partition ends them."""
    run = 1
    first = 1 if tensor.on_chip else 0
    for n, step in zip(reversed(tensor.shape[first:]), reversed(tensor.strides[first:]), strict=True):
        if n != 1 and step != run:
            break
        run *= n
    return run * dtypes.itemsize(tensor.dtype)


def core_barrier(data, cores, engine=Engine.gpsimd, name=None):
    """Wait for the other core; then both may read what either wrote to `data`."""
    core, what = current(), "core_barrier"
    require(core.count == 2 and tuple(cores) == (0, 1), "lnc", f"{what} of cores {cores} on {core.count}")
    shared = isinstance(data, NkiTensor) and data.buffer is MemoryRegion.shared_hbm
    require(shared, "buffer", f"{what} on {data}, which is not shared HBM")
    core.exchange.meet(core, (what, data.shape))
    if core.index == 0:
        data.storage.settle()
    core.exchange.meet(core, (what, "after"))
    core.counters.issue(Engine.gpsimd, 0.0)


def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engine.dma, name=None):
    """Send the tile `src` to the other core and receive its into `dst`."""
    core, what = current(), "sendrecv"
    other = 1 - core.index
    require(core.count == 2, "lnc", f"{what} on one core")
    require(
        (send_to_rank, recv_from_rank) == (other, other), "argument", f"{what} with {send_to_rank}, {recv_from_rank}"
    )
    require(dma_engine.name == "dma", "subset", f"{what} by GpSimd's DMA")
    for tensor in (src, dst):
        require(tensor.buffer is MemoryRegion.sbuf, "buffer", f"{what} of {tensor}, which is not in SBUF")
    require((src.shape, src.dtype) == (dst.shape, dst.dtype), "shape", f"{what} of {src} into {dst}")
    check_written(src, what, core)
    core.exchange.mail[core.index] = src.raw().copy()
    core.exchange.meet(core, (what, pipe_id, src.shape, src.dtype))
    mark_written(dst, what, core)
    dst.raw()[...] = core.exchange.mail[other]
    core.exchange.meet(core, (what, "after"))
    moved = src.size * dtypes.itemsize(src.dtype)
    core.counters.core_to_core += moved
    core.counters.issue(Engine.dma, moved / core.generation.dma_rate / 1000)
