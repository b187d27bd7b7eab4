"""`measure_key_bases`: in which directions a model's keys vary most on a text (see `inferlib.models.key_bases`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inferlib.calibration.measured import Measurement
from inferlib.checkpoint.layer_arrays import BASES
from inferlib.model_files import ModelFiles
from inferlib.models.config import ConfigError
from inferlib.models.key_bases import directions, with_key_bases
from inferlib.texts import TextSample


def measure_key_bases(
    model: str | Path,
    *,
    data: str | Path | Sequence[str] | TextSample,
    revision: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Measure the bases on a text, and write them beside the model, where `LLM(model, attention_pages="loki:64")` finds
    them; returns the file.

    model, revision: as for `LLM`; an unquantised checkpoint with a tokenizer. data: text of the kind that the model
    will see, see `TextSample`. Of each layer and KV head the basis has the leading principal components of the keys as
    the cache has them, behind their rotary embedding, a quarter of a head's size.

    Layer by layer: the memory taken is a layer's, and the residual of the text on the host. Raises CheckpointError,
    ConfigError or ConfigurationError before long work, also if the file cannot be written, and OSError for a full disk.
    """
    return _MEASUREMENT.run(model, data, revision=revision, progress=progress)


class Covariance:
    """The covariance of each KV head's keys over windows of `width` tokens, and its `directions` leading directions."""

    def __init__(self, width: int, directions: int):
        self.width, self.directions, self.count = width, directions, 0
        self.sums: Any = 0.0
        self.products: Any = 0.0

    def add(self, arrays: tuple[jax.Array, ...]) -> None:
        """Keys [N, K, S, h] of N windows, in their first slots."""
        keys = np.asarray(arrays[0][:, :, : self.width], np.float64)
        self.count += keys.shape[0] * self.width
        self.sums = self.sums + keys.sum(axis=(0, 2))
        self.products = self.products + np.einsum("nksh,nksi->khi", keys, keys, optimize=True)

    def result(self) -> np.ndarray:
        """[K, h, d] float32: the eigenvectors of the d largest eigenvalues, the largest first."""
        mean = self.sums / self.count
        vectors = np.linalg.eigh(self.products / self.count - mean[:, :, None] * mean[:, None])[1]
        return vectors[..., : -self.directions - 1 : -1].astype(np.float32)


def _check(files: ModelFiles) -> None:
    """Raise ConfigError for a model that can have no bases."""
    if not any(directions(layer.attention) for layer in files.config.layers):
        raise ConfigError(
            f"{files.config.family} has no layer that keeps keys of all positions, and so none to measure: leave it out"
        )
    with_key_bases(files.config)


def _statistic(mixer: Any, width: int) -> Covariance | None:
    return Covariance(width, count) if (count := directions(mixer)) else None


_MEASUREMENT = Measurement(BASES, "measure", "measuring keys", _check, _statistic)
