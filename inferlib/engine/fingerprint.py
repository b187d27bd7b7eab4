"""What tells a model's pages from those of others: its configuration, its weights, and the form of a page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from inferlib.cache.disk_tier import MODEL_BYTES
from inferlib.cache.plan import CachePlan
from inferlib.models.abstract import AbstractModel
from inferlib.programs.page_transfer import PageTransfer
from inferlib.programs.start_functions import run
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def fingerprint(
    models: Sequence[AbstractModel], weights: Sequence[jax.Array], plan: CachePlan, transfer: PageTransfer
) -> bytes:
    """Equal for engines whose pages are the same numbers in the same order. models: whose cells pages have. weights:
    theirs, one after the other; all of them are read, on their devices, but for the factors of adapters, which pages
    have in their keys."""
    pairs, at = [], 0
    for model in models:
        pairs += zip(model.base_specs, weights[at:], strict=False)
        at += len(model.specs)
    shards = transfer.shards
    arrays = [[x.axes, x.dtype.name, x.fold, x.shape[x.axes.index(axes.PAGES) + 1 :]] for x in plan.arrays]
    parts: dict[str, Any] = {
        "models": [asdict(model.config) for model in models],
        "weights": [[spec.name, spec.shape, spec.dtype.name] for spec, _ in pairs],
        "page": [plan.page, [group._asdict() for group in transfer.groups], arrays],
        "mesh": [shards.preset, dict(shards.mesh.shape) if shards.mesh is not None else {}],
    }
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True, default=repr).encode(), digest_size=MODEL_BYTES)
    for spec, x in pairs:
        digest.update(np.asarray(run(checksum, (shards, spec.axes), x)).tobytes())
    return digest.digest()


def checksum(shards: Shards, names: tuple[str | None, ...], x: jax.Array) -> jax.Array:
    """uint32 [devices, 2]: two sums of each device's part of x, in which every number counts by its place. names: the
    logical axes of x."""
    if shards.rules is None or shards.mesh is None:
        return _sums(x)
    out = PartitionSpec(tuple(shards.mesh.axis_names), None)
    return jax.shard_map(_sums, mesh=shards.mesh, in_specs=(shards.rules.spec(names),), out_specs=out, check_vma=False)(
        x
    )


def _sums(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    else:
        bits = lax.bitcast_convert_type(x.astype(jnp.int32), jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim, size in enumerate(x.shape):
        place = place * jnp.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    first = _mixed(bits + _mixed(place))
    return jnp.stack([first.sum(dtype=jnp.uint32), _mixed(first ^ place).sum(dtype=jnp.uint32)])[None]


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32 bits after which each depends on all (lowbias32 of Wellons, "Prospecting for hash
    functions")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
