"""`measure_key_bases`: in which directions a model's keys vary most on a text (see `inferlib.models.key_bases`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inferlib.calibration.forward import LayerwiseForward, devices_for
from inferlib.calibration.opened import OriginalWeights, unquantized
from inferlib.checkpoint.key_bases import path_of, write_key_bases
from inferlib.checkpoint.laid_out import stored_model
from inferlib.model_files import ModelFiles
from inferlib.models.config import ConfigError
from inferlib.models.key_bases import directions, with_key_bases
from inferlib.option_checks import ConfigurationError, check_flag, checked_output
from inferlib.progress import CountProgress, on_terminal
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
    check_flag("progress", progress, optional=True)
    show = on_terminal() if progress is None else progress
    data = data if isinstance(data, TextSample) else TextSample(data)
    if jax.process_count() > 1:
        raise ConfigurationError("bases are measured in one process: start one, without --coordinator")
    files = unquantized(ModelFiles.open(model, revision, progress=show), "measure")
    _check(files)
    checked_output("the file of bases", path_of(files.path))
    assert files.tokenizer is not None
    windows = data.windows(files.tokenizer, files.config.context)
    of_model = stored_model(files.config, "float32", None)
    weights, walk = OriginalWeights(files, of_model), LayerwiseForward(of_model, windows, devices_for(len(windows)))
    walk.begin(weights.load(None))
    bases: dict[int, np.ndarray] = {}
    with CountProgress("measuring keys", len(files.config.layers), show=show) as bar:
        for layer, spec in enumerate(files.config.layers):
            keys = Covariance(windows.shape[1])
            count = directions(spec.attention)
            walk.advance(layer, weights.load(layer), keys.add if count else None)
            if count:
                bases[layer] = keys.leading(count)
            bar.advance(1)
    return write_key_bases(files.path, bases)


class Covariance:
    """The covariance of the keys of each KV head, over windows of `width` tokens."""

    def __init__(self, width: int):
        self.width, self.count = width, 0
        self.sums: Any = 0.0
        self.products: Any = 0.0

    def add(self, arrays: tuple[jax.Array, ...]) -> None:
        """Keys [N, K, S, h] of N windows, in their first slots."""
        keys = np.asarray(arrays[0][:, :, : self.width], np.float64)
        self.count += keys.shape[0] * self.width
        self.sums = self.sums + keys.sum(axis=(0, 2))
        self.products = self.products + np.einsum("nksh,nksi->khi", keys, keys, optimize=True)

    def leading(self, count: int) -> np.ndarray:
        """[K, h, d] float32: the eigenvectors of the d largest eigenvalues, the largest first."""
        mean = self.sums / self.count
        vectors = np.linalg.eigh(self.products / self.count - mean[:, :, None] * mean[:, None])[1]
        return vectors[..., : -count - 1 : -1].astype(np.float32)


def _check(files: ModelFiles) -> None:
    """Raise ConfigError for a model that can have no bases."""
    if not any(directions(layer.attention) for layer in files.config.layers):
        raise ConfigError(
            f"{files.config.family} has no layer that keeps keys of all positions, and so none to measure: leave it out"
        )
    with_key_bases(files.config)
