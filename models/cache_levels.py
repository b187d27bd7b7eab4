"""Budgets of a bounded cache that differ by layer: as lower layers attend to more positions than upper ones (Cai et al.
2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
https://arxiv.org/abs/2406.02069); or by preferences that were measured (CAKE, see `inferlib.models.layer_preferences`).

Shapes are static, so layers of similar budgets are one level, with one budget, and with pages and a page table of its
own. Level 0 are the layers which keep the fewest positions. The total is that of the same budget for all layers, or
with preferences up to that. For PyramidKV levels mirror each other: as many layers are above the mean as below it, by
as many positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from inferlib.models.config import AttentionSpec, ConfigError, ModelConfig
from inferlib.ops.cache_policy import CachePolicy

_BETA = 20  # the uppermost layer keeps 1 / 20 of the mean beside the newest positions, as in the paper's experiments


def level_sizes(layers: int) -> tuple[int, ...]:
    """How many of so many layers are in each level, those that keep the fewest first: the same from either end, in up
    to four levels."""
    outer = layers // 3 if layers % 2 else layers // 4
    sizes = (outer, layers - 2 * outer, outer)
    if layers % 2 == 0:
        sizes = (outer, layers // 2 - outer, layers // 2 - outer, outer)
    return tuple(size for size in sizes if size)


def cache_owners(config: ModelConfig) -> list[int]:
    """The numbers of the layers of attention that have keys and values of their own."""
    mixers = enumerate(layer.attention for layer in config.layers)
    return [number for number, mixer in mixers if isinstance(mixer, AttentionSpec) and mixer.cache_of is None]


def with_cache_levels(config: ModelConfig, policy: CachePolicy | None) -> ModelConfig:
    """The model whose layers are in the levels of a policy that has some. A layer that reads the cache of another one
    is in the level of that. Preferences are left out if the policy needs none, so that the model is the same without.
    Raises ConfigError if it needs some that the model lacks."""
    by_preference = policy is not None and policy.by_preference
    if config.layer_preferences and not by_preference:
        config = replace(config, layer_preferences=())
    if policy is None or not policy.by_layer:
        return config
    owners, layers = cache_owners(config), []
    ascending = [level for level, size in enumerate(level_sizes(len(owners))) for _ in range(size)]
    levels = dict(zip(reversed(owners), ascending, strict=True))
    if by_preference:
        shares = dict(zip(owners, layer_shares(config, policy), strict=True))
        levels = dict(zip(sorted(owners, key=lambda x: (shares[x], -x)), ascending, strict=True))
    for number, layer in enumerate(config.layers):
        mixer = layer.attention
        if isinstance(mixer, AttentionSpec):
            owner = number if mixer.cache_of is None else mixer.cache_of
            layer = replace(layer, attention=replace(mixer, cache_level=levels[owner]))
        layers.append(layer)
    return replace(config, layers=tuple(layers))


def pyramid(policy: CachePolicy, layers: int, max_len: int) -> list[float]:
    """The paper's budgets of layers, the uppermost first, before they are rounded: they ascend by equal steps.

    Beside the newest positions, an interval of them, a layer keeps up to `max_len` less these.
    """
    mean, most = policy.budget - policy.interval, max_len - policy.interval
    largest = min(2 * mean - mean / _BETA, most)
    step = (2 * largest - 2 * mean) / (layers - 1)
    return [policy.interval + 2 * mean - largest + i * step for i in range(layers)]


def layer_shares(config: ModelConfig, policy: CachePolicy) -> tuple[float, ...]:
    """The shares of the layers that have caches of their own; () if a policy needs none. Raises ConfigError if they
    were not measured."""
    if not policy.by_preference:
        return ()
    if not config.layer_preferences:
        raise ConfigError(
            f"cache_policy {str(policy)!r} takes preferences of layers, and this model has none: write them beside it "
            f"by `inferlib layer-preferences MODEL --data TEXT.jsonl`, or take 'pyramidkv:{policy.budget}' or "
            f"'snapkv:{policy.budget}', which need none"
        )
    return config.layer_preferences


def preferred(policy: CachePolicy, shares: Sequence[float]) -> list[float]:
    """CAKE's budgets of layers with these shares, the smallest first, before they are rounded or bounded. Beside the
    newest positions, an interval of them, layers share what all have together."""
    total = (policy.budget - policy.interval) * len(shares)
    return sorted(policy.interval + share * total for share in shares)


def preferred_levels(policy: CachePolicy, shares: Sequence[float], unit: int, max_len: int) -> tuple[int, ...]:
    """The budgets of the levels of layers with these shares, the fewest first: multiples of `unit`, as near to the mean
    of each level's layers as the total allows. What a level would have beyond `max_len` the others get.

    Raises ValueError if all levels would keep the same, though rows of `max_len` tokens are longer than that.
    """
    each, sizes, at, means = preferred(policy, shares), level_sizes(len(shares)), 0, []
    for size in sizes:
        means.append(sum(each[at : at + size]) / size)
        at += size
    least, most = -(-policy.least // unit), -(-max_len // unit)
    units = [least] * len(sizes)
    left = (policy.budget // unit - least) * len(shares)  # of units of a layer

    def may_grow(level: int) -> bool:
        above = units[level + 1] if level + 1 < len(units) else most
        return sizes[level] <= left and units[level] < above

    while growing := [level for level in range(len(sizes)) if may_grow(level)]:
        level = max(growing, key=lambda x: means[x] - units[x] * unit)
        units[level] += 1
        left -= sizes[level]
    if units[0] == units[-1]:
        raise ValueError(_same(policy, len(shares), unit, max_len))
    return tuple(count * unit for count in units)


def level_budgets(
    policy: CachePolicy, layers: int, unit: int, max_len: int, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """The budgets of the levels of so many layers, the fewest first: multiples of `unit`, as the policy's budget is,
    which is their mean over the layers. Of each level it is the mean of its layers' budgets, rounded. shares: of the
    layers, for a policy by preferences.

    Raises ValueError if all levels would keep the same, though rows of `max_len` tokens are longer than that.
    """
    sizes, budget = level_sizes(layers), policy.budget
    if budget >= max_len:
        return (budget,) * len(sizes)
    if policy.by_preference:
        return preferred_levels(policy, shares, unit, max_len)
    each, upper, at = pyramid(policy, layers, max_len), [], 0
    for size in sizes[: len(sizes) // 2]:
        mean = sum(each[at : at + size]) / size
        upper.append(max(math.floor(mean / unit + 0.5), -(-policy.least // unit)) * unit)
        at += size
    middle = [budget] * (len(sizes) % 2)
    levels = (*upper, *middle, *(2 * budget - x for x in reversed(upper)))
    if levels[0] == levels[-1]:
        raise ValueError(_same(policy, layers, unit, max_len))
    return levels


def _same(policy: CachePolicy, layers: int, unit: int, max_len: int) -> str:
    return (
        f"cache_policy {str(policy)!r} would keep the same of all {layers} layers, as budgets are multiples of {unit} "
        f"positions, {policy.least} or more, and rows have up to {max_len}: take another budget, or "
        f"'snapkv:{policy.budget}'"
    )


def layer_budgets(config: ModelConfig, policy: CachePolicy | None) -> dict[int, int]:
    """The budget of each layer of a model that has a cache of its own, by the layer's number; {} if all keep the same,
    or all positions."""
    if policy is None or len(policy.levels) < 2:
        return {}
    mixers = ((number, config.layers[number].attention) for number in cache_owners(config))
    return {number: policy.levels[mixer.cache_level] for number, mixer in mixers if isinstance(mixer, AttentionSpec)}


def budgets_text(budgets: dict[int, int]) -> str:
    """Budgets by the number of a layer as text, such as "3584 in layers 0 to 7, 512 in layers 8 to 15"."""
    parts = []
    for budget, run in groupby(budgets, key=budgets.__getitem__):
        first, *rest = run
        parts.append(f"{budget} in layers {first} to {rest[-1]}" if rest else f"{budget} in layer {first}")
    return ", ".join(parts)
