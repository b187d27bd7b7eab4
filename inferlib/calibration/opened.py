"""The files of an original model, as a calibration and what is like it take them: layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from inferlib.calibration.layer_weights import Weights
from inferlib.checkpoint.assemble import LoadItem
from inferlib.checkpoint.laid_out import LaidOutWeights
from inferlib.checkpoint.load import load_item, plan_load
from inferlib.checkpoint.shipped import QuantizedSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel
from inferlib.models.families import family_of
from inferlib.sharding.shards import Shards


def unquantized(files: ModelFiles, verb: str) -> ModelFiles:
    """The files, if they hold an original model and a tokenizer. verb: what is to be done with it, such as "calibrate".
    Raises CheckpointError."""
    if isinstance(files.source, QuantizedSource):
        raise CheckpointError(f"{files.path} is quantised already: {verb} the original")
    if isinstance(files.source, LaidOutWeights):
        form = "quantised" if files.source.quantization else "converted"
        raise CheckpointError(f"{files.path} is {form} already: {verb} the original")
    if files.tokenizer is None:
        raise CheckpointError(
            f"{files.path} has no tokenizer, which makes tokens of the text: put tokenizer.json there"
        )
    return files


@dataclass(frozen=True)
class OriginalWeights:
    """The weights of `unquantized` files. model: with float32 weights, as one device stores it."""

    files: ModelFiles
    model: AbstractModel

    @cached_property
    def _items(self) -> dict[int | None, list[LoadItem]]:
        """What to read of the checkpoint, by layer. Raises CheckpointError if it does not hold the model."""
        source, items = self.files.source, {}
        assert not isinstance(source, LaidOutWeights)
        for item in plan_load(source, family_of(self.files.hf), self.model):
            items.setdefault(item.weight.block, []).append(item)
        return items

    def load(self, layer: int | None) -> Weights:
        """The weights of a layer, or those outside the layers, in float32."""
        source, weights = self.files.source, {}
        assert not isinstance(source, LaidOutWeights)
        for item in self._items[layer]:
            (weights[item.weight.part],) = load_item(source, item, self.model, Shards(), lambda _: None, [None])
        return weights
