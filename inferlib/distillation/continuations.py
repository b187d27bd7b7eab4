"""What a model itself goes on with, greedily: text that a head for it should draft best."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inferlib.chat import ChatError
from inferlib.distillation.generation import generate_once
from inferlib.option_checks import ConfigurationError
from inferlib.sampling.params import SamplingParams
from inferlib.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_ANSWER = 16  # tokens that an answer may have at least


def continue_prompts(
    model: str | Path, prompts: Sequence[list[int]], length: int, *, dtype: str, progress: bool
) -> list[np.ndarray]:
    """Each prompt, shorter than `length`, and what the model goes on with up to `length` tokens or its own end.

    The model is loaded for this alone.
    """
    params = [SamplingParams(temperature=0.0, max_tokens=length - len(prompt)) for prompt in prompts]
    outputs = generate_once(model, prompts, params, length=length, dtype=dtype, progress=progress)
    return [np.asarray([*p, *o.outputs[0].token_ids], np.int32) for p, o in zip(prompts, outputs, strict=True)]


def prompts_of_chats(chats: Sequence[list[Any]], tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """The tokens of each chat up to where its answer begins. Those that leave no room for an answer in `length` tokens
    are left out, with a warning. Raises ConfigurationError if one cannot be rendered."""
    template, prompts = tokenizer.chat_template, []
    if chats and template is None:
        raise ConfigurationError("the model has no chat template, and the data has messages: give texts alone")
    for number, messages in enumerate(chats, 1):
        assert template is not None
        try:
            prompts.append(list(tokenizer.encode(template.render(messages), add_special_tokens=False)))
        except ChatError as error:
            raise ConfigurationError(f"chat {number} of the data: {error}") from error
    short = [prompt for prompt in prompts if len(prompt) + _ANSWER <= length]
    if long := len(prompts) - len(short):
        log.warning(
            "%d of %d chats are left out: they leave less than %d of the %d tokens of --length for an answer",
            *(long, len(prompts), _ANSWER, length),
        )
    return short
