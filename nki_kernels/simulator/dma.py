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
    by_vector = any(t.is_indirect() and t.index.per_partition for t in (dst, src))
    copies_only = dst.dtype == src.dtype and not by_vector
    hardware = dge_mode.name == "hwdge"
    require(copies_only or not hardware, "dtype", f"{what} of {src} to {dst}: hwdge neither converts nor gathers")
    moved = 0
    for there, here in _parts(core, what, dst, src, oob_mode):
        moved += _move(core, what, there, here)
    core.counters.issue(Engine.dma, moved / core.generation.dma_rate / 1000)


def _parts(core: Core, what: str, dst: NkiTensor, src: NkiTensor, mode: oob_mode) -> list[tuple[NkiTensor, NkiTensor]]:
    """(destination, source) of every transfer: one, or one for every index of a vector that is not skipped."""
    indirect, direct = (src, dst) if src.is_indirect() else (dst, src)
    index, rows = indirect.index, indirect.shape[0]
    if index is None:
        return [(dst, src)]
    check_written(index.offsets, what, core)
    indices = index.offsets.raw()[:, 0].astype(np.int64)
    inside = (indices >= 0) & (indices < index.bound)
    skips = mode.name == "skip"
    require(skips or bool(inside.all()), "out-of-bounds", f"{what}: {indices[~inside]} of {index.bound} rows")
    if not index.per_partition:
        require(not skips, "subset", f"{what} that skips a scalar index")
        pairs = [(direct, indirect.moved(int(indices[0]) * index.step, rows))]
    else:
        require(direct.shape[0] == rows, "shape", f"{what} of {direct} by {rows} indices")
        pairs = [
            (direct.moved(int(row) * direct.strides[0], 1), indirect.moved(int(indices[row]) * index.step, 1))
            for row in np.flatnonzero(inside)
        ]
    return pairs if indirect is src else [(there, here) for here, there in pairs]


def _move(core: Core, what: str, dst: NkiTensor, src: NkiTensor) -> int:
    """Copy, count, and return the bytes that the DMA engines move."""
    check_written(src, what, core)
    mark_written(dst, what, core)
    values = src.raw()
    if dst.dtype != src.dtype:
        values = dtypes.from_float32(dtypes.to_float32(values, src.dtype), dst.dtype)
    dst.raw()[...] = values.reshape(dst.shape)
    counters = core.counters
    written, read = (t.size * dtypes.itemsize(t.dtype) for t in (dst, src))
    counters.hbm_read += 0 if src.on_chip else read
    counters.hbm_written += 0 if dst.on_chip else written
    moved = max(written, read)
    counters.short_dma += moved if min(_run(src), _run(dst)) < SHORT_BYTES else 0
    return moved


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
