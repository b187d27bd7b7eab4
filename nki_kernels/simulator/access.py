"""Access of instructions to tensors: checks of operands, reads of written bytes only, writes rounded to the dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.machine import PARTITIONS, Core, Engine
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor import BY_MATMUL, SETTLED, MemoryRegion, NkiTensor, check_generation

SBUF, PSUM = (MemoryRegion.sbuf,), (MemoryRegion.psum,)
EITHER = SBUF + PSUM
# An instruction takes at least this many cycles of its engine (the vendor's "MIN_II").
LEAST_CYCLES = 64


def operand(core: Core, what: str, tensor: Any, buffers=EITHER, kinds: tuple[str, ...] | None = None) -> NkiTensor:
    """Check a compute engine's operand: where it lies, where its partitions start, its pattern, its dtype."""
    require(isinstance(tensor, NkiTensor), "argument", f"{what} is {type(tensor).__name__}, not a tensor")
    places = " or ".join(buffer.value for buffer in buffers)
    require(tensor.buffer in buffers, "buffer", f"{what} {tensor} must lie in {places}")
    require(tensor.ndim >= 2 and tensor.shape[0] <= PARTITIONS, "partitions", f"{what} {tensor}")
    check_generation(core.generation, tensor.dtype)
    start, count = tensor.offset // tensor.row, tensor.shape[0]
    legal = (0,) if count > 64 else (0, 64) if count > 32 else (0, 32, 64, 96)
    require(start in legal, "partition-start", f"{what} {tensor} starts at partition {start}")
    stays = count == 1 or tensor.strides[0] == tensor.row
    require(stays, "partition-step", f"{what} {tensor} steps {tensor.strides[0]}, a partition is {tensor.row}")
    free = free_dims(tensor)
    require(len(free) <= 3, "access-pattern", f"{what} {tensor} has {len(free)} free dimensions that do not merge")
    if kinds is not None:
        require(tensor.dtype in kinds, "dtype", f"{what} {tensor} must be {' or '.join(kinds)}")
    return tensor


def free_dims(tensor: NkiTensor) -> list[tuple[int, int]]:
    """[(step, size)] of the free dimensions, neighbours merged where one continues the other."""
    merged: list[tuple[int, int]] = []
    for step, n in zip(tensor.strides[1:], tensor.shape[1:], strict=True):
        if n == 1:
            continue
        if merged and merged[-1][0] == step * n:
            merged[-1] = (step, merged[-1][1] * n)
        else:
            merged.append((step, n))
    return merged


def free_size(tensor: NkiTensor) -> int:
    return tensor.size // tensor.shape[0]


def same_layout(what: str, *tensors: NkiTensor) -> None:
    """Refuse tensors that differ in partitions or in elements a partition: elementwise instructions want them alike."""
    sizes = {(t.shape[0], free_size(t)) for t in tensors}
    require(len(sizes) == 1, "shape", f"{what} of {', '.join(map(str, tensors))}")


def check_written(tensor: NkiTensor, what: str, core: Core) -> None:
    if tensor.storage.written is None:
        return
    flags = tensor.flags(tensor.storage.written)
    if (flags == tensor.word(SETTLED)).all():
        return
    require(bool((flags != 0).all()), "unwritten", f"{what} reads {tensor}, of which parts were never written")
    readable = (flags == tensor.word(SETTLED)) | (flags == tensor.word(1 + core.index))
    require(
        bool(readable.all()), "core-race", f"{what} reads {tensor}, written by the other core since the last barrier"
    )


def mark_written(tensor: NkiTensor, what: str, core: Core, by_matmul: bool = False) -> None:
    storage = tensor.storage
    require(not storage.read_only, "read-only", f"{what} writes {tensor}, a kernel's input")
    require(0 not in _moving_strides(tensor), "access-pattern", f"{what} writes {tensor}, a broadcast view")
    flags = tensor.flags(storage.written)
    if tensor.on_chip or core.count == 1:
        flags[...] = tensor.word(SETTLED)
    else:
        other = tensor.word(2 - core.index)
        require(not (flags == other).any(), "core-race", f"{what} writes {tensor}, as the other core does")
        flags[...] = tensor.word(1 + core.index)
    if tensor.buffer is MemoryRegion.psum:
        tensor.flags(storage.by_matmul)[...] = tensor.word(BY_MATMUL) if by_matmul else 0


def _moving_strides(tensor: NkiTensor) -> list[int]:
    return [step for step, n in zip(tensor.strides, tensor.shape, strict=True) if n > 1]


def read_raw(core: Core, what: str, tensor: NkiTensor) -> np.ndarray:
    """[partitions, elements a partition] as stored."""
    check_written(tensor, what, core)
    return tensor.raw().reshape(tensor.shape[0], -1)


def read(core: Core, what: str, tensor: NkiTensor) -> np.ndarray:
    """[partitions, elements a partition] in float32, as the engines compute."""
    return dtypes.to_float32(read_raw(core, what, tensor), tensor.dtype)


def write_raw(core: Core, what: str, tensor: NkiTensor, values: np.ndarray, by_matmul: bool = False) -> None:
    mark_written(tensor, what, core, by_matmul=by_matmul)
    tensor.raw()[...] = values.reshape(tensor.shape)


def write(core: Core, what: str, tensor: NkiTensor, values: np.ndarray, by_matmul: bool = False) -> None:
    write_raw(core, what, tensor, dtypes.from_float32(values, tensor.dtype), by_matmul)


def scalar_operand(core: Core, what: str, value: object, partitions: int) -> np.ndarray | np.float32:
    """A compile-time number, or a float32 column [partitions, 1] that is broadcast along the free dimension."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return np.float32(value)
    column = operand(core, what, value)
    require(
        column.shape[0] == partitions and free_size(column) == 1, "shape", f"{what} {column}, for {partitions} rows"
    )
    require(column.dtype == "float32", "float32-operand", f"{what} {column}")
    return read(core, what, column)


def busy(core: Core, engine: Engine, cycles: float) -> None:
    """Count an instruction and the engine's time for it, by the published clock."""
    clocks = {
        Engine.tensor: core.generation.tensor_clock,
        Engine.vector: core.generation.vector_clock,
        Engine.scalar: core.generation.scalar_clock,
        Engine.gpsimd: core.generation.gpsimd_clock,
    }
    core.counters.issue(engine, max(cycles, LEAST_CYCLES) / clocks[engine] / 1000)


def choose(what: str, asked: Any, legal: tuple[Engine, ...]) -> Engine:
    """The engine asked for; if the choice is left to the compiler, the first engine that can."""
    require(isinstance(asked, Engine), "argument", f"{what}: engine {asked!r} is no member of nki.isa.engine")
    engine = legal[0] if asked is Engine.unknown else asked
    require(engine in legal, "engine", f"{what} on the {engine.name} engine")
    return engine


def no_gpsimd_psum(what: str, engine: Engine, *tensors: NkiTensor) -> None:
    for tensor in tensors:
        reached = engine is not Engine.gpsimd or tensor.buffer is MemoryRegion.sbuf
        require(reached, "buffer", f"{what}: GpSimd cannot reach {tensor}")
