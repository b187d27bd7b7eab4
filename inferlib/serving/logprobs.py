"""Log-probabilities of tokens, in the two forms that OpenAI has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferlib.outputs import Logprob

Entries = Sequence[Mapping[int, Logprob] | None]
_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(tokens: Sequence[int], entries: Entries, top: int) -> dict[str, Any]:
    """The log-probabilities of a chat's answer: each token with its bytes, and the `top` most likely ones."""
    content = []
    for token, entry in zip(tokens, entries, strict=True):
        assert entry is not None
        ranked = sorted(entry.values(), key=lambda x: x.rank)[:top]
        content.append(_token(entry[token]) | {"top_logprobs": [_token(x) for x in ranked]})
    return {"content": content, "refusal": None}


def _token(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {"token": text, "logprob": max(entry.logprob, _LEAST), "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(
    tokens: Sequence[int], entries: Entries, top: int, offset: int, decode: Callable[[int], str]
) -> dict[str, Any]:
    """The log-probabilities of a completion: lists with an item for each token.

    offset: characters of the text before the first token. decode: gives the text of a token that has no entry, such as
    the first of a prompt. The token that was chosen stands beside the `top` most likely ones, as with OpenAI.
    """
    made: dict[str, list] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, entry in zip(tokens, entries, strict=True):
        logprob = None if entry is None else entry[token]
        text = decode(token) if logprob is None else logprob.decoded_token or ""
        made["text_offset"].append(offset)
        made["tokens"].append(text)
        made["token_logprobs"].append(None if logprob is None else max(logprob.logprob, _LEAST))
        ranked = [] if entry is None or not top else sorted(entry.values(), key=lambda x: x.rank)
        made["top_logprobs"].append({x.decoded_token: max(x.logprob, _LEAST) for x in ranked} or None)
        offset += len(text)
    return made
