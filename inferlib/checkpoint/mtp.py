"""The MTP layer in a model's checkpoint, as DeepSeek-V3 and GLM-4.5 ship it: `model.layers.{L}.` behind the L layers of
the model, with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm` beside what a layer has.

Its copies of the embedding and of the head (`embed_tokens`, `shared_head.head`) are the model's, and are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.checkpoint.assemble import LoadItem
from inferlib.checkpoint.load import item_of, load_each
from inferlib.checkpoint.source import CheckpointError, TensorSource
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.families.common import Family
from inferlib.models.mtp import AbstractMtp
from inferlib.models.pieces import Piece, assembly
from inferlib.sharding.shards import Shards


def check_mtp(family: Family) -> None:
    """Raise ConfigError unless models of a family have such a layer."""
    if family.prefix.replace("{i}", "{layers}") not in family.drafts:
        raise ConfigError(
            f"{family.name} has no layer for predicting further tokens behind its last one, as DeepSeek-V3 and "
            "GLM-4.5 have: choose another way to draft"
        )


@dataclass(frozen=True)
class MtpFiles:
    """The tensors of a model and its MTP layer. prefix: how the names of the layer's begin."""

    source: TensorSource
    family: Family
    target: ModelConfig
    prefix: str

    @staticmethod
    def open(source: TensorSource, family: Family, target: ModelConfig) -> MtpFiles:
        """Raises ConfigError for a family that ships such layers in another form, or none, and CheckpointError for a
        checkpoint without the layer."""
        check_mtp(family)
        prefix = family.prefix.format(i=len(target.layers))
        if prefix + "eh_proj.weight" not in set(source.names()):
            raise CheckpointError(
                f"the checkpoint has no layer {prefix} for predicting further tokens: take the original, as copies "
                "often leave it out"
            )
        return MtpFiles(source, family, target, prefix)

    def load(
        self,
        mtp: AbstractMtp,
        *,
        shards: Shards = Shards(),  # noqa: B008
        formats: Sequence[Format | NamedSharding | None] | None = None,
    ) -> tuple[jax.Array, ...]:
        """The layer's weights in the order of `mtp.model.specs`, on their devices; formats: see `load_weights`. Raises
        CheckpointError for tensors that are missing or of another shape."""
        items = [self._item(mtp, weight) for weight in mtp.model.weights]
        _check(self.source, items)
        return load_each(self.source, items, mtp.model, shards, formats)

    def _item(self, mtp: AbstractMtp, weight: WeightSpec) -> LoadItem:
        if weight.block is not None:
            return item_of(replace(self.family, prefix=self.prefix), mtp.model, weight)
        dim, part = self.target.dim, weight.part
        if part == "eh_proj":
            made = assembly(Piece(self.prefix + "eh_proj.weight", (dim, 2 * dim)), "out wide -> wide out")
        else:
            name = "shared_head.norm" if part == "final_norm" else part
            made = assembly(Piece(f"{self.prefix}{name}.weight", (dim,)), "d -> d")
        return LoadItem(weight, None, (made.pieces,), self.family.fused_experts, made.arrange)


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
