"""Tensors of NKI: aliasing views of HBM, SBUF and PSUM storage that know which of their bytes were written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from inferlib.nki_kernels.simulator import dtypes
from inferlib.nki_kernels.simulator.machine import PARTITIONS, PSUM_BANK_BYTES, Core, Generation
from inferlib.nki_kernels.simulator.rules import RuleError, SubsetError, require

# States of a byte in HBM: written by core 0 or 1 since the last barrier, or visible to both. On chip, SETTLED means
# written.
SETTLED = 0xFF
# PSUM: what wrote an element last.
BY_MATMUL = 0x01


class MemoryRegion(Enum):
    """The memory that a tensor is in."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)


class Storage:
    """Bytes [partitions, bytes a partition] of one allocation, one row in HBM, freed with its last view."""

    def __init__(self, core: Core | None, buffer: MemoryRegion, rows: int, row_bytes: int):
        self.buffer, self.core, self.size = buffer, core, 0
        self.data = np.zeros((rows, row_bytes), np.uint8)
        self.written: np.ndarray | None = np.zeros((rows, row_bytes), np.uint8)
        self.read_only = False
        if buffer is MemoryRegion.psum:
            self.by_matmul = np.zeros((rows, row_bytes), np.uint8)
        if core is not None and buffer in ON_CHIP:
            size = row_bytes if buffer is MemoryRegion.sbuf else -(-row_bytes // PSUM_BANK_BYTES)
            core.take(buffer.value, size)
            self.size = size

    def __del__(self):
        if self.core is not None and self.size:
            self.core.give(self.buffer.value, self.size)

    @staticmethod
    def of_input(array: np.ndarray) -> Storage:
        """HBM that holds a kernel's input."""
        made = Storage(None, MemoryRegion.shared_hbm, 1, 0)
        made.data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)[None]
        made.written, made.read_only = None, True
        return made

    def settle(self) -> None:
        """A barrier: from now on, each core may touch what the other wrote."""
        if self.written is not None:
            self.written[self.written != 0] = SETTLED


@dataclass(frozen=True)
class Indirection:
    """The start of an indirect view: `offsets` [rows, 1] in SBUF, in steps of `step` elements, each less than `bound`.

    per_partition: each row of the view has its own offset; else the whole view one.
    """

    offsets: NkiTensor
    step: int
    bound: int
    per_partition: bool


class NkiTensor:
    """A strided view: element (i, j, ...) is at offset + i * strides[0] + j * strides[1] + ... of its storage."""

    def __init__(self, storage, dtype, shape, strides, offset=0, name="", index=None):
        self.storage, self.dtype, self.name = storage, dtype, name
        self.shape, self.strides, self.offset = tuple(shape), tuple(strides), offset
        self.index: Indirection | None = index

    @property
    def buffer(self) -> MemoryRegion:
        return self.storage.buffer

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def on_chip(self) -> bool:
        return self.buffer in ON_CHIP

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'}{list(self.shape)} {self.dtype} in {self.buffer.value}"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise SubsetError(f"NkiTensor.{name}")

    def __bool__(self) -> bool:
        raise RuleError("language", "a tensor's value is not known while the kernel is specialised")

    # Storage

    @property
    def row(self) -> int:
        """Elements of a partition (of all of HBM's storage)."""
        return self.storage.data.shape[1] // dtypes.itemsize(self.dtype)

    def flags(self, array: np.ndarray) -> np.ndarray:
        """A byte array of the storage's shape, viewed as one unsigned integer an element."""
        size = dtypes.itemsize(self.dtype)
        flat = array.reshape(-1).view(f"u{size}")[self.offset :]
        return np.lib.stride_tricks.as_strided(flat, self.shape, [step * size for step in self.strides])

    def raw(self) -> np.ndarray:
        """The elements as numpy sees them, aliasing the storage."""
        return self.flags(self.storage.data).view(dtypes.storage_dtype(self.dtype))

    def moved(self, offset: int, rows: int) -> NkiTensor:
        """The first `rows` rows, `offset` elements further on and no longer indirect."""
        shape, start = (rows, *self.shape[1:]), self.offset + offset
        last = start + sum(step * (n - 1) for step, n in zip(self.strides, shape, strict=True))
        total = self.storage.data.size // dtypes.itemsize(self.dtype)
        require(last < total, "out-of-bounds", f"an index leads to element {last} of {self}, which ends at {total}")
        return NkiTensor(self.storage, self.dtype, shape, self.strides, start, self.name)

    def word(self, state: int) -> int:
        """A byte's state, repeated over an element."""
        return int.from_bytes(bytes([state]) * dtypes.itemsize(self.dtype), "little")

    # Views

    def _view(self, shape, strides, offset=None, dtype=None) -> NkiTensor:
        offset = self.offset if offset is None else offset
        return NkiTensor(self.storage, dtype or self.dtype, shape, strides, offset, self.name, self.index)

    def _free(self, dim: int, what: str) -> int:
        require(-self.ndim <= dim < self.ndim, "view", f"{what}: {self} has no dimension {dim}")
        dim %= self.ndim
        require(dim > 0 or not self.on_chip, "view", f"{what} of the partition dimension of {self}")
        require(dim > 0 or self.index is None, "view", f"{what} of an indirect dimension of {self}")
        return dim

    def __getitem__(self, key) -> NkiTensor:
        key = key if isinstance(key, tuple) else (key,)
        if Ellipsis in key:
            at = key.index(Ellipsis)
            key = (*key[:at], *[slice(None)] * (self.ndim - len(key) + 1), *key[at + 1 :])
        require(len(key) <= self.ndim, "view", f"{len(key)} indices into {self}")
        key = (*key, *[slice(None)] * (self.ndim - len(key)))
        shape, strides, offset = [], [], self.offset
        for dim, part in enumerate(key):
            n, step = self.shape[dim], self.strides[dim]
            if isinstance(part, int):
                part = part + n if part < 0 else part
                require(0 <= part < n, "access-pattern", f"index {part} of dimension {dim} of {self}")
                require(dim > 0 or self.index is None, "view", f"an index into the indirect dimension of {self}")
                offset += part * step
                # Integer indices keep the partition dimension, and on-chip tensors two dimensions.
                if self.on_chip and (dim == 0 or (dim == self.ndim - 1 and len(shape) == 1)):
                    shape.append(1)
                    strides.append(step)
                continue
            require(isinstance(part, slice), "view", f"index {part!r} into {self}")
            start = 0 if part.start is None else part.start + (n if part.start < 0 else 0)
            stop = n if part.stop is None else part.stop + (n if part.stop < 0 else 0)
            jump = 1 if part.step is None else part.step
            inside = 0 <= start < stop <= n and jump >= 1
            require(inside, "access-pattern", f"slice {start}:{stop}:{jump} of dimension {dim} of {self}")
            whole = (start, stop, jump) == (0, n, 1)
            require(whole or dim > 0 or self.index is None, "view", f"a slice of the indirect dimension of {self}")
            require(jump == 1 or dim > 0 or not self.on_chip, "partition-step", f"slice ::{jump} of {self}")
            offset += start * step
            shape.append(-(-(stop - start) // jump))
            strides.append(step * jump)
        return self._view(shape or [1], strides or [1], offset)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        key = [slice(None)] * self.ndim
        key[dim] = slice(start, end, step)
        return self[tuple(key)]

    def permute(self, dims) -> NkiTensor:
        require(sorted(dims) == list(range(self.ndim)), "view", f"permute {dims} of {self}")
        fixed = self.on_chip or self.index is not None
        require(dims[0] == 0 or not fixed, "view", f"permute {dims} moves the partition dimension of {self}")
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        dim = self._free(dim, "broadcast")
        require(self.shape[dim] == 1, "view", f"broadcast of dimension {dim} of {self}, which is not 1")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(shape, strides)

    def expand_dim(self, dim: int) -> NkiTensor:
        require(dim > 0 or not self.on_chip, "view", f"expand_dim before the partition dimension of {self}")
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(dim, 1)
        strides.insert(dim, 1)
        return self._view(shape, strides)

    def squeeze_dim(self, dim: int) -> NkiTensor:
        dim = self._free(dim, "squeeze_dim")
        require(self.shape[dim] == 1, "view", f"squeeze of dimension {dim} of {self}")
        require(self.ndim > 2 or not self.on_chip, "partitions", f"squeeze of {self} leaves one dimension")
        return self._view(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def reshape_dim(self, dim: int, shape) -> NkiTensor:
        dim, shape = self._free(dim, "reshape_dim"), list(shape)
        if -1 in shape:
            shape[shape.index(-1)] = self.shape[dim] // -math.prod(shape)
        require(math.prod(shape) == self.shape[dim], "view", f"reshape_dim {shape} of dimension {dim} of {self}")
        steps = [self.strides[dim] * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return self._view(
            (*self.shape[:dim], *shape, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *steps, *self.strides[dim + 1 :]),
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        self._free(start_dim, "flatten_dims")
        for d in range(start_dim, end_dim):
            dense = self.strides[d] == self.strides[d + 1] * self.shape[d + 1]
            require(dense, "view", f"flatten_dims {start_dim} to {end_dim} of {self}, not contiguous there")
        size = math.prod(self.shape[start_dim : end_dim + 1])
        return self._view(
            (*self.shape[:start_dim], size, *self.shape[end_dim + 1 :]),
            (*self.strides[:start_dim], self.strides[end_dim], *self.strides[end_dim + 1 :]),
        )

    def is_contiguous(self) -> bool:
        step = 1
        for d in range(self.ndim - 1, 0 if self.on_chip else -1, -1):
            if self.shape[d] != 1 and self.strides[d] != step:
                return False
            step *= self.shape[d]
        return True

    def reshape(self, shape) -> NkiTensor:
        require(self.index is None and self.is_contiguous(), "view", f"reshape of {self}, which is not contiguous")
        require(math.prod(shape) == self.size, "view", f"reshape of {self} to {list(shape)}")
        same_partitions = not self.on_chip or shape[0] == self.shape[0]
        require(same_partitions, "view", f"reshape of {self} to {list(shape)} changes its partitions")
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if self.on_chip:
            strides[0] = self.strides[0]
        return self._view(shape, strides)

    def view(self, dtype: str) -> NkiTensor:
        old, new = dtypes.itemsize(self.dtype), dtypes.itemsize(dtype)
        require(self.index is None, "view", f"view of the indirect {self}")
        require(self.strides[-1] == 1, "view", f"view of {self}, whose last dimension is not contiguous")
        steps = [n * old for n in (*self.strides[:-1], self.offset, self.shape[-1])]
        require(all(n % new == 0 for n in steps), "view", f"{self} does not divide into {dtype}")
        *strides, offset, last = (n // new for n in steps)
        return self._view((*self.shape[:-1], last), (*strides, 1), offset, dtype)

    def get_pattern(self) -> list[list[int]]:
        return [[step, n] for step, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        return self.index is not None

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None) -> NkiTensor:
        """Any [step, count] pattern over the storage; at a row given by an SBUF tensor when it is read."""
        made = self._view([n for _, n in pattern], [s for s, _ in pattern], dtype=dtype)
        # The vendor's texts differ on whether an offset counts from the storage or the view: only views at 0 take one.
        if offset is not None:
            require(self.offset == 0, "view", f"ap with an offset into {self}, itself at offset {self.offset}")
            made.offset = offset
        require(all(s >= 0 and n >= 1 for s, n in pattern), "access-pattern", f"ap {pattern} of {self}")
        last = made.offset + sum(s * (n - 1) for s, n in pattern)
        if self.on_chip:
            require(pattern[0][0] == made.row, "partition-step", f"ap {pattern}: a partition of {self} is {made.row}")
            free = made.offset % made.row + sum(s * (n - 1) for s, n in pattern[1:])
            require(free < made.row, "access-pattern", f"ap {pattern} leaves its partition of {self}")
        total = self.storage.data.size // dtypes.itemsize(made.dtype)
        require(last < total, "access-pattern", f"ap {pattern} at {made.offset} of {self}, which ends at {total}")
        require(scalar_offset is None or vector_offset is None, "argument", "scalar_offset and vector_offset together")
        offsets = vector_offset if scalar_offset is None else scalar_offset
        if offsets is None:
            return made
        require(not self.on_chip, "subset", f"an indirect view of {self}, on chip")
        require(self.index is None, "view", f"an indirect view of {self}, which is one")
        require(indirect_dim == 0, "subset", f"indirect_dim {indirect_dim}")
        rows = 1 if vector_offset is None else pattern[0][1]
        fits = offsets.buffer is MemoryRegion.sbuf and offsets.shape == (rows, 1)
        require(fits, "shape", f"offsets {offsets} of an indirect view of {rows} rows")
        require(offsets.dtype in ("int32", "uint32"), "dtype", f"offsets {offsets} of an indirect view")
        if vector_offset is not None:
            require(
                pattern[0][0] == self.strides[0], "access-pattern", f"ap {pattern}: a row of {self} is its first step"
            )
        made.index = Indirection(offsets, self.strides[0], self.shape[0], vector_offset is not None)
        return made


def allocate(core: Core, shape, dtype: str, buffer: MemoryRegion, name: str) -> NkiTensor:
    """A fresh tensor, as `nl.ndarray`; both cores get the same one in shared HBM."""
    require(isinstance(buffer, MemoryRegion), "argument", f"buffer {buffer!r} is no memory region of nki.language")
    require(all(isinstance(n, int) and n > 0 for n in shape), "shape", f"ndarray of shape {shape}")
    check_generation(core.generation, dtype)
    size, strides = dtypes.itemsize(dtype), [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if buffer in ON_CHIP:
        require(len(shape) >= 2, "partitions", f"ndarray {list(shape)} in {buffer.value}")
        require(shape[0] <= PARTITIONS, "partitions", f"ndarray {list(shape)} in {buffer.value}")
        storage = Storage(core, buffer, shape[0], size * math.prod(shape[1:]))
    elif buffer is MemoryRegion.shared_hbm and core.count > 1:
        storage = _shared(core, (tuple(shape), dtype), size * math.prod(shape))
    else:
        storage = Storage(core, buffer, 1, size * math.prod(shape))
    return NkiTensor(storage, dtype, shape, strides, name=name)


def _shared(core: Core, key: tuple, row_bytes: int) -> Storage:
    """The core's next allocation of shared HBM, made by whichever core comes first."""
    with core.exchange.lock:
        made, at = core.exchange.shared, core.shared_allocations
        core.shared_allocations += 1
        if at == len(made):
            made.append((key, Storage(core, MemoryRegion.shared_hbm, 1, row_bytes)))
        require(made[at][0] == key, "core-pairing", f"cores allocate {made[at][0]} and {key} in shared HBM")
        return made[at][1]


def check_generation(generation: Generation, dtype: str) -> None:
    lacks = dtype in dtypes.ONLY_GEN4 and generation.number < 4
    require(not lacks, "generation", f"{generation.name} has no {dtype}")
