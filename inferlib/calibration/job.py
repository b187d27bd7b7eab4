"""A calibration of one model: its layers are loaded, changed, rounded and written, one after the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.calibration.forward import LayerwiseForward, Recorded
from inferlib.calibration.layer_weights import Weights, layer_parts, specs_of
from inferlib.calibration.low_rank import round_with_branch
from inferlib.calibration.matrices import MatrixForm
from inferlib.calibration.opened import OriginalWeights
from inferlib.calibration.recipe import Recipe
from inferlib.calibration.report import MatrixReport
from inferlib.calibration.rotation import (
    Rotations,
    check_rotates,
    online_rotation,
    rotate_back,
    rotate_inputs,
    rotate_layer,
    rotate_outside,
    untied,
)
from inferlib.calibration.rounding import round_matrix
from inferlib.calibration.smoothing import sites, smooth
from inferlib.calibration.store import Store
from inferlib.checkpoint.laid_out import stored_model
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.families import config_from_hf
from inferlib.models.part_names import first_of_no_part
from inferlib.models.quantization import Quantization
from inferlib.ops.observed import InputSums
from inferlib.option_checks import ConfigurationError, brief
from inferlib.progress import CountProgress


@dataclass(frozen=True)
class Job:
    """A calibration of opened files.

    original, target: the model with float32 weights, and as it is stored. hf: the Hugging Face config of the target.
    rotations: merged into weights; None: there are none.
    """

    files: ModelFiles
    recipe: Recipe
    quantization: Quantization
    original: AbstractModel
    target: AbstractModel
    hf: Mapping[str, Any]
    rotations: Rotations | None = None

    @staticmethod
    def make(files: ModelFiles, recipe: Recipe, quantization: Quantization, dtype: str) -> Job:
        """Raises ConfigurationError if the recipe does not fit the model."""
        config, hf, original = files.config, files.hf, stored_model(files.config, "float32", None)
        rotations = None
        if recipe.rotate:
            outside = {weight.part.removesuffix(".bias") for weight in original.weights if weight.block is None}
            layers = [layer_parts(original, i) for i in range(len(config.layers))]
            check_rotates(layers, outside, recipe.rotate)
            rotations = Rotations.hadamard(layers)
            rotation = online_rotation(original.weights) if recipe.online else 0
            quantization = replace(quantization, rotation=rotation)
            if config.tied:  # the head stays as it was, and is not the embedding
                hf = _untied(hf)
                quantization = replace(quantization, unquantized=("head",))
                config = untied(config)
                if config_from_hf(hf) != config:
                    raise ConfigurationError(
                        f"{recipe.rotate} parts the head from the embedding, which {hf.get('model_type')} models never "
                        "do: take awq+gptq or gptq"
                    )
        quantization = replace(quantization, rank=recipe.rank, branches=recipe.branches)
        target = stored_model(config, dtype, quantization)
        if not any(weight.scheme for weight in target.weights):
            raise ConfigurationError("the model has no matrices to quantise")
        _check_branches(quantization, target)
        job = Job(files, recipe, quantization, original, target, hf, rotations)
        if recipe.smooth and not any(job.has_sites(i) for i in range(len(config.layers))):
            raise ConfigurationError(
                f"{recipe.smooth} moves factors into norms, values and feed-forwards, and this model has none that "
                "take them: take gptq or clip"
            )
        return job

    @property
    def config_json(self) -> str:
        return json.dumps(self.hf, indent=2)

    def has_sites(self, layer: int) -> bool:
        parts = layer_parts(self.target, layer)
        return any(sites(parts, {part for part, spec in parts.specs.items() if spec.scheme}))

    # ---- the run

    def run(self, windows: np.ndarray, store: Store, bar: CountProgress, devices: int = 1) -> None:
        """Quantise every layer, and then what is outside. devices: how many share the windows."""
        walk = LayerwiseForward(stored_model(self.target.config, "float32", None), windows, devices)
        outside = self.outside_weights()
        recorded = walk.begin(outside, [part for part in self.quantized(None) if part != "head"])
        for layer in range(len(self.target.config.layers)):
            if store.has(layer):
                weights = self.read(store, layer)
            else:
                weights, reports = self.layer(layer, walk, store)
                bar.note(f"layer {layer}: " + ", ".join(f"{r.part} {r.loss:.5f}" for r in reports))
            walk.advance(layer, weights)
            bar.advance(1)
        if store.has(None):
            return
        if "head" in self.quantized(None):
            recorded |= walk.end(outside, ["head"])
        self.finish(None, outside, _by_part(recorded), store)

    def layer(self, layer: int, walk: LayerwiseForward, store: Store) -> tuple[Weights, list[MatrixReport]]:
        """Quantise a layer and write it. Returns its weights as they were rounded."""
        weights = self.load(layer)
        parts = layer_parts(self.target, layer)
        if self.rotations is not None:
            weights = rotate_layer(parts, weights, self.rotations)
        sums = _by_part(walk.record(layer, weights, self.quantized(layer)))
        if self.recipe.smooth is not None:
            scheme = self.quantization.scheme
            weights, sums = smooth(parts, weights, sums, self.recipe.smooth, scheme, self.target.dtype)
        return self.finish(layer, weights, sums, store)

    def finish(
        self, layer: int | None, weights: Weights, sums: Mapping[str, InputSums], store: Store
    ) -> tuple[Weights, list[MatrixReport]]:
        """Round a layer's weights, and write them."""
        arrays, reports = [], []
        for spec in specs_of(self.target, layer):
            w = weights[spec.part]
            if spec.scheme is None:
                arrays.append((spec, (jnp.asarray(w, spec.dtype),)))
                continue
            stored, report = _round(spec, layer, w, sums.get(spec.part), self.recipe)
            arrays.append((spec, tuple(map(jnp.asarray, stored))))
            reports.append(report)
        store.write(arrays, reports)
        return {spec.part: _dequantized(spec, values) for spec, values in arrays}, reports

    # ---- weights

    def quantized(self, layer: int | None) -> list[str]:
        """The parts of a layer that are quantised; None: outside the layers."""
        return [spec.part for spec in specs_of(self.target, layer) if spec.scheme]

    @cached_property
    def _originals(self) -> OriginalWeights:
        return OriginalWeights(self.files, self.original)

    def load(self, layer: int | None) -> Weights:
        """The original weights of a layer, float32. Raises CheckpointError if the checkpoint lacks them."""
        return self._originals.load(layer)

    def outside_weights(self) -> Weights:
        """The weights outside the layers, rotated if the recipe says so; those that are not quantised as they will be
        stored."""
        weights = self.load(None)
        if self.rotations is not None:
            specs = {spec.part: spec for spec in specs_of(self.original, None)}
            weights = rotate_outside(self.files.config, specs, weights, self.rotations)
        return {
            spec.part: weights[spec.part]
            if spec.scheme
            else jnp.asarray(weights[spec.part], spec.dtype).astype("float32")
            for spec in specs_of(self.target, None)
        }

    def read(self, store: Store, layer: int) -> Weights:
        """The weights of a layer that is done."""
        specs = specs_of(self.target, layer)
        arrays = store.read(specs)
        return {spec.part: _dequantized(spec, [arrays[array.part] for array in spec.arrays]) for spec in specs}


def _check_branches(quantization: Quantization, target: AbstractModel) -> None:
    """Raise ConfigurationError for a rank that is too high, and for branches of parts that cannot have one."""
    for weight in target.weights:
        if weight.rank >= (least := min(MatrixForm.of(weight).sizes[1:])) and weight.rank:
            raise ConfigurationError(
                f"lowrank:{weight.rank} is no low rank of {weight.part}, a side of which has {least}: lower it"
            )
    if not quantization.branches:
        return
    everywhere = stored_model(target.config, str(target.dtype), replace(quantization, branches=()))
    parts = sorted({weight.part for weight in everywhere.weights if weight.rank})
    if (name := first_of_no_part(quantization.branches, parts)) is not None:
        raise ConfigurationError(
            f"lowrank:{quantization.rank}:{brief(name)} names no matrix that can have a branch; those that can are "
            f"{', '.join(parts)}"
        )


def _by_part(recorded: Recorded) -> dict[str, InputSums]:
    return {name: sums for names, sums in recorded.items() for name in names}


def _dequantized(spec: WeightSpec, arrays: Sequence[jax.Array]) -> jax.Array:
    """A stored weight as float32 numbers, for inputs that are not rotated."""
    values = [np.asarray(array).astype(np.float32) for array in arrays]
    if spec.scheme is None:
        return jnp.asarray(values[0])
    shared = spec.contracting if spec.scheme.group is None else (spec.contracting[-1] + 1,)
    whole = jnp.asarray((values[0] * np.expand_dims(values[1], shared)).reshape(spec.shape))
    if spec.rank:
        a, b = map(jnp.asarray, values[-2:])
        whole = whole + jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
    return rotate_back(whole, spec.contracting[-1], spec.scheme.rotation) if spec.scheme.rotation else whole


def _round(
    spec: WeightSpec, layer: int | None, w: jax.Array, sums: InputSums | None, recipe: Recipe
) -> tuple[tuple[np.ndarray, ...], MatrixReport]:
    """The arrays of a rounded weight, and what was lost."""
    scheme, form = spec.scheme, MatrixForm.of(spec)
    assert scheme is not None
    count, inputs, _ = form.sizes
    if sums is None:  # a product that nothing records
        zeros = jnp.zeros((count, inputs))
        sums = InputSums(jnp.zeros((count, inputs, inputs)), zeros, zeros, jnp.zeros((count,)))
    matrices, values, scales, totals, factors = form.matrices(w), [], [], np.zeros(3), ()
    if scheme.rotation:
        matrices, sums = rotate_inputs(matrices, sums, scheme.rotation)
    for matrix, products, tokens in zip(matrices, sums.products, np.asarray(sums.counts), strict=True):
        h = products / max(float(tokens), 1.0)
        if not bool(jnp.all(jnp.isfinite(h)) & jnp.all(jnp.isfinite(matrix))):
            raise CheckpointError(
                f"{spec.name} or its inputs on the text are not finite: the weights are damaged, or the text is not of "
                "the model's kind"
            )
        if spec.rank:
            rounded, branch = round_with_branch(matrix, h, scheme, form.group(scheme), recipe.rounding, spec.rank)
            factors = form.factors(*map(np.asarray, branch))
        else:
            rounded = round_matrix(matrix, h, scheme, form.group(scheme), recipe.rounding)
        square = jnp.sum(matrix * jnp.matmul(h, matrix, precision=jax.lax.Precision.HIGHEST))
        lost = [float(x) for x in (jnp.sum(rounded.losses), jnp.sum(rounded.nearest), square)]
        totals += np.asarray(lost) * float(tokens)
        values.append(np.asarray(rounded.values))
        scales.append(np.asarray(rounded.scales))
    loss, nearest, square = totals
    counts = np.asarray(sums.counts)
    shares = [float(max(x, 0.0) / square) if square > 0 else 0.0 for x in (loss, nearest)]
    report = MatrixReport(layer, spec.part, *shares, tokens=int(counts.min()), idle=int(np.sum(counts == 0)))
    return (*form.stored(scheme, np.stack(values), np.stack(scales)), *factors), report


def _untied(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config of a model whose head is not its embedding."""
    changed = {**hf, "tie_word_embeddings": False}
    if isinstance(hf.get("text_config"), Mapping):
        changed["text_config"] = {**hf["text_config"], "tie_word_embeddings": False}
    return changed
