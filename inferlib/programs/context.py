"""What the functions of a program are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.programs.keys import ProgramKey
from inferlib.programs.row_state import RowState
from inferlib.sampling.sampler import Vocabulary
from inferlib.sharding import axes
from inferlib.speculation.drafter import ModelDrafter

BRANCHES_ARE_CHEAP = ("cpu", "tpu")  # platforms; GPUs wait for the host at each, Trainium has none


@dataclass(frozen=True)
class ProgramContext:
    """What `build` gets. drafter: a model that drafts, whose weights and cache lie behind the model's."""

    model: AbstractModel
    plan: CachePlan
    config: EngineConfig
    key: ProgramKey
    drafter: ModelDrafter | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.config.shards)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states a model that drafts reads."""
        return () if self.drafter is None else self.drafter.feature_layers

    @property
    def branches_are_cheap(self) -> bool:
        return self.config.platform in BRANCHES_ARE_CHEAP

    @property
    def sampling_mode(self) -> Literal["greedy", "sample", "logprobs"]:
        mode = self.key.mode
        assert mode in ("greedy", "sample", "logprobs")
        return mode

    def any_row(self, x: jax.Array) -> jax.Array:
        """Whether any row of any replica, [..., R] -> [...]; the replicas stay in step."""
        return self.config.shards.max(jnp.any(x, axis=-1).astype(jnp.int32), axes.ROWS) > 0

    def with_room(self, rows: RowState) -> RowState:
        """The rows, of which those are inactive that wait for their cache to be compacted."""
        if (policy := self.config.compacted) is None:
            return rows
        return rows._replace(active=rows.active & (rows.length < policy.compacts_at))
