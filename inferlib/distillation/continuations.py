"""What a model itself goes on with, greedily: text that a head for it should draft best."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from inferlib.llm import LLM
from inferlib.sampling.params import SamplingParams


def continue_rows(
    model: str | Path, rows: np.ndarray, begin: Sequence[int], *, dtype: str, progress: bool
) -> list[np.ndarray]:
    """The beginning of each row [n, T], and what the model goes on with up to T tokens or its own end.

    begin: how many tokens of each row stay. The model is loaded for this alone.
    """
    length = rows.shape[1]
    # What trains afterwards needs memory too.
    memory = None if jax.default_backend() == "cpu" else 0.3
    llm = LLM(model, dtype=dtype, max_len=length, cache_memory=memory, progress=progress, generation_config="none")
    try:
        prompts = [row[:count].tolist() for row, count in zip(rows, begin, strict=True)]
        params = [SamplingParams(temperature=0.0, max_tokens=length - int(count)) for count in begin]
        outputs = llm.generate(prompts, params)
        return [np.asarray([*p, *o.outputs[0].token_ids], np.int32) for p, o in zip(prompts, outputs, strict=True)]
    finally:
        del llm
        gc.collect()
