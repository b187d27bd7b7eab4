"""What a program knows of its place in the mesh, and the few collectives it uses.

Programs are written for one device's part (they run inside `jax.shard_map`), so every collective is one of the calls
below and none is chosen by a partitioner. Without a mesh each call is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from inferlib.sharding import axes
from inferlib.sharding.mesh import MESH_AXES, Parallelism, ShardingError, make_mesh, ring_of
from inferlib.sharding.rules import PRESETS, Rules, preset
from inferlib.sharding.stripe import Stripe

_TILE = 16  # rows of bfloat16


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
    def replicas(self) -> int:
        """Into how many shares the rows are split."""
        return self.size(axes.ROWS)

    @property
    def only_axis(self) -> str | None:
        """The mesh axis that all devices are on, if weights are split over it and tokens are not."""
        over = self.mesh_axes(axes.MLP)
        alone = len(over) == 1 and self.mesh.shape[over[0]] == self.mesh.size and over == self.mesh_axes(axes.KV_HEADS)
        return over[0] if alone and not self.splits_tokens else None

    @property
    def splits_tokens(self) -> bool:
        return self.rules is not None and self.rules.split_tokens and bool(self.mesh_axes(axes.MLP))

    @property
    def feeders(self) -> int:
        """How many devices that split the feed-forward have rows of their own, whose tokens it takes together."""
        apart = set(self.mesh_axes(axes.ROWS)) & set(self.mesh_axes(axes.MLP))
        return self.size(axes.MLP) if apart else 1

    def sharding(self, names: tuple[str | None, ...]) -> NamedSharding | None:
        """Where an array with these logical axes lives; None on a single device."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.rules.spec(names))

    @property
    def several_processes(self) -> bool:
        """Whether other processes hold some of the devices."""
        return isinstance(self.mesh, Mesh) and self.mesh.is_multi_process

    @property
    def on_cpu(self) -> bool:
        """Whether CPU devices are the mesh."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def place(self, x: np.ndarray, names: tuple[str | None, ...]) -> jax.Array:
        """A host array, the same on every process, as an array on the mesh; each process transfers its own part."""
        if not self.several_processes:
            return jax.device_put(x, self.sharding(names))
        return jax.make_array_from_callback(x.shape, self.sharding(names), x.__getitem__)

    def local_shape(self, names: Sequence[str | None], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a device's part of an array with these logical axes."""
        sharding = self.sharding(tuple(names))
        return shape if sharding is None else sharding.shard_shape(shape)

    def mesh_axes(self, *names: str | None) -> tuple[str, ...]:
        """The mesh axes that really split any of these logical axes, in the mesh's order."""
        if self.rules is None:
            return ()
        found = {axis for name in names for axis in self.rules.axes_of(name)}
        return tuple(axis for axis, size in self.mesh.shape.items() if size > 1 and axis in found)

    def size(self, name: str) -> int:
        """Into how many shares a logical axis is split."""
        return prod(self.mesh.shape[axis] for axis in self.mesh_axes(name))

    def ring(self, axis: str) -> tuple[int, ...]:
        """The places along a mesh axis, each near to the next; see `ring_of`."""
        if not isinstance(self.mesh, Mesh):
            return tuple(range(self.mesh.shape[axis]))
        line = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(axis), -1).reshape(-1, self.mesh.shape[axis])
        return ring_of(line[0])

    # ---- inside a program: this device's share, and collectives

    def index(self, name: str) -> jax.Array | int:
        """Which share of a logical axis this device holds."""
        return lax.axis_index(over) if (over := self.mesh_axes(name)) else 0

    def stripe(self, name: str, behind: int = 0) -> Stripe:
        """The positions dealt to this device, or to the one so many places behind it, of an axis dealt out in turn."""
        count = self.size(name)
        return Stripe(count, (self.index(name) - behind) % count) if count > 1 else Stripe()

    def sum(self, x: jax.Array, *names: str) -> jax.Array:
        """All-reduce of parts that each device summed over its share of these logical axes."""
        return lax.psum(x, over) if (over := self.mesh_axes(*names)) else x

    def max(self, x: jax.Array, name: str) -> jax.Array:
        return lax.pmax(x, over) if (over := self.mesh_axes(name)) else x

    def min(self, x: jax.Array, name: str) -> jax.Array:
        return lax.pmin(x, over) if (over := self.mesh_axes(name)) else x

    def gather(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        """All-gather the shares of a logical axis along dimension `dim`."""
        return lax.all_gather(x, over, axis=dim, tiled=True) if (over := self.mesh_axes(name)) else x

    def scatter(self, x: jax.Array, name: str) -> jax.Array:
        """Reduce-scatter over a logical axis: each device gets its share of the first dimension of the sum."""
        return lax.psum_scatter(x, over, tiled=True) if (over := self.mesh_axes(name)) else x

    def stack(self, x: jax.Array, name: str) -> jax.Array:
        """[...] -> [n, ...]: all-gather of what each of the n devices along a logical axis has."""
        return lax.all_gather(x, over) if (over := self.mesh_axes(name)) else x[None]

    def all_to_all(self, x: jax.Array, name: str) -> jax.Array:
        """[n, ...] -> [n, ...]: give x[i] to device i of the n along a logical axis, and get what each gives to this
        one."""
        return lax.all_to_all(x, over, 0, 0) if (over := self.mesh_axes(name)) else x

    def ragged_all_to_all(
        self,
        x: jax.Array,
        out: jax.Array,
        starts: jax.Array,
        sizes: jax.Array,
        at: jax.Array,
        received: jax.Array,
        name: str,
    ) -> jax.Array:
        """Give device i the sizes[i] rows of x from starts[i] on, which it has from at[i] on, and get received[i] of
        its own; rows of `out` that none are written to stay. Each of the numbers is [n] int32. Not on CPU."""
        return lax.ragged_all_to_all(x, out, starts, sizes, at, received, axis_name=self.mesh_axes(name))

    def exchange(self, x: jax.Array, name: str) -> jax.Array:
        """All-to-all: [..., h] -> [n, ..., h / n], this device's share of the last dimension from each of n."""
        return self.all_to_all(jnp.moveaxis(x.reshape(*x.shape[:-1], self.size(name), -1), -2, 0), name)

    def pass_on(self, x: jax.Array, name: str) -> jax.Array:
        """Collective permutation: give x to the next device along a logical axis and get the one's before."""
        n = self.size(name)
        return lax.ppermute(x, self.mesh_axes(name), [(i, (i + 1) % n) for i in range(n)]) if n > 1 else x

    def sum_tokens(self, x: jax.Array, *names: str) -> jax.Array:
        """Sum parts [T, D] over logical axes; where tokens are split, each device keeps its share of them, and of those
        that were `fed` its own."""
        over = self.mesh_axes(*names)
        if not over or not (self.splits_tokens or self.feeders > 1):
            return self.sum(x, *names)
        short = self.padded(x.shape[0]) - x.shape[0] if self.splits_tokens else 0
        padded = jnp.pad(x, ((0, short), (0, 0))) if short else x
        return lax.psum_scatter(padded, over, scatter_dimension=0, tiled=True)

    def padded(self, tokens: int) -> int:
        """Tokens with those that fill up the devices' equal shares; large ones are of whole tiles of a TPU's rows."""
        devices = self.size(axes.MLP)
        share = -(-tokens // devices)
        return devices * (share if share < 8 * _TILE else -(-share // _TILE) * _TILE)

    def all_tokens(self, x: jax.Array, tokens: int) -> jax.Array:
        """Undo the split of tokens: this device's share -> [tokens, D]."""
        return self.gather(x, axes.MLP, dim=0)[:tokens] if self.splits_tokens else x

    def fed(self, x: jax.Array) -> jax.Array:
        """[T, ...] -> [n T, ...]: what the feed-forward takes of the n `feeders`."""
        return self.gather(x, axes.MLP, dim=0) if self.feeders > 1 else x

    def unfed(self, x: jax.Array) -> jax.Array:
        """This device's part of what was `fed`."""
        own = x.shape[0] // self.feeders
        return lax.dynamic_slice_in_dim(x, self.index(axes.MLP) * own, own) if self.feeders > 1 else x


def make_shards(parallel: Parallelism | None, devices: Sequence[jax.Device] | None = None) -> Shards:
    """The mesh and rules of a `Parallelism`; a single device for None or one device."""
    if parallel is None:
        return Shards()
    rules = _rules(parallel)
    return Shards(make_mesh(parallel, devices), rules) if parallel.devices > 1 else Shards()


def planned_shards(parallel: Parallelism) -> Shards:
    """Like `make_shards`, but to plan with: there need not be any such devices."""
    rules = _rules(parallel)
    return Shards(AbstractMesh(parallel.shape, MESH_AXES), rules) if parallel.devices > 1 else Shards()


def _rules(parallel: Parallelism) -> Rules:
    """The preset, which must have a use for every device."""
    rules = preset(parallel.rules)
    for axis, size in zip(MESH_AXES, parallel.shape, strict=True):
        if size > 1 and axis not in rules.mesh_axes:
            able = [name for name, other in PRESETS.items() if axis in other.mesh_axes]
            raise ShardingError(
                f"parallel={parallel}: rules {rules.name!r} split nothing over the {axis} axis; {', '.join(able)} do"
            )
    return rules
