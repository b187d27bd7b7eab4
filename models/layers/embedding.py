"""Tables of embeddings whose rows are split over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def look_up(table: jax.Array, ids: jax.Array, shards: Shards) -> jax.Array:
    """Rows `ids` [T] of a table [V, ...]; zeros for tokens outside this device's shard of the vocabulary."""
    if shards.size(axes.VOCAB) == 1:
        return jnp.take(table, ids, axis=0, mode="clip")
    ids = ids - shards.index(axes.VOCAB) * table.shape[0]
    local = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(local[:, None], jnp.take(table, ids, axis=0, mode="clip"), 0)
