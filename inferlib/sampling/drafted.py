"""Sampling after each of a row's drafts at once, as if the drafts before it stood.

A launch costs GPUs more than the arithmetic on one row, so that C samples one after another take C times as long as
one. What is sampled after a draft that does not stand is not used.

Shapes: N rows; k drafts; C = 1 + k positions; V columns of logits on this device.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from inferlib.sampling import token_table
from inferlib.sampling.sampler import WHOLE, RowParams, Sampled, Vocabulary, sample


def sample_drafted(
    logits: jax.Array,
    params: RowParams,
    counts: jax.Array,
    generated: jax.Array,
    drafts: jax.Array,
    *,
    mode: Literal["greedy", "sample", "logprobs"],
    vocabulary: Vocabulary = WHOLE,
) -> Sampled:
    """Choose the token of each row at each position: the one that `sample` chooses once all drafts before are counted.

    Args:
        logits: [N, C, V] float32, after the last token and after each draft.
        params, counts, generated: of the rows, as for `sample`, before the first position.
        drafts: [N, k or more] int32; negative ones are no token.
        mode: static, as for `sample`.

    Returns:
        The fields of `Sampled` with leading axes [C, N].
    """
    rows, positions, width = logits.shape
    logits = logits.swapaxes(0, 1).reshape(-1, width)
    if mode == "greedy":
        chosen = sample(logits, None, None, None, mode=mode, vocabulary=vocabulary)
    else:
        repeated = jax.tree.map(lambda x: jnp.concatenate([x] * positions), params)
        begun = _begun_words(params, drafts, positions)
        seen = _counted(counts, drafts, positions, vocabulary)
        numbers = (jnp.arange(positions)[:, None] + generated).reshape(-1)
        repeated = repeated._replace(bias_values=begun)
        chosen = sample(logits, repeated, seen, numbers, mode=mode, vocabulary=vocabulary)
    return jax.tree.map(lambda x: x.reshape(positions, rows, *x.shape[1:]), chosen)


def _begun_words(params: RowParams, drafts: jax.Array, positions: int) -> jax.Array:
    """The `bias_values` [C * N, E] at each position: they say which bad words the output has begun."""
    values = [params.bias_values]
    for i in range(positions - 1):
        values.append(token_table.followed(params.bias_ids, values[-1], drafts[:, i]))
    return jnp.concatenate(values)


def _counted(counts: jax.Array, drafts: jax.Array, positions: int, vocabulary: Vocabulary) -> jax.Array:
    """The counts [C * N, V] at each position: `counts` [N, V], and the drafts before it."""
    ids = vocabulary.ids(counts)
    seen = [counts]
    for i in range(positions - 1):
        seen.append(seen[-1] + (ids == drafts[:, i, None]))
    return jnp.concatenate(seen)
