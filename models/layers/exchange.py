"""How tokens reach experts that other devices hold, and how what these make of them comes back.

Few tokens are gathered: every device has those of all and sums what its own experts make of each, and a reduce-scatter
brings the sums home. More are exchanged by all-to-all: a token goes, with all its routes, once to each device that
holds any expert it chose, and as many sums come back. Whichever moves fewer bytes is chosen when a program is built.

Any device may be chosen by all tokens, but has no room for them all at once: there is room for what balanced routing
brings and half as much again, and what exceeds it goes in further rounds. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.config import MoeSpec
from inferlib.ops.backend import Backend
from inferlib.ops.loops import expected_trips
from inferlib.ops.segment_sum import TILE, segment_sum
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# What a link carries in the microsecond or so that one more collective takes to start.
_START_BYTES = 64 << 10
_SLACK = 1.5  # rows that there is room for, times those of balanced load
_FEW = 1024  # rows for which there is always room: so few cost less than rounds
# x [N, D], slots [N, k] int32 (-1: none) and weights [N, k] -> [N, D], the weighted sum of those that are this device's
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of tokens. rows: that a device sends in a round, and gets back, in all; of a ragged one the
    expected number. room: how many it can get in a round, of a ragged one from all devices, of others from each.
    many: whether these are so many rows that it matters how they lie."""

    rows: int
    room: int
    ragged: bool
    many: bool = True


def exchange_of(spec: MoeSpec, tokens: int, row_bytes: int, devices: int, backend: Backend) -> Exchange | None:
    """How `tokens` tokens of each of `devices` devices reach the experts, where all of these are equally likely; None:
    tokens are gathered. row_bytes: of a token's activations."""
    if devices == 1:
        return None
    share, everyone = spec.device_share(devices) * tokens, devices * tokens
    if backend.exchange == "ragged":
        many = _are_many(everyone, backend)
        how = Exchange(ceil(devices * share), _room(devices * share, everyone) if many else everyone, True, many)
    else:
        room = min(tokens, ceil(_SLACK * share))
        how = Exchange(devices * room, room, False)
    of_row = 2 * row_bytes + 8 * spec.router.chosen
    return how if how.rows * of_row + _START_BYTES < everyone * of_row else None


def pairs_room(chosen: int, tokens: int, received: int, backend: Backend) -> int:
    """How many pairs of a token and an expert of its `chosen` a device takes in a round, of `received` tokens that it
    got from devices that have `tokens` each: its experts are chosen as often as its tokens choose."""
    most = received * chosen
    return max(_room(tokens * chosen, most), min(TILE * chosen, most)) if _are_many(most, backend) else most


def _are_many(rows: int, backend: Backend) -> bool:
    """Whether rows may come in rounds; not on a GPU, which would wait for the host to look at a loop's condition."""
    return rows > _FEW and backend.grouped_matmul != "pallas_gpu"


def _room(expected: float, most: int) -> int:
    return min(-(-ceil(_SLACK * expected) // TILE) * TILE, most)


def through_experts(
    x: jax.Array, slots: jax.Array, weights: jax.Array, own: int, how: Exchange | None, compute: Compute, shards: Shards
) -> jax.Array:
    """What the experts of all devices make of this one's tokens: x [T, D], slots and weights [T, k] -> [T, D].

    own: how many experts each device holds. how: see `exchange_of`.
    """
    if shards.size(axes.EXPERTS) == 1:
        return compute(x, slots, weights)
    routes = jnp.concatenate([slots.astype(jnp.float32), weights], axis=1)  # numbers of slots are exact in float32
    if how is None:
        everyone, routes = (shards.gather(a, axes.EXPERTS, dim=0) for a in (x, routes))
        return shards.scatter(_computed(compute, everyone, routes), axes.EXPERTS)
    trip = _Trip.of(slots, own, shards.size(axes.EXPERTS))
    return (_ragged if how.ragged else _padded)(x, routes, trip, how, compute, shards)


class _Trip(NamedTuple):
    """Where tokens go. goes [T, n]: to which devices; counts [n]: how many to each. Of each choice, device [T, k] (-1:
    none), whether it is the token's first there, and the token's number among those that go there."""

    goes: jax.Array
    counts: jax.Array
    device: jax.Array
    first: jax.Array
    rank: jax.Array

    def summed(self, parts: jax.Array) -> jax.Array:
        """parts [T, k, D], of each first choice, -> [T, D]: in the order of a token's choices, whatever came first, so
        that its sum depends on nothing but itself."""
        return jnp.sum(jnp.where(self.first[:, :, None], parts, 0), axis=1, dtype=jnp.float32).astype(parts.dtype)

    @staticmethod
    def of(slots: jax.Array, own: int, devices: int) -> _Trip:
        device = slots // own
        goes = jnp.any(device[:, :, None] == jnp.arange(devices), axis=1)
        same = device[:, :, None] == device[:, None, :]
        first = (device >= 0) & (jnp.argmax(same, axis=2) == jnp.arange(slots.shape[1]))
        ranks = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
        rank = jnp.take_along_axis(ranks, jnp.maximum(device, 0), axis=1)
        return _Trip(goes, jnp.sum(goes, axis=0, dtype=jnp.int32), device, first, rank)


def _padded(x: jax.Array, routes: jax.Array, trip: _Trip, how: Exchange, compute: Compute, shards: Shards) -> jax.Array:
    """Of the tokens that go to each device a round takes as many as there is room for; all devices take as many rounds
    as the one that needs the most."""
    (tokens, dim), room, devices = x.shape, how.room, trip.counts.size
    order = jnp.argsort(~trip.goes.T, axis=1)  # those that go to a device, in front
    order = jnp.pad(order, ((0, 0), (0, -tokens % room)))

    def one_round(number: jax.Array, parts: jax.Array) -> jax.Array:
        start = number * room
        which = lax.dynamic_slice_in_dim(order, start, room, axis=1)
        some = (start + jnp.arange(room) < trip.counts[:, None])[:, :, None]
        there = shards.all_to_all(x[which], axes.EXPERTS)
        theirs = shards.all_to_all(jnp.where(some, routes[which], -1), axes.EXPERTS)
        out = _computed(compute, there.reshape(-1, dim), theirs.reshape(devices * room, -1))
        back = shards.all_to_all(out.reshape(there.shape), axes.EXPERTS).reshape(-1, dim)
        place = trip.rank - start
        now = (place >= 0) & (place < room)
        return jnp.where(now[:, :, None], back[jnp.where(now, trip.device * room + place, 0)], parts)

    rounds = shards.max(jnp.max(-(-trip.counts // room)), axes.ROWS)
    with expected_trips(1):
        parts = lax.fori_loop(0, rounds, one_round, jnp.zeros((*trip.device.shape, dim), x.dtype))
    return trip.summed(parts)


def _ragged(x: jax.Array, routes: jax.Array, trip: _Trip, how: Exchange, compute: Compute, shards: Shards) -> jax.Array:
    """The same, sending only what there is. As a token goes to a device but once, a device can get no more than the
    tokens of all."""
    (tokens, dim), devices, me, room = x.shape, trip.counts.size, shards.index(axes.EXPERTS), how.room
    most = tokens * min(devices, trip.device.shape[1])
    order = jnp.argsort(~trip.goes.T.reshape(-1))[:most] % tokens  # by device
    sizes = shards.stack(trip.counts, axes.EXPERTS)  # [from, to]
    sent, got = (jnp.cumsum(sizes, axis=axis) - sizes for axis in (1, 0))  # where they start, there and here
    filled = lax.empty if how.many else jnp.zeros
    # A TPU exchanges rows as pairs of halves: to lay out all that there is room for anew would move more than that.
    x = x.reshape(tokens, 2 - dim % 2, -1) if how.many else x
    x, routes = x[order], routes[order]

    def moved(rows: jax.Array, out: jax.Array, *where: jax.Array) -> jax.Array:
        return shards.ragged_all_to_all(rows, out, *where, axes.EXPERTS)

    def exchanged(sent: jax.Array, sizes: jax.Array, got: jax.Array, home: jax.Array) -> jax.Array:
        there, back = (sent[me], sizes[me], got[me], sizes[:, me]), (got[:, me], sizes[:, me], sent[:, me], sizes[me])
        theirs = moved(routes, jnp.full((room, routes.shape[1]), -1, routes.dtype), *there)
        out = _computed(compute, moved(x, filled((room, *x.shape[1:]), x.dtype), *there), theirs)
        return moved(out, home, *back)

    def one_round(number: jax.Array, home: jax.Array) -> jax.Array:
        """Those that come to lie in a device's next `room` rows."""
        start = number * room
        before = jnp.clip(start - got, 0, sizes)  # gone in earlier rounds
        now = jnp.clip(start + room - got, 0, sizes) - before
        return exchanged(sent + before, now, jnp.clip(got + before - start, 0, room), home)

    home = filled((most, *x.shape[1:]), x.dtype)
    if room == devices * tokens:
        home = exchanged(sent, sizes, got, home)
    else:
        rounds = shards.max(-(-jnp.max(jnp.sum(sizes, axis=0)) // room), axes.ROWS)
        with expected_trips(1):
            home = lax.fori_loop(0, rounds, one_round, home)
    places = jnp.where(trip.first, sent[me][trip.device] + trip.rank, 0)
    if not how.many:
        return trip.summed(home[places])
    first, tiles = trip.first.reshape(-1), -(-tokens // TILE)
    counts = jnp.pad(jnp.sum(trip.first, axis=1, dtype=jnp.int32), (0, -tokens % TILE))
    return segment_sum(
        lax.empty((counts.size, dim), x.dtype),
        home,
        places.reshape(-1)[jnp.argsort(~first)],
        None,
        jnp.cumsum(counts) - counts,
        counts,
        0,
        tiles,
        tiles=tiles,
        longest=trip.device.shape[1],
    )[:tokens]


def _computed(compute: Compute, x: jax.Array, routes: jax.Array) -> jax.Array:
    slots, weights = jnp.split(routes, 2, axis=1)
    return compute(x, slots.astype(jnp.int32), weights)
