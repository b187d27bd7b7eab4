"""Meshes: how many devices along each of the named axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

# Replicas of the whole model; and the split of weights, heads and vocabulary.
DATA, TENSOR = "data", "tensor"
_SHORT = {"dp": "data", "tp": "tensor"}


class ShardingError(ValueError):
    """A mesh or a split that cannot work; the message says what can."""


@dataclass(frozen=True)
class Parallelism:
    """Devices along each mesh axis, and the preset that says what is split over them (see `sharding.rules`)."""

    tensor: int = 1
    data: int = 1
    rules: str = "tp"

    def __post_init__(self):
        for name in ("tensor", "data"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ShardingError(f"{name} must be a positive number of devices, got {size!r}")

    @staticmethod
    def parse(text: str) -> Parallelism:
        """Read "tp=4,dp=2" or "tensor=4,data=2,rules=tp_sp"."""
        known = {f.name for f in fields(Parallelism)}
        values: dict[str, int | str] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            name = _SHORT.get(name, name)
            if name not in known or not value:
                raise ShardingError(f"cannot read {part!r} in parallel={text!r}; write for example tp=4,dp=2")
            if name in values:
                raise ShardingError(f"{name} appears twice in parallel={text!r}")
            if name != "rules" and not value.isdecimal():
                raise ShardingError(f"{part!r} in parallel={text!r} needs a number of devices")
            values[name] = value if name == "rules" else int(value)
        return Parallelism(**values)

    @property
    def devices(self) -> int:
        return self.tensor * self.data

    def __str__(self) -> str:
        return f"tp={self.tensor},dp={self.data}" + ("" if self.rules == "tp" else f",rules={self.rules}")


def make_mesh(parallel: Parallelism, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes "data" and "tensor"; on TPU, neighbours on the tensor axis are neighbours on the torus.

    devices: all of this process's by default; surplus ones stay unused. Raises ShardingError if there are too few.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = (parallel.data, parallel.tensor)
    if parallel.devices > len(devices):
        raise ShardingError(f"parallel={parallel} needs {parallel.devices} devices, and there are {len(devices)}")
    if parallel.devices == len(devices) and devices[0].platform == "tpu":
        # The tensor axis may be shorter than an axis of the torus, as 8 on 16 x 16 x 16.
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(placed, (DATA, TENSOR))
    return Mesh(np.array(devices[: parallel.devices]).reshape(shape), (DATA, TENSOR))
