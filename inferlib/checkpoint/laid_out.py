"""Weights laid out for programs, as Orbax checkpoints: one for each layer, and one for the parts outside the layers.

They are stored as a single device would have them: fused and in the order of the programs, but without the copies and
padding that a mesh needs (see `models.layout`), and layer by layer, whether or not a target stacks them. So any mesh
can restore them: each device reads its part, and neither side needs room for more than a layer beside the weights.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, SingleDeviceSharding

from inferlib.checkpoint.assemble import Heads, expand, heads_of
from inferlib.checkpoint.load import into_stack
from inferlib.checkpoint.load import placement as placement_of
from inferlib.checkpoint.source import CheckpointError, read_json
from inferlib.models.abstract import AbstractModel, ArraySpec, WeightSpec, abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.layer_preferences import KEY as LAYER_PREFERENCES
from inferlib.models.quantization import Quantization
from inferlib.ops.quantized import nbytes
from inferlib.option_checks import check_dtype
from inferlib.placement import TABLES, ExpertPlacement
from inferlib.programs.start_functions import run
from inferlib.progress import ByteProgress
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FORMAT = 2  # of the stored layout: fused arrays and their names
_MANIFEST, _WEIGHTS = "inferlib.json", "weights"
# Arrays are stored in chunks of at most this, so that a device reads little beyond its own part.
_CHUNK_BYTES = 16 << 20


def stored_model(config: ModelConfig, dtype: str, quantization: Quantization | None) -> AbstractModel:
    """The model as `convert` stores it: for one device, without kernels' layouts."""
    return abstract_model(config, dtype, quantization=quantization)


def _of_weights(hf: dict[str, Any]) -> dict[str, Any]:
    """A config without preferences of layers, on which no weight depends: they may be measured later."""
    return {name: value for name, value in hf.items() if name != LAYER_PREFERENCES}


def write_manifest(
    directory: Path, hf: dict[str, Any], model: AbstractModel, quantization: Quantization | None
) -> None:
    """Describe the directory's weights. hf: the config.json by which they were laid out."""
    manifest = {
        "format": FORMAT,
        "dtype": model.dtype.name,
        "quantization": quantization and asdict(quantization),
        "config": _of_weights(hf),
        "weights": _described(model),
    }
    (directory / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def save_weights(directory: Path, weights: Iterable[tuple[WeightSpec, tuple[jax.Array, ...]]]) -> Iterator[int]:
    """Store the arrays of a `stored_model`'s weights, in their order, layer by layer; yields the bytes of each.

    `weights` is consumed as it goes. With several processes, each calls this with its arrays. Raises OSError if the
    writing fails.
    """
    import orbax.checkpoint as ocp

    # A separate thread writes a layer to its end even if Ctrl-C interrupts this thread, so that nothing is being
    # written when the caller cleans up.
    with _checkpointer() as checkpointer, ThreadPoolExecutor(max_workers=1) as writer:
        for block, layer in groupby(weights, key=lambda weight: weight[0].block):
            arrays = {
                spec.part: array for weight, values in layer for spec, array in zip(weight.arrays, values, strict=True)
            }
            options = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            item, failure = ocp.args.StandardSave(arrays, options), ""
            try:
                writer.submit(checkpointer.save, layer_folder(directory, block), args=item).result()
            except jax.errors.JaxRuntimeError:
                raise
            except Exception as error:  # the package raises nothing narrower
                failure = _brief(error)
            if failure:  # not from the error, which would keep the layer's other writes alive
                raise OSError(f"the weights could not be written: {failure}")
            yield sum(nbytes(array.shape, array.dtype) for array in arrays.values())
            del arrays, item  # before the next layer is read


class LaidOutWeights:
    """The weights of a directory that `convert` wrote.

    Raises CheckpointError if its manifest is damaged, of another version of the format, or of another model than its
    config.json (`hf`).
    """

    FILES = (_MANIFEST, _WEIGHTS)  # in the directory, beside the model's description

    def __init__(self, directory: Path, hf: dict[str, Any]):
        self.directory = directory
        file = directory / _MANIFEST
        if not file.exists():
            raise CheckpointError(
                f"{directory} has converted weights, and no {_MANIFEST} that says of what model; "
                "convert the original again"
            )
        try:
            manifest = read_json(file)
            version = manifest["format"]
        except (CheckpointError, KeyError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); convert the original again") from None
        if version != FORMAT:
            raise CheckpointError(
                f"{directory} has weights of format {version!r}, and this version of inferlib reads format {FORMAT}; "
                "convert the original again"
            )
        try:
            check_dtype(manifest["dtype"])
            self.dtype = np.dtype(manifest["dtype"])
            self.quantization = Quantization.from_json(manifest["quantization"])
            self._arrays = {name: _stored_array(*array) for name, array in manifest["weights"].items()}
            config = dict(manifest["config"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged ({error!r}); convert the original again") from None
        if different := _differences(config, _of_weights(hf)):
            raise CheckpointError(
                f"{directory} has weights of another model than its config.json: {different}; "
                "put the right config.json there or convert the original again"
            )

    @staticmethod
    def are_in(directory: Path) -> bool:
        return (directory / _MANIFEST).exists() or (directory / _WEIGHTS).is_dir()

    def names(self) -> Iterable[str]:
        return self._arrays.keys()

    def nbytes(self, name: str) -> int:
        return nbytes(*self._arrays[name])

    def load(
        self,
        model: AbstractModel,
        *,
        placement: ExpertPlacement | None = None,
        shards: Shards,
        formats: Sequence[Format | NamedSharding | None] | None = None,
        progress: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Read the arrays of `model` in the order of `model.specs`; for placement and formats see `load_weights`.

        Weights that are not stored quantised are cast to the model's dtype, or quantised if the model says so. Raises
        CheckpointError if the stored arrays are damaged or belong to another config.
        """
        stored = stored_model(model.config, self.dtype.name, self.quantization)
        if different := _differences(self._arrays, _described(stored)):
            raise CheckpointError(
                f"the weights in {self.directory} are not those of its config.json in this version of inferlib: "
                f"{different}; convert the original again"
            )
        # Stored weights are of one layer each; the target's may be stacks.
        targets = {(i, weight.part): weight for weight in model.weights for i in _layers(model, weight)}
        rest = iter(formats or [None] * len(model.specs))
        places_of = {weight.name: tuple(islice(rest, len(weight.arrays))) for weight in model.weights}
        loaded: dict[str, tuple[jax.Array, ...]] = {
            weight.name: placement.place(model, weight, shards, places_of[weight.name])
            for weight in model.weights
            if placement is not None and weight.part in TABLES
        }
        with (
            _checkpointer() as checkpointer,
            ByteProgress("loading weights", stored.nbytes, show=progress) as bar,
        ):
            for block, group in groupby(stored.weights, key=lambda weight: weight.block):
                weights = tuple(group)
                wanted = {
                    spec.part: _wanted(spec, targets[block, weight.part], shards)
                    for weight in weights
                    for spec in weight.arrays
                }
                arrays = _restore(checkpointer, self.directory, block, wanted)
                for weight in weights:
                    target = targets[block, weight.part]
                    restored = tuple(arrays.pop(spec.part) for spec in weight.arrays)
                    number = 0 if block is None else model.layers_of(target.block).index(block)
                    if placement is not None and axes.EXPERTS in weight.axes:
                        restored = _in_slots(weight, restored, placement.of(model, target)[number], shards)
                    layer, places = _expanded(model, shards, weight, target, restored), places_of[target.name]
                    if target.axes[0] == axes.LAYERS:
                        layer = into_stack(target, shards, places, loaded.get(target.name), number, layer)
                    else:
                        layer = _in_format(layer, places, shards)
                    # The next weight may need the memory of the arrays that this one was made of.
                    loaded[target.name] = jax.block_until_ready(layer)
                    bar.advance(sum(spec.nbytes for spec in weight.arrays))
        return tuple(array for weight in model.weights for array in loaded[weight.name])


def read_layer(directory: Path, weights: Sequence[WeightSpec]) -> dict[str, jax.Array]:
    """The arrays of one layer of a `stored_model`, by their parts, as `save_weights` wrote them. Raises
    CheckpointError if they are damaged."""
    wanted = {spec.part: _wanted(spec, weight, Shards()) for weight in weights for spec in weight.arrays}
    with _checkpointer() as checkpointer:
        return _restore(checkpointer, directory, weights[0].block, wanted)


def layer_folder(directory: Path, block: int | None) -> Path:
    """The folder that `save_weights` writes a layer to. block: None stands for what is outside the layers."""
    return directory.absolute() / _WEIGHTS / ("outside" if block is None else f"layer{block:04d}")


def _restore(
    checkpointer: ocp.Checkpointer, directory: Path, block: int | None, wanted: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    folder = layer_folder(directory, block)
    try:
        return checkpointer.restore(folder, args=ocp.args.StandardRestore(wanted))
    except jax.errors.JaxRuntimeError:
        raise  # of the device, such as too little memory
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"{folder} is damaged; convert the original again ({_brief(error)})") from error


@contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    import orbax.checkpoint as ocp  # takes a third of a second

    with quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        yield checkpointer


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Orbax from printing errors that it also raises, and errors of writes that fail after the first, for which
    nobody waits."""
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    levels = [logger.level for logger in loggers]

    def shown(what: sys.UnraisableHookArgs) -> None:
        if not (what.exc_type is RuntimeError and str(what.exc_value) == "Event loop is closed"):
            hook(what)

    sys.unraisablehook = shown
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _brief(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def _stored_array(shape: Sequence[int], dtype: str) -> tuple[tuple[int, ...], str]:
    """An array's entry in a manifest. Raises TypeError or ValueError for anything else."""
    if not all(type(size) is int and size >= 0 for size in shape) or np.dtype(dtype).hasobject:
        raise ValueError(f"an array of {shape} {dtype}")
    return tuple(shape), dtype


def _described(model: AbstractModel) -> dict[str, tuple[tuple[int, ...], str]]:
    return {spec.name: (spec.shape, spec.dtype.name) for spec in model.specs}


def _layers(model: AbstractModel, weight: WeightSpec) -> Iterable[int | None]:
    return (None,) if weight.block is None else model.layers_of(weight.block)


def _wanted(stored: ArraySpec, target: WeightSpec, shards: Shards) -> jax.ShapeDtypeStruct:
    """The array to restore. Only a weight that is not quantised, and is not going to be, changes its dtype."""
    whole = stored.part == target.part and target.scheme is None
    sharding = placement_of(shards, stored.axes, stored.shape) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(stored.shape, target.dtype if whole else stored.dtype, sharding=sharding)


def _expanded(
    model: AbstractModel, shards: Shards, stored: WeightSpec, target: WeightSpec, arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Add the copies and padding of the model's layout to one layer's weight, and quantise it if the target says so."""
    target = replace(target.of_layer, name="", block=None)
    same = stored.scheme == target.scheme and not target.packed
    if same and [x.shape for x in arrays] == [spec.shape for spec in target.arrays]:
        return arrays
    layer = None if stored.block is None else model.config.layers[stored.block]
    places = tuple(shards.sharding(spec.axes) for spec in target.arrays)
    static = heads_of(model.layout, layer, stored), replace(stored, name="", block=None), target
    return run(expand_all, static, *arrays, place=places)


def _uncommitted(x: jax.Array) -> jax.Array:
    """The array, committed to no device. On CPUs, programs refuse committed arrays of types of less than a byte,
    because JAX misreports their layout, and restored arrays are committed."""
    packed = jax.dtypes.itemsize_bits(x.dtype) < 8 and {d.platform for d in x.sharding.device_set} == {"cpu"}
    return jnp.asarray(np.asarray(x)) if packed else x


def _in_format(
    arrays: Sequence[jax.Array], places: Sequence[Format | NamedSharding | None], shards: Shards
) -> tuple[jax.Array, ...]:
    """The arrays in the layouts of `places`."""
    pairs = zip(arrays, places, strict=True)
    arrays = tuple(jax.device_put(x, place) if isinstance(place, Format) else x for x, place in pairs)
    return arrays if shards.mesh else tuple(map(_uncommitted, arrays))


def _in_slots(
    stored: WeightSpec, arrays: tuple[jax.Array, ...], experts: tuple[int, ...], shards: Shards
) -> tuple[jax.Array, ...]:
    """Put one layer's experts in the order of their slots."""
    order, taken = np.array(experts, np.int32), []
    for spec, x in zip(stored.arrays, arrays, strict=True):
        at = spec.axes.index(axes.EXPERTS)
        place = placement_of(shards, spec.axes, (*x.shape[:at], order.size, *x.shape[at + 1 :]))
        taken.append(run(_take, (at,), x, order, place=place))
    return tuple(taken)


def _take(axis: int, x: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.take(x, order, axis=axis)


def expand_all(
    heads: Heads | None, stored: WeightSpec, target: WeightSpec, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """See `_expanded`. Traceable."""
    whole = replace(target, scheme=stored.scheme, packed=False, float4=False, separate=False)
    expanded = tuple(
        expand(x, spec.axes, spec.shape, heads, fill=float(spec.part.endswith(".scales")))
        for spec, x in zip(whole.arrays, arrays, strict=True)
    )
    return target.packed_arrays(*expanded) if stored.scheme == target.scheme else target.stored(*expanded)


def _differences(stored: dict[str, Any], expected: dict[str, Any], most: int = 5) -> str:
    """List the entries that differ; "" if none does."""
    absent = "absent"
    lines = [
        f"{name} was {stored.get(name, absent)} and is {expected.get(name, absent)}"
        for name in sorted(stored.keys() | expected.keys())
        if stored.get(name, absent) != expected.get(name, absent)
    ]
    return ", ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
