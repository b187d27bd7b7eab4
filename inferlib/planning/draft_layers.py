"""What a layer that drafts takes, as a model of one layer: an EAGLE-3 head, or a model's own for further tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from inferlib.models.abstract import AbstractModel
from inferlib.models.config import ModelConfig
from inferlib.models.eagle3 import Eagle3Config, abstract_head
from inferlib.models.mtp import abstract_mtp, layer_like
from inferlib.models.quantization import Quantization
from inferlib.models.recurrent import keeps_state
from inferlib.planning.collectives import Collective
from inferlib.planning.costs import Deployed, Matrix, Memory, step_time
from inferlib.planning.drafts import Drafts
from inferlib.programs.keys import ProgramKey
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards


@dataclass(frozen=True)
class DeployedLayer(Deployed):
    """A layer on the mesh of the model that it drafts for.

    config: of the layer alone. target_config: of that model. head: of EAGLE-3; None: the layer is the model's own, and
    uses its head.
    """

    target_config: ModelConfig | None = None
    head: Eagle3Config | None = None

    @staticmethod
    def of(target: Deployed, head: Eagle3Config | None) -> DeployedLayer:
        """The layer on a target's mesh. Heads are not quantised."""
        config = target.config
        one = replace(config, layers=(layer_like(config),)) if head is None else head.model
        quantization = target.quantization if head is None else None
        formats = quantization, target.kv_cache_dtype
        return DeployedLayer(one, target.target, target.parallel, *formats, target_config=config, head=head)

    @cached_property
    def model(self) -> AbstractModel:
        if self.head is not None:
            return _abstract_head(self.head, self.parallel)
        assert self.target_config is not None
        return _abstract_mtp(self.target_config, self.parallel, self.quantization)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of the layer, and the head that it takes from its target."""
        return super().matrices + self._borrowed

    @cached_property
    def _borrowed(self) -> tuple[Matrix, ...]:
        if self.head is not None:
            return ()
        whole = Deployed(self.config, self.target, self.parallel, self.quantization).matrices
        return tuple(matrix for matrix in whole if matrix.use == "sampled")

    def memory(self, batch: int, max_len: int, chunk: int) -> Memory:
        """The memory of the layer, without what belongs to the target."""
        whole = super().memory(batch, max_len, chunk)
        return replace(whole, weights=whole.weights - sum(matrix.nbytes for matrix in self._borrowed))

    def _collectives(self, key: ProgramKey) -> tuple[Collective, ...]:
        """The collectives of a model of this one layer: of its embedding, its branches and its head."""
        return Deployed(self.config, self.target, self.parallel, self.quantization)._collectives(key)


# A plan asks for a layer with each number of rows and drafts.
@lru_cache(maxsize=256)
def _abstract_head(head: Eagle3Config, parallel: Parallelism) -> AbstractModel:
    return abstract_head(head, "bfloat16", shards=planned_shards(parallel)).model


@lru_cache(maxsize=256)
def _abstract_mtp(config: ModelConfig, parallel: Parallelism, quantization: Quantization | None) -> AbstractModel:
    return abstract_mtp(config, "bfloat16", quantization=quantization, shards=planned_shards(parallel)).model


def drafting_seconds(drafting: Deployed, rows: int, live: float, count: int) -> float:
    """Seconds that `count` drafts of each row take.

    The first step of them also runs tokens that were generated since the last one: the token before the last, or all of
    them where a draft keeps states or reads features, up to as many as were verified.
    """
    recurrent = any(keeps_state(layer.attention) for layer in drafting.config.layers)
    before = count if recurrent or isinstance(drafting, DeployedLayer) else 1
    first, each = (step_time(drafting.decode(rows, live, drafts=n), drafting.network).seconds for n in (before, 0))
    return first + (count - 1) * each


def drafting_of(drafts: Drafts, target: Deployed) -> Deployed | None:
    """What drafts on a target's mesh; None if no model or layer does."""
    if drafts.model is not None:
        return replace(target, config=drafts.model)
    return DeployedLayer.of(target, drafts.head) if drafts.speculation.by_model else None
