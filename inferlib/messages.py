"""Messages between processes: a kind, fields of JSON, and arrays. Reading a message runs no code of its writer."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_HEAD = struct.Struct("<I")  # bytes of the JSON that follows
_DTYPES = ("<i4", "<i8", "<u4", "<f4", "|b1")


class MessageError(ValueError):
    """Bytes that are not a message of this version of inferlib."""


@dataclass(frozen=True)
class Message:
    """kind: a name that the reader knows. fields: JSON values. arrays: of int32, int64, uint32, float32 or bool."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()

    def encode(self) -> bytes:
        """The bytes that `decode` reads."""
        arrays = [np.ascontiguousarray(array) for array in self.arrays]
        shapes = [[array.dtype.str, array.shape] for array in arrays]
        head = json.dumps([self.kind, self.fields, shapes]).encode()
        return b"".join([_HEAD.pack(len(head)), head, *(array.tobytes() for array in arrays)])

    @staticmethod
    def decode(data: bytes) -> Message:
        """Read a message. Its arrays are read-only. Raises MessageError if the bytes are anything else."""
        try:
            start = _HEAD.size + _HEAD.unpack_from(data)[0]
            kind, fields, shapes = json.loads(data[_HEAD.size : start])
            arrays = []
            for dtype, shape in shapes:
                if dtype not in _DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
                    raise ValueError(f"an array of {dtype!r} {shape!r}")
                flat = np.frombuffer(data, dtype, math.prod(shape), start)
                arrays.append(flat.reshape(shape))
                start += flat.nbytes
        except (ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
            raise MessageError(f"not a message of this version of inferlib ({error})") from None
        if start != len(data) or not isinstance(kind, str) or not isinstance(fields, dict):
            raise MessageError("not a message of this version of inferlib")
        return Message(kind, fields, tuple(arrays))
