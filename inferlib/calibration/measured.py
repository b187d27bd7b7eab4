"""What is measured of a model's cells on a text, layer by layer, and kept in a file beside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from inferlib.calibration.forward import LayerwiseForward, devices_for
from inferlib.calibration.opened import OriginalWeights, unquantized
from inferlib.checkpoint.laid_out import stored_model
from inferlib.checkpoint.layer_arrays import LayerArrays
from inferlib.model_files import ModelFiles
from inferlib.option_checks import ConfigurationError, check_flag, checked_output
from inferlib.platforms import prepare_jax
from inferlib.progress import CountProgress, on_terminal
from inferlib.texts import TextSample


class Statistic(Protocol):
    """What is summed up over a layer's cells."""

    def add(self, arrays: tuple[jax.Array, ...]) -> None:
        """Take the arrays of the layer's cache, [N, K, S, ...], of N windows, which are in their first slots."""
        ...

    def result(self) -> np.ndarray:
        """The array of the layer, float32."""
        ...


@dataclass(frozen=True)
class Measurement:
    """What is measured. arrays: the file that it becomes. verb, title: what is done, in errors and on the bar. check:
    raises ConfigError for a model that cannot have it. statistic: of a layer's mixer, for windows of so many tokens;
    None: nothing is measured of the layer. keep_queries: see `LayerwiseForward`."""

    arrays: LayerArrays
    verb: str
    title: str
    check: Callable[[ModelFiles], None]
    statistic: Callable[[Any, int], Statistic | None]
    keep_queries: bool = False

    def run(
        self,
        model: str | Path,
        data: str | Path | Sequence[str] | TextSample,
        *,
        revision: str | None,
        progress: bool | None,
    ) -> Path:
        """Measure a model on a text; returns the file. Raises CheckpointError, ConfigError or ConfigurationError before
        long work, also if the file cannot be written, and OSError for a full disk."""
        prepare_jax()
        check_flag("progress", progress, optional=True)
        show = on_terminal() if progress is None else progress
        data = data if isinstance(data, TextSample) else TextSample(data)
        if jax.process_count() > 1:
            raise ConfigurationError(f"to {self.verb} takes one process: start one, without --coordinator")
        files = unquantized(ModelFiles.open(model, revision, progress=show), self.verb)
        self.check(files)
        checked_output(f"the file {self.arrays.file}", self.arrays.path_of(files.path))
        assert files.tokenizer is not None
        windows = data.windows(files.tokenizer, files.config.context)
        of_model, devices = stored_model(files.config, "float32", None), devices_for(len(windows))
        weights, measured = OriginalWeights(files, of_model), dict[int, np.ndarray]()
        walk = LayerwiseForward(of_model, windows, devices, keep_queries=self.keep_queries)
        walk.begin(weights.load(None))
        with CountProgress(self.title, len(files.config.layers), show=show) as bar:
            for layer, spec in enumerate(files.config.layers):
                statistic = self.statistic(spec.attention, windows.shape[1])
                walk.advance(layer, weights.load(layer), None if statistic is None else statistic.add)
                if statistic is not None:
                    measured[layer] = statistic.result()
                bar.advance(1)
        return self.arrays.write(files.path, measured)
