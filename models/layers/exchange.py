"""How tokens reach experts that other devices hold, and how what these make of them comes back.

Few tokens are gathered: every device has those of all and sums what its own experts make of each, and a reduce-scatter
brings the sums home. More are exchanged by all-to-all: a token goes, with all its routes, once to each device that
holds any expert it chose, and as many sums come back. Whichever moves fewer bytes is chosen when a program is built.
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
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# What a link carries in the microsecond or so that one more collective takes to start.
_START_BYTES = 64 << 10
# x [N, D], slots [N, k] int32 (-1: none) and weights [N, k] -> [N, D], the weighted sum of those that are this device's
Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of tokens. rows: that a device sends, and gets back, in all; of a ragged one the expected number.
    room: how many of them to each device; None: ragged."""

    rows: int
    room: int | None


def exchange_of(spec: MoeSpec, tokens: int, row_bytes: int, devices: int, *, ragged: bool) -> Exchange | None:
    """How `tokens` tokens of each of `devices` devices reach the experts, where all of these are equally likely; None:
    tokens are gathered.

    row_bytes: of a token's activations. ragged: the backend has `jax.lax.ragged_all_to_all`; without, what goes to each
    device is padded to half as much again as is expected.
    """
    if devices == 1:
        return None
    share = spec.device_share(devices) * tokens
    room = None if ragged else min(tokens, ceil(1.5 * share))
    rows = ceil(devices * share) if ragged else devices * room
    of_row = 2 * row_bytes + 8 * spec.router.chosen
    return Exchange(rows, room) if rows * of_row + _START_BYTES < devices * tokens * of_row else None


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
    parts = (_ragged if how.room is None else _padded)(x, routes, trip, how, compute, shards)
    # In the order of a token's choices, whatever came first, so that its sum depends on nothing but itself.
    return jnp.sum(jnp.where(trip.first[:, :, None], parts, 0), axis=1, dtype=jnp.float32).astype(x.dtype)


class _Trip(NamedTuple):
    """Where tokens go. goes [T, n]: to which devices; counts [n]: how many to each. Of each choice, device [T, k] (-1:
    none), whether it is the token's first there, and the token's number among those that go there."""

    goes: jax.Array
    counts: jax.Array
    device: jax.Array
    first: jax.Array
    rank: jax.Array

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
    """The parts [T, k, D] that come back of each first choice.

    There is room for the tokens of balanced routing. Of others nothing is dropped: what is left goes in further rounds,
    at most T / room of them, and all devices take as many as the one that needs the most.
    """
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
    return lax.fori_loop(0, rounds, one_round, jnp.zeros((*trip.device.shape, dim), x.dtype))


def _ragged(x: jax.Array, routes: jax.Array, trip: _Trip, how: Exchange, compute: Compute, shards: Shards) -> jax.Array:
    """The same in one round, sending only what there is. In memory there is room for the worst case: as a token goes to
    a device but once, a device can get no more than the tokens of all."""
    tokens, devices, me = x.shape[0], trip.counts.size, shards.index(axes.EXPERTS)
    most = tokens * min(devices, trip.device.shape[1])
    order = jnp.argsort(~trip.goes.T.reshape(-1))[:most] % tokens  # by device
    sizes = shards.stack(trip.counts, axes.EXPERTS)  # [from, to]
    sent, got = (jnp.cumsum(sizes, axis=axis) - sizes for axis in (1, 0))  # where they start, there and here
    there, home = (sent[me], sizes[me], got[me], sizes[:, me]), (got[:, me], sizes[:, me], sent[:, me], sizes[me])

    def moved(rows: jax.Array, room: int, where: tuple[jax.Array, ...], fill: int = 0) -> jax.Array:
        return shards.ragged_all_to_all(rows, jnp.full((room, rows.shape[1]), fill, rows.dtype), *where, axes.EXPERTS)

    theirs = moved(routes[order], devices * tokens, there, fill=-1)
    out = _computed(compute, moved(x[order], devices * tokens, there), theirs)
    return moved(out, most, home)[jnp.where(trip.first, sent[me][trip.device] + trip.rank, 0)]


def _computed(compute: Compute, x: jax.Array, routes: jax.Array) -> jax.Array:
    slots, weights = jnp.split(routes, 2, axis=1)
    return compute(x, slots.astype(jnp.int32), weights)
