"""`calibrate_cache`: what makes a model's keys easy to round, measured on a text (see `inferlib.models.key_turns`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inferlib.calibration.measured import Measurement
from inferlib.checkpoint.layer_arrays import TURNS
from inferlib.model_files import ModelFiles
from inferlib.models.config import AttentionSpec, ConfigError
from inferlib.models.key_turns import turns_of, with_key_turns
from inferlib.ops.int4_cells import unsupported
from inferlib.texts import TextSample


def calibrate_cache(
    model: str | Path,
    *,
    data: str | Path | Sequence[str] | TextSample,
    revision: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Measure on a text how keys and queries vary, and write the turns of both beside the model, where `LLM(model,
    kv_cache_dtype="int4_calibrated")` finds them; returns the file.

    model, revision: as for `LLM`; an unquantised checkpoint with a tokenizer. data: text of the kind that the model
    will see, see `TextSample`; keys turn with their positions, so windows should not be much shorter than prompts.

    Layer by layer: the memory taken is a layer's, and the residual of the text on the host. Raises CheckpointError,
    ConfigError or ConfigurationError before long work, also if the file cannot be written, and OSError for a full disk.
    """
    return _MEASUREMENT.run(model, data, revision=revision, progress=progress)


class _Products:
    """The sums of k k^T and of q q^T for each KV head, over windows of `width` tokens."""

    def __init__(self, width: int):
        self.width = width
        self.keys: Any = 0.0
        self.queries: Any = 0.0

    def add(self, arrays: tuple[jax.Array, ...]) -> None:
        """Keys [N, K, S, h] of N windows, in their first slots, and last their queries [N, K, W, G * h]."""
        keys, queries = (np.asarray(x[:, :, : self.width], np.float64) for x in (arrays[0], arrays[-1]))
        queries = queries.reshape(*keys.shape[:2], -1, keys.shape[-1])
        self.keys = self.keys + np.einsum("nksh,nksi->khi", keys, keys, optimize=True)
        self.queries = self.queries + np.einsum("nksh,nksi->khi", queries, queries, optimize=True)

    def result(self) -> np.ndarray:
        """[K, 2, h, h] float32"""
        return np.stack([turns_of(*of_head) for of_head in zip(self.keys, self.queries, strict=True)]).astype(
            np.float32
        )


def _check(files: ModelFiles) -> None:
    """Raise ConfigError for a model whose cache cannot be calibrated."""
    mixers = [layer.attention for layer in with_key_turns(files.config).layers]
    sizes = {mixer.head_dim for mixer in mixers if isinstance(mixer, AttentionSpec)}
    why = next((why for size in sizes if (why := unsupported(size))), "" if sizes else "no layer keeps keys of heads")
    if why:
        raise ConfigError(f"the cache of {files.config.family} cannot be calibrated: {why}; take kv_cache_dtype int8")


def _statistic(mixer: Any, width: int) -> _Products | None:
    return _Products(width) if isinstance(mixer, AttentionSpec) else None


_MEASUREMENT = Measurement(TURNS, "calibrate", "measuring keys and queries", _check, _statistic, keep_queries=True)
