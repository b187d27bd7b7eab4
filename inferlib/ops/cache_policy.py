"""Which positions of a row stay in a cache that keeps a budget of them.

Cells are scored by their keys, or by the attention that they got so far. So rows can be compacted at any time: the best
positions of each KV head move together, in their order, and attention runs on them as it is. A key was rotated by its
position when it was written, so a cell needs no position any more.

The first positions stay in any case, as much attention falls on them (Xiao et al. 2023, "StreamingLLM",
https://arxiv.org/abs/2309.17453), and so do the newest, which were not there long enough to be judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.option_text import read_option

SINKS = 4  # first positions of a row, which always stay
_INTERVAL = 32
_TEXT = re.compile(r"([a-z0-9]+):(\d{1,9})(?::(\d{1,6}))?")
_POOLED = 7  # positions over which attention is averaged
_LEAST = 1e-12  # of a norm that is divided by
_BITS = 14  # of scores that are made of keys


class Cells(NamedTuple):
    """What a row has at P positions. keys [..., P, h] float32; valid [P]: which count; mass [..., P]: the attention
    that they got, see `inferlib.ops.attention_mass`, for policies that need it."""

    keys: jax.Array
    valid: jax.Array
    mass: jax.Array | None = None


def recency(cells: Cells) -> jax.Array:
    """The newest positions stay (StreamingLLM)."""
    return jnp.broadcast_to(jnp.arange(cells.valid.size, dtype=jnp.float32), cells.keys.shape[:-1])


def attention_mass(cells: Cells) -> jax.Array:
    """Positions stay that got the most attention from all queries so far, they and their neighbours (Zhang et al. 2023,
    "H2O: Heavy-Hitter Oracle", https://arxiv.org/abs/2306.14048; pooled as by Li et al. 2024, "SnapKV",
    https://arxiv.org/abs/2404.14469, since single positions are seldom all of a word)."""
    assert cells.mass is not None
    count = cells.valid.size
    padded = jnp.pad(cells.mass, [(0, 0)] * (cells.mass.ndim - 1) + [(_POOLED // 2, _POOLED // 2)])
    return _rounded(sum((padded[..., i : i + count] for i in range(_POOLED)), jnp.zeros_like(cells.mass)) / _POOLED)


def small_norm(cells: Cells) -> jax.Array:
    """Keys of small norms stay, which get much attention (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based
    Strategy for KV Cache Compression", https://arxiv.org/abs/2406.11430)."""
    return _rounded(-jnp.linalg.norm(cells.keys, axis=-1))


def distinct_keys(cells: Cells) -> jax.Array:
    """Keys stay that are least similar, by their cosine, to the mean of all keys' directions (Park et al. 2025,
    "KeyDiff", https://arxiv.org/abs/2504.15364)."""
    keys, valid = cells.keys, cells.valid
    unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), _LEAST)
    mean = jnp.sum(jnp.where(valid[:, None], unit, 0), axis=-2, keepdims=True) / jnp.maximum(jnp.sum(valid), 1)
    mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), _LEAST)
    return _rounded(-jnp.sum(unit * mean, axis=-1))


def _rounded(scores: jax.Array) -> jax.Array:
    """Scores in fewer bits. Those of a token that stands twice may differ by rounding alone, which depends on the
    batch; so they are equal."""
    return lax.reduce_precision(scores, exponent_bits=8, mantissa_bits=_BITS)


# Scores [..., P] of cells; a higher one stays.
Score = Callable[[Cells], jax.Array]
METHODS: Mapping[str, Score] = {
    "streaming": recency,
    "knorm": small_norm,
    "keydiff": distinct_keys,
    "h2o": attention_mass,
}


@dataclass(frozen=True)
class CachePolicy:
    """What a row's cache keeps, for each layer and KV head.

    method: one of METHODS. budget: positions that a row keeps when it is compacted, with the first `SINKS` and the
    newest `interval` among them. interval: a row that decodes is compacted whenever it has so many more. Raises
    ValueError for others.
    """

    method: str
    budget: int
    interval: int = _INTERVAL

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"cache_policy has the methods {', '.join(METHODS)}, got {self.method!r:.100}")
        if type(self.interval) is not int or self.interval < 1:
            raise ValueError(f"cache_policy compacts after 1 position or more, got {self.interval!r:.100}")
        least = SINKS + self.interval + 1
        if type(self.budget) is not int or self.budget < least:
            raise ValueError(
                f"cache_policy keeps the first {SINKS} positions and the newest {self.interval} in any case, so its "
                f"budget is {least} or more, got {self.budget!r:.100}: raise it, or compact more often, such as "
                f"'{self.method}:64:8'"
            )

    @property
    def most(self) -> int:
        """Positions of a row that decodes at which it is compacted."""
        return self.budget + self.interval

    @property
    def by_attention(self) -> bool:
        """True if the cache has the attention that each cell got."""
        return METHODS[self.method] is attention_mass

    def bound(self, max_len: int, tile: int) -> int | None:
        """Most cells of a row of up to `max_len` tokens whose prompt is compacted after `tile` tokens more than the
        budget; None if no row is ever compacted."""
        return min(max_len, self.budget + max(self.interval, tile)) if self.most < max_len else None

    @staticmethod
    def read(value: Any) -> CachePolicy | None:
        """Of an option: a `CachePolicy`, text such as "keydiff:2048" or "keydiff:2048:32", or None. Raises
        ValueError."""
        usage = (
            "cache_policy is text such as 'keydiff:2048', the positions that a row keeps, or 'keydiff:2048:32' to "
            "compact it after every 32 more"
        )
        make = lambda x: CachePolicy(x[1], int(x[2]), int(x[3]) if x[3] else _INTERVAL)  # noqa: E731
        return read_option(value, CachePolicy, _TEXT, make, usage)

    def __str__(self) -> str:
        interval = () if self.interval == _INTERVAL else (self.interval,)
        return ":".join(str(x) for x in (self.method, self.budget, *interval))


def retained_positions(
    keys: jax.Array, count: jax.Array, policy: CachePolicy, mass: jax.Array | None = None
) -> jax.Array:
    """The positions [..., C] that stay of `count`, ascending, C being the budget; count is C or more.

    keys [..., P, h]: of P positions, of which the first `count` are there, and others may be anything. mass [..., P]:
    the attention that these got, if the policy needs it. Of equal scores the older position stays.
    """
    at = jnp.arange(keys.shape[-2], dtype=jnp.int32)
    valid = at < count
    keys = jnp.where(valid[:, None], keys.astype(jnp.float32), 0)
    always = (at < SINKS) | (at >= count - policy.interval)
    mass = None if mass is None else jnp.where(valid, mass, 0)
    scores = jnp.where(always, jnp.inf, METHODS[policy.method](Cells(keys, valid, mass)))
    _, retained = lax.top_k(jnp.where(valid, scores, -jnp.inf), policy.budget)
    return jnp.sort(retained, axis=-1)
