"""The MTP layer in a model's checkpoint: as DeepSeek-V3 and GLM-4.5 ship it, `model.layers.{L}.` behind the L layers of
the model, with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm` beside what a layer has; as Qwen3-Next does, `mtp.`.

Its copies of the embedding and of the head (`embed_tokens`, `shared_head.head`) are the model's, and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.checkpoint.assemble import LoadItem
from inferlib.checkpoint.load import as_stored, item_of, load_each
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.families.common import Family, MtpNames
from inferlib.models.mtp import AbstractMtp
from inferlib.models.pieces import Piece, assembly
from inferlib.sharding.shards import Shards


def mtp_names(family: Family) -> MtpNames:
    """How models of a family name such a layer. Raises ConfigError if they have none."""
    if family.mtp is None:
        raise ConfigError(
            f"{family.name} has no layer for predicting further tokens as DeepSeek-V3, GLM-4.5 and Qwen3-Next have: "
            "choose another way to draft"
        )
    return family.mtp


@dataclass(frozen=True)
class MtpFiles:
    """The tensors of a model and its MTP layer. names: of the layer's. prefix: how they begin."""

    source: TensorSource
    family: Family
    target: ModelConfig
    names: MtpNames
    prefix: str

    @staticmethod
    def open(source: TensorSource, family: Family, target: ModelConfig) -> MtpFiles:
        """Raises ConfigError for a family that ships such layers in another form, or none, and CheckpointError for a
        checkpoint without the layer."""
        names = mtp_names(family)
        prefix = names.prefix.format(layers=len(target.layers))
        if f"{prefix}{names.projection}.weight" not in set(source.names()):
            raise CheckpointError(
                f"the checkpoint has no layer {prefix} for predicting further tokens: take the original, as copies "
                "often leave it out"
            )
        return MtpFiles(source, family, target, names, prefix)

    def load(
        self,
        mtp: AbstractMtp,
        *,
        shards: Shards = Shards(),  # noqa: B008
        formats: Sequence[Format | NamedSharding | None] | None = None,
    ) -> tuple[jax.Array, ...]:
        """The layer's weights in the order of `mtp.model.specs`, on their devices; formats: see `load_weights`. Raises
        CheckpointError for tensors that are missing or of another shape."""
        family = as_stored(replace(self.family, prefix=self.prefix + self.names.layer), set(self.source.names()))
        items = [self._item(family, mtp, weight) for weight in mtp.model.weights]
        _check(self.source, items)
        return load_each(self.source, items, mtp.model, shards, formats)

    def _item(self, family: Family, mtp: AbstractMtp, weight: WeightSpec) -> LoadItem:
        if weight.block is not None:
            return item_of(family, mtp.model, weight)
        dim, names = self.target.dim, self.names
        modules = {"enorm": names.embedding_norm, "hnorm": names.hidden_norm, "final_norm": names.norm}
        if weight.part == "eh_proj":
            made = assembly(Piece(f"{self.prefix}{names.projection}.weight", (dim, 2 * dim)), "out wide -> wide out")
        else:
            made = assembly(Piece(f"{self.prefix}{modules[weight.part]}.weight", (dim,)), "d -> d")
        return LoadItem(weight, None, (made.pieces,), family.fused_experts, made.arrange)


def _check(source: TensorSource, items: Sequence[LoadItem]) -> None:
    names = set(source.names())
    wanted = {p.tensor: p.stored for item in items for layer in item.pieces for p in layer if p.values is None}
    problems = [f"{name} {shape} is missing" for name, shape in wanted.items() if name not in names]
    problems += [
        f"{name} is {tuple(source.shape(name))} instead of {shape}"
        for name, shape in wanted.items()
        if name in names and tuple(source.shape(name)) != shape
    ]
    if problems:
        raise CheckpointError(f"the checkpoint's layer for predicting further tokens: {'; '.join(problems[:5])}")
