"""Rotations of the residual stream and of values, merged into weights (Ashkboos et al. 2024, "QuaRot").

A model whose norms have no weights computes the same if its residual is rotated: RMS norms do not change under
rotations, and matrices take them back. A Hadamard rotation spreads outliers over all channels, so that matrices are
easier to round. The feed-forward's hidden channels would need a rotation while the model runs, and stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.calibration.layer_weights import LayerParts, Weights, values_of
from inferlib.config import ConfigurationError
from inferlib.models.abstract import WeightSpec
from inferlib.models.config import ModelConfig
from inferlib.sharding import axes

_SEED = 0


@cache
def rotation(size: int) -> np.ndarray:
    """An orthogonal matrix [size, size], float64: a Hadamard matrix with random signs, the same at each call; if none
    of the size is known, a random rotation."""
    generator = np.random.default_rng(_SEED)
    hadamard = _hadamard(size)
    if hadamard is None:
        q, r = np.linalg.qr(generator.standard_normal((size, size)))
        return q * np.sign(np.diag(r))
    return generator.choice([-1.0, 1.0], size)[:, None] * hadamard / math.sqrt(size)


def _hadamard(size: int) -> np.ndarray | None:
    """A Hadamard matrix of +-1: a Kronecker product of Sylvester's and Paley's."""
    if size == 1:
        return np.ones((1, 1))
    for order in range(size, 1, -1):
        if size % order == 0 and (factor := _factor(order)) is not None:
            rest = _hadamard(size // order)
            if rest is not None:
                return np.kron(factor, rest)
    return None


def _factor(order: int) -> np.ndarray | None:
    """Sylvester's matrix of order 2, or Paley's first of order q + 1, for a prime q that is 3 modulo 4."""
    if order == 2:
        return np.array([[1.0, 1.0], [1.0, -1.0]])
    q = order - 1
    if order % 4 or q % 2 == 0 or any(q % n == 0 for n in range(3, math.isqrt(q) + 1, 2)) or q > 200:
        return None
    residues = {i * i % q for i in range(1, q)}
    character = np.array([0.0] + [1.0 if i in residues else -1.0 for i in range(1, q)])
    matrix = np.eye(order)
    matrix[0, 1:], matrix[1:, 0] = 1.0, -1.0
    matrix[1:, 1:] += character[(np.arange(q)[None, :] - np.arange(q)[:, None]) % q]
    return matrix


def check_rotates(layers: list[LayerParts], outside: set[str]) -> None:
    """Raise ConfigurationError if the model's residual cannot be rotated."""
    fixed = [layer.number for layer in layers if not layer.rotates]
    if fixed or outside - {"embed", "positions", "final_norm", "head", "head_bias"}:
        where = f"layer {fixed[0]}" if fixed else "the embedding"
        raise ConfigurationError(
            f"hadamard rotates a residual that only RMS norms without biases read, and {where} of this model does more "
            "with it: take awq+gptq or gptq"
        )


def untied(config: ModelConfig) -> ModelConfig:
    """The rotated model's configuration: the head takes the final norm's weight, so it is not the embedding."""
    return replace(config, tied=False)


def rotate_layer(layer: LayerParts, weights: Weights) -> Weights:
    """A layer's weights in the rotated residual, with its norms' weights folded into what reads them."""
    weights, width = dict(weights), layer.config.dim
    turn = jnp.asarray(rotation(width), jnp.float32)
    for norm in layer.smoothed_norms:
        gain = weights[norm] + float(layer.config.norm.unit_offset)
        weights[norm] = jnp.full_like(gain, 0.0 if layer.config.norm.unit_offset else 1.0)
        for part in layer.readers(norm):
            weights[part] = _along(weights[part], layer.width_dim(part), gain[:, None] * turn)
    for part in layer.writers:
        weights[part] = _along(weights[part], layer.width_dim(part), turn)
    if layer.rotates_values:
        turn = jnp.asarray(rotation(layer.spec.attention.value_dim), jnp.float32)
        for part, place in values_of(layer, weights):
            w = weights[part]
            weights[part] = w.at[place].set(_along(w[place], -1, turn))
        weights["attn.o"] = _along(weights["attn.o"], 2, turn)
    return weights


def rotate_outside(config: ModelConfig, specs: dict[str, WeightSpec], weights: Weights) -> Weights:
    """The weights outside the layers, in the rotated residual. specs: of the original model."""
    turn = jnp.asarray(rotation(config.dim), jnp.float32)
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
