"""Text that a teacher writes itself, to learn from beside other texts: it has every subject that the teacher knows.

Each sample begins with a random token and goes on at temperature 1 (Liu et al. 2023, "LLM-QAT",
https://arxiv.org/abs/2305.17888, which takes the most likely token for the first few).
"""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import numpy as np

from inferlib.llm import LLM
from inferlib.sampling.params import SamplingParams


def sample_rows(
    model: str | Path, count: int, length: int, tokens: int, *, dtype: str, seed: int, progress: bool
) -> np.ndarray:
    """`count` rows of `length` tokens, int32; the first one of each is one of `tokens`. The model is loaded for this
    alone."""
    first = np.random.default_rng(seed).integers(0, tokens, count)
    # What trains afterwards needs memory too.
    memory = None if jax.default_backend() == "cpu" else 0.3
    llm = LLM(model, dtype=dtype, max_len=length, cache_memory=memory, progress=progress, generation_config="none")
    try:
        params = [
            SamplingParams(temperature=1.0, max_tokens=length - 1, ignore_eos=True, seed=seed * count + i)
            for i in range(count)
        ]
        outputs = llm.generate([[int(token)] for token in first], params, progress=progress)
        return np.asarray([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs], np.int32)
    finally:
        del llm
        gc.collect()
