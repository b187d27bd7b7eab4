"""An EAGLE-3 head drafts (Li et al., NeurIPS 2025, arXiv:2503.01840): see `inferlib.models.eagle3`.

Shapes: B rows; D width of the head; U tokens that it can choose, V that there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepContext
from inferlib.models.eagle3 import AbstractHead
from inferlib.sampling.sampler import Vocabulary
from inferlib.sharding import axes
from inferlib.speculation.drafter import DraftTools
from inferlib.speculation.features import FeatureDrafter


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(FeatureDrafter):
    """See `inferlib.speculation.drafter.ModelDrafter`."""

    head: AbstractHead

    @property
    def model(self) -> AbstractModel:
        return self.head.model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.config.feature_layers

    def fused(self, tools: DraftTools, features: jax.Array) -> jax.Array:
        return tools.module.fuse(features, self.backend.matmul)

    def embedding(self, tools: DraftTools, context: StepContext) -> jax.Array:
        return tools.module.embedding(context.batch.tokens, tools.target.embed[...], context.shards)

    def logits(self, tools: DraftTools, hidden: jax.Array) -> jax.Array:
        """The logits of all tokens; those that the head cannot choose have -inf."""
        head, config, shards = tools.module, self.head.config, tools.shards
        logits = head.logits(hidden, shards, self.backend.matmul)
        if config.model.vocab == config.target_vocab:
            return logits
        logits = shards.gather(logits, axes.VOCAB, dim=1)[:, : config.model.vocab]
        columns = Vocabulary(shards).columns(head.target_ids(jnp.arange(config.model.vocab)), tools.columns)
        none = jnp.full((hidden.shape[0], tools.columns), -jnp.inf, logits.dtype)
        return none.at[:, columns].set(logits, mode="drop")
