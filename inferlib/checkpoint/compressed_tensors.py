"""A laid-out model as compressed-tensors files, which transformers and vLLM load, and this library too.

Every weight is taken apart into the tensors that its checkpoint had. Quantised ones become the values and scales of
https://github.com/vllm-project/compressed-tensors: integers packed ("pack-quantized"), or as they are where inputs are
rounded too ("int-quantized", "float-quantized").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.checkpoint.assemble import LoadItem
from inferlib.checkpoint.experts import of_expert
from inferlib.checkpoint.safetensors import write_safetensors
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.ops.quantized import Scheme
from inferlib.option_checks import ConfigurationError

_SCHEMES = {"int8": ("int", 8), "int4": ("int", 4), "float8_e4m3fn": ("float", 8)}


@dataclass(frozen=True)
class Numbers:
    """A weight as it is stored: values of a scheme, and scales spread over them; or whole numbers, without scales.
    Both have the weight's shape."""

    values: np.ndarray
    scales: np.ndarray | None = None

    @property
    def whole(self) -> np.ndarray:
        """The numbers themselves."""
        return self.values if self.scales is None else self.values.astype(np.float32) * self.scales

    @staticmethod
    def of(weight: WeightSpec, arrays: Sequence[np.ndarray]) -> Numbers:
        """arrays: those of `WeightSpec.arrays`, without a branch."""
        if weight.scheme is None:
            return Numbers(np.asarray(arrays[0]))
        values, scales = (np.asarray(array) for array in arrays)
        at = weight.contracting[-1]
        if weight.scheme.group is None:
            return Numbers(values, np.broadcast_to(np.expand_dims(scales, weight.contracting), weight.shape))
        spread = np.broadcast_to(np.expand_dims(scales, at + 1), values.shape)
        return Numbers(values.reshape(weight.shape), spread.reshape(weight.shape))


def must_fit(model: AbstractModel, items: Sequence[LoadItem]) -> None:
    """Raise ConfigurationError if a model's weights have no form among compressed-tensors. items: see `Writer`."""
    for item in items:
        if item.arrange is None and len(item.pieces[0][0].shape) > 2:
            raise ConfigurationError(
                f"{item.pieces[0][0].tensor} has all experts of a layer, and compressed-tensors files have each alone: "
                "use the directory with inferlib"
            )
    quantized = [weight for weight in model.weights if weight.scheme]
    for weight in quantized:
        scheme = weight.scheme
        assert scheme is not None
        in_groups = scheme.group is not None and scheme.values != "int4"
        if scheme.values not in _SCHEMES or scheme.scales == "float8_e8m0fnu" or in_groups:
            raise ConfigurationError(
                "compressed-tensors files have int4, int8, int8_a8, fp8 and fp8_a8: quantise to one of these"
            )
        if weight.rank or scheme.rotation:
            raise ConfigurationError(
                "compressed-tensors files have no branch of low rank and rotate no inputs: quantise without lowrank, "
                "and with hadamard:merged or spinquant:merged instead of hadamard or spinquant"
            )


@dataclass
class Writer:
    """Writes a model's tensors to a directory, a file for each layer.

    items: how weights are made of tensors. Scales and numbers that are not quantised have the model's dtype.
    """

    directory: Path
    model: AbstractModel
    items: Sequence[LoadItem]
    files: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    nbytes: int = 0

    def write(self, block: int | None, weights: Iterable[tuple[WeightSpec, Numbers]]) -> None:
        """Write a layer's weights; None: those outside the layers. Raises OSError if that fails."""
        tensors: dict[str, np.ndarray] = {}
        items = {item.weight.name: item for item in self.items}
        for name, numbers in taken_apart((items[weight.name], numbers) for weight, numbers in weights):
            tensors |= self._tensors(name, numbers)
        file = f"model-{'outside' if block is None else f'layer-{block:04d}'}.safetensors"
        write_safetensors(self.directory / file, tensors)
        self.files |= dict.fromkeys(tensors, file)
        self.nbytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, hf: Mapping[str, Any]) -> None:
        """Write the index, and the config.json of a Hugging Face config."""
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": self.files}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        dtypes = dict.fromkeys(name for name in ("dtype", "torch_dtype") if name in hf) or {"dtype": None}
        config = {**hf, **dict.fromkeys(dtypes, self.model.dtype.name), "quantization_config": self._description()}
        (self.directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @property
    def _scheme(self) -> Scheme:
        return next(weight.scheme for weight in self.model.weights if weight.scheme)

    @property
    def _group(self) -> int | None:
        """Inputs that share a scale: as many in all tensors, as files have one number for them."""
        scheme, weights = self._scheme, [weight for weight in self.model.weights if weight.scheme]
        if scheme.group is None:
            return None
        return math.gcd(*(scheme.group_of(weight.shape[weight.contracting[-1]]) for weight in weights))

    def _tensors(self, name: str, numbers: Numbers) -> dict[str, np.ndarray]:
        """A tensor [out, in] of a checkpoint as files have it."""
        module, values, scales = name.removesuffix(".weight"), numbers.values, numbers.scales
        if scales is None or name == _HEAD:
            whole = numbers.whole
            if whole.ndim == 2:
                self.ignored.append(module)
            return {name: np.ascontiguousarray(whole.astype(self.model.dtype))}
        group = self._group or values.shape[1]
        shared = scales.reshape(len(scales), -1, group)
        if np.any(shared != shared[..., :1]) or values.shape[1] % 8:
            raise ConfigurationError(
                f"{name} {values.shape} has groups that compressed-tensors files do not have: quantise to int8 or fp8"
            )
        tensors = {f"{module}.weight_scale": np.ascontiguousarray(shared[..., 0].astype(self.model.dtype))}
        if not self._packs:
            return {f"{module}.weight": np.ascontiguousarray(values), **tensors}
        shape = np.array(values.shape, np.int64)
        return {f"{module}.weight_packed": _packed(values), f"{module}.weight_shape": shape, **tensors}

    @property
    def _packs(self) -> bool:
        return self._scheme.values.startswith("int") and not self._scheme.round_inputs

    def _description(self) -> dict[str, Any]:
        scheme, group = self._scheme, self._group
        kind, bits = _SCHEMES[scheme.values]
        common = {"num_bits": bits, "type": kind, "symmetric": True}
        weights = common | {"strategy": "channel" if group is None else "group", "group_size": group, "dynamic": False}
        inputs = common | {"strategy": "token", "dynamic": True} if scheme.round_inputs else None
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self._packs else f"{kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "ignore": sorted({*self.ignored, "lm_head"}),
        }


_HEAD = "lm_head.weight"  # loaders take it as it is


def _packed(values: np.ndarray) -> np.ndarray:
    """Integers [out, in] as int32 [out, in * bits / 32]: codes from the lowest bits on, with an offset of half their
    range."""
    bits = jax.dtypes.itemsize_bits(values.dtype)
    codes = (values.astype(np.int16) + (1 << bits - 1)).astype(np.uint32).reshape(len(values), -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(codes << shifts, axis=-1).view(np.int32)


def taken_apart(weights: Iterable[tuple[LoadItem, Numbers]]) -> Iterator[tuple[str, Numbers]]:
    """The checkpoint's tensors by name, of weights that may each be a part of one."""
    made: dict[str, list[tuple[np.ndarray, Numbers]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for item, numbers in weights:
        if item.arrange is None:
            yield from _experts(item, numbers)
            continue
        # Where each element came from: the pieces' elements are numbered, and laid out as the elements were.
        starts, counted = [0], []
        for piece in item.pieces[0]:
            rows = piece.rows or (0, piece.shape[0])
            shape = (rows[1] - rows[0], *piece.shape[1:])
            counted.append(np.arange(starts[-1], starts[-1] + math.prod(shape), dtype=np.int32).reshape(shape))
            starts.append(starts[-1] + math.prod(shape))
        order = np.asarray(item.arrange(*map(jnp.asarray, counted))).reshape(-1)
        for piece, (low, high) in zip(item.pieces[0], pairwise(starts), strict=True):
            if piece.values is not None:
                continue
            here = slice(None) if len(counted) == 1 else (order >= low) & (order < high)
            first = (piece.rows[0] if piece.rows else 0) * math.prod(piece.shape[1:])
            places = order[here] + (first - low)
            if piece.transposed:
                places = places % piece.shape[1] * piece.shape[0] + places // piece.shape[1]
            scales = None if numbers.scales is None else numbers.scales.reshape(-1)[here]
            made.setdefault(piece.tensor, []).append((places, Numbers(numbers.values.reshape(-1)[here], scales)))
            shapes[piece.tensor] = piece.stored
    for name, parts in made.items():
        yield name, _together(name, shapes[name], parts)


def _experts(item: LoadItem, numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
    """The tensors of each expert, [out, in] or [out]. numbers: [E, 2, D, F], [E, F, D], or of biases."""
    pieces, count = item.pieces[0], len(numbers.values)
    for expert in range(count):
        tensors = of_expert(pieces, expert, count)
        for half, piece in enumerate(tensors):
            at = (expert, half) if item.weight.part.removesuffix("_bias").endswith("gate_up") else (expert,)
            values, scales = (None if x is None else x[at].T for x in (numbers.values, numbers.scales))
            assert values is not None
            yield piece.tensor, Numbers(values, scales)


def _together(name: str, shape: tuple[int, ...], parts: Sequence[tuple[np.ndarray, Numbers]]) -> Numbers:
    """One tensor of its parts; whole numbers if only some of them are quantised."""
    size, scaled = math.prod(shape), all(numbers.scales is not None for _, numbers in parts)
    there = np.zeros(size, bool)
    for places, _ in parts:
        there[places] = True
    if not there.all() or sum(len(places) for places, _ in parts) != size:
        raise ConfigurationError(
            f"{name} is not made of weights alone, so it cannot be written as compressed-tensors: use inferlib alone"
        )
    kinds = {numbers.values.dtype for _, numbers in parts} if scaled else {np.dtype(np.float32)}
    values = np.empty(size, kinds.pop())
    scales = np.empty(size, np.float32) if scaled else None
    for where, numbers in parts:
        if scales is not None and numbers.scales is not None:
            values[where], scales[where] = numbers.values, numbers.scales
        else:
            values[where] = numbers.whole
    return Numbers(values.reshape(shape), None if scales is None else scales.reshape(shape))
