"""Text of a model that is loaded to write it, and for nothing else."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import jax

from inferlib.llm import LLM
from inferlib.outputs import RequestOutput
from inferlib.sampling.params import SamplingParams


def generate_once(
    model: str | Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    length: int,
    dtype: str,
    progress: bool,
) -> list[RequestOutput]:
    """What the model goes on with behind prompts of tokens. length: tokens of a prompt and its output, at most."""
    # What trains afterwards needs memory too.
    memory = None if jax.default_backend() == "cpu" else 0.3
    llm = LLM(model, dtype=dtype, max_len=length, cache_memory=memory, progress=progress, generation_config="none")
    try:
        return llm.generate(list(prompts), params, progress=progress)
    finally:
        del llm
        gc.collect()
