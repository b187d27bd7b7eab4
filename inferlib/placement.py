"""The placement of experts in slots: it spreads experts over devices by their tokens, and copies the busiest.

Each device of the expert axis takes an equal run of a layer's slots. Weights and two small tables depend on the
placement; programs depend only on the number of slots.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.config import ModelConfig, MoeSpec
from inferlib.option_checks import ConfigurationError
from inferlib.sharding.shards import Shards

_MOST_DEVICES, _MOST_SLOTS = 1 << 14, 1 << 16  # of one layer
TABLES = ("mlp.slots", "mlp.copies")  # the weights of `Moe` that a placement fills


@dataclass(frozen=True)
class ExpertPlacement:
    """layers: the expert in each slot, for each layer with experts in order. The tokens of an expert with several slots
    take turns among them. Raises ConfigurationError if the layers differ in their number of slots."""

    layers: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not self.layers or len(lengths := {len(row) for row in self.layers}) > 1 or lengths == {0}:
            raise ConfigurationError("an expert placement lists, for each layer, the experts of equally many slots")

    @property
    def slots(self) -> int:
        return len(self.layers[0])

    @staticmethod
    def read(path: str | Path) -> ExpertPlacement:
        """A file that `write` made: {"expert_placement": [[0, 1, ...], ...]}. Raises ConfigurationError."""
        return ExpertPlacement(tuple(map(tuple, _read(path, "expert_placement"))))

    def write(self, path: str | Path) -> None:
        _write(path, "expert_placement", self.layers)

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigurationError if this is not a placement for the model."""
        if len(config.mixtures) != len(self.layers):
            raise ConfigurationError(
                f"the expert placement has {len(self.layers)} layers, and the model {len(config.mixtures)} with experts"
            )
        for layer, (row, spec) in enumerate(zip(self.layers, config.mixtures, strict=True)):
            if strange := sorted(set(row) - set(range(spec.experts))):
                raise ConfigurationError(
                    f"layer {layer} of the expert placement has expert {strange[0]}, and the model has 0 to "
                    f"{spec.experts - 1}"
                )
            if missing := sorted(set(range(spec.experts)) - set(row)):
                raise ConfigurationError(
                    f"layer {layer} of the expert placement has no slot for expert {missing[0]}"
                    + (f" and {len(missing) - 1} more" if missing[1:] else "")
                )

    def of(self, model: AbstractModel, weight: WeightSpec) -> tuple[tuple[int, ...], ...]:
        """The expert in each slot, for the layers that a weight belongs to."""
        mixed = [i for i, layer in enumerate(model.config.layers) if isinstance(layer.mlp, MoeSpec)]
        return tuple(self.layers[mixed.index(i)] for i in model.layers_of(weight.block))

    def place(
        self,
        model: AbstractModel,
        weight: WeightSpec,
        shards: Shards,
        formats: Sequence[Format | NamedSharding | None],
    ) -> tuple[jax.Array, ...]:
        """The array of one of TABLES, on its devices. formats: see `load_weights`."""
        rows = np.array(self.of(model, weight))
        if weight.part == "mlp.slots":
            table = np.argsort(rows, axis=1, kind="stable")
        else:
            table = np.stack([np.bincount(row, minlength=weight.shape[-1]) for row in rows])
        array = shards.place(table.reshape(weight.shape).astype(weight.dtype), weight.axes)
        return (jax.device_put(array, formats[0]) if isinstance(formats[0], Format) else array,)


def balanced(load: np.ndarray, devices: int, slots: int | None = None) -> ExpertPlacement:
    """A placement that gives each of `devices` devices about equally many tokens, by greedy choices.

    load [layers, experts]: number of tokens that chose each expert, as `LLM.expert_load` gives it. slots: number of
    slots; by default that of the experts, rounded up to a multiple of the devices. Surplus slots go to copies of the
    experts with the most tokens per copy. Then each copy, the busiest first, goes to the device with the fewest tokens
    so far. Raises ConfigurationError for an impossible load or number of slots.
    """
    load = np.asarray(load, np.float64)
    if load.ndim != 2 or not load.size or not np.isfinite(load).all() or (load < 0).any():
        raise ConfigurationError(f"an expert load is counts [layers, experts], got an array of shape {load.shape}")
    if not 0 < devices <= _MOST_DEVICES or (slots is not None and slots > _MOST_SLOTS):
        raise ConfigurationError(
            f"experts are placed in at most {_MOST_SLOTS} slots on 1 to {_MOST_DEVICES} devices, not in "
            f"{slots or 'as many as there are'} on {devices}"
        )
    experts: int = load.shape[1]
    slots = -(-experts // devices) * devices if slots is None else slots
    if slots < experts or slots % devices:
        raise ConfigurationError(
            f"{slots} slots for {experts} experts do not divide over {devices} devices: take a multiple, such as "
            f"{-(-max(slots, experts) // devices) * devices}"
        )
    return ExpertPlacement(tuple(_balanced_layer(row, devices, slots) for row in load))


def _balanced_layer(load: np.ndarray, devices: int, slots: int) -> tuple[int, ...]:
    copies = np.ones(load.size, np.int64)
    for _ in range(slots - load.size):
        copies[np.argmax(load / copies)] += 1
    each = load / copies
    by_device: list[list[int]] = [[] for _ in range(devices)]
    total = np.zeros(devices)
    for expert in np.argsort(-each, kind="stable").repeat(copies[np.argsort(-each, kind="stable")]):
        free = [d for d in range(devices) if len(by_device[d]) < slots // devices]
        device = min(free, key=lambda d: (expert in by_device[d], total[d], d))
        by_device[device].append(int(expert))
        total[device] += each[expert]
    return tuple(expert for experts in by_device for expert in experts)


def imbalance(load: np.ndarray, placement: ExpertPlacement, devices: int) -> np.ndarray:
    """[layers]: the tokens of the busiest device, relative to the mean over devices."""
    ratios = []
    for row, slots in zip(np.asarray(load, np.float64), placement.layers, strict=True):
        copies = np.bincount(slots, minlength=row.size)
        of_devices = (row / copies)[np.array(slots)].reshape(devices, -1).sum(axis=1)
        ratios.append(of_devices.max() / max(of_devices.mean(), 1e-9))
    return np.array(ratios)


def read_load(path: str | Path) -> np.ndarray:
    """The expert load [layers, experts] that `write_load` wrote. Raises ConfigurationError."""
    rows = _read(path, "expert_load")
    if len({len(row) for row in rows}) != 1:
        raise ConfigurationError(f"{path} must hold one count for each expert of every layer")
    return np.array(rows)


def write_load(path: str | Path, load: np.ndarray) -> None:
    _write(path, "expert_load", load.tolist())


def _read(path: str | Path, name: str) -> list[list[int]]:
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))[name]
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigurationError(f'{path} must be a JSON object with "{name}"') from None
    lists = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not lists or not all(type(n) is int and n >= 0 for row in rows for n in row):
        raise ConfigurationError(f'"{name}" in {path} must be a list of whole numbers for each layer with experts')
    return rows


def _write(path: str | Path, name: str, rows: Sequence[Sequence[int]]) -> None:
    lines = ",\n".join(json.dumps(list(row)) for row in rows)
    Path(path).write_text(f'{{"{name}": [\n{lines}\n]}}\n', encoding="utf-8")
