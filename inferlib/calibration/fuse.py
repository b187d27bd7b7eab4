"""Fuse the feed-forwards of a model that follow one another, and measure on a text what that changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from inferlib.calibration.forward import LayerwiseForward
from inferlib.calibration.opened import OriginalWeights, unquantized
from inferlib.checkpoint.laid_out import quiet, save_weights, stored_model, write_manifest
from inferlib.conversion import output_directory
from inferlib.evaluation.statistics import Mean, Scores
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.ffn_fusion import KEY, fused_config, fused_layers, fused_weights
from inferlib.option_checks import ConfigurationError, check_dtype, check_flag, checked_output
from inferlib.platforms import prepare_jax
from inferlib.progress import CountProgress, on_terminal
from inferlib.tables import Part, Tables
from inferlib.texts import TextSample


@dataclass(frozen=True)
class FusionReport(Tables):
    """The result of `fuse_feed_forwards`: `print` shows it.

    before, after: layers of the original and of the fused model. nbytes: of all weights. tokens: of the text.
    divergence: of the fused model's next tokens from the original's (Kullback-Leibler), in nats; agreement: how often
    both find the same token most likely. Both are of the weights before they are rounded.
    """

    out: Path
    before: int
    after: int
    nbytes: int
    tokens: int
    divergence: Mean
    agreement: Mean

    def parts(self) -> Sequence[Part]:
        table = Table("layers", "fused", "divergence, nats", "same token", title=str(self.out))
        same = f"{self.agreement.value:.1%}"
        table.add_row(str(self.before), str(self.after), self.divergence.text(4), same)
        return [table]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self) | {"out": str(self.out)}


def fuse_feed_forwards(
    model: str | Path,
    out: str | Path,
    *,
    data: str | Path | Sequence[str] | TextSample,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    revision: str | None = None,
    progress: bool | None = None,
) -> FusionReport:
    """Write a model to the directory `out` in which feed-forwards that follow one another are one, side by side.

    A step has fewer and wider products. Feed-forwards that were trained one after the other give other results, which
    the text tells; see `inferlib.models.ffn_fusion`. model, revision, dtype, quantization: as for `convert`; an
    unquantised checkpoint with a tokenizer. data: see `TextSample`. One layer is in memory at a time, beside the text's
    residuals. Raises CheckpointError, ConfigError or ConfigurationError before anything is written, and OSError if the
    writing fails.
    """
    prepare_jax()
    check_dtype(dtype)
    check_flag("progress", progress, optional=True)
    out, show = checked_output("out", out), on_terminal() if progress is None else progress
    sample = data if isinstance(data, TextSample) else TextSample(data)
    if jax.process_count() > 1:
        raise ConfigurationError("feed-forwards are fused in one process: start one, without --coordinator")
    files = unquantized(ModelFiles.open(model, revision, progress=show), "fuse")
    scheme = files.quantization(quantization)
    assert files.tokenizer is not None
    windows = sample.windows(files.tokenizer, files.config.context)
    config, hf = fused_config(files.config), {**files.hf, KEY: True}
    stored = stored_model(config, dtype, scheme)
    fusion = _Fusion(files, stored, windows)
    bar = CountProgress("fusing layers", len(config.layers), show=show)
    with quiet(), output_directory(out, stored.nbytes) as directory, bar:
        for _ in save_weights(directory, fusion.weights(bar)):
            pass
        divergence, agreement = fusion.scores()
        files.save_description(directory)
        (directory / "config.json").write_text(json.dumps(hf, indent=2), encoding="utf-8")
        write_manifest(directory, hf, stored, scheme)
    return FusionReport(
        out, len(files.config.layers), len(config.layers), stored.nbytes, windows.size, divergence, agreement
    )


class _Fusion:
    """Both models, layer by layer, on the same windows [N, W]. target: the fused model as it is stored."""

    def __init__(self, files: ModelFiles, target: AbstractModel, windows: np.ndarray):
        self.config, self.target, self.windows = files.config, target, windows
        original, fused = (stored_model(config, "float32", None) for config in (files.config, target.config))
        self.walks = LayerwiseForward(original, windows), LayerwiseForward(fused, windows)
        self.originals = OriginalWeights(files, original)
        self._outside = self.originals.load(None)

    def weights(self, bar: CountProgress) -> Iterator[tuple[WeightSpec, tuple[jax.Array, ...]]]:
        """The fused model's weights as they are stored, while the windows run through both models."""
        before, after = self.walks
        for walk in self.walks:
            walk.begin(self._outside)
        groups = fused_layers(self.config)
        for block, specs in groupby(self.target.weights, key=lambda spec: spec.block):
            values = self._outside
            if block is not None:
                layers = [self.originals.load(number) for number in groups[block]]
                for number, layer in zip(groups[block], layers, strict=True):
                    before.advance(number, layer)
                values = fused_weights(self.config, layers)
                after.advance(block, values)
                bar.advance(1)
            for spec in specs:
                yield spec, spec.stored(values[spec.part])

    def scores(self) -> tuple[Mean, Mean]:
        """Divergence and agreement of the two models, once all layers have run."""
        base, logits = (walk.logits(self._outside) for walk in self.walks)
        scores = [Scores.of(*window) for window in zip(self.windows, logits, base, strict=True)]
        divergences = [score.divergence for score in scores if score.divergence is not None]
        agreements = [score.agreement for score in scores if score.agreement is not None]
        return Mean.of(divergences), Mean.of(agreements)
