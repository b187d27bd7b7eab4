"""`export`: write a quantised model as files that other libraries load."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from inferlib.checkpoint.compressed_tensors import Numbers, Writer, must_fit
from inferlib.checkpoint.laid_out import LaidOutWeights, read_layer, stored_model
from inferlib.checkpoint.load import load_items
from inferlib.checkpoint.source import CheckpointError
from inferlib.conversion import output_directory
from inferlib.model_files import CALIBRATION, ModelFiles
from inferlib.models.families import family_of
from inferlib.option_checks import check_flag, checked_output
from inferlib.platforms import prepare_jax
from inferlib.progress import CountProgress, on_terminal


def export(model: str | Path, out: str | Path, *, progress: bool | None = None) -> int:
    """Write a quantised model to the directory `out` as compressed-tensors files, which transformers and vLLM load.

    model: a directory that `calibrate`, or `convert` with a quantization, wrote: of int4, int8, int8_a8, fp8 or fp8_a8,
    without branches of low rank and inputs that are rotated while the model runs, and of experts only those that files
    have one by one. The head is written whole. `LLM(out)` loads the result, too. Returns the bytes of weights.

    `out` appears once everything is written. Raises CheckpointError or ConfigurationError before anything is written,
    and OSError if the writing fails, which leaves nothing behind.
    """
    prepare_jax()
    check_flag("progress", progress, optional=True)
    out, files = checked_output("out", out), ModelFiles.open(model)
    source = files.source
    if not isinstance(source, LaidOutWeights) or source.quantization is None:
        raise CheckpointError(
            f"{files.path} is no directory that inferlib quantize, or inferlib convert --quantization, wrote: write one"
        )
    files.must_have_published_layers()
    if "model_type" not in files.hf:
        raise CheckpointError(
            f"{files.path / 'config.json'} has no model_type, by which other libraries know the model: add it"
        )
    stored = stored_model(files.config, source.dtype.name, source.quantization)
    items = load_items(family_of(files.hf), stored)
    must_fit(stored, items)
    blocks = (None, *range(len(files.config.layers)))
    with (
        output_directory(out, stored.nbytes) as directory,
        CountProgress("exporting layers", len(blocks), show=on_terminal() if progress is None else progress) as bar,
    ):
        files.save_description(directory)
        if (files.path / CALIBRATION).exists():
            shutil.copyfile(files.path / CALIBRATION, directory / CALIBRATION)
        writer = Writer(directory, stored, items)
        for block in blocks:
            weights = [weight for weight in stored.weights if weight.block == block]
            arrays = read_layer(files.path, weights)
            values = ([np.asarray(arrays[spec.part]) for spec in weight.arrays] for weight in weights)
            writer.write(block, [(w, Numbers.of(w, x)) for w, x in zip(weights, values, strict=True)])
            bar.advance(1)
        writer.finish(files.hf)
    return writer.nbytes
