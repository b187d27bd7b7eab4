"""A model's own layer for predicting further tokens drafts (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section
2.2): see `inferlib.models.mtp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepContext
from inferlib.models.mtp import AbstractMtp
from inferlib.speculation.drafter import DraftTools
from inferlib.speculation.features import FeatureDrafter


@dataclass(frozen=True, eq=False)
class MtpDrafter(FeatureDrafter):
    """See `inferlib.speculation.drafter.ModelDrafter`."""

    layer: AbstractMtp

    @property
    def model(self) -> AbstractModel:
        return self.layer.model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.layer.target_layers,)

    def fused(self, tools: DraftTools, features: jax.Array) -> jax.Array:
        """The target's hidden states after its final norm."""
        return tools.target.final_norm(features[:, 0], tools.shards)

    def passed_on(self, tools: DraftTools, hidden: jax.Array) -> jax.Array:
        return tools.module.passed_on(hidden, tools.shards)

    def embedding(self, tools: DraftTools, context: StepContext) -> jax.Array:
        return tools.target.embedding(context)

    def logits(self, tools: DraftTools, hidden: jax.Array) -> jax.Array:
        """The logits by the target's head, behind the layer's own norm."""
        return tools.target.logits(hidden, tools.shards, self.backend.matmul, norm=tools.module.final_norm)
