"""Tables of embeddings whose rows are split over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def look_up(table: jax.Array, ids: jax.Array, shards: Shards) -> jax.Array:
    """Rows `ids` [T] of a table [V, ...]: of this device's share of the vocabulary, zeros for the other tokens."""
    if shards.size(axes.VOCAB) == 1:
        return jnp.take(table, ids, axis=0, mode="clip")
    ids = ids - shards.index(axes.VOCAB) * table.shape[0]
    own = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(own[:, None], jnp.take(table, ids, axis=0, mode="clip"), 0)
