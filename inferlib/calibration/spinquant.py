"""Rotations that are learned from Hadamard's (Liu et al. 2024, "SpinQuant", https://arxiv.org/abs/2405.16406).

The rotations are those that `rotation` merges into weights. They are learned by Cayley SGD, so that the model whose
rotated weights are rounded to nearest says what the original does: the loss is the KL divergence of next tokens'
distributions. (The paper's is the cross entropy of the texts, with inputs of products rounded as well.) Gradients go
straight through the rounding. The whole model is in memory, in float32, with its gradients.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from inferlib.calibration.cayley import cayley_sgd
from inferlib.calibration.compiled import compiled
from inferlib.calibration.layer_weights import Weights, layer_parts, specs_of
from inferlib.calibration.rotation import Rotations, rotate_ahead, rotate_layer, rotate_outside
from inferlib.checkpoint.npz import write_npz
from inferlib.checkpoint.source import CheckpointError
from inferlib.distillation.data import rows_of_step
from inferlib.distillation.loop import product_dtype
from inferlib.finetuning.losses import divergence
from inferlib.finetuning.whole_rows import has_gradients, hidden_states
from inferlib.models.abstract import AbstractModel, WeightSpec, abstract_model
from inferlib.ops.fake_quantized import FakeQuantizedWeight, straight_through
from inferlib.ops.quantized import quantize
from inferlib.option_checks import ConfigurationError
from inferlib.progress import CountProgress

# Of the first step; it falls to 0 by the last one. By the paper's 1.5 the loss of SmolLM2-135M in int4 fell less.
_RATE = 0.2
_STEP_TOKENS = 512  # of the windows of a step
_MEASURED = 2048  # tokens that the loss is measured on, before and after


@dataclass(frozen=True)
class Learned:
    """Learned rotations. before, after: the loss by Hadamard's rotations and by these, in nats."""

    rotations: Rotations
    before: float
    after: float

    def save(self, file: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        arrays: dict[str, Any] = {"residual": self.rotations.residual, "loss": [self.before, self.after]}
        arrays |= {f"values.{layer}": turn for layer, turn in self.rotations.values.items()}
        write_npz(file, arrays)

    @staticmethod
    def load(file: Path) -> Learned:
        """Raises CheckpointError if the file is damaged."""
        try:
            with np.load(file) as arrays:
                numbers = [name.removeprefix("values.") for name in arrays.files if name.startswith("values.")]
                rotations = Rotations(arrays["residual"], {int(n): arrays[f"values.{n}"] for n in numbers})
                before, after = arrays["loss"].tolist()
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile):
            raise CheckpointError(f"{file} is damaged: remove {file.parent} to begin anew") from None
        return Learned(rotations, before, after)


@dataclass(frozen=True, eq=False)
class Learning:
    """What learns a model's rotations. original, target: the model with float32 weights, and as it will be stored.
    first: Hadamard's rotations, from which learning starts. steps: of the optimizer."""

    original: AbstractModel
    target: AbstractModel
    first: Rotations
    steps: int

    def check(self, window: int) -> None:
        """Raise ConfigurationError for a model whose layers have no gradients in windows of so many tokens."""
        shapes: Any = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in self.original.specs]
        tokens = jax.ShapeDtypeStruct((1, window), jnp.int32)
        if not has_gradients(self.loss, self.first, shapes, tokens):
            raise ConfigurationError(
                f"spinquant learns by gradients, and {self.original.config.family} has layers without gradients, loops "
                "that run as often as the device says: take hadamard"
            )

    def learned(self, file: Path, load: Callable[[int | None], Weights], windows: np.ndarray, *, show: bool) -> Learned:
        """The rotations of a file; if there is none, those that are learned now, and written to it. load: the weights
        of a layer, or by None of what is outside the layers."""
        if not file.exists():
            loaded = {block: load(block) for block in dict.fromkeys(spec.block for spec in self.original.weights)}
            weights = [loaded[spec.block][spec.part] for spec in self.original.weights]
            self.learn(weights, windows, show=show).save(file)
        return Learned.load(file)

    def learn(self, weights: Sequence[jax.Array], windows: np.ndarray, *, show: bool) -> Learned:
        """Learn rotations on windows [N, W] of tokens. weights: the original's. Raises CheckpointError if the loss is
        not finite."""
        count = min(len(windows), max(1, _STEP_TOKENS // windows.shape[1]))
        optimizer = cayley_sgd(optax.linear_schedule(_RATE, 0.0, self.steps))
        rotations: Rotations = jax.tree.map(jnp.asarray, self.first)
        state = optimizer.init(rotations)  # pyright: ignore[reportArgumentType]
        tested = self._tested(windows, count)

        @compiled()
        def step(rotations, state, weights, tokens):
            loss, gradients = jax.value_and_grad(self.loss)(rotations, weights, tokens)
            updates, state = optimizer.update(gradients, state, rotations)
            return optax.apply_updates(rotations, updates), state, loss

        loss_of = compiled()(self.loss)

        def measured(rotations: Rotations) -> float:
            mean = float(np.mean([loss_of(rotations, weights, tokens) for tokens in tested]))
            if not np.isfinite(mean):
                raise CheckpointError(
                    "the model's loss on the text is not finite: the weights are damaged, or the text "
                    "is not of the model's kind"
                )
            return mean

        before = measured(rotations)
        with CountProgress("learning rotations", self.steps, show=show) as bar:
            for number in range(self.steps):
                tokens = rows_of_step(windows, number, count, seed=0)
                rotations, state, loss = step(rotations, state, weights, tokens)
                bar.note(f"step {number}: KL {float(loss):.4f}")
                bar.advance(1)
        rotations = jax.tree.map(_orthogonal, rotations)
        return Learned(rotations, before, measured(rotations))

    def _tested(self, windows: np.ndarray, count: int) -> list[np.ndarray]:
        """The windows that the loss is measured on, spread over all, `count` at once."""
        batches = max(1, min(len(windows), _MEASURED // windows.shape[1]) // count)
        return np.split(windows[np.linspace(0, len(windows) - 1, batches * count).astype(int)], batches)

    # ---- the loss

    def loss(self, rotations: Rotations, weights: Sequence[jax.Array], tokens: jax.Array) -> jax.Array:
        """The mean KL divergence, from the original, of the model whose rotated weights are rounded to nearest; on rows
        [B, T]. weights: the original's. Traceable."""
        dtype = product_dtype(None)
        student = abstract_model(self.target.config, dtype)
        rounded = hidden_states(student, self.rounded(rotations, weights, student), tokens)
        teacher = abstract_model(self.original.config, dtype)
        return divergence(rounded, hidden_states(teacher, [w.astype(teacher.dtype) for w in weights], tokens))

    def rotated(self, rotations: Rotations, weights: Sequence[jax.Array]) -> dict[int | None, Weights]:
        """The weights of each layer and, by None, those outside the layers, in the rotated residual. Traceable."""
        rotated: dict[int | None, Weights] = {}
        for spec, weight in zip(self.original.weights, weights, strict=True):
            rotated.setdefault(spec.block, {})[spec.part] = weight
        outside = {spec.part: spec for spec in specs_of(self.original, None)}
        for layer, of_layer in rotated.items():
            if layer is None:
                rotated[layer] = rotate_outside(self.original.config, outside, of_layer, rotations)
            else:
                rotated[layer] = rotate_layer(layer_parts(self.original, layer), of_layer, rotations)
        return rotated

    def rounded(
        self, rotations: Rotations, weights: Sequence[jax.Array], dense: AbstractModel
    ) -> list[jax.Array | FakeQuantizedWeight]:
        """The weights by which the dense model computes what the target will. Traceable."""
        rotated = self.rotated(rotations, weights)
        return [_rounded(spec, rotated[spec.block][spec.part], dense.dtype) for spec in self.target.weights]


def _rounded(spec: WeightSpec, w: jax.Array, dtype: np.dtype) -> jax.Array | FakeQuantizedWeight:
    """A rotated weight as its product will have it, rounded to nearest if it is quantised."""
    if spec.scheme is None:
        return w.astype(dtype)
    if spec.scheme.rotation:
        w = rotate_ahead(w, spec.contracting[-1], spec.scheme.rotation)
    nearest = quantize(w, spec.contracting, spec.scheme).dequantized(spec.contracting, jnp.float32).reshape(w.shape)
    return FakeQuantizedWeight(straight_through(w, nearest).astype(dtype), spec.scheme)


def _orthogonal(x: jax.Array) -> np.ndarray:
    """The matrix without what rounding has added in many steps, by a step of Newton's iteration in float64."""
    turn = np.asarray(x, np.float64)
    return (1.5 * turn - 0.5 * turn @ (turn.T @ turn)).astype(np.float32)
