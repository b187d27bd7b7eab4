"""`SamplingParams`, and the sampler that compiled programs contain."""

from __future__ import annotations

from inferlib.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, SamplingParams
from inferlib.sampling.sampler import (
    PROMPT_FLAG,
    RowParams,
    Sampled,
    count_tokens,
    follow_bad_words,
    is_stop,
    mark_prompt,
    pack,
    sample,
    unpack,
)

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_TOKENS",
    "PROMPT_FLAG",
    "RowParams",
    "Sampled",
    "SamplingParams",
    "count_tokens",
    "follow_bad_words",
    "is_stop",
    "mark_prompt",
    "pack",
    "sample",
    "unpack",
]
