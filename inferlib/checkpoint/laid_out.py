"""Weights laid out for programs, as Orbax checkpoints: one per layer, and one of what is outside the layers.

They are stored as a single device would hold them: fused and in the order of the programs, but without the copies and
padding that a mesh needs (see `models.layout`), and layer by layer, whether or not a target stacks them. So any mesh
can restore them, of which each device reads its own part, and neither side holds more than a layer beside the weights.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, SingleDeviceSharding

from inferlib.checkpoint.assemble import expand
from inferlib.checkpoint.load import into_stack, new_stack, placement
from inferlib.checkpoint.source import CheckpointError
from inferlib.compile.functions import run
from inferlib.models.abstract import AbstractModel, WeightSpec, abstract_model
from inferlib.models.config import ModelConfig
from inferlib.progress import ByteProgress
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FORMAT = 1  # of the stored layout: fused arrays and their names
_MANIFEST, _WEIGHTS = "inferlib.json", "weights"
# Arrays are stored in chunks of at most this, so that a device reads little beyond its own part.
_CHUNK_BYTES = 16 << 20


def stored_model(config: ModelConfig, dtype: str) -> AbstractModel:
    """The model whose weights are stored."""
    return abstract_model(config, dtype)


def write_manifest(directory: Path, hf: dict[str, Any], model: AbstractModel) -> None:
    """Say what the directory holds. hf: the config.json that the weights were laid out by."""
    manifest = {
        "format": FORMAT,
        "dtype": model.specs[0].dtype.name,
        "config": hf,
        "weights": {spec.name: spec.shape for spec in model.specs},
    }
    (directory / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def save_weights(directory: Path, weights: Iterable[tuple[WeightSpec, jax.Array]]) -> Iterator[int]:
    """Store weights of a `stored_model` in the order of its specs, layer by layer; yields the bytes of each.

    `weights` is consumed as it goes. With several processes, each calls this with its arrays. Raises OSError if the
    writing fails.
    """
    import orbax.checkpoint as ocp

    # In a thread of its own a layer is written to its end when Ctrl-C interrupts this one, so that nothing is still
    # being written when the caller cleans up.
    with _checkpointer() as checkpointer, ThreadPoolExecutor(max_workers=1) as writer:
        for block, layer in groupby(weights, key=lambda weight: weight[0].block):
            arrays = {spec.part: array for spec, array in layer}
            options = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            try:
                item = ocp.args.StandardSave(arrays, options)
                writer.submit(checkpointer.save, _folder(directory, block), args=item).result()
            except jax.errors.JaxRuntimeError:
                raise
            except Exception as error:  # the package raises nothing narrower
                raise OSError(f"the weights could not be written: {_brief(error)}") from error
            yield sum(array.nbytes for array in arrays.values())
            del arrays, item  # before the next layer is read


class LaidOutWeights:
    """The weights of a directory that `convert` wrote.

    Raises CheckpointError if its manifest is damaged, of another version of the format, or of another model than its
    config.json (`hf`).
    """

    def __init__(self, directory: Path, hf: dict[str, Any]):
        self.directory = directory
        file = directory / _MANIFEST
        if not file.exists():
            raise CheckpointError(
                f"{directory} has converted weights, and no {_MANIFEST} that says of what model; "
                "convert the original again"
            )
        try:
            manifest = json.loads(file.read_bytes())
            version = manifest["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged ({error!r}); convert the original again") from None
        if version != FORMAT:
            raise CheckpointError(
                f"{directory} has weights of format {version!r}, and this version of inferlib reads format {FORMAT}; "
                "convert the original again"
            )
        try:
            self.dtype = np.dtype(manifest["dtype"])
            self._shapes = {name: tuple(shape) for name, shape in manifest["weights"].items()}
            config = dict(manifest["config"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged ({error!r}); convert the original again") from None
        if different := _differences(config, hf):
            raise CheckpointError(
                f"{directory} has weights of another model than its config.json: {different}; "
                "put the right config.json there or convert the original again"
            )

    @staticmethod
    def are_in(directory: Path) -> bool:
        return (directory / _MANIFEST).exists() or (directory / _WEIGHTS).is_dir()

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def nbytes(self, name: str) -> int:
        return int(np.prod(self._shapes[name])) * self.dtype.itemsize

    def load(
        self,
        model: AbstractModel,
        *,
        shards: Shards,
        formats: Sequence[Format | NamedSharding | None] | None = None,
        progress: bool = False,
    ) -> tuple[jax.Array, ...]:
        """The weights of `model` in the order of `model.specs`, cast to its dtype; formats as for `load_weights`.

        Raises CheckpointError if the stored arrays are damaged or not those of its config.
        """
        stored = stored_model(model.config, self.dtype.name)
        if different := _differences(self._shapes, {spec.name: spec.shape for spec in stored.specs}):
            raise CheckpointError(
                f"the weights in {self.directory} are not those of its config.json in this version of inferlib: "
                f"{different}; convert the original again"
            )
        # A layer's weight: the target's specs are of one layer or of a stack of them.
        targets = {(i, spec.part): n for n, spec in enumerate(model.specs) for i in _layers(model, spec)}
        formats = list(formats or [None] * len(model.specs))
        weights: list[jax.Array | None] = [None] * len(model.specs)
        with (
            _checkpointer() as checkpointer,
            ByteProgress("loading weights", stored.nbytes, show=progress) as bar,
        ):
            for block, group in groupby(stored.specs, key=lambda spec: spec.block):
                specs = tuple(group)
                wanted = {s.part: _wanted(s, model.specs[targets[block, s.part]].dtype, shards) for s in specs}
                arrays = self._restore(checkpointer, block, wanted)
                for spec in specs:
                    n = targets[block, spec.part]
                    target = model.specs[n]
                    layer = _expanded(model, shards, target, block, arrays.pop(spec.part))
                    if target.axes[0] == axes.LAYERS:
                        place = formats[n] or shards.sharding(target.axes)
                        stack = weights[n] if weights[n] is not None else new_stack(place, target)
                        layer = into_stack(place, stack, model.layers_of(target.block).index(block), layer)
                    elif isinstance(formats[n], Format):
                        layer = jax.device_put(layer, formats[n])
                    weights[n] = layer.block_until_ready()  # the next may need the memory of what it was made of
                    bar.advance(spec.nbytes)
        return tuple(weights)

    def _restore(
        self, checkpointer: ocp.Checkpointer, block: int | None, wanted: dict[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        folder = _folder(self.directory, block)
        try:
            return checkpointer.restore(folder, args=ocp.args.StandardRestore(wanted))
        except jax.errors.JaxRuntimeError:
            raise  # of the device, such as too little memory
        except Exception as error:  # the package raises nothing narrower
            raise CheckpointError(f"{folder} is damaged; convert the original again ({_brief(error)})") from error


@contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    import orbax.checkpoint as ocp  # takes a third of a second

    # Orbax also logs what it raises, with the traces of its threads.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            yield checkpointer
    finally:
        logger.setLevel(level)


def _brief(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def _folder(directory: Path, block: int | None) -> Path:
    return directory.absolute() / _WEIGHTS / ("outside" if block is None else f"layer{block:04d}")


def _layers(model: AbstractModel, spec: WeightSpec) -> Iterable[int | None]:
    return (None,) if spec.block is None else model.layers_of(spec.block)


def _wanted(stored: WeightSpec, dtype: np.dtype, shards: Shards) -> jax.ShapeDtypeStruct:
    sharding = placement(shards, stored.axes, stored.shape) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(stored.shape, dtype, sharding=sharding)


def _expanded(model: AbstractModel, shards: Shards, target: WeightSpec, block: int | None, x: jax.Array) -> jax.Array:
    """One layer's weight with the copies and padding of the model's layout."""
    names, shape = target.axes, target.shape
    if names[0] == axes.LAYERS:
        names, shape = names[1:], shape[1:]
    if x.shape == shape:
        return x
    spec = None if block is None else model.config.layers[block]
    return run(expand, (model.layout, spec, names), x, place=shards.sharding(names))


def _differences(stored: dict[str, Any], given: dict[str, Any], most: int = 5) -> str:
    """What differs, "" if nothing does."""
    absent = "absent"
    lines = [
        f"{name} was {stored.get(name, absent)} and is {given.get(name, absent)}"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name, absent) != given.get(name, absent)
    ]
    return ", ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
