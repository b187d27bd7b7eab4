"""A checkpoint as the loader sees it: named tensors that can be read a few rows at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not supported. The message names the file and the fix."""


# Most bytes of JSON: what the safetensors format allows for a header.
MOST_JSON_BYTES = 100_000_000
_POINTER = b"version https://git-lfs.github.com/spec/"


def size_of(file: Path) -> int:
    """The number of bytes of a file. Raises CheckpointError if it is not a regular file, or only git-lfs's pointer to
    one, and OSError if it may not be read."""
    if not file.is_file():
        raise CheckpointError(f"{file} is {'not a file' if file.exists() else 'missing'}")
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(f"{file} is a pointer of git-lfs and not the file itself: run git lfs pull there")
    return file.stat().st_size


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if there is none, and OSError if the file may not be read."""
    if (size := size_of(file)) > MOST_JSON_BYTES:
        raise CheckpointError(f"{file} has {size} bytes, and JSON of models at most {MOST_JSON_BYTES}")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, it holds a {type(value).__name__}")
    return value


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
