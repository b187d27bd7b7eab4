"""Functions of a user that change logits on the host, before anything else does, as vLLM had them until version 0."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# f(generated, logits) or f(prompt, generated, logits), which returns logits.
LogitsProcessor = Callable[..., Any]


class LogitsProcessorError(RuntimeError):
    """A logits processor raised an exception, or returned something other than logits. Its request ends."""


def checked(processors: object) -> tuple[LogitsProcessor, ...]:
    """The processors as a tuple. Raises ValueError unless they are functions of two or three arguments."""
    if processors is None:
        return ()
    listed = (processors,) if callable(processors) else processors
    if not isinstance(listed, Sequence) or not all(callable(f) for f in listed):
        raise ValueError(f"logits_processors must be a list of functions, got {processors!r}")
    for function in listed:
        if not (_takes(function, 2) or _takes(function, 3)):
            raise ValueError(
                f"logits_processors: {_name(function)} must take (token_ids, logits) or (prompt_token_ids, token_ids, "
                "logits)"
            )
    return tuple(listed)


def process(
    processors: Sequence[LogitsProcessor], prompt: Sequence[int], tokens: Sequence[int], logits: np.ndarray
) -> np.ndarray:
    """Logits [V] float32 after all processors, which may change their argument in place.

    prompt: its token ids. tokens: generated so far. Raises LogitsProcessorError.
    """
    for function in processors:
        past = (list(tokens),) if _takes(function, 2) else (list(prompt), list(tokens))
        where = f"logits processor {_name(function)}, called for generated token {len(tokens)},"
        try:
            changed = function(*past, logits.copy())
        except BaseException as error:  # of any kind: it ends this request and no other
            raise LogitsProcessorError(f"{where} raised {type(error).__name__}: {error}") from error
        if problem := _problem(changed, logits.size):
            raise LogitsProcessorError(f"{where} {problem}")
        logits = np.asarray(changed).astype(np.float32)
    return logits


def _problem(changed: Any, vocab: int) -> str | None:
    """What is wrong with these as logits of `vocab` tokens; None if nothing is."""
    if changed is None:
        return "returned None: it must return the logits"
    try:
        array = np.asarray(changed)
    except Exception as error:
        return f"returned what is no array: {error}"
    if array.shape != (vocab,):
        return f"returned the shape {array.shape}: logits have the shape ({vocab},)"
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return f"returned numbers of type {array.dtype}: logits are float32"
    array = array.astype(np.float32)
    if np.isnan(array).any():
        return "returned NaN"
    if array.max() == np.inf:
        return "returned infinity: to choose a token for certain, set all others to -inf"
    return "bans every token: all logits are -inf" if array.max() == -np.inf else None


def _takes(function: LogitsProcessor, arguments: int) -> bool:
    """True if it can be called with `arguments` arguments by position. One without a signature takes two."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return arguments == 2
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _name(function: LogitsProcessor) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
