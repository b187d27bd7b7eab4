"""A checkpoint as the loader sees it: named tensors that can be read a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not supported. The message names the file and the fix."""


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, in Hugging Face layout (projections are [out, in]).

    Every method raises CheckpointError for a name that is not in the checkpoint.
    """

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The dtype of the arrays that `read` returns; bfloat16 is `ml_dtypes.bfloat16`."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes on disk."""
        ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor or rows of its first axis; a read-only view of the file if its format allows."""
        ...


class StoredTensor(Protocol):
    """A tensor as a file's header describes it; see `TensorSource`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=StoredTensor)


class StoredTensors(Generic[T]):
    """The methods of a `TensorSource` that need only files' headers; all but `names` raise CheckpointError for an
    unknown tensor. path: of the file or directory; `_tensors`: the headers' entries, by tensor."""

    path: Path
    _tensors: dict[str, T]

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._find(name).dtype

    def nbytes(self, name: str) -> int:
        return self._find(name).nbytes

    def _find(self, name: str) -> T:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}") from None


def map_array(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """A read-only view of `shape` items at byte `offset` of a file; unmapped when nothing refers to it."""
    if math.prod(shape) == 0:  # an empty range cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape).view(np.ndarray)
