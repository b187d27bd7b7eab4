"""Which tokens of a prompt the later layers see (Jo et al. 2025, "FastKV: KV Cache Compression for Fast Long-Context
Processing with Token-Selective Propagation", https://arxiv.org/abs/2502.01068).

A prompt is cut into segments of equal length, the last of which may be shorter. Behind one layer, the selecting one,
only some tokens of each segment go on: the last ones, and those that get the most attention from these in the selecting
layer. The paper selects once, of a whole prompt, as is done here of a prompt of one segment. Of a longer one each
segment is selected of as soon as it is computed, by weights that are a softmax over the segment alone. So a prompt of
any length runs in steps of static shapes, and what goes on of a segment depends on the tokens up to its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions
from inferlib.ops.cache_policy import pooled, rounded_scores
from inferlib.ops.option_text import read_option
from inferlib.ops.precision import precision_of

WINDOW = 8  # last tokens of a segment, which go on and whose attention selects the others, as in the paper
SEGMENT = 2048  # tokens of a segment by default
UNIT = 32  # the tokens that go on of a segment are a multiple of this, as kernels take them
_POOLED = 7  # positions over which attention is averaged, as in the paper
_PARTS = 1000  # a share counts in these, so that devices and the host compute with whole numbers
_TEXT = re.compile(r"fastkv:(\d{1,6}):(\d*\.?\d+)(?::(\d{1,6}))?")


@dataclass(frozen=True)
class TokenPropagation:
    """How many tokens of a prompt go on, and from where.

    layer: the number of the first layer that sees fewer tokens, 1 or more; the one before it selects them. share: of
    the tokens of a segment that go on, from 0.001 to 1. segment: tokens of a segment; None: what buckets say, or the
    default. Raises ValueError for others.
    """

    layer: int
    share: float
    segment: int | None = None

    def __post_init__(self):
        if type(self.layer) is not int or self.layer < 1:
            raise ValueError(
                "sparse_prefill fastkv names the first layer that sees fewer tokens, 1 or more, got "
                f"{self.layer!r:.100}"
            )
        number = not isinstance(self.share, bool) and isinstance(self.share, int | float)
        if not number or not 1 / _PARTS <= self.share <= 1:
            raise ValueError(
                f"the share of the tokens of sparse_prefill fastkv is {1 / _PARTS} to 1, got {self.share!r:.100}"
            )
        if self.segment is not None and (type(self.segment) is not int or self.segment < 1):
            raise ValueError(f"a segment of sparse_prefill fastkv has 1 token or more, got {self.segment!r:.100}")

    @staticmethod
    def read(value: Any) -> TokenPropagation | None:
        """What an option stands for: a `TokenPropagation`, text such as "fastkv:20:0.3" or "fastkv:20:0.3:2048", or
        None. Raises ValueError for anything else."""
        usage = (
            "sparse_prefill fastkv is text such as 'fastkv:20:0.3', the first layer that sees fewer tokens and the "
            "share of a prompt that it sees, or 'fastkv:20:0.3:2048', with the tokens of a segment"
        )
        make = lambda x: TokenPropagation(int(x[1]), float(x[2]), int(x[3]) if x[3] else None)  # noqa: E731
        return read_option(value, TokenPropagation, _TEXT, make, usage)

    def __str__(self) -> str:
        segment = () if self.segment is None else (str(self.segment),)
        return ":".join(("fastkv", str(self.layer), f"{self.share:g}", *segment))

    def count(self, tokens: Any) -> Any:
        """How many of the tokens of a segment go on, which may be the last, shorter one of a prompt: the share of them,
        rounded up to whole units, or all. tokens: a number, or an array of int32."""
        units = -(-tokens * round(self.share * _PARTS) // (_PARTS * UNIT))
        return tokens - (tokens > UNIT * units) * (tokens - UNIT * units)

    def skipped(self, length: Any) -> Any:
        """How many of the first `length` tokens of a prompt do not go on; `length` may be an array."""
        assert self.segment is not None
        last = length % self.segment
        return length // self.segment * (self.segment - self.count(self.segment)) + last - self.count(last)


def saliency(
    q: jax.Array, k: jax.Array, lengths: jax.Array, options: AttentionOptions, heads: jax.Array | None = None
) -> jax.Array:
    """The attention [P, C] float32 that tokens of segments get from the last tokens of their segment: summed over these
    and over the heads of this device, and averaged over neighbours. 0 for the last tokens themselves.

    q [P, C, K, G, h], k [P, C, K, h]: queries and keys as attention takes them. lengths [P] int32: tokens of a segment;
    those behind may be anything. heads [K, G] bool: which heads count; None: all.
    """
    places, window = jnp.arange(k.shape[1]), min(WINDOW, k.shape[1])
    last = lengths[:, None] - window + jnp.arange(window)  # [P, W]; negative: there is none
    q = jnp.take_along_axis(q, jnp.maximum(last, 0)[..., None, None, None], axis=1)
    logits = jnp.einsum("pwkgh,pckh->pkgwc", q, k, precision=precision_of(q.dtype), preferred_element_type=jnp.float32)
    logits = logits * options.scale
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    seen = (places <= last[..., None])[:, None, None]
    older = (places < (lengths - window)[:, None])[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    counts = seen & older if heads is None else seen & older & heads[..., None, None]
    return pooled(jnp.sum(jnp.where(counts, weights, 0), axis=(1, 2, 3)), _POOLED)


def chosen_tokens(scores: jax.Array, lengths: jax.Array, counts: jax.Array, most: int) -> jax.Array:
    """The places [P, most] int32 of the tokens that go on of segments, ascending: `counts` [P] of each, the last ones
    and those of the highest scores [P, C]. Of equal scores the older token goes on. Behind them the places are C.
    lengths [P]: tokens of a segment.
    """
    places, lengths = jnp.arange(scores.shape[1]), lengths[:, None]
    scores = jnp.where(places >= lengths - WINDOW, jnp.inf, rounded_scores(scores))
    _, chosen = lax.top_k(jnp.where(places < lengths, scores, -jnp.inf), most)
    return jnp.sort(jnp.where(jnp.arange(most) < counts[:, None], chosen, scores.shape[1]), axis=-1)
