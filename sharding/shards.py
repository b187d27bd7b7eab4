"""A program's place in the mesh, and the collectives it uses.

Programs are written for one device and run inside `jax.shard_map`, so every collective is one of the calls below; no
partitioner adds any. Without a mesh each call is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from inferlib.sharding import axes
from inferlib.sharding.mesh import MESH_AXES, Device, Parallelism, ShardingError, make_mesh, ring_of
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
    def preset(self) -> str:
        """The name of the rules; empty on a single device."""
        return "" if self.rules is None else self.rules.name

    @property
    def _sizes(self) -> Mapping[str, int]:
        """The number of devices along each mesh axis."""
        return {} if self.mesh is None else self.mesh.shape

    @property
    def replicas(self) -> int:
        """Number of shards that rows are split into."""
        return self.size(axes.ROWS)

    @property
    def only_axis(self) -> str | None:
        """The mesh axis that all devices are on, if weights are split over it and tokens are not; else None."""
        over = self.mesh_axes(axes.MLP)
        everywhere = len(over) == 1 and self._sizes[over[0]] == prod(self._sizes.values())
        alone = everywhere and over == self.mesh_axes(axes.KV_HEADS)
        return over[0] if alone and not self.splits_tokens else None

    @property
    def splits_tokens(self) -> bool:
        return self.rules is not None and self.rules.split_tokens and bool(self.mesh_axes(axes.MLP))

    @property
    def mlp_row_shards(self) -> int:
        """How many shards of rows the feed-forward takes together: those of the devices that split both rows and the
        feed-forward."""
        apart = set(self.mesh_axes(axes.ROWS)) & set(self.mesh_axes(axes.MLP))
        return self.size(axes.MLP) if apart else 1

    def sharding(self, names: tuple[str | None, ...]) -> NamedSharding | None:
        """The sharding of an array with these logical axes; None on a single device."""
        return None if self.mesh is None or self.rules is None else NamedSharding(self.mesh, self.rules.spec(names))

    @property
    def several_processes(self) -> bool:
        """True if some of the devices belong to other processes."""
        return isinstance(self.mesh, Mesh) and self.mesh.is_multi_process

    @property
    def on_cpu(self) -> bool:
        """True if the mesh consists of CPU devices."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def place(self, x: np.ndarray, names: tuple[str | None, ...]) -> jax.Array:
        """A host array, the same on every process, as an array on the mesh; each process transfers its shards."""
        sharding = self.sharding(names)
        if sharding is None or not self.several_processes:
            return jax.device_put(x, sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def local_shape(self, names: Sequence[str | None], shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a device's shard of an array with these logical axes."""
        sharding = self.sharding(tuple(names))
        return shape if sharding is None else sharding.shard_shape(shape)

    def mesh_axes(self, *names: str | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that split any of these logical axes, in the mesh's order."""
        if self.rules is None:
            return ()
        over = {axis for name in names for axis in self.rules.axes_of(name)}
        return tuple(axis for axis, size in self._sizes.items() if size > 1 and axis in over)

    def size(self, name: str | None) -> int:
        """Number of shards that a logical axis is split into."""
        return prod(self._sizes[axis] for axis in self.mesh_axes(name))

    def ring(self, axis: str) -> tuple[int, ...]:
        """The indices along a mesh axis in an order in which each device is near the next; see `ring_of`."""
        if not isinstance(self.mesh, Mesh):
            return tuple(range(self._sizes[axis]))
        line = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(axis), -1).reshape(-1, self.mesh.shape[axis])
        return ring_of(line[0])

    # ---- inside a program: this device's shard, and collectives

    def index(self, name: str) -> jax.Array | int:
        """Which shard of a logical axis this device has."""
        return lax.axis_index(over) if (over := self.mesh_axes(name)) else 0

    def stripe(self, name: str, behind: int = 0) -> Stripe:
        """The positions that this device, or the one `behind` places before it, has of an axis that is dealt out in
        turn."""
        count = self.size(name)
        return Stripe(count, (self.index(name) - behind) % count) if count > 1 else Stripe()

    def sum(self, x: jax.Array, *names: str) -> jax.Array:
        """All-reduce: sum x over the devices that split these logical axes."""
        return lax.psum(x, over) if (over := self.mesh_axes(*names)) else x

    def max(self, x: jax.Array, name: str) -> jax.Array:
        return lax.pmax(x, over) if (over := self.mesh_axes(name)) else x

    def gather(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        """All-gather the shards of a logical axis along dimension `dim`."""
        return lax.all_gather(x, over, axis=dim, tiled=True) if (over := self.mesh_axes(name)) else x

    def part(self, x: jax.Array, name: str) -> jax.Array:
        """This device's rows of what `gather` along the first dimension returned."""
        rows = x.shape[0] // self.size(name)
        return lax.dynamic_slice_in_dim(x, self.index(name) * rows, rows) if self.size(name) > 1 else x

    def scatter(self, x: jax.Array, name: str) -> jax.Array:
        """Reduce-scatter over a logical axis: each device gets its shard of the sum, along the first dimension."""
        return lax.psum_scatter(x, over, tiled=True) if (over := self.mesh_axes(name)) else x

    def stack(self, x: jax.Array, name: str) -> jax.Array:
        """[...] -> [n, ...]: all-gather x of each of the n devices along a logical axis."""
        return lax.all_gather(x, over) if (over := self.mesh_axes(name)) else x[None]

    def all_to_all(self, x: jax.Array, name: str) -> jax.Array:
        """[n, ...] -> [n, ...]: send x[i] to device i of the n along a logical axis, and receive what each sends to
        this one."""
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
        """Send sizes[i] rows of x, from starts[i] on, to device i, which writes them to `out` from at[i] on; receive
        received[i] rows from it. The other rows of `out` stay. starts, sizes, at, received: [n] int32. Not on CPU."""
        return lax.ragged_all_to_all(x, out, starts, sizes, at, received, axis_name=self.mesh_axes(name))

    def exchange(self, x: jax.Array, name: str) -> jax.Array:
        """All-to-all: [..., h] -> [n, ..., h / n], this device's shard of the last dimension from each of n devices."""
        return self.all_to_all(jnp.moveaxis(x.reshape(*x.shape[:-1], self.size(name), -1), -2, 0), name)

    def pass_on(self, x: jax.Array, name: str) -> jax.Array:
        """Collective permutation: send x to the next device along a logical axis, and receive the previous one's."""
        n = self.size(name)
        return lax.ppermute(x, self.mesh_axes(name), [(i, (i + 1) % n) for i in range(n)]) if n > 1 else x

    def sum_of(self, x: jax.Array, name: str, hops: Sequence[int]) -> jax.Array:
        """Sum x over `hops` other devices along a logical axis, by a collective permutation from each: a TPU makes
        these while it computes, and waits for an all-reduce.

        The number of each device is this one's with the bits of a hop turned, if the number of devices is a power of
        two, else this one's less a hop.
        """
        n, over = self.size(name), self.mesh_axes(name)
        sends = (lambda i, hop: (i + hop) % n) if n & (n - 1) else (lambda i, hop: i ^ hop)
        if not hops:
            return jnp.zeros_like(x)
        return reduce(add, (lax.ppermute(x, over, [(i, sends(i, hop)) for i in range(n)]) for hop in hops))

    def sum_tokens(self, x: jax.Array, *names: str) -> jax.Array:
        """Sum partial sums [T, D] over logical axes. If tokens are split, or came from `gather_for_mlp`, each device
        gets only the sums of its tokens."""
        over = self.mesh_axes(*names)
        if not over or not (self.splits_tokens or self.mlp_row_shards > 1):
            return self.sum(x, *names)
        short = self.padded(x.shape[0]) - x.shape[0] if self.splits_tokens else 0
        padded = jnp.pad(x, ((0, short), (0, 0))) if short else x
        return lax.psum_scatter(padded, over, scatter_dimension=0, tiled=True)

    def padded(self, tokens: int) -> int:
        """The number of tokens, rounded up to equal shards; large shards are rounded up to tiles of a TPU."""
        devices = self.size(axes.MLP)
        local = -(-tokens // devices)
        return devices * (local if local < 8 * _TILE else -(-local // _TILE) * _TILE)

    def all_tokens(self, x: jax.Array, tokens: int) -> jax.Array:
        """Undo the split of tokens: this device's shard -> [tokens, D]."""
        return self.gather(x, axes.MLP, dim=0)[:tokens] if self.splits_tokens else x

    def gather_for_mlp(self, x: jax.Array) -> jax.Array:
        """[T, ...] -> [n T, ...]: the tokens of all n `mlp_row_shards`, which the feed-forward takes together."""
        return self.gather(x, axes.MLP, dim=0) if self.mlp_row_shards > 1 else x

    def local_rows(self, x: jax.Array) -> jax.Array:
        """This device's rows of the result of `gather_for_mlp`."""
        return self.part(x, axes.MLP) if self.mlp_row_shards > 1 else x


def make_shards(parallel: Parallelism | None, devices: Sequence[Device] | None = None) -> Shards:
    """The mesh and rules of a `Parallelism`; a single device for None or one device."""
    if parallel is None:
        return Shards()
    rules = _rules(parallel)
    return Shards(make_mesh(parallel, devices), rules) if parallel.devices > 1 else Shards()


def planned_shards(parallel: Parallelism) -> Shards:
    """Like `make_shards`, but for planning: no such devices have to exist."""
    rules = _rules(parallel)
    mesh = AbstractMesh(parallel.shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return Shards(mesh, rules) if parallel.devices > 1 else Shards()


def _rules(parallel: Parallelism) -> Rules:
    """The preset. Raises ShardingError if it splits nothing over a mesh axis of several devices."""
    rules = preset(parallel.rules)
    for axis, size in zip(MESH_AXES, parallel.shape, strict=True):
        if size > 1 and axis not in rules.mesh_axes:
            able = [name for name, other in PRESETS.items() if axis in other.mesh_axes]
            raise ShardingError(
                f"parallel={parallel}: rules {rules.name!r} split nothing over the {axis} axis; {', '.join(able)} do"
            )
    return rules
