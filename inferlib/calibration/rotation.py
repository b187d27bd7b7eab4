"""Rotations of the residual stream and of values, merged into weights (Ashkboos et al. 2024, "QuaRot").

A model whose norms have no weights computes the same if its residual is rotated: RMS norms do not change under
rotations, and matrices take them back. A Hadamard rotation spreads outliers over all channels, so that matrices are
easier to round; `spinquant` learns rotations that start from it. Hidden channels of feed-forwards are rotated while the
model runs (`ops.hadamard`), which the weights of dense down projections undo.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.calibration.layer_weights import LayerParts, Weights, values_of
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import ModelConfig
from inferlib.models.quantization import ROTATED
from inferlib.ops.hadamard import hadamard, rotation_matrix
from inferlib.ops.observed import InputSums
from inferlib.option_checks import ConfigurationError
from inferlib.sharding import axes

_SEED = 0
_ONLINE = 128  # inputs that are rotated together while the model runs, as wide as matrix units are; more gained nothing


@cache
def rotation(size: int) -> np.ndarray:
    """An orthogonal matrix [size, size], float64: a Hadamard matrix with random signs, the same at each call; if none
    of the size is known, a random rotation."""
    generator = np.random.default_rng(_SEED)
    signs = hadamard(size)
    if signs is None:
        q, r = np.linalg.qr(generator.standard_normal((size, size)))
        return q * np.sign(np.diag(r))
    return generator.choice([-1.0, 1.0], size)[:, None] * signs / math.sqrt(size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotations:
    """Orthogonal matrices [old, new], float32. residual [D, D]; values: of value heads, [h, h] each, by the numbers of
    the layers where these may be rotated."""

    residual: jax.Array | np.ndarray
    values: Mapping[int, jax.Array | np.ndarray]

    @staticmethod
    def hadamard(layers: Sequence[LayerParts]) -> Rotations:
        """The rotations of `rotation` for a model's layers."""
        sizes = {layer.number: layer.spec.attention.value_dim for layer in layers if layer.rotates_values}
        values = {number: rotation(size).astype(np.float32) for number, size in sizes.items()}
        return Rotations(rotation(layers[0].config.dim).astype(np.float32), values)


def check_rotates(layers: Sequence[LayerParts], outside: set[str], method: str) -> None:
    """Raise ConfigurationError if the model's residual cannot be rotated."""
    fixed = [layer.number for layer in layers if not layer.rotates]
    if fixed or outside - {"embed", "positions", "final_norm", "head", "head_bias"}:
        where = f"layer {fixed[0]}" if fixed else "the embedding"
        raise ConfigurationError(
            f"{method} rotates a residual that only RMS norms without biases read, and {where} of this model does more "
            "with it: take awq+gptq or gptq"
        )


def untied(config: ModelConfig) -> ModelConfig:
    """The rotated model's configuration: the head takes the final norm's weight, so it is not the embedding."""
    return replace(config, tied=False)


def online_rotation(weights: Iterable[WeightSpec]) -> int:
    """How many consecutive inputs of dense down projections are rotated together while the model runs; 0: there are no
    such projections.

    As many as divide those of all of them, so that meshes can split them between rotations.
    """
    sizes = [weight.shape[weight.contracting[-1]] for weight in weights if weight.part in ROTATED]
    rotation = math.gcd(_ONLINE, *sizes) if sizes else 0
    return rotation if rotation > 1 else 0


def rotate_inputs(w: jax.Array, sums: InputSums, size: int) -> tuple[jax.Array, InputSums]:
    """Matrices [E, I, O] and the sums over their inputs, of which each `size` consecutive ones are rotated together."""
    turn = jnp.asarray(rotation_matrix(size), jnp.float32)
    products = _in_runs(_in_runs(sums.products, 1, turn), 2, turn)
    return _in_runs(w, 1, turn), sums._replace(products=products)


def rotate_ahead(w: jax.Array, dim: int, size: int) -> jax.Array:
    """A weight for inputs, along `dim`, of which each `size` consecutive ones are rotated together."""
    return _in_runs(w, dim, jnp.asarray(rotation_matrix(size), jnp.float32))


def rotate_back(w: jax.Array, dim: int, size: int) -> jax.Array:
    """A weight that `rotate_ahead` made, as it was before."""
    return _in_runs(w, dim, jnp.asarray(rotation_matrix(size).T, jnp.float32))


def _in_runs(w: jax.Array, dim: int, turn: jax.Array) -> jax.Array:
    """The weight with each run of a dimension multiplied by a matrix [old, new]."""
    size = turn.shape[0]
    runs = w.reshape(*w.shape[:dim], w.shape[dim] // size, size, *w.shape[dim + 1 :])
    return _along(runs, dim + 1, turn).reshape(w.shape)


def rotate_layer(layer: LayerParts, weights: Weights, rotations: Rotations) -> Weights:
    """A layer's weights in the rotated residual, with its norms' weights folded into what reads them. Traceable."""
    weights, turn = dict(weights), jnp.asarray(rotations.residual)
    for norm in layer.smoothed_norms:
        gain = weights[norm] + float(layer.config.norm.unit_offset)
        weights[norm] = jnp.full_like(gain, 0.0 if layer.config.norm.unit_offset else 1.0)
        for part in layer.readers(norm):
            weights[part] = _along(weights[part], layer.width_dim(part), gain[:, None] * turn)
    for part in layer.writers:
        weights[part] = _along(weights[part], layer.width_dim(part), turn)
    if layer.number in rotations.values:
        turn = jnp.asarray(rotations.values[layer.number])
        for part, place in values_of(layer, weights):
            w = weights[part]
            weights[part] = w.at[place].set(_along(w[place], -1, turn))
        weights["attn.o"] = _along(weights["attn.o"], 2, turn)
    return weights


def rotate_outside(
    config: ModelConfig, specs: Mapping[str, WeightSpec], weights: Weights, rotations: Rotations
) -> Weights:
    """The weights outside the layers, in the rotated residual. specs: of the original model. Traceable."""
    turn = jnp.asarray(rotations.residual)
    rotated = dict(weights)
    for part in ("embed", "positions"):
        if part in weights:
            rotated[part] = _along(weights[part], specs[part].axes.index(axes.EMBED), turn)
    if "final_norm" in weights:
        gain = weights["final_norm"] + float(config.norm.unit_offset)
        head = weights["embed"].T if config.tied else weights["head"]
        rotated["final_norm"] = jnp.full_like(gain, 0.0 if config.norm.unit_offset else 1.0)
        rotated["head"] = _along(head, 0, gain[:, None] * turn)
    return rotated


def _along(w: jax.Array, dim: int, turn: jax.Array) -> jax.Array:
    """The weight with one of its dimensions multiplied by a matrix [old, new]."""
    product = jnp.tensordot(w, turn, axes=((dim,), (0,)), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(product, -1, dim)
