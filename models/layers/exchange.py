"""How tokens reach experts on other devices, and how the outputs come back.

If there are few tokens, every device gathers all of them, routes them as the others do, and sums the outputs of its
experts; a reduce-scatter returns the sums, or an all-to-all what each device adds to them. More tokens are exchanged by
all-to-all: a token goes, with all its routes, once to each device that has an expert it chose, and one sum returns from
each. That takes two more collectives and moves fewer bytes, which on a torus cross more links. The way that takes less
time is chosen when a program is built.

All tokens may choose experts of one device, but it has no room for all at once. There is room for 1.5 times the rows of
balanced routing; the others go in further rounds. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.config import MoeSpec
from inferlib.ops.backend import Backend
from inferlib.ops.loops import expected_trips
from inferlib.ops.segment_sum import TILE, Segments, segment_sum
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# Bytes that a device's links carry, at 100 GB/s and more, in the 20 us each that the two more collectives of an
# all-to-all take to start and to arrive.
_WAIT_BYTES = 4 << 20
# On a torus of n devices, a byte of an all-to-all takes some 0.8 times the root of n as long as one of a gather: it
# crosses the links of devices in between. By the cost model, for 2 to 64 devices of a slice.
_FURTHER = 0.8
# Compilers for a torus make an all-reduce, which passes twice the hops, of a reduce-scatter whose parts are small and
# not whole tiles of so many rows and numbers.
_TORUS_TILE = 8, 128
_SLACK = 1.5  # room for rows, as a multiple of the rows of balanced load
_LEAST_ROOM = 1024  # there is always room for so many rows: further rounds would cost more
# x [N, D], slots [N, k] int32 (-1: none) and weights [N, k] -> [N, D], the weighted sum over this device's experts
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of tokens.

    rows: the rows that a device sends in a round, and gets back; if ragged, the expected number. room: the rows that it
    can receive in a round, from all devices together if ragged, else from each. many: there are so many rows that their
    layout in memory matters.
    """

    rows: int
    room: int
    ragged: bool
    many: bool = True


def exchange_of(spec: MoeSpec, tokens: int, row_bytes: int, devices: int, backend: Backend) -> Exchange | None:
    """How `tokens` tokens of each of `devices` devices reach the experts, if all experts are equally likely; None:
    tokens are gathered. row_bytes: bytes of a token's activations."""
    if devices == 1:
        return None
    share, all_rows = spec.device_share(devices) * tokens, devices * tokens
    if backend.exchange == "ragged":
        many = _are_many(all_rows, backend)
        room = _room(devices * share, all_rows) if many else all_rows
        exchange = Exchange(ceil(devices * share), room, ragged=True, many=many)
    else:
        room = min(tokens, ceil(_SLACK * share))
        exchange = Exchange(devices * room, room, ragged=False)
    bytes_per_row = 2 * row_bytes + 8 * spec.router.chosen
    further = max(_FURTHER * devices**0.5, 1.0) if backend.on_torus else 1.0
    sent = exchange.rows * bytes_per_row * further + _WAIT_BYTES
    return exchange if sent < all_rows * bytes_per_row else None


def gathers(spec: MoeSpec, tokens: int, row_bytes: int, shards: Shards, backend: Backend) -> bool:
    """Whether every device takes the tokens of all; see `exchange_of`."""
    devices = shards.size(axes.EXPERTS)
    return devices > 1 and exchange_of(spec, tokens, row_bytes, devices, backend) is None


def returns_parts(tokens: int, width: int, backend: Backend) -> bool:
    """Whether gathered tokens come back by an all-to-all of what each device adds to the sums [tokens, width] of every
    other, not by a reduce-scatter. An all-to-all of few tokens passes fewer hops, and has few bytes that go further."""
    rows, lanes = _TORUS_TILE
    return backend.on_torus and (tokens < rows or (tokens == rows and width % lanes > 0))


def pairs_room(chosen: int, tokens: int, received: int, backend: Backend) -> int:
    """How many pairs of a token and one of its `chosen` experts a device takes in a round. It receives `received`
    tokens from devices that have `tokens` each; on average, as many choices fall on its experts as its own tokens make.
    """
    most = received * chosen
    return max(_room(tokens * chosen, most), min(TILE * chosen, most)) if _are_many(most, backend) else most


def _are_many(rows: int, backend: Backend) -> bool:
    """Whether rows may come in rounds, which are a loop."""
    return rows > _LEAST_ROOM and backend.loops_on_device


def _room(expected: float, most: int) -> int:
    return min(-(-ceil(_SLACK * expected) // TILE) * TILE, most)


def through_experts(
    x: jax.Array,
    slots: jax.Array,
    weights: jax.Array,
    count: int,
    exchange: Exchange | None,
    compute: Compute,
    shards: Shards,
    backend: Backend,
) -> jax.Array:
    """The outputs of the experts, on all devices, for this device's tokens: x [T, D], slots and weights [T, k] -> [T,
    D].

    count: number of experts on each device. exchange: see `exchange_of`; if None, x, slots and weights are of the
    tokens of all devices.
    """
    if exchange is None:
        sums = compute(x, slots, weights)
        return sums if shards.size(axes.EXPERTS) == 1 else _returned(sums, shards, backend)
    routes = jnp.concatenate([slots.astype(jnp.float32), weights], axis=1)  # numbers of slots are exact in float32
    trip = _Trip.of(slots, count, shards.size(axes.EXPERTS))
    return (_ragged if exchange.ragged else _padded)(x, routes, trip, exchange, compute, shards)


def _returned(sums: jax.Array, shards: Shards, backend: Backend) -> jax.Array:
    """Partial sums [n T, D] on each of n devices -> [T, D], the sums of this device's tokens. Parts are added in the
    order of devices, whatever the batch."""
    devices, (rows, width) = shards.size(axes.EXPERTS), sums.shape
    if not returns_parts(rows // devices, width, backend):
        return shards.scatter(sums, axes.EXPERTS)
    parts = shards.all_to_all(sums.reshape(devices, -1, width), axes.EXPERTS)
    # One by one: XLA fuses what follows with a sum of arrays, but not with a sum over a dimension.
    return reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(sums.dtype)


class _Trip(NamedTuple):
    """The devices that tokens go to.

    is_sent [T, n]: whether a token goes to a device; counts [n]: how many tokens go to it. device [T, k]: the device of
    each choice (-1: none); first [T, k]: whether it is the token's first choice on that device; rank [T, k]: the
    token's number among the tokens that go there.
    """

    is_sent: jax.Array
    counts: jax.Array
    device: jax.Array
    first: jax.Array
    rank: jax.Array

    def summed(self, parts: jax.Array) -> jax.Array:
        """parts [T, k, D], one of each first choice, -> [T, D]: summed in the order of a token's choices, whichever
        came first, so that a token's sum depends on nothing but itself."""
        return jnp.sum(jnp.where(self.first[:, :, None], parts, 0), axis=1, dtype=jnp.float32).astype(parts.dtype)

    @staticmethod
    def of(slots: jax.Array, count: int, devices: int) -> _Trip:
        device = slots // count
        is_sent = jnp.any(device[:, :, None] == jnp.arange(devices), axis=1)
        same = device[:, :, None] == device[:, None, :]
        first = (device >= 0) & (jnp.argmax(same, axis=2) == jnp.arange(slots.shape[1]))
        ranks = jnp.cumsum(is_sent, axis=0, dtype=jnp.int32) - 1
        rank = jnp.take_along_axis(ranks, jnp.maximum(device, 0), axis=1)
        return _Trip(is_sent, jnp.sum(is_sent, axis=0, dtype=jnp.int32), device, first, rank)


def _padded(
    x: jax.Array, routes: jax.Array, trip: _Trip, exchange: Exchange, compute: Compute, shards: Shards
) -> jax.Array:
    """Each round sends as many tokens to every device as there is room for. All devices run the number of rounds that
    the busiest one needs."""
    (tokens, dim), room, devices = x.shape, exchange.room, trip.counts.size
    order = jnp.argsort(~trip.is_sent.T, axis=1)  # for each device, the tokens that go there come first
    order = jnp.pad(order, ((0, 0), (0, -tokens % room)))

    def one_round(number: jax.Array, parts: jax.Array) -> jax.Array:
        start = number * room
        token = lax.dynamic_slice_in_dim(order, start, room, axis=1)
        is_sent = (start + jnp.arange(room) < trip.counts[:, None])[:, :, None]
        received = shards.all_to_all(x[token], axes.EXPERTS)
        received_routes = shards.all_to_all(jnp.where(is_sent, routes[token], -1), axes.EXPERTS)
        out = _computed(compute, received.reshape(-1, dim), received_routes.reshape(devices * room, -1))
        back = shards.all_to_all(out.reshape(received.shape), axes.EXPERTS).reshape(-1, dim)
        slot = trip.rank - start
        has_returned = (slot >= 0) & (slot < room)
        return jnp.where(has_returned[:, :, None], back[jnp.where(has_returned, trip.device * room + slot, 0)], parts)

    rounds = shards.max(jnp.max(-(-trip.counts // room)), axes.ROWS)
    with expected_trips(1):
        parts = lax.fori_loop(0, rounds, one_round, jnp.zeros((*trip.device.shape, dim), x.dtype))
    return trip.summed(parts)


def _ragged(
    x: jax.Array, routes: jax.Array, trip: _Trip, exchange: Exchange, compute: Compute, shards: Shards
) -> jax.Array:
    """Like `_padded`, but sends no padding. A token goes to a device at most once, so a device receives no more rows
    than all devices have tokens."""
    (tokens, dim), devices, me, room = x.shape, trip.counts.size, shards.index(axes.EXPERTS), exchange.room
    most = tokens * min(devices, trip.device.shape[1])
    order = jnp.argsort(~trip.is_sent.T.reshape(-1))[:most] % tokens  # by device
    sizes = shards.stack(trip.counts, axes.EXPERTS)  # [from, to]
    # Where the rows of each pair of devices start, among the rows sent and among the rows received.
    sent, received = (jnp.cumsum(sizes, axis=axis) - sizes for axis in (1, 0))
    filled = lax.empty if exchange.many else jnp.zeros
    # Rows are exchanged as pairs of halves. Laying out all the room anew would move more than the exchange.
    x = x.reshape(tokens, 2 - dim % 2, -1) if exchange.many else x
    x, routes = x[order], routes[order]

    def moved(rows: jax.Array, out: jax.Array, *where: jax.Array) -> jax.Array:
        return shards.ragged_all_to_all(rows, out, *where, name=axes.EXPERTS)

    def exchanged(sent: jax.Array, sizes: jax.Array, received: jax.Array, returned: jax.Array) -> jax.Array:
        outward = sent[me], sizes[me], received[me], sizes[:, me]
        homeward = received[:, me], sizes[:, me], sent[:, me], sizes[me]
        received_routes = moved(routes, jnp.full((room, routes.shape[1]), -1, routes.dtype), *outward)
        out = _computed(compute, moved(x, filled((room, *x.shape[1:]), x.dtype), *outward), received_routes)
        return moved(out, returned, *homeward)

    def one_round(number: jax.Array, returned: jax.Array) -> jax.Array:
        """Exchange the rows that belong to a device's next `room` rows."""
        start = number * room
        before = jnp.clip(start - received, 0, sizes)  # rows that went in earlier rounds
        count = jnp.clip(start + room - received, 0, sizes) - before
        return exchanged(sent + before, count, jnp.clip(received + before - start, 0, room), returned)

    returned = filled((most, *x.shape[1:]), x.dtype)
    if room == devices * tokens:
        returned = exchanged(sent, sizes, received, returned)
    else:
        rounds = shards.max(-(-jnp.max(jnp.sum(sizes, axis=0)) // room), axes.ROWS)
        with expected_trips(1):
            returned = lax.fori_loop(0, rounds, one_round, returned)
    places = jnp.where(trip.first, sent[me][trip.device] + trip.rank, 0)
    return _summed_segments(returned, places, trip, dim) if exchange.many else trip.summed(returned[places])


def _summed_segments(returned: jax.Array, places: jax.Array, trip: _Trip, dim: int) -> jax.Array:
    """`_Trip.summed` for many returned rows [N, *D], at places [T, k] -> [T, D]."""
    tokens, longest = places.shape
    first, tiles = trip.first.reshape(-1), -(-tokens // TILE)
    counts = jnp.pad(jnp.sum(trip.first, axis=1, dtype=jnp.int32), (0, -tokens % TILE))
    return segment_sum(
        lax.empty((counts.size, dim), returned.dtype),
        returned,
        Segments(places.reshape(-1)[jnp.argsort(~first)], None, jnp.cumsum(counts) - counts, counts),
        0,
        tiles,
        tiles=tiles,
        longest=longest,
    )[:tokens]


def _computed(compute: Compute, x: jax.Array, routes: jax.Array) -> jax.Array:
    slots, weights = jnp.split(routes, 2, axis=1)
    return compute(x, slots.astype(jnp.int32), weights)
