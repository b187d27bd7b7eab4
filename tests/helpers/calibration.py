"""For tests of calibration: a job on a checkpoint, and a model's logits from the weights of its layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from inferlib.calibration.forward import LayerwiseForward
from inferlib.calibration.job import Job
from inferlib.calibration.layer_weights import Weights
from inferlib.calibration.recipe import Recipe
from inferlib.checkpoint.laid_out import stored_model
from inferlib.model_files import ModelFiles
from inferlib.models.quantization import Quantization


def job_of(path: Path, method: str, scheme: str) -> Job:
    quantization = Quantization.named(scheme)
    return Job.make(ModelFiles.open(path), Recipe.read(method, quantization), quantization, "float32")


def logits_of(job: Job, windows: np.ndarray, weights_of: Callable[[int, LayerwiseForward], Weights]) -> np.ndarray:
    """[N, W, V]: of a job's target, each layer's weights from a function of its number and what runs before it."""
    walk = LayerwiseForward(stored_model(job.target.config, "float32", None), windows)
    outside = job.outside_weights()
    walk.begin(outside)
    for layer in range(len(job.target.config.layers)):
        walk.advance(layer, weights_of(layer, walk))
    return walk.logits(outside)
