"""What a calibration asks of the files of a model."""

from __future__ import annotations

from inferlib.checkpoint.laid_out import LaidOutWeights
from inferlib.checkpoint.shipped import QuantizedSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles


def unquantized(files: ModelFiles, verb: str) -> ModelFiles:
    """The files, if they hold an original model and a tokenizer. verb: what is to be done with it, such as "calibrate".
    Raises CheckpointError."""
    if isinstance(files.source, QuantizedSource):
        raise CheckpointError(f"{files.path} is quantised already: {verb} the original")
    if isinstance(files.source, LaidOutWeights):
        form = "quantised" if files.source.quantization else "converted"
        raise CheckpointError(f"{files.path} is {form} already: {verb} the original")
    if files.tokenizer is None:
        raise CheckpointError(
            f"{files.path} has no tokenizer, which makes tokens of the text: put tokenizer.json there"
        )
    return files
