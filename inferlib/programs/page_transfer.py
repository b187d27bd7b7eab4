"""Pages between the cache and host memory, by two small programs: one reads pages, one writes them. Rings and states of
rows go the same way.

On the host a page is a few flat arrays, which devices copy as they are: of each device one for each dtype and way in
which cells are split. Int8 keys and values with their scales on one device are two. Whatever the layers and their
layouts, it is a copy of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from inferlib.cache.disk_tier import Form
from inferlib.cache.host_memory import HostMemory, reachable
from inferlib.cache.host_tier import Page
from inferlib.cache.plan import CacheArray, CachePlan
from inferlib.ops.by_platform import by_platform
from inferlib.programs.start_functions import prepared
from inferlib.sharding import axes
from inferlib.sharding.mesh import Device
from inferlib.sharding.shards import Shards

CALL_PAGES = 8  # pages of each replica that one call reads or writes


class Part(NamedTuple):
    """The place of one array of the cache in a page.

    index: the array's index. dim: the dimension of its pages. shape: that of a page of it on a device, the dimensions
    before `dim` first. first: the place of its first number in the flat array.
    """

    index: int
    dim: int
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Group(NamedTuple):
    """Arrays of one dtype that the same mesh axes split. Of a page they are flat arrays [1, 1, X] of n devices."""

    dtype: str
    over: tuple[str, ...]
    devices: int
    parts: tuple[Part, ...]

    @property
    def numbers(self) -> int:
        """X."""
        return sum(part.size for part in self.parts)

    @property
    def form(self) -> Form:
        return Form((1, 1, self.numbers), np.dtype(jnp.dtype(self.dtype)))

    @property
    def nbytes(self) -> int:
        """Bytes of one of the arrays."""
        return self.numbers * jnp.dtype(self.dtype).itemsize


class DevicePart(NamedTuple):
    """What a device has of a group's arrays: the part `number` of those of its replica."""

    device: Device
    replica: int
    number: int


class EntryTransfer:
    """Reads and writes entries, called pages here, of arrays that have equally many: pages, rows or snapshots. Its
    programs are compiled by `prepare`, or when they are needed.

    On the devices what one call reads or writes are blocks [R, n, X] of the R replicas: for each of its pages one of
    each group, those of the first page first.

    each: entries of a replica. most: of each replica, that one call reads or writes. memory: where pages are on the
    host.
    """

    def __init__(
        self, arrays: Sequence[CacheArray], shards: Shards, each: int, most: int, memory: HostMemory | None = None
    ):
        self.arrays, self.shards, self.each, self.most = tuple(arrays), shards, each, most
        self.memory, self.groups = memory or HostMemory(), _groups(self.arrays, shards)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of a page's arrays on the host."""
        return tuple(group.form for group in self.groups for _ in range(group.devices))

    @property
    def nbytes(self) -> int:
        """Bytes of a page on the host."""
        return sum(group.devices * group.nbytes for group in self.groups)

    @property
    def blocks(self) -> int:
        """How many one call has."""
        return self.most * len(self.groups)

    @property
    def call_bytes(self) -> int:
        """Bytes that one call's blocks take on a device."""
        return self.most * sum(group.nbytes for group in self.groups)

    def prepare(self) -> None:
        """Compile both programs, unless that is done."""
        self.prepare_read()
        self.prepare_write()

    def prepare_read(self) -> None:
        _ = self._read

    def prepare_write(self) -> None:
        _ = self._write

    def batches(self, pages: Iterable[int]) -> Iterator[list[int]]:
        """Pages in batches that one call reads or writes."""
        of_replica: dict[int, list[int]] = {}
        for page in pages:
            of_replica.setdefault(page // self.each, []).append(page)
        for first in range(0, max(map(len, of_replica.values()), default=0), self.most):
            yield [page for of_one in of_replica.values() for page in of_one[first : first + self.most]]

    def read(self, cache: tuple[jax.Array, ...], pages: Sequence[int]) -> tuple[jax.Array, ...]:
        """Blocks of some pages, which `cut` takes: at most `most` of each replica, numbered as all replicas' together.
        The cache stays."""
        return self._read(cache, self._numbers(pages))

    def write(self, cache: tuple[jax.Array, ...], pages: Sequence[int], contents: Sequence[Page]) -> tuple[Any, Any]:
        """The cache, which is donated, with these contents of pages, as many as `read` takes; and an array that is
        there once they are written."""
        of_replica: dict[int, list[Page]] = {}
        for page, content in zip(pages, contents, strict=True):
            of_replica.setdefault(page // self.each, []).append(content)
        return self._write(cache, self._numbers(pages), self._sent(of_replica))

    def cut(self, blocks: Sequence[jax.Array], pages: Sequence[int]) -> list[Page]:
        """The pages of blocks that were read, on the host. It waits for the copies."""
        devices = [device for place in self._places(pages) for device in self._devices(place // self.most)]
        return self._pages(self.memory.copies(self._parts(blocks, pages), devices))

    def sent(self, blocks: Sequence[jax.Array], pages: Sequence[int], target: EntryTransfer) -> list[Page]:
        """The pages of blocks that were read, on their way to the same replicas of an equal mesh of other devices.
        target: the transfer of that mesh, which writes them to any of its replicas."""
        devices = [device for place in self._places(pages) for device in target._devices(place // self.most)]
        return self._pages(jax.device_put(self._parts(blocks, pages), list(map(SingleDeviceSharding, devices))))

    def hosted(self, page: Page) -> Page:
        """A page from elsewhere, such as a file, as those on the host are."""
        return self._pages(self.memory.copies(page, self._devices(0)))[0]

    def _parts(self, blocks: Sequence[jax.Array], pages: Sequence[int]) -> list[jax.Array]:
        """The arrays of the pages in blocks, each on one device."""
        parts = []
        for place in self._places(pages):
            replica, entry = divmod(place, self.most)
            for group, layout in enumerate(self._layouts):
                block = blocks[entry * len(self.groups) + group]
                shards = {shard.device: shard.data for shard in block.addressable_shards}
                parts += [shards[device] for device in self._first(layout, replica)]
        return parts

    def _devices(self, replica: int) -> list[Device]:
        """A device that has the array, for each array of a page of a replica."""
        return [device for layout in self._layouts for device in self._first(layout, replica)]

    def _pages(self, arrays: Sequence[Any]) -> list[Page]:
        size = len(self.forms)
        return [tuple(arrays[first : first + size]) for first in range(0, len(arrays), size)]

    def _sent(self, of_replica: Mapping[int, Sequence[Page]]) -> tuple[jax.Array, ...]:
        """Blocks of the contents of pages, which are on their way to the devices. Those beyond them are padding: the
        last content of a device once more, which takes no memory."""
        blank = [tuple(np.zeros(form.shape, form.dtype) for form in self.forms)]
        sources, devices, first = [], [], 0
        for group, layout in zip(self.groups, self._layouts, strict=True):
            for part in layout:
                for content in of_replica.get(part.replica) or blank:
                    sources.append(reachable(content[first + part.number], part.device))
                    devices.append(SingleDeviceSharding(part.device))
            first += group.devices
        sent = iter(jax.device_put(sources, devices))
        blocks: list[list[jax.Array]] = [[] for _ in range(self.most)]
        for group, layout, place in zip(self.groups, self._layouts, self._places_of_blocks, strict=True):
            columns = [[next(sent) for _ in of_replica.get(part.replica) or blank] for part in layout]
            for entry, of_entry in enumerate(blocks):
                parts = [column[min(entry, len(column) - 1)] for column in columns]
                of_entry.append(jax.make_array_from_single_device_arrays(self._block_shape(group), place, parts))
        return tuple(block for of_entry in blocks for block in of_entry)

    @cached_property
    def _layouts(self) -> tuple[tuple[DevicePart, ...], ...]:
        """What each device has of each group's blocks."""
        layouts = []
        for group, place in zip(self.groups, self._places_of_blocks, strict=True):
            indices: Mapping[Device, Any] = place.addressable_devices_indices_map(self._block_shape(group))
            firsts = ((device, index[0].start or 0, index[1].start or 0) for device, index in indices.items())
            layouts.append(tuple(DevicePart(*first) for first in firsts))
        return tuple(layouts)

    @staticmethod
    def _first(layout: tuple[DevicePart, ...], replica: int) -> list[Device]:
        """One of the devices that have the part, for each part of a replica in order."""
        devices = {part.number: part.device for part in reversed(layout) if part.replica == replica}
        return [device for _, device in sorted(devices.items())]

    def _places(self, pages: Sequence[int]) -> list[int]:
        """The places of pages in a block, of which each replica has its own part."""
        used, places = [0] * self.shards.replicas, []
        for page in pages:
            replica = page // self.each
            places.append(replica * self.most + used[replica])
            used[replica] += 1
        assert max(used) <= self.most, "a call has so many pages of a replica"
        return places

    def _numbers(self, pages: Sequence[int]) -> np.ndarray | jax.Array:
        """Pages as replicas number their own. The rest is padding, which no replica has."""
        numbers = np.full((self.shards.replicas * self.most, 1), self.each, np.int32)
        for place, page in zip(self._places(pages), pages, strict=True):
            numbers[place] = page % self.each
        return numbers

    def _block_place(self, group: Group) -> NamedSharding | None:
        mesh = self.shards.mesh
        return None if mesh is None else NamedSharding(mesh, _block_spec(self.shards, group))

    @cached_property
    def _places_of_blocks(self) -> list[NamedSharding | SingleDeviceSharding]:
        """Where the blocks of each group are."""
        return [self._block_place(group) or SingleDeviceSharding(jax.devices()[0]) for group in self.groups]

    def _block_shape(self, group: Group) -> tuple[int, int, int]:
        return self.shards.replicas, group.devices, group.numbers

    def _struct(self, shape: tuple[int, ...], dtype: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    @property
    def _cache(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self._struct(x.shape, x.dtype, self.shards.sharding(x.axes)) for x in self.arrays)

    @property
    def _names(self) -> tuple[tuple[str | None, ...], ...]:
        return tuple(x.axes for x in self.arrays)

    @property
    def _rows(self) -> jax.ShapeDtypeStruct:
        place = self.shards.sharding((axes.ROWS, None))
        return self._struct((self.shards.replicas * self.most, 1), jnp.int32, place)

    @cached_property
    def _read(self) -> Callable:
        place = None if self.shards.mesh is None else self.most * tuple(map(self._block_place, self.groups))
        static = self.shards, self._names, self.groups
        return prepared(read_pages, static, self._cache, self._rows, place=place, donate=False)

    @cached_property
    def _write(self) -> Callable:
        place = None if self.shards.mesh is None else (tuple(x.sharding for x in self._cache), self._rows.sharding)
        static, groups = (self.shards, self._names, self.groups), self.groups
        blocks = tuple(self._struct(self._block_shape(g), g.form.dtype, self._block_place(g)) for g in groups)
        return prepared(write_pages, static, self._cache, self._rows, self.most * blocks, place=place)


class PageTransfer(EntryTransfer):
    """Reads and writes the pages of a cache."""

    def __init__(self, plan: CachePlan, shards: Shards):
        super().__init__(plan.part(plan.arrays, of_rows=False), shards, plan.pages // shards.replicas, CALL_PAGES)
        self.plan = plan


def _groups(arrays: Sequence[CacheArray], shards: Shards) -> tuple[Group, ...]:
    groups: dict[tuple[str, tuple[str, ...]], list[Part]] = {}
    for index, array in enumerate(arrays):
        dim, local = array.axes.index(axes.PAGES), shards.local_shape(array.axes, array.shape)
        over = shards.mesh_axes(*(name for name in array.axes if name != axes.PAGES))
        parts = groups.setdefault((array.dtype.name, over), [])
        first = parts[-1].first + parts[-1].size if parts else 0
        parts.append(Part(index, dim, (*local[:dim], *local[dim + 1 :]), first))
    sizes = {} if shards.mesh is None else shards.mesh.shape
    return tuple(
        Group(dtype, over, math.prod(sizes[axis] for axis in over), tuple(parts))
        for (dtype, over), parts in groups.items()
    )


def _block_spec(shards: Shards, group: Group) -> PartitionSpec:
    """How a block [R, n, X] lies on the mesh."""
    return PartitionSpec(shards.mesh_axes(axes.PAGES) or None, group.over or None, None)


def read_pages(
    shards: Shards,
    names: tuple[tuple[str | None, ...], ...],
    groups: tuple[Group, ...],
    cache: tuple[jax.Array, ...],
    pages: jax.Array,
) -> tuple[jax.Array, ...]:
    """Blocks [R, n, X], for each page one of each group. pages: int32 [R * N, 1], each replica's by its own numbers."""

    def local(cache: tuple[jax.Array, ...], pages: jax.Array) -> tuple[jax.Array, ...]:
        of_groups = []
        for group in groups:
            cells = [_cells(cache[part.index], part.dim, pages[:, 0]) for part in group.parts]
            of_groups.append(jnp.concatenate(cells, axis=1)[:, None])
        return tuple(x[page : page + 1] for page in range(pages.shape[0]) for x in of_groups)

    if shards.rules is None:
        return local(cache, pages)
    taken = tuple(map(shards.rules.spec, names)), shards.rules.spec((axes.ROWS, None))
    count = pages.shape[0] // shards.replicas
    specs = count * tuple(_block_spec(shards, group) for group in groups)
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=specs, check_vma=False)(cache, pages)


def write_pages(
    shards: Shards,
    names: tuple[tuple[str | None, ...], ...],
    groups: tuple[Group, ...],
    cache: tuple[jax.Array, ...],
    pages: jax.Array,
    blocks: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The cache with the pages of blocks that `read_pages` made, and a small array to wait for. A page that a replica
    does not have is padding."""

    def local(cache: tuple[jax.Array, ...], pages: jax.Array, blocks: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        new = list(cache)
        for number, group in enumerate(groups):
            block = jnp.concatenate(blocks[number :: len(groups)])
            for part in group.parts:
                cells = block[:, 0, part.first : part.first + part.size].reshape(-1, *part.shape)
                new[part.index] = _with_cells(cache[part.index], part.dim, pages[:, 0], cells)
        return tuple(new), pages + 1  # JAX would hand the pages themselves back before the program ends

    if shards.rules is None:
        return local(cache, pages, blocks)
    specs, rows = tuple(map(shards.rules.spec, names)), shards.rules.spec((axes.ROWS, None))
    count = pages.shape[0] // shards.replicas
    taken = specs, rows, count * tuple(_block_spec(shards, group) for group in groups)
    return jax.shard_map(local, mesh=shards.mesh, in_specs=taken, out_specs=(specs, rows), check_vma=False)(
        cache, pages, blocks
    )


def _cells(x: jax.Array, dim: int, pages: jax.Array) -> jax.Array:
    """[N, ...] flat: the cells of pages, which are a dimension of x. Those before it are merged with it, as in
    `row_changes`: a TPU's compiler would copy stacked latents as a whole. One page is a slice, as the compiler copies
    rings as a whole to gather one."""
    count, stack = x.shape[dim], math.prod(x.shape[:dim])
    if pages.shape[0] == 1:
        return lax.dynamic_index_in_dim(x, jnp.minimum(pages[0], count - 1), dim).reshape(1, -1)
    rows = jnp.arange(stack)[None, :] * count + jnp.minimum(pages, count - 1)[:, None]
    cells = x.reshape(-1, *x.shape[dim + 1 :]).at[rows.reshape(-1)].get(mode="clip")
    return cells.reshape(pages.shape[0], -1)


def _with_cells(x: jax.Array, dim: int, pages: jax.Array, cells: jax.Array) -> jax.Array:
    """x with the cells [N, ...] of pages. On CPUs one page follows the other, as XLA would copy an array of bfloat16
    twice; and one alone is written as a slice."""
    if pages.shape[0] == 1:
        return _one_by_one(dim, x, pages, cells)
    return by_platform(x, pages, cells, cpu=partial(_one_by_one, dim), default=partial(_at_once, dim))


def _one_by_one(dim: int, x: jax.Array, pages: jax.Array, cells: jax.Array) -> jax.Array:
    count = x.shape[dim]

    def one(i, x):
        at = jnp.minimum(pages[i], count - 1)
        old = lax.dynamic_index_in_dim(x, at, dim, keepdims=False)
        new = jnp.where(pages[i] < count, cells[i], old)
        return lax.dynamic_update_index_in_dim(x, new, at, dim)

    return lax.fori_loop(0, pages.shape[0], one, x)


def _at_once(dim: int, x: jax.Array, pages: jax.Array, cells: jax.Array) -> jax.Array:
    """No row is written twice, which GPUs are told: else they write atomically."""
    count, stack = x.shape[dim], math.prod(x.shape[:dim])
    rows = jnp.arange(stack)[None, :] * count + pages[:, None]
    beyond = stack * count + jnp.arange(rows.size).reshape(rows.shape)  # padding, in rows of its own as well
    rows = jnp.where(pages[:, None] < count, rows, beyond).reshape(-1)
    flat = x.reshape(-1, *x.shape[dim + 1 :])
    cells = cells.reshape(-1, *flat.shape[1:])
    return flat.at[rows].set(cells, mode="drop", unique_indices=True).reshape(x.shape)
