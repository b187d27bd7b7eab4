"""Which positions of a row stay in a cache that keeps a budget of them.

Cells are scored by their keys, by the attention that they got so far, or by the attention that they get from the newest
queries. So rows can be compacted at any time: the best positions of each KV head move together, and attention runs on
them as it is. A key was rotated by its position when it was written, so a cell needs no position any more. They stay in
their order where scores depend on it; otherwise few of them move, to where others were dropped.

The first positions stay in any case, as much attention falls on them (Xiao et al. 2023, "StreamingLLM",
https://arxiv.org/abs/2309.17453), and so do the newest, which were not there long enough to be judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.option_text import read_option

SINKS = 4  # first positions of a row, which always stay
_INTERVAL = 32
_TEXT = re.compile(r"([a-z0-9]+):(\d{1,9})(?::(\d{1,6}))?")
_POOLED = 7  # positions over which all attention so far is averaged
_POOLED_RECENT = 5  # positions over which that of the newest queries is
_GAMMA = 200  # how much the variance of attention counts beside its mean, as in CAKE's experiments
_LEAST = 1e-12  # of a norm that is divided by
_BITS = 14  # of scores that are made of keys
_SUMMED = 128  # positions that are added up at once


def mean_of_heads(scores: jax.Array) -> jax.Array:
    """Scores [..., K, P] averaged over the KV heads: [..., 1, P]."""
    return jnp.mean(scores, axis=-2, keepdims=True)


class Cells(NamedTuple):
    """What a row has at P positions.

    keys [..., P, h] float32; valid [P]: which count. For policies that need it, mass [..., P]: the attention that they
    got, see `inferlib.ops.attention_mass`; or weights [..., W, G, P]: the attention that they get from each of the
    newest queries of their KV head, see `inferlib.ops.recent_queries`, 0 of the newest positions. over_heads: averages
    [..., K, P] over the KV heads of all devices.
    """

    keys: jax.Array
    valid: jax.Array
    mass: jax.Array | None = None
    weights: jax.Array | None = None
    over_heads: Callable[[jax.Array], jax.Array] = mean_of_heads


def recency(cells: Cells) -> jax.Array:
    """The newest positions stay (StreamingLLM)."""
    return jnp.broadcast_to(jnp.arange(cells.valid.size, dtype=jnp.float32), cells.keys.shape[:-1])


def attention_mass(cells: Cells) -> jax.Array:
    """Positions stay that got the most attention from all queries so far, they and their neighbours (Zhang et al. 2023,
    "H2O: Heavy-Hitter Oracle", https://arxiv.org/abs/2306.14048; pooled as by Li et al. 2024, "SnapKV",
    https://arxiv.org/abs/2404.14469, since single positions are seldom all of a word)."""
    assert cells.mass is not None
    return rounded_scores(pooled(cells.mass, _POOLED))


def last_attention(cells: Cells) -> jax.Array:
    """Positions stay that get the most attention from the newest query, on average over its heads of this KV head (Wang
    et al. 2025, "LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction", SAGE-KV,
    https://arxiv.org/abs/2503.08879)."""
    assert cells.weights is not None
    return rounded_scores(jnp.mean(cells.weights[..., -1, :, :], axis=-2))


def last_attention_of_all_heads(cells: Cells) -> jax.Array:
    """Scores by which the same positions stay for all KV heads of a layer: the attention that they get from the newest
    query, on average over all heads (Oren et al. 2024, "Transformers are Multi-State RNNs", TOVA,
    https://arxiv.org/abs/2401.06104)."""
    assert cells.weights is not None
    scores = cells.over_heads(jnp.mean(cells.weights[..., -1, :, :], axis=-2))
    return rounded_scores(jnp.broadcast_to(scores, cells.keys.shape[:-1]))


def window_attention(cells: Cells) -> jax.Array:
    """Positions stay that get the most attention from the newest queries, they and their neighbours (Li et al. 2024,
    "SnapKV: LLM Knows What You are Looking for Before Generation", https://arxiv.org/abs/2404.14469; with other budgets
    for each layer Cai et al. 2024, "PyramidKV", https://arxiv.org/abs/2406.02069)."""
    assert cells.weights is not None
    return rounded_scores(pooled(jnp.mean(cells.weights, axis=(-3, -2)), _POOLED_RECENT))


def mean_and_variance(cells: Cells) -> jax.Array:
    """Positions stay that get much attention from the newest queries, or attention that changes from one of them to
    another, they and their neighbours (Qin et al. 2025, "CAKE: Cascading and Adaptive KV Cache Eviction with Layer
    Preferences", https://arxiv.org/abs/2503.12491). The variance is that of samples, 0 of a single query."""
    assert cells.weights is not None
    mean, window = jnp.mean(cells.weights, axis=-3), cells.weights.shape[-3]
    variance = jnp.sum((cells.weights - mean[..., None, :, :]) ** 2, axis=-3) / max(window - 1, 1)
    return rounded_scores(pooled(jnp.mean(mean + _GAMMA * variance, axis=-2), _POOLED_RECENT))


def correlation(cells: Cells) -> jax.Array:
    """Positions stay that get the most attention from the newest queries, summed (Ghadia et al. 2025, "Dialogue Without
    Limits: Constant-Sized KV Caches for Extended Responses in LLMs", MorphKV, https://arxiv.org/abs/2503.00979)."""
    assert cells.weights is not None
    return rounded_scores(jnp.sum(cells.weights, axis=(-3, -2)))


def small_norm(cells: Cells) -> jax.Array:
    """Keys of small norms stay, which get much attention (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based
    Strategy for KV Cache Compression", https://arxiv.org/abs/2406.11430)."""
    return rounded_scores(-jnp.linalg.norm(cells.keys, axis=-1))


def distinct_keys(cells: Cells) -> jax.Array:
    """Keys stay that are least similar, by their cosine, to the mean of all keys' directions (Park et al. 2025,
    "KeyDiff", https://arxiv.org/abs/2504.15364)."""
    keys, valid = cells.keys, cells.valid
    factors = 1 / jnp.maximum(jnp.linalg.norm(keys, axis=-1), _LEAST)  # last: directions would be as large as keys
    mean = _sum_of_positions(keys * jnp.where(valid, factors, 0)[..., None]) / jnp.maximum(jnp.sum(valid), 1)
    mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), _LEAST)
    # XLA would fuse the sum into what follows, where each thread of a GPU adds up a key alone: that took 1.0 of the
    # 6.1 ms in which an H200 compacted eight rows.
    products = lax.optimization_barrier(jnp.sum(keys * mean[..., None, :], axis=-1))
    return rounded_scores(-products * factors)


def _sum_of_positions(values: jax.Array) -> jax.Array:
    """The sum [..., h] of values [..., P, h], first of up to 128 positions each. For one sum of all, which few threads
    of a GPU would make, XLA computes and writes the values before it adds them, in float32."""
    count, size = values.shape[-2:]
    parts = values.reshape(*values.shape[:-2], -1, math.gcd(count, _SUMMED), size)
    return jnp.sum(lax.optimization_barrier(jnp.sum(parts, axis=-2)), axis=-2)


def pooled(scores: jax.Array, width: int) -> jax.Array:
    """Scores [..., P] averaged over `width` positions around each, an odd number; 0 stands beyond the ends."""
    count = scores.shape[-1]
    padded = jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(width // 2, width // 2)])
    return sum((padded[..., i : i + count] for i in range(width)), jnp.zeros_like(scores)) / width


def rounded_scores(scores: jax.Array) -> jax.Array:
    """Scores in fewer bits. Those of a token that stands twice may differ by rounding alone, which depends on the
    batch; so they are equal."""
    return lax.reduce_precision(scores, exponent_bits=8, mantissa_bits=_BITS)


class Method(NamedTuple):
    """score: [..., P] of cells; a higher one stays. needs: what the cache has beside keys for it, the attention that
    cells got, the newest query of a row, or the queries of its newest positions, an interval of them. by_layer: by what
    layers have other budgets, see `inferlib.models.cache_levels`: lower ones keep more than upper ones, or each as many
    as was measured; None: all keep the same. ordered: True if scores depend on the order of the positions before the
    newest interval, by more than which of two equal ones is ahead; so cells that stay must stay in order."""

    score: Callable[[Cells], jax.Array]
    needs: Literal["mass", "last query", "queries"] | None = None
    by_layer: Literal["depth", "preference"] | None = None
    ordered: bool = True


METHODS: Mapping[str, Method] = {
    "streaming": Method(recency),
    "knorm": Method(small_norm, ordered=False),
    "keydiff": Method(distinct_keys, ordered=False),
    "h2o": Method(attention_mass, "mass"),
    "tova": Method(last_attention_of_all_heads, "last query", ordered=False),
    "sagekv": Method(last_attention, "last query", ordered=False),
    "snapkv": Method(window_attention, "queries"),
    "morphkv": Method(correlation, "queries", ordered=False),
    "pyramidkv": Method(window_attention, "queries", by_layer="depth"),
    "cake": Method(mean_and_variance, "queries", by_layer="preference"),
}


@dataclass(frozen=True)
class CachePolicy:
    """What a row's cache keeps, for each layer and KV head.

    method: one of METHODS. budget: positions that a row keeps when it is compacted, with the first `SINKS` and the
    newest `interval` among them; of a method by layer it is the mean over the layers. interval: a row that decodes is
    compacted whenever it has this many more. levels: the budgets of a model's levels of layers, the fewest first; ():
    all layers have `budget`, or the model is not known. Raises ValueError for others.
    """

    method: str
    budget: int
    interval: int = _INTERVAL
    levels: tuple[int, ...] = ()

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"cache_policy has the methods {', '.join(METHODS)}, got {self.method!r:.100}")
        if type(self.interval) is not int or self.interval < 1:
            raise ValueError(f"cache_policy compacts after 1 position or more, got {self.interval!r:.100}")
        if type(self.budget) is not int or self.budget < (least := self.least):
            raise ValueError(
                f"cache_policy keeps the first {SINKS} positions and the newest {self.interval} in any case, so its "
                f"budget is {least} or more, got {self.budget!r:.100}: raise it, or compact more often, such as "
                f"'{self.method}:64:8'"
            )

    @property
    def least(self) -> int:
        """The smallest budget."""
        return SINKS + self.interval + 1

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budget of each level of layers, the fewest first; of one level, if all layers have the same."""
        return self.levels or (self.budget,)

    @property
    def by_layer(self) -> bool:
        """True if layers have other budgets than each other."""
        return METHODS[self.method].by_layer is not None

    @property
    def by_preference(self) -> bool:
        """True if these follow measured preferences of layers, see `inferlib.models.layer_preferences`."""
        return METHODS[self.method].by_layer == "preference"

    def of_level(self, level: int) -> CachePolicy:
        """What the layers of a level keep."""
        return replace(self, budget=self.budgets[level], levels=())

    @property
    def compacts_at(self) -> int:
        """Positions of a row that decodes at which it is compacted, in layers that keep the fewest."""
        return self.budgets[0] + self.interval

    @property
    def ordered(self) -> bool:
        """True if cells that stay must stay in order."""
        return METHODS[self.method].ordered

    @property
    def counts_mass(self) -> bool:
        """True if the cache has the attention that each cell got."""
        return METHODS[self.method].needs == "mass"

    @property
    def queries(self) -> int:
        """How many of a row's newest queries the cache keeps."""
        return {"last query": 1, "queries": self.interval}.get(METHODS[self.method].needs or "", 0)

    def bounds(self, max_len: int, tile: int) -> tuple[int, ...]:
        """Most cells of a row of up to `max_len` tokens, in layers of each level, whose prompt is compacted after
        `tile` tokens more than the least budget; () if no row is ever compacted."""
        if self.compacts_at >= max_len:
            return ()
        return tuple(min(max_len, budget + max(self.interval, tile)) for budget in self.budgets)

    @staticmethod
    def read(value: Any) -> CachePolicy | None:
        """The policy that an option stands for: a `CachePolicy`, text such as "keydiff:2048" or "keydiff:2048:32", or
        None. Raises ValueError for anything else."""
        usage = (
            "cache_policy is text such as 'keydiff:2048', the positions that a row keeps, or 'keydiff:2048:32' to "
            "compact it after every 32 more"
        )
        make = lambda x: CachePolicy(x[1], int(x[2]), int(x[3]) if x[3] else _INTERVAL)  # noqa: E731
        return read_option(value, CachePolicy, _TEXT, make, usage)

    def __str__(self) -> str:
        interval = () if self.interval == _INTERVAL else (self.interval,)
        return ":".join(str(x) for x in (self.method, self.budget, *interval))


def best_positions(scores: jax.Array, budget: int) -> jax.Array:
    """The positions [..., C] of the C highest scores [..., P], ascending, C being the budget, at most P. Of equal
    scores the position further ahead stays."""
    _, retained = lax.top_k(scores, budget)
    return jnp.sort(retained, axis=-1, stable=False)  # all differ; to sort stably takes a GPU their numbers beside them


class Moves(NamedTuple):
    """Cells that move: those at `sources` to `targets`, both [..., N], positions of a row or numbers of a cache's
    cells. Targets differ from each other. One behind all cells is that of a cell that does not move. targets: None if
    cells move to the first positions, in their order."""

    sources: jax.Array
    targets: jax.Array | None = None


def fewest_moves(scores: jax.Array, counts: jax.Array, budget: int, interval: int) -> Moves:
    """What moves so that the positions of `best_positions` are the first C, the budget, with N = P - C + interval.

    Cells that stay among the first C - interval are not moved. Others that stay take the places of those that are
    dropped there, and the newest interval comes behind them in order. What does not move has 0 as its source and P as
    its target. scores [..., P], of `position_scores`. counts [...]: how many positions are there; if no more than C,
    nothing moves.
    """
    total, ahead = scores.shape[-1], budget - interval
    scores = jnp.where(scores == 0, 0.0, scores)  # 0 and -0 are equal, but not where they are sorted
    values, order = lax.top_k(scores, total)
    least, last = values[..., budget - 1, None], order[..., budget - 1, None]  # of those that stay
    at = jnp.arange(ahead, total - interval, dtype=jnp.int32)
    score, counts = scores[..., ahead : total - interval], counts[..., None]
    stays = (score > least) | ((score == least) & (at <= last))
    sources = jnp.where(stays & (at < counts - interval), at, total)
    targets = jnp.where(order[..., budget:] < ahead, order[..., budget:], total)
    sources, targets = lax.sort(jnp.stack([sources, targets]), is_stable=False)  # as many of both are less than `total`
    newest = jnp.broadcast_to(jnp.arange(interval, dtype=jnp.int32), (*scores.shape[:-1], interval))
    sources = jnp.concatenate([sources, counts - interval + newest], axis=-1)
    targets = jnp.concatenate([targets, ahead + newest], axis=-1)
    moved = (counts > budget) & (targets < total)
    return Moves(jnp.where(moved, sources, 0), jnp.where(moved, targets, total))


def position_scores(
    keys: jax.Array,
    count: jax.Array,
    policy: CachePolicy,
    mass: jax.Array | None = None,
    weights: jax.Array | None = None,
    over_heads: Callable[[jax.Array], jax.Array] = mean_of_heads,
) -> jax.Array:
    """Scores [..., P] of positions: the higher ones stay. Those that stay in any case have infinity, and those that are
    not there less than all others.

    keys [..., P, h]: of P positions, of which the first `count` are there, the budget or more, and others may be
    anything. mass [..., P]: the attention that these got; weights [..., W, G, P]: what they get from the newest
    queries; both if the policy needs it, and over_heads, see `Cells`.
    """
    at = jnp.arange(keys.shape[-2], dtype=jnp.int32)
    valid, newest = at < count, at >= count - policy.interval
    keys = jnp.where(valid[:, None], keys.astype(jnp.float32), 0)
    mass = None if mass is None else jnp.where(valid, mass, 0)
    weights = None if weights is None else jnp.where(newest, 0, weights)
    scores = METHODS[policy.method].score(Cells(keys, valid, mass, weights, over_heads))
    return jnp.where(valid, jnp.where((at < SINKS) | newest, jnp.inf, scores), -jnp.inf)
