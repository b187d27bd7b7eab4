"""Turns of keys: for each layer and KV head, a matrix that makes keys easy to round, and that of queries which undoes
it (see `inferlib.ops.calibrated_cells`).

Keys k become k A and queries q become q B with A B^T = I, so that products of both stay what they were. A is chosen for
the error of these products: let S be the sum of q q^T and C of k k^T over a text, behind the rotary embedding. Then
A^T C A and B^T S B are the same diagonal matrix, with its largest entries first. Of all A that makes the trace of one
times the trace of the other least: the error of a product, if all numbers of a cell had the same step. That is the
factors of SmoothQuant (Xiao et al. 2022, https://arxiv.org/abs/2211.10438) as matrices, and the directions that keys
and queries have in common are those of Loki and ResQ. At last each quarter is rotated, so that its channels vary alike.

They are measured once on a text. A model has them as weights if it is loaded for that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from inferlib.models.config import AttentionSpec, ConfigError, ModelConfig
from inferlib.ops.calibrated_cells import QUARTERS

KEY = "key_turns"  # in a config: true of a model that has them
FILE = "key_turns.npz"  # in a model's directory: an array [K, 2, h, h] for each layer that has some, by its number
_TAKE = "take kv_cache_dtype int4"
_LEAST = 1e-3  # of the mean variance of a channel, which is added to each: directions that the text lacks count too


def with_key_turns(config: ModelConfig) -> ModelConfig:
    """The model with turns in all layers that keep keys. Raises ConfigError for layers that borrow a cache, whose
    queries would need the turns of other layers, and for models that repeat layers or have lanes."""
    if config.loop is not None:
        raise ConfigError(f"{config.family} repeats layers, whose keys differ from step to step: {_TAKE}")
    if config.lanes is not None:
        raise ConfigError(f"{config.family} has lanes, for which a cache is not calibrated: {_TAKE}")
    layers = []
    for number, layer in enumerate(config.layers):
        mixer = layer.attention
        if isinstance(mixer, AttentionSpec):
            if mixer.cache_of is not None:
                raise ConfigError(
                    f"layer {number} of this model attends to the cache of another layer, and such a cache is not "
                    f"calibrated: {_TAKE}"
                )
            layer = replace(layer, attention=replace(mixer, key_turns=True))
        layers.append(layer)
    return replace(config, layers=tuple(layers))


def turns_of(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The matrices [2, h, h] float64 for keys and for queries, of the sums [h, h] of k k^T and q q^T of a KV head."""
    size = len(keys)
    tiny = np.finfo(np.float32).tiny
    keys, queries = (x + max(_LEAST * np.trace(x) / size, tiny) * np.eye(size) for x in (keys, queries))
    root, back = _roots(keys)
    variances, directions = np.linalg.eigh(root @ queries @ root)
    variances, directions = variances[::-1], directions[:, ::-1]
    scales = np.maximum(variances, tiny**2) ** 0.25
    rotation = np.kron(np.eye(QUARTERS), _hartley(size // QUARTERS))
    return np.stack([back @ directions * scales @ rotation, root @ directions / scales @ rotation])


def _hartley(size: int) -> np.ndarray:
    """The matrix of Hartley's transform, which is orthogonal and has no large entries, like Hadamard's, but exists for
    every size."""
    angles = 2 * np.pi * np.outer(np.arange(size), np.arange(size)) / size
    return (np.cos(angles) + np.sin(angles)) / np.sqrt(size)


def _roots(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square root of a symmetric positive matrix, and its inverse."""
    values, vectors = np.linalg.eigh(x)
    values = np.sqrt(np.maximum(values, values[-1] * np.finfo(np.float32).eps))
    return vectors * values @ vectors.T, vectors / values @ vectors.T
