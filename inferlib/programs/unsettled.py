"""What recurrent layers have yet to run between the two programs of a step with drafts.

The first program ends with logits behind each draft, and leaves the states as they were. Which drafts stand, the second
one knows, so it takes what the first read of the tokens, and runs the rules over those that stand: see
`inferlib.models.replay`. Every device has its part of this, which lies along a first axis over all devices.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from inferlib.models.config import ModelConfig
from inferlib.models.recurrent import keeps_state
from inferlib.sharding.shards import Shards

Inputs: TypeAlias = tuple[tuple[jax.Array, ...], ...]  # of each block, see `LayerCache.inputs`


def has_states(model: ModelConfig) -> bool:
    """True if layers of a model keep a state of each row, which does not go back."""
    return any(keeps_state(layer.attention) for layer in model.layers)


def of_device(inputs: Inputs) -> Inputs:
    """The inputs of this device as its part of those of all."""
    return jax.tree.map(lambda x: x[None], inputs)


def on_device(inputs: Inputs) -> Inputs:
    """The inputs of this device."""
    return jax.tree.map(lambda x: x[0], inputs)


def spec_of(shards: Shards) -> PartitionSpec:
    """How arrays of all devices' parts lie on a mesh."""
    assert shards.mesh is not None
    return PartitionSpec(tuple(shards.mesh.axis_names))


def sharding_of(shards: Shards) -> NamedSharding | None:
    """The sharding by `spec_of`; None on a single device."""
    return None if shards.mesh is None else NamedSharding(shards.mesh, spec_of(shards))
