"""Text of a model that is loaded to write it, and for nothing else."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from inferlib.llm import LLM
from inferlib.outputs import RequestOutput
from inferlib.sampling.params import SamplingParams

_ROWS = 256  # that an accelerator decodes at once


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
    on_cpu = jax.default_backend() == "cpu"
    memory, rows = None if on_cpu else 0.3, None if on_cpu else min(_ROWS, len(prompts))
    options: dict[str, Any] = dict(max_len=length, max_batch=rows, cache_memory=memory, progress=progress)
    llm = LLM(model, dtype=dtype, generation_config="none", **options)
    try:
        return llm.generate(list(prompts), params, progress=progress)
    finally:
        del llm
        gc.collect()
