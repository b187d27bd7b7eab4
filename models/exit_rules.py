"""The rules by which tokens leave a loop's core: what a token's threshold is compared with (see
`inferlib.models.early_exit`).

A rule takes the states [T, D] before and after a step, and gives [T] float32. It is of each token's own states alone,
so that results depend on neither the batch, nor how a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

Rule = Callable[[jax.Array, jax.Array], jax.Array]
_TOKENS = 64  # whose logits are in memory at a time


def relative_change(old: jax.Array, new: jax.Array) -> jax.Array:
    """|new - old| / |new| ("latent-diff" in the code of Geiping et al. 2025)."""
    change, size = (_norms(x) for x in (new.astype(jnp.float32) - old.astype(jnp.float32), new))
    return change / size


@dataclass(frozen=True)
class Divergence:
    """KL(p || q) in nats of the distributions of the next token that the states before and after a step make (Geiping
    et al. 2025, section 6), read without the coda.

    inputs: of the coda, [T, D] of states [T, D]. logits: [n, V] float32 of n of these, of this device's part of the
    vocabulary.

    The paper reads distributions through the coda. Its layers attend to their cells of earlier tokens, of which a chunk
    has other steps than a row that decodes, so that results would depend on how a prompt is cut.
    """

    inputs: Callable[[jax.Array], jax.Array]
    logits: Callable[[jax.Array], jax.Array]
    shards: Shards

    def __call__(self, old: jax.Array, new: jax.Array) -> jax.Array:
        with jax.named_scope("exit_rule"):
            pair = jnp.stack([self.inputs(old), self.inputs(new)], axis=1)  # [T, 2, D]
            tokens = pair.shape[0]
            count, size = blocks_of(tokens)
            if count == 1:
                return self.of_pairs(pair)
            padded = jnp.pad(pair, [(0, count * size - tokens), (0, 0), (0, 0)])
            return lax.map(self.of_pairs, padded.reshape(count, size, *pair.shape[1:])).reshape(-1)[:tokens]

    def of_pairs(self, pair: jax.Array) -> jax.Array:
        """[n] of the coda's inputs [n, 2, D] before and after a step; both share a pass over the head."""
        logits = self.logits(pair.reshape(-1, pair.shape[-1])).reshape(*pair.shape[:2], -1)
        shards = self.shards
        shifted = logits - shards.max(jnp.max(logits, axis=-1, keepdims=True), axes.VOCAB)
        total = shards.sum(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True), axes.VOCAB)
        p, q = jnp.moveaxis(shifted - jnp.log(total), 1, 0)
        # Columns that pad the vocabulary have the logit -inf in both.
        return shards.sum(jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * (p - q), 0.0), axis=-1), axes.VOCAB)


def rule_of(
    name: Literal["change", "kl"] | None,
    inputs: Callable[[jax.Array], jax.Array],
    logits: Callable[[jax.Array], jax.Array],
    shards: Shards,
) -> Rule:
    """The rule of `LoopSpec.early_exit`. inputs, logits: see `Divergence`."""
    return Divergence(inputs, logits, shards) if name == "kl" else relative_change


def blocks_of(tokens: int) -> tuple[int, int]:
    """How many blocks a `Divergence` takes `tokens` tokens in, and how many tokens each block has."""
    return (1, tokens) if tokens <= _TOKENS else (-(-tokens // _TOKENS), _TOKENS)


def _norms(x: jax.Array) -> jax.Array:
    """[T] of x [T, D]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
