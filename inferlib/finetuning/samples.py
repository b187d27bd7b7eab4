"""Text that a teacher writes itself, to learn from beside other texts: it has every subject that the teacher knows.

Each sample begins with a random token and goes on at temperature 1 (Liu et al. 2023, "LLM-QAT",
https://arxiv.org/abs/2305.17888, which takes the most likely token for the first few).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inferlib.distillation.generation import generate_once
from inferlib.sampling.params import SamplingParams


def sample_rows(
    model: str | Path, count: int, length: int, tokens: int, *, dtype: str, seed: int, progress: bool
) -> np.ndarray:
    """`count` rows of `length` tokens, int32; the first one of each is one of `tokens`. The model is loaded for this
    alone."""
    first = np.random.default_rng(seed).integers(0, tokens, count)
    params = [
        SamplingParams(temperature=1.0, max_tokens=length - 1, ignore_eos=True, seed=seed * count + i)
        for i in range(count)
    ]
    prompts = [[int(token)] for token in first]
    outputs = generate_once(model, prompts, params, length=length, dtype=dtype, progress=progress)
    return np.asarray([[*p, *o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)], np.int32)
