"""What a program knows of its place in the mesh, and the few collectives it uses.

Programs are written for one device's part (they run inside `jax.shard_map`), so every collective is one of the calls
below and none is chosen by a partitioner. Without a mesh each call is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from inferlib.sharding.mesh import DATA, TENSOR, Parallelism, make_mesh
from inferlib.sharding.rules import Rules, preset


@dataclass(frozen=True)
class Shards:
    """A mesh and its rules; `Shards()` is a single device."""

    mesh: Mesh | AbstractMesh | None = None
    rules: Rules | None = None

    def __post_init__(self):
        if (self.mesh is None) != (self.rules is None):
            raise ValueError("a mesh needs rules and rules need a mesh")

    # ---- sizes and placement

    @property
    def tensor(self) -> int:
        return self.mesh.shape[TENSOR] if self.mesh is not None else 1

    @property
    def data(self) -> int:
        return self.mesh.shape[DATA] if self.mesh is not None else 1

    @property
    def splits_tokens(self) -> bool:
        return self.tensor > 1 and self.rules.split_tokens

    def sharding(self, names: tuple[str | None, ...]) -> NamedSharding | None:
        """Where an array with these logical axes lives; None on a single device."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.rules.spec(names))

    @property
    def several_processes(self) -> bool:
        """Whether other processes hold some of the devices."""
        return isinstance(self.mesh, Mesh) and self.mesh.is_multi_process

    def place(self, x: np.ndarray, names: tuple[str | None, ...]) -> jax.Array:
        """A host array, the same on every process, as an array on the mesh; each process transfers its own part."""
        if not self.several_processes:
            return jax.device_put(x, self.sharding(names))
        return jax.make_array_from_callback(x.shape, self.sharding(names), x.__getitem__)

    # ---- collectives, inside a program

    def axis(self, name: str) -> str | None:
        """The mesh axis that really splits a logical axis."""
        axis = self.rules.axis_of(name) if self.rules is not None else None
        return axis if axis is not None and self.mesh.shape[axis] > 1 else None

    def sum(self, x: jax.Array, name: str) -> jax.Array:
        """All-reduce of parts that each device summed over its share of a logical axis."""
        return lax.psum(x, axis) if (axis := self.axis(name)) else x

    def max(self, x: jax.Array, name: str) -> jax.Array:
        return lax.pmax(x, axis) if (axis := self.axis(name)) else x

    def min(self, x: jax.Array, name: str) -> jax.Array:
        return lax.pmin(x, axis) if (axis := self.axis(name)) else x

    def size(self, name: str) -> int:
        """Into how many shares a logical axis is split."""
        return self.mesh.shape[axis] if (axis := self.axis(name)) else 1

    def index(self, name: str) -> jax.Array | int:
        """Which share of a logical axis this device holds."""
        return lax.axis_index(axis) if (axis := self.axis(name)) else 0

    def gather(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        """All-gather the shares of a logical axis along dimension `dim`."""
        return lax.all_gather(x, axis, axis=dim, tiled=True) if (axis := self.axis(name)) else x

    def sum_tokens(self, x: jax.Array, name: str) -> jax.Array:
        """Sum parts [T, D] over a logical axis; where tokens are split, each device keeps its share of them."""
        axis = self.axis(name)
        if axis is None or not self.splits_tokens:
            return self.sum(x, name)
        return lax.psum_scatter(self._padded(x), axis, scatter_dimension=0, tiled=True)

    def all_tokens(self, x: jax.Array, tokens: int) -> jax.Array:
        """Undo the split of tokens: this device's share -> [tokens, D]."""
        return lax.all_gather(x, TENSOR, axis=0, tiled=True)[:tokens] if self.splits_tokens else x

    def _padded(self, x: jax.Array) -> jax.Array:
        short = -x.shape[0] % self.tensor
        return jnp.pad(x, ((0, short), (0, 0))) if short else x


def make_shards(parallel: Parallelism | None, devices: Sequence[jax.Device] | None = None) -> Shards:
    """The mesh and rules of a `Parallelism`; a single device for None or one device."""
    if parallel is None:
        return Shards()
    rules = preset(parallel.rules)
    return Shards(make_mesh(parallel, devices), rules) if parallel.devices > 1 else Shards()


def planned_shards(parallel: Parallelism) -> Shards:
    """Like `make_shards`, but to plan with: there need not be any such devices."""
    rules, shape = preset(parallel.rules), (parallel.data, parallel.tensor)
    return Shards(AbstractMesh(shape, (DATA, TENSOR)), rules) if parallel.devices > 1 else Shards()
