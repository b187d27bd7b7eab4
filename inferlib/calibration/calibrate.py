"""`calibrate`: quantise a model by what its matrices multiply on a text, layer by layer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from inferlib.calibration.forward import devices_for
from inferlib.calibration.job import Job
from inferlib.calibration.opened import unquantized
from inferlib.calibration.recipe import Recipe
from inferlib.calibration.report import CalibrationReport
from inferlib.calibration.store import ROTATIONS, opened
from inferlib.checkpoint.laid_out import write_manifest
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import ConfigError
from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError, check_dtype, check_flag, checked_output
from inferlib.platforms import prepare_jax
from inferlib.progress import CountProgress, on_terminal
from inferlib.texts import TextSample

if TYPE_CHECKING:
    from inferlib.calibration.spinquant import Learning


def calibrate(
    model: str | Path,
    out: str | Path,
    *,
    data: str | Path | Sequence[str] | TextSample,
    method: str = "gptq",
    scheme: str = "int4",
    dtype: str = "bfloat16",
    revision: str | None = None,
    progress: bool | None = None,
) -> CalibrationReport:
    """Quantise a model by a text, and write it to the directory `out`, which `LLM(out)` loads on any mesh.

    model, revision: as for `LLM`; an unquantised checkpoint with a tokenizer. data: text of the kind that the model
    will see, see `TextSample`. method: "nearest", "clip" (searched scales), "gptq", "awq", "smoothquant" (for
    schemes that round inputs by token), "hadamard", "hadamard:merged" (no rotation while the model runs), "spinquant"
    (learned rotations; "spinquant:100" in 100 steps, "spinquant:merged"), "lowrank:16" (a branch of rank 16) or
    "lowrank:16:mlp" (beside matrices of the feed-forward alone: parts, or how their names begin, with commas), and
    several with + between, such as "awq+gptq". scheme: of the matrices, as `LLM`'s `quantization`. dtype: "float32",
    "bfloat16" or "float16" of other weights.

    Layer by layer, the inputs of products are recorded with all layers before quantised. The memory taken is a layer's,
    and the residual of the text on the host. All GPUs or TPUs of the process share the text. To learn rotations takes
    the whole model, on one device. If it is interrupted, the same call goes on where it stopped, or learns the
    rotations anew if they were not done, and its result is the same. Raises CheckpointError, ConfigError
    or ConfigurationError before anything is written; OSError if `out` exists or the writing fails.
    """
    started = time.monotonic()
    prepare_jax()
    check_dtype(dtype)
    check_flag("progress", progress, optional=True)
    out, show = checked_output("out", out), on_terminal() if progress is None else progress
    data = data if isinstance(data, TextSample) else TextSample(data)
    quantization = Quantization.named(scheme)
    recipe = Recipe.read(method, quantization)
    if jax.process_count() > 1:
        raise ConfigurationError("a calibration runs in one process: start one, without --coordinator")
    files = _original(ModelFiles.open(model, revision, progress=show))
    assert files.tokenizer is not None
    windows = data.windows(files.tokenizer, files.config.context)
    job = Job.make(files, recipe, quantization, dtype)
    learning = _learning(job, windows.shape[1])
    settings = {
        "model": str(files.path),
        "method": method,
        "scheme": scheme,
        "dtype": dtype,
        "text": hashlib.sha256(windows.tobytes()).hexdigest(),
    }
    with opened(out, settings, job.target.nbytes) as store:
        learned = learning and learning.learned(store.partial / ROTATIONS, job.load, windows, show=show)
        job = replace(job, rotations=learned.rotations) if learned else job
        with CountProgress("calibrating layers", len(files.config.layers), show=show) as bar:
            job.run(windows, store, bar, devices_for(len(windows)))
        files.save_description(store.partial)
        (store.partial / "config.json").write_text(job.config_json, encoding="utf-8")
        write_manifest(store.partial, dict(job.hf), job.target, job.quantization)
    bits, seconds = _bits(job.target), time.monotonic() - started
    losses = learned and (learned.before, learned.after)
    return CalibrationReport(out, method, scheme, bits, job.target.nbytes, windows.size, seconds, store.reports, losses)


def _bits(target: AbstractModel) -> float:
    """Bits of a number of the quantised matrices."""
    quantized = [weight for weight in target.weights if weight.scheme]
    return 8 * sum(a.nbytes for w in quantized for a in w.arrays) / sum(int(np.prod(w.shape)) for w in quantized)


def _learning(job: Job, window: int) -> Learning | None:
    """What learns the rotations of a job; None: they are not learned. Raises ConfigurationError if that cannot be."""
    if job.rotations is None or job.recipe.rotate != "spinquant":
        return None
    if find_spec("optax") is None:
        raise ConfigurationError("spinquant takes optax: pip install 'inferlib[distill]'")
    from inferlib.calibration.spinquant import Learning  # which imports optax

    learning = Learning(job.original, job.target, job.rotations, job.recipe.steps)
    learning.check(window)
    return learning


def _original(files: ModelFiles) -> ModelFiles:
    """Raise CheckpointError or ConfigError for a model that cannot be calibrated."""
    if files.config.loop is not None:
        raise ConfigError(
            f"{files.config.family} repeats layers, and a calibration runs each once: leave it out and give `LLM` "
            "quantization, which rounds weights as they are loaded"
        )
    if files.config.lanes is not None:
        raise ConfigError(
            f"{files.config.family} has lanes, and a calibration follows one residual: leave it out and give `LLM` "
            "quantization, which rounds weights as they are loaded"
        )
    return unquantized(files, "calibrate")
