"""Tokens that a request treats specially, as one table of a static size: biases, allowed tokens and bad words.

A table has MAX_LOGIT_BIAS entries, each a token id and a value. A value in [-100, 100] is added to the token's logit.
A bad word of tokens t1 ... tm is a run of m entries: t1 to t(m-1) with the value UNMATCHED, or MATCHED where the output
ends with the word's tokens up to this one; then tm with the value BANNED. So the next token that would complete a word
is known from its run alone, and following a new token is one comparison for each entry (Shift-And: Baeza-Yates and
Gonnet, 1992).

Shapes: N rows; E entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from inferlib.sampling.params import MAX_LOGIT_BIAS, SamplingParams

UNMATCHED, MATCHED, BANNED = 1e3, 2e3, float("-inf")


def entries(params: SamplingParams, output: Sequence[int] = ()) -> tuple[list[int], list[float], int]:
    """Token ids and values of a request, and the number of entries, from the first, that are the only tokens it may
    choose (0: all).

    output: the tokens that it has generated. Raises ValueError if there are more than MAX_LOGIT_BIAS entries, or if a
    bad word is still text.
    """
    bias, allowed = dict(params.logit_bias or {}), params.allowed_token_ids or ()
    if allowed:
        bias = {token: bias.get(token, 0.0) for token in allowed}
    ids, values = list(bias), list(bias.values())
    for word in params.bad_words or ():
        if isinstance(word, str):
            raise ValueError(f"the bad word {word!r} has no token ids yet")
        ids += word
        for size in range(1, len(word)):
            values.append(MATCHED if tuple(output[-size:]) == word[:size] else UNMATCHED)
        values.append(BANNED)
    if len(ids) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"logit_bias, allowed_token_ids and the tokens of bad_words (a word counts with and without a space before "
            f"it) are {len(ids)} entries together; the compiled sampler has room for {MAX_LOGIT_BIAS}"
        )
    return ids, values, len(allowed)


def added(values: jax.Array) -> jax.Array:
    """What the entries [N, E] add to the logits of their tokens now."""
    completes = (values == BANNED) & _may_follow(values)
    return jnp.where(completes, -jnp.inf, jnp.where(jnp.abs(values) < UNMATCHED, values, 0.0))


def followed(ids: jax.Array, values: jax.Array, token: jax.Array) -> jax.Array:
    """The values [N, E] after each row's next token [N]."""
    matched = _may_follow(values) & (ids == token[:, None])
    return jnp.where(values >= UNMATCHED, jnp.where(matched, MATCHED, UNMATCHED), values)


def _may_follow(values: jax.Array) -> jax.Array:
    """For each entry: True if it begins a word, or if the output ends with the word's tokens before it."""
    before = jnp.pad(values[:, :-1], ((0, 0), (1, 0)))
    return before != UNMATCHED


def with_token_ids(params: SamplingParams, encode: Callable[[str], list[int]] | None) -> SamplingParams:
    """The parameters with all bad words as token ids: of a text, and of the text behind a space, as in vLLM.

    encode: gives the token ids of a text, None if there is no tokenizer. Raises ValueError.
    """
    words: list[tuple[int, ...]] = []
    for word in params.bad_words or ():
        words += _spellings(word, encode) if isinstance(word, str) else [tuple(word)]
    made = replace(params, bad_words=tuple(dict.fromkeys(words)))
    entries(made)
    return made


def _spellings(word: str, encode: Callable[[str], list[int]] | None) -> list[tuple[int, ...]]:
    if encode is None:
        raise ValueError("bad_words as text need a tokenizer, and the model has none: give token ids")
    inside, first = (tuple(encode(space + word.lstrip())) for space in ("", " "))
    if not inside:
        raise ValueError(f"the bad word {word!r} has no tokens")
    # Where the second ends with the first, the first alone bans it.
    return [inside] if first[-len(inside) :] == inside else [inside, first]


def check_choice(params: SamplingParams, stop_ids: tuple[int, ...]) -> None:
    """Raise ValueError if no token that is allowed may be chosen. stop_ids: of the request, with its model's."""
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in params.bad_words or () if len(word) == 1}
    banned |= set(stop_ids) if params.min_tokens else set()
    if set(params.allowed_token_ids) <= banned:
        raise ValueError(
            "allowed_token_ids leave no token: bad_words, or stop tokens before min_tokens, ban all of them"
        )
