"""What training makes smaller, of hidden states: their logits are computed for some tokens at a time.

Shapes: B rows of T tokens; D width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.decoder import Decoder
from inferlib.sharding.shards import Shards

_LOGITS = 4096  # tokens whose logits are in memory at once
Ran = tuple[Decoder, jax.Array]  # a decoder, and its last hidden states [B, T, D]


def _in_parts(of_part: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """The mean of a function of rows, computed for as many at once as have room for logits. Gradients compute each part
    again."""
    count, length = rows[0].shape[:2]
    at_once = max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * length <= _LOGITS))
    parts = [x.reshape(count // at_once, at_once * x.shape[1], *x.shape[2:]) for x in rows]
    return lax.map(jax.checkpoint(lambda parts: of_part(*parts)), tuple(parts)).mean()


def divergence(student: Ran, teacher: Ran) -> jax.Array:
    """The mean KL divergence of next tokens' distributions from the teacher's."""
    (decoder, hidden), (wise, known) = student, teacher

    def of_part(hidden: jax.Array, known: jax.Array) -> jax.Array:
        said = jax.nn.log_softmax(lax.stop_gradient(wise.logits(known, Shards(), "xla")), axis=-1)
        learned = jax.nn.log_softmax(decoder.logits(hidden, Shards(), "xla"), axis=-1)
        return jnp.sum(jnp.exp(said) * (said - learned), axis=-1).mean()

    return _in_parts(of_part, hidden, known)


def cross_entropy(student: Ran, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy with each next token of the rows [B, T]."""
    decoder, hidden = student
    length = tokens.shape[1]
    counted = jnp.broadcast_to(jnp.arange(length) < length - 1, tokens.shape)

    def of_part(hidden: jax.Array, following: jax.Array, counted: jax.Array) -> jax.Array:
        likely = jax.nn.log_softmax(decoder.logits(hidden, Shards(), "xla"), axis=-1)
        losses = -jnp.take_along_axis(likely, following[:, None], axis=-1)[:, 0]
        return jnp.where(counted, losses, 0.0).sum() / counted.sum()

    return _in_parts(of_part, hidden, jnp.roll(tokens, -1, axis=1), counted)
