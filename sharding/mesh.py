"""Meshes: how many devices along each of the named axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

# Replicas of the whole model; replicas with different experts; the split of sequences (or of the model's width, in two
# dimensions); the split of heads, feed-forward and vocabulary. Devices on the last axis are the closest neighbours.
MESH_AXES = DATA, EXPERT, SEQUENCE, TENSOR = "data", "expert", "sequence", "tensor"
Device: TypeAlias = Any  # a jax.Device, a name that type checkers cannot follow
_SHORT = {"dp": DATA, "ep": EXPERT, "cp": SEQUENCE, "tp": TENSOR}


class ShardingError(ValueError):
    """A mesh or a split that cannot work; the message says what can."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Number of devices along each mesh axis, and the preset that says what is split over them (see `sharding.rules`).

    rules: by default "cp" if the sequence axis is used, else "tp".
    """

    tensor: int = 1
    sequence: int = 1
    expert: int = 1
    data: int = 1
    rules: str = ""

    def __post_init__(self):
        for name in MESH_AXES:
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ShardingError(f"{name} must be a positive number of devices, got {size!r}")
        if not isinstance(self.rules, str):
            raise ShardingError(f"rules must be the name of a preset, got {self.rules!r}")
        if not self.rules:
            object.__setattr__(self, "rules", self._usual_rules)

    @property
    def _usual_rules(self) -> str:
        return "cp" if self.sequence > 1 else "tp"

    @staticmethod
    def read(parallel: str | Parallelism) -> Parallelism:
        """The option `parallel` in either form. Raises ShardingError for any other, and for blank text."""
        if isinstance(parallel, Parallelism):
            return parallel
        if not isinstance(parallel, str) or not parallel.strip():
            raise ShardingError(
                f"parallel must be text such as 'tp=4,dp=2', or a Parallelism, got {parallel!r}; leave it out for one "
                "device"
            )
        return Parallelism.parse(parallel)

    @staticmethod
    def parse(text: str) -> Parallelism:
        """Read "tp=4,dp=2" or "tensor=4,sequence=2,rules=helix"; short names are tp, cp, ep and dp."""
        known = {f.name for f in fields(Parallelism)}
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            name = _SHORT.get(name, name)
            if name not in known or not value:
                raise ShardingError(f"cannot read {part!r} in parallel={text!r}; write for example tp=4,dp=2")
            if name in values:
                raise ShardingError(f"{name} appears twice in parallel={text!r}")
            if name != "rules" and not (value.isdecimal() and len(value) < 10):
                raise ShardingError(f"{part!r} in parallel={text!r} needs a number of devices")
            values[name] = value if name == "rules" else int(value)
        return Parallelism(**values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Devices along each of MESH_AXES."""
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def devices(self) -> int:
        return self.tensor * self.sequence * self.expert * self.data

    def __str__(self) -> str:
        sizes = [f"{short}={getattr(self, name)}" for short, name in reversed(_SHORT.items())]
        used = [size for size in sizes if not size.endswith("=1")] or ["tp=1"]
        return ",".join(used if self.rules == self._usual_rules else [*used, f"rules={self.rules}"])


def alone(device: Device) -> AbstractMesh:
    """A mesh of one device, which tells functions that are traced under it (`jax.sharding.use_abstract_mesh`) the
    device's kind."""
    return Mesh(np.array([device]), ("device",)).abstract_mesh


def make_mesh(parallel: Parallelism, devices: Sequence[Device] | None = None) -> Mesh:
    """A mesh with the axes MESH_AXES; on TPU, neighbours on an axis are neighbours on the torus.

    devices: by default all, process by process; surplus ones stay unused. Raises ShardingError if there are too few, or
    if a process would have none.
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id)) if devices is None else list(devices)
    shape = parallel.shape
    if parallel.devices > len(devices):
        raise ShardingError(f"parallel={parallel} needs {parallel.devices} devices, and there are {len(devices)}")
    idle = {d.process_index for d in devices} - {d.process_index for d in devices[: parallel.devices]}
    if idle:
        raise ShardingError(
            f"parallel={parallel} takes {parallel.devices} of {len(devices)} devices and leaves none for process "
            f"{min(idle)}: use devices of every process"
        )
    if parallel.devices == len(devices) and devices[0].platform == "tpu":
        # A mesh axis may be shorter than an axis of the torus, such as 8 on 16 x 16 x 16.
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, MESH_AXES)
    return Mesh(np.array(devices[: parallel.devices]).reshape(shape), MESH_AXES)


def _to_and_fro(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All places of a box, each a neighbour of the next."""
    path = [()]
    for size in sizes:
        path = [(*place, step) for step in range(size) for place in (path if step % 2 == 0 else path[::-1])]
    return path


def ring_of(devices: Sequence[Device]) -> tuple[int, ...]:
    """The indices of the devices in a ring: as far as possible, each is a neighbour of the next on a TPU's network, and
    the last of the first. Devices of a chip follow one another; devices other than TPUs keep their order.

    Chips that fill a box of two or more dimensions, one of them even, form a ring without any wrap-around link. On a
    line that does not close, the last link leads back through all others.
    """
    if any(getattr(device, "coords", None) is None for device in devices):
        return tuple(range(len(devices)))
    places = {}
    for index, device in enumerate(devices):
        places.setdefault(tuple(device.coords), []).append(index)
    corners = [sorted(set(values)) for values in zip(*places, strict=True)]
    sizes = [len(values) for values in corners]
    if prod(sizes) != len(places):
        return tuple(range(len(devices)))
    long = [dim for dim, size in enumerate(sizes) if size > 1]
    first = next((dim for dim in long if sizes[dim] % 2 == 0), next(iter(long), 0))
    rest = [dim for dim in range(len(sizes)) if dim != first]
    path = _to_and_fro([sizes[dim] for dim in rest])
    # Along the first dimension at the start of that path, and back to and fro over all the rest of it.
    rows, order = range(sizes[first]), []
    back = [(row, place) for row in rows for place in (path[1:] if row % 2 == 0 else path[:0:-1])]
    for row, place in [*((row, path[0]) for row in rows), *back[::-1]]:
        coords = [0] * len(sizes)
        for dim, step in ((first, row), *zip(rest, place, strict=True)):
            coords[dim] = corners[dim][step]
        order += places[tuple(coords)]
    return tuple(order)
