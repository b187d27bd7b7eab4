"""What a model itself goes on with, greedily: text that a head for it should draft best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from inferlib.distillation.generation import generate_once
from inferlib.sampling.params import SamplingParams


def continue_rows(
    model: str | Path, rows: np.ndarray, begin: Sequence[int], *, dtype: str, progress: bool
) -> list[np.ndarray]:
    """The beginning of each row [n, T], and what the model goes on with up to T tokens or its own end.

    begin: how many tokens of each row stay. The model is loaded for this alone.
    """
    length = rows.shape[1]
    prompts = [row[:count].tolist() for row, count in zip(rows, begin, strict=True)]
    params = [SamplingParams(temperature=0.0, max_tokens=length - int(count)) for count in begin]
    outputs = generate_once(model, prompts, params, length=length, dtype=dtype, progress=progress)
    return [np.asarray([*p, *o.outputs[0].token_ids], np.int32) for p, o in zip(prompts, outputs, strict=True)]
