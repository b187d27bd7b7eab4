"""Safetensors directories: one or many files, with or without an index.

The header is read here because the numpy interface of the safetensors package (0.8) cannot read float8 tensors; the
format is eight bytes of header length, a JSON header and the data. Tensors are views of the mapped file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from inferlib.checkpoint.source import MOST_JSON_BYTES, CheckpointError, StoredTensors, map_array, read_json, size_of

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = (
    ", and {} is a pickle, which may run code and is not read: take the model's safetensors, or write them with "
    "transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
)
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


@dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsSource(StoredTensors[_Tensor]):
    """The tensors of a directory's *.safetensors files, as a `TensorSource`.

    With model.safetensors.index.json, the tensors it lists; otherwise those of model.safetensors, or of all
    *.safetensors files together. Headers are checked at once: raises CheckpointError for missing, truncated
    or damaged files, unsupported types, and tensors that are there twice or not at all.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory)
        index = self.path / _INDEX
        self._tensors = _indexed(index) if index.exists() else _unindexed(self.path)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        tensor = self._find(name)
        array = map_array(tensor.file, tensor.dtype, tensor.shape, tensor.offset)
        return array if rows is None else array[rows]


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file, whole or not at all. Raises ValueError for a type that the format lacks."""
    names = {np.dtype(kind): name for name, kind in _DTYPES.items()}
    header, at = {}, 0
    for name, x in tensors.items():
        if x.dtype not in names:
            raise ValueError(f"safetensors has no {x.dtype}, which is the type of {name}")
        header[name] = {"dtype": names[x.dtype], "shape": x.shape, "data_offsets": (at, at + x.nbytes)}
        at += x.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            out.write(np.ascontiguousarray(x).tobytes())
    partial.replace(file)


def _indexed(index: Path) -> dict[str, _Tensor]:
    files = listed_in(index)
    shards = {shard: index.parent / shard for shard in sorted(set(files.values()))}
    missing = [shard for shard, path in shards.items() if not path.exists()]
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}; download them again")
    headers = {shard: _header(path) for shard, path in shards.items()}
    for name, shard in files.items():
        if name not in headers[shard]:
            raise CheckpointError(f"{index} says tensor {name!r} is in {shard}, which does not hold it")
    return {name: headers[shard][name] for name, shard in files.items()}


def listed_in(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index; files are in its directory. Raises CheckpointError."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) and file for file in files.values()):
        raise CheckpointError(f"{index} is damaged: it has no weight_map of tensor names to files")
    for file in set(files.values()):
        if "\0" in file or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise CheckpointError(f"{index} is damaged: it names a file outside its directory, {file!r}")
    return files


def _unindexed(directory: Path) -> dict[str, _Tensor]:
    # Beside model.safetensors, other files are other forms of the same weights.
    single = directory / _SINGLE
    paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
        pickles = sorted(path.name for path in directory.glob("*.bin")) + sorted(
            p.name for p in directory.glob("*.pt*")
        )
        raise CheckpointError(
            f"{directory} holds no *.safetensors file" + (_PICKLED.format(pickles[0]) if pickles else "")
        )
    tensors: dict[str, _Tensor] = {}
    for path in paths:
        header = _header(path)
        twice = sorted(tensors.keys() & header.keys())
        if twice:
            raise CheckpointError(f"tensor {twice[0]!r} is in both {tensors[twice[0]].file} and {path}")
        tensors |= header
    return tensors


def _header(path: Path) -> dict[str, _Tensor]:
    size = size_of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data = 8 + length
        if size < data or length > MOST_JSON_BYTES:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file: {data} bytes of header, the file has {size}"
            )
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path))
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry, data) for name, entry in entries.items()}
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header: {type(error).__name__}: {error}") from None
    expected = max((t.offset + t.nbytes for t in tensors.values()), default=data)
    if expected > size:
        raise CheckpointError(f"{path} is truncated: its tensors need {expected} bytes, the file has {size}")
    return tensors


def _tensor(path: Path, name: str, entry: dict[str, Any], data: int) -> _Tensor:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{path}: type {entry['dtype']} of tensor {name!r} is not supported; known: {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int for number in (begin, end, *shape)):
        raise CheckpointError(f"{path} has a damaged header: tensor {name!r} has sizes that are no whole numbers")
    tensor = _Tensor(path, np.dtype(_DTYPES[entry["dtype"]]), shape, data + begin)
    if begin < 0 or min(tensor.shape, default=0) < 0 or end - begin != tensor.nbytes:
        raise CheckpointError(
            f"{path} has a damaged header: tensor {name!r} of shape {tensor.shape} and type {entry['dtype']} "
            f"needs {tensor.nbytes} bytes, its offsets give {end - begin}"
        )
    return tensor


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise CheckpointError(f"{path} has a damaged header: {twice!r} is there twice")
    return entries
