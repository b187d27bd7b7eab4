"""How many tokens a request took, as OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inferlib.outputs import RequestOutput


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """The usage of a request, from the latest output of each of its prompts."""
    prompt = generated = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        generated += output.metrics.generated
        cached += output.num_cached_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
