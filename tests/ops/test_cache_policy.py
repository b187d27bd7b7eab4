"""What a bounded cache keeps equals a plain reading of each paper."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions
from inferlib.models.cache_levels import (
    budgets_text,
    layer_budgets,
    level_budgets,
    level_sizes,
    preferred,
    preferred_levels,
    pyramid,
    with_cache_levels,
)
from inferlib.models.config import AttentionSpec, ConfigError, LayerSpec, MlpSpec, ModelConfig
from inferlib.ops.attention_mass import add_mass
from inferlib.ops.cache_policy import METHODS, SINKS, CachePolicy, best_positions, fewest_moves, position_scores
from inferlib.ops.recent_queries import recent_weights, write_queries

HEADS, CELLS, WIDTH, GROUP, BUDGET, INTERVAL = 2, 48, 8, 3, 12, 4
KINDS = ("normal", "ties", "outliers", "zeros")


class Row(NamedTuple):
    """What a row has: keys [K, P, h], the attention that they got [K, P], queries [K, W, G, h] of its newest W
    positions, the oldest first; and how queries weigh keys."""

    keys: np.ndarray
    mass: np.ndarray
    queries: np.ndarray
    scale: float = 0.1

    def weights(self, head: int) -> np.ndarray:
        """[W, G, P]: softmax over the cells up to each query's own; 0 for the newest W, which stay in any case."""
        keys, queries = self.keys[head].astype(np.float64), self.queries[head].astype(np.float64)
        weights = np.zeros((*queries.shape[:2], len(keys)))
        for i, g in np.ndindex(*queries.shape[:2]):
            seen = len(keys) - len(queries) + i + 1
            logits = self.scale * keys[:seen] @ queries[i, g]
            weights[i, g, :seen] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        return weights


def pooled(scores: np.ndarray, width: int) -> list[float]:
    return [float(scores[max(p - width // 2, 0) : p + width // 2 + 1].sum()) / width for p in range(len(scores))]


def older(weights: np.ndarray, interval: int) -> np.ndarray:
    return np.where(np.arange(weights.shape[-1]) < weights.shape[-1] - interval, weights, 0)


def h2o(row: Row, head: int, interval: int) -> list[float]:
    return pooled(row.mass[head], 7)


def streaming(row: Row, head: int, interval: int) -> list[float]:
    return list(range(row.keys.shape[1]))


def knorm(row: Row, head: int, interval: int) -> list[float]:
    return [-float(np.sqrt((key.astype(np.float64) ** 2).sum())) for key in row.keys[head]]


def keydiff(row: Row, head: int, interval: int) -> list[float]:
    keys = row.keys[head].astype(np.float64)
    lengths = [max(float(np.sqrt((key**2).sum())), 1e-12) for key in keys]
    anchor = sum(key / length for key, length in zip(keys, lengths, strict=True)) / len(keys)
    size = max(float(np.sqrt((anchor**2).sum())), 1e-12)
    return [-float(key @ anchor) / (length * size) for key, length in zip(keys, lengths, strict=True)]


def sagekv(row: Row, head: int, interval: int) -> list[float]:
    return list(row.weights(head)[-1].mean(axis=0))


def tova(row: Row, head: int, interval: int) -> list[float]:
    return list(np.mean([row.weights(k)[-1].mean(axis=0) for k in range(len(row.keys))], axis=0))


def snapkv(row: Row, head: int, interval: int) -> list[float]:
    return pooled(older(row.weights(head).mean(axis=(0, 1)), interval), 5)


def morphkv(row: Row, head: int, interval: int) -> list[float]:
    return list(row.weights(head).sum(axis=(0, 1)))


def cake(row: Row, head: int, interval: int) -> list[float]:
    """The mean over the newest queries, and 200 times their variance as torch has it. Of the neighbours of one that has
    most of the attention, scores differ by less than what counts: 15 binary digits."""
    weights, scores = older(row.weights(head), interval), []
    for p in range(weights.shape[-1]):
        of_heads = [list(weights[:, g, p]) for g in range(GROUP)]
        means = [sum(x) / interval for x in of_heads]
        variances = [sum((y - mean) ** 2 for y in x) / (interval - 1) for x, mean in zip(of_heads, means, strict=True)]
        scores.append(sum(means) / GROUP + 200 * sum(variances) / GROUP)
    fractions, exponents = np.frexp(pooled(np.array(scores), 5))
    return list(np.ldexp(np.round(fractions * 2**15), exponents))


ORACLES: dict[str, Any] = {f.__name__: f for f in (streaming, knorm, keydiff, h2o, tova, sagekv, snapkv, morphkv, cake)}
ORACLES["pyramidkv"] = snapkv  # with another budget for each layer


def by_the_paper(method: str, row: Row, head: int, budget: int, interval: int) -> list[int]:
    """The positions that stay of a KV head of a row: the first, the newest, and those of the highest scores."""
    scores, count = ORACLES[method](row, head, interval), row.keys.shape[1]
    return by_scores(scores, count, budget, interval)


def by_scores(scores: Any, count: int, budget: int, interval: int) -> list[int]:
    scores = [float(f"{score:.9g}") for score in scores]  # those that are equal but for the order of sums
    always = [p for p in range(count) if p < SINKS or p >= count - interval]
    others = sorted((p for p in range(count) if p not in always), key=lambda p: (-scores[p], p))
    return sorted(always + others[: budget - len(always)])


def row_of(kind: str, count: int, window: int) -> Row:
    """A row of so many cells, with the queries of its newest positions."""
    rng = np.random.default_rng([len(kind), count])
    normal = rng.normal(size=(HEADS, count, WIDTH))
    keys = {
        "normal": lambda: normal,
        # Many scores are equal, and exact.
        "ties": lambda: np.eye(WIDTH)[np.repeat(rng.integers(0, 2, (HEADS, count)), 2, axis=1)[:, :count]],
        "outliers": lambda: normal * np.where(rng.random((HEADS, count, 1)) < 0.1, 50, 1),
        "zeros": lambda: np.zeros((HEADS, count, WIDTH)),
    }[kind]()
    mass, queries = rng.integers(0, 9, (HEADS, count)), rng.normal(size=(HEADS, window, GROUP, WIDTH))
    return Row(*(x.astype(np.float32) for x in (keys, mass, queries)))


def spoiled(x: np.ndarray) -> np.ndarray:
    """[K, P, ...] with NaN behind the cells that are there."""
    return np.concatenate([x, np.full((HEADS, CELLS - x.shape[1], *x.shape[2:]), np.nan, np.float32)], axis=1)


@pytest.mark.parametrize("method", METHODS)
def test_keeps_what_the_paper_keeps(method):
    """Of rows of different lengths, whatever lies behind their cells; queries lie by their positions."""
    policy, dropped = CachePolicy(method, BUDGET, INTERVAL), 3
    window = policy.queries

    @jax.jit
    def chosen(keys, mass, queries, count):
        weights = None
        if window:
            zeroed = jnp.where(jnp.arange(CELLS)[:, None] < count, keys, 0)
            weights = recent_weights(queries, zeroed, count, count - 1 + dropped, AttentionOptions(0.1))
        return best_positions(position_scores(keys, count, policy, mass, weights), policy.budget)

    for kind in KINDS:
        for count in (BUDGET, BUDGET + 1, BUDGET + INTERVAL, CELLS):
            row = row_of(kind, count, max(window, 1))
            places = (count + dropped + np.arange(-max(window, 1), 0)) % max(window, 1)
            stored = np.empty_like(row.queries)
            stored[:, places] = row.queries
            stored = stored.reshape(*stored.shape[:2], -1)
            positions = np.asarray(chosen(spoiled(row.keys), spoiled(row.mass), stored, np.int32(count)))
            for head in range(HEADS):
                expected = by_the_paper(method, row, head, BUDGET, INTERVAL)
                assert positions[head].tolist() == expected, (kind, count, head)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros"])
def test_fewest_moves(kind):
    """All that stays is where it was or in the place of what is dropped, and the newest are last and in order."""
    total, budget, interval, heads = 30, 21, 5, 4
    rng = np.random.default_rng(len(kind))
    older = {
        "normal": lambda: rng.normal(size=(heads, total)),
        "ties": lambda: rng.integers(0, 3, (heads, total)).astype(float),
        "zeros": lambda: np.where(rng.random((heads, total)) < 0.5, 0.0, -0.0),
    }[kind]()
    move = jax.jit(lambda scores, counts: fewest_moves(scores, counts, budget, interval))
    for count in (0, SINKS, budget, budget + 1, budget + interval, total):
        at = np.arange(total)
        scores = np.where((at < SINKS) | (at >= count - interval), np.inf, older)
        scores = np.where(at < count, scores, -np.inf).astype(np.float32)
        moves = move(scores, np.full(heads, count, np.int32))
        for head in range(heads):
            sources, targets = np.asarray(moves.sources[head]), np.asarray(moves.targets[head])
            assert len(sources) == len(targets) == total - budget + interval
            moved = targets < total
            assert (sources[~moved] == 0).all()
            if count <= budget:
                assert not moved.any()
                continue
            cells = at.copy()
            cells[targets[moved]] = at[sources[moved]]
            stay = sorted(at, key=lambda p: (-scores[head, p], p))[:budget]
            assert sorted(cells[:budget]) == sorted(stay)
            assert cells[budget - interval : budget].tolist() == list(range(count - interval, count))
            assert all(cells[p] == p for p in stay if p < budget - interval)
            assert len(set(targets[moved])) == moved.sum() <= count - budget + interval


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.ordered])
def test_scores_do_not_depend_on_the_order_of_older_positions(method):
    """Of methods that say so: they move with their cells."""
    policy = CachePolicy(method, BUDGET, INTERVAL)
    row, count = row_of("normal", CELLS, max(policy.queries, 1)), CELLS - 7
    stored = row.queries.reshape(*row.queries.shape[:2], -1)
    order = np.random.default_rng(0).permutation(np.arange(SINKS, count - INTERVAL))
    order = np.concatenate([np.arange(SINKS), order, np.arange(count - INTERVAL, CELLS)])

    @jax.jit
    def scored(keys):
        weights = None
        if policy.queries:
            weights = recent_weights(stored, keys, count, count - 1, AttentionOptions(0.1))
        return position_scores(keys, jnp.int32(count), policy, weights=weights)

    np.testing.assert_allclose(scored(row.keys[:, order]), scored(row.keys)[:, order], rtol=1e-4)


def pyramid_by_the_paper(budget: int, window: int, layers: int, length: int) -> list[int]:
    """What each layer keeps of a prompt, the lowest first, in whole numbers as its authors' code has them: the mean
    beside the window, from which budgets fall by equal steps to a twentieth of it. None is more than the prompt."""
    mean = budget - window
    fewest = mean // 20
    most = mean * 2 - fewest
    if most >= length - window:
        most = length - window
        fewest = mean * 2 - most
    step = (most - fewest) // (layers - 1)
    return [most - i * step + window for i in range(layers)]


@pytest.mark.parametrize(("layers", "most"), [(2, 4096), (3, 4096), (7, 4096), (30, 4096), (32, 1 << 20), (80, 2600)])
def test_budgets_fall_as_in_the_paper(layers, most):
    """Levels have the mean of their layers' budgets but for rounding, and the total is that of equal budgets."""
    policy, unit = CachePolicy("pyramidkv", 2048), 128
    expected = pyramid_by_the_paper(2048, 32, layers, most)
    np.testing.assert_allclose(pyramid(policy, layers, most)[::-1], expected, rtol=0, atol=layers)
    sizes, budgets = level_sizes(layers), level_budgets(policy, layers, unit, most)
    assert sum(sizes) == layers
    assert len(sizes) == len(budgets) <= 4
    assert sum(size * budget for size, budget in zip(sizes, budgets, strict=True)) == 2048 * layers
    at = 0
    for size, budget in zip(sizes, budgets, strict=True):
        assert budget % unit == 0
        assert abs(budget - np.mean(expected[::-1][at : at + size])) <= unit / 2 + layers
        at += size
    assert list(budgets) == sorted(set(budgets))
    assert set(level_budgets(policy, layers, unit, 2048)) == {2048}  # all that there is


@pytest.mark.parametrize(("layers", "most"), [(2, 4096), (7, 4096), (30, 4096), (32, 1 << 20), (32, 2600)])
def test_budgets_follow_preferences(layers, most):
    """Levels have the mean of their layers' budgets but for rounding, as long as rows are not shorter; and all of them
    together no more than the same budget for all."""
    rng, policy, unit = np.random.default_rng(layers), CachePolicy("cake", 2048), 128
    for spread in (0.2, 1.0, 3.0):
        shares = np.exp(rng.normal(size=layers) * spread)
        shares /= shares.sum()
        expected = np.sort(shares) * (2048 - 32) * layers + 32
        np.testing.assert_allclose(preferred(policy, list(shares)), expected, rtol=1e-9)
        sizes, budgets = level_sizes(layers), preferred_levels(policy, list(shares), unit, most)
        taken = sum(size * budget for size, budget in zip(sizes, budgets, strict=True))
        assert 2048 * layers - max(sizes) * unit < taken <= 2048 * layers or budgets[0] >= most
        assert list(budgets) == sorted(budgets)
        assert budgets[0] < budgets[-1] <= most + unit
        at = 0
        for size, budget in zip(sizes, budgets, strict=True):
            assert budget % unit == 0
            assert budget >= policy.least
            if expected.max() < most:
                assert abs(budget - expected[at : at + size].mean()) <= 2 * unit
            at += size
    assert set(level_budgets(policy, layers, unit, 2048, list(shares))) == {2048}  # all that there is
    with pytest.raises(ValueError, match=f"the same of all {layers} layers"):
        preferred_levels(policy, [1 / layers] * layers, unit, most)


@pytest.mark.slow
def test_budgets_are_those_of_kvpress():
    """Which does not count the newest positions among them, and takes a share of the prompt for the mean."""
    presses = pytest.importorskip("kvpress", reason="needs kvpress and what it imports: pip install --no-deps kvpress")
    policy, layers = CachePolicy("pyramidkv", 2048), 32
    for length in (3000, 4096, 32768):
        press = presses.PyramidKVPress(1 - (policy.budget - policy.interval) / length, window_size=policy.interval)
        config = SimpleNamespace(num_hidden_layers=layers)
        modules = [SimpleNamespace(config=config, layer_idx=number) for number in range(layers)]
        expected = [press.get_layer_budget(module, length) + policy.interval for module in modules]
        np.testing.assert_allclose(pyramid(policy, layers, length)[::-1], expected, rtol=0, atol=0.51)


def test_layers_are_in_levels():
    """Lower layers in higher ones; and those that read the cache of another with that."""
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None)
    mixers = [attention] * 8 + [replace(attention, cache_of=number) for number in (7, 0)]
    layers = tuple(LayerSpec(mixer, MlpSpec(hidden=2)) for mixer in mixers)
    model = ModelConfig("test", vocab=8, dim=2, layers=layers, context=4096)
    assert with_cache_levels(model, CachePolicy("snapkv", 256)) is model
    policy = replace(CachePolicy("pyramidkv", 256), levels=(64, 192, 320, 448))
    leveled = with_cache_levels(model, policy)
    assert [layer.attention.cache_level for layer in leveled.layers] == [3, 3, 2, 2, 1, 1, 0, 0, 0, 3]
    budgets = layer_budgets(leveled, policy)
    assert list(budgets.values()) == [448, 448, 320, 320, 192, 192, 64, 64]
    assert budgets_text(budgets).startswith("448 in layers 0 to 1, 320 in")
    assert layer_budgets(model, CachePolicy("snapkv", 256)) == {}
    cake = CachePolicy("cake", 256)
    with pytest.raises(ConfigError, match=r"inferlib layer-preferences MODEL .*'pyramidkv:256'"):
        with_cache_levels(model, cake)
    measured = replace(model, layer_preferences=(0.1, 0.2, 0.05, 0.3, 0.1, 0.05, 0.1, 0.1))
    leveled = with_cache_levels(measured, cake)
    assert [layer.attention.cache_level for layer in leveled.layers] == [2, 3, 0, 3, 2, 0, 1, 1, 1, 2]
    assert with_cache_levels(measured, CachePolicy("snapkv", 256)) == model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_readings_are_those_of_kvpress(kind):
    """Where both have a policy. kvpress takes other versions of transformers than the other tests."""
    presses = pytest.importorskip("kvpress", reason="needs kvpress and what it imports: pip install --no-deps kvpress")
    torch, ratio = pytest.importorskip("torch"), 1 - (BUDGET + 0.5) / CELLS
    made = {
        "streaming": presses.StreamingLLMPress(ratio, n_sink=SINKS),
        "knorm": presses.KnormPress(ratio),
        "keydiff": presses.KeyDiffPress(ratio),
        "tova": presses.TOVAPress(ratio),
        "snapkv": presses.SnapKVPress(ratio, window_size=INTERVAL, kernel_size=5),
    }
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS))
    for method, press in made.items():
        row = row_of(kind, CELLS, CachePolicy(method, BUDGET, INTERVAL).queries or 1)
        weights = np.stack([row.weights(head) for head in range(HEADS)]).transpose(0, 2, 1, 3)  # [K, G, W, P]
        attention = torch.from_numpy(weights.reshape(1, HEADS * GROUP, -1, CELLS))
        keys, hidden = torch.from_numpy(row.keys[None]).double(), torch.zeros(1, CELLS, 1)
        scores = press.score(module, hidden, keys, keys, attention, {})[0]
        for head in range(HEADS):
            expected = by_scores(scores[head].tolist(), CELLS, BUDGET, INTERVAL)
            assert by_the_paper(method, row, head, BUDGET, INTERVAL) == expected, (method, head)


def test_queries_of_the_newest_positions_are_stored():
    """Of decode rows and of chunks, several of a row among them; others stay, and padding is dropped."""
    rows, window, layer = 4, 3, 1
    rng = np.random.default_rng(0)
    stored = rng.normal(size=(2, rows, HEADS, window, GROUP * WIDTH)).astype(np.float32)
    # Row 0: tokens 4 to 8; row 2: 0 and 1; row 3: 7; padding, and a row that does not exist.
    at = np.array([0, 0, 2, 0, 0, 0, 2, 3, 1, 9], np.int32)
    positions = np.array([4, 5, 0, 6, 7, 8, 1, 7, -1, 2], np.int32)
    new = rng.normal(size=(len(at), HEADS, GROUP, WIDTH)).astype(np.float32)
    expected = stored.copy()
    for row, position, queries in sorted(zip(at, positions, new, strict=True), key=lambda x: x[1]):
        if row < rows and position >= 0:
            expected[layer, row, :, position % window] = queries.reshape(HEADS, -1)
    result = jax.jit(lambda *x: write_queries(*x, layer))(stored, new, at, positions)
    np.testing.assert_array_equal(np.asarray(result), expected)


def test_each_query_counts_once():
    """Of decode rows and of chunks of several lengths, in stacked layers; whatever lies behind a row's cells, and in
    new cells. Pages without a query's cells stay."""
    rows, columns, page, width, group, layer = 4, 3, 8, 4, 2, 1
    rng = np.random.default_rng(0)
    first, count = np.array([5, 0, -1, 14], np.int32), np.array([3, 2, 0, 1], np.int32)
    q = rng.normal(size=(rows, width, HEADS, group, WIDTH)).astype(np.float32)
    pages = rng.permutation(rows * columns).reshape(rows, columns).astype(np.int32)
    pages[2] = 1 << 30
    keys = np.full((2, rows * columns, HEADS, page, WIDTH), np.nan, np.float32)
    mass = np.full(keys.shape[:-1], np.nan, np.float32)
    rows_keys, before = rng.normal(size=(rows, HEADS, 24, WIDTH)).astype(np.float32), rng.random((rows, HEADS, 24))
    for row, last in enumerate(first + count):
        for p in range(last):
            keys[layer, pages[row, p // page], :, p % page] = rows_keys[row, :, p]
            if p < first[row]:
                mass[layer, pages[row, p // page], :, p % page] = before[row, :, p]
    options = AttentionOptions(0.3, softcap=5.0, sinks=jnp.asarray(rng.normal(size=(HEADS, group)), jnp.float32))
    new = np.asarray(jax.jit(lambda *x: add_mass(*x[:3], x[3:6], options, layer))(mass, keys, pages, q, first, count))
    for row, head in np.ndindex(rows, HEADS):
        expected = np.where(np.arange(24) < first[row], before[row, head], 0)
        for i, g in np.ndindex(count[row], group):
            seen = rows_keys[row, head, : first[row] + i + 1].astype(np.float64)
            logits = 5 * np.tanh(0.3 * seen @ q[row, i, head, g] / 5)
            total = np.exp(logits).sum() + np.exp(float(options.sinks[head, g]))
            expected[: len(seen)] += np.exp(logits) / total
        for p in range(first[row] + count[row]):
            result = new[layer, pages[row, p // page], head, p % page]
            np.testing.assert_allclose(result, expected[p], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(new[0], mass[0])
    unused = [pages[row, c] for row in (0, 1, 3) for c in range(columns) if c * page >= first[row] + count[row]]
    np.testing.assert_array_equal(new[layer, unused], mass[layer, unused])


def test_options():
    assert CachePolicy.read(None) is None
    for text in ("keydiff:64", "keydiff:64:8"):
        assert str(CachePolicy.read(text)) == text
        assert CachePolicy.read(CachePolicy.read(text)) == CachePolicy.read(text)
    wrong = {
        "text such as 'keydiff:2048'": ["keydiff", "keydiff:", "keydiff:-3", "keydiff:2.5", "", 64, True, ["knorm:64"]],
        "has the methods streaming, knorm, keydiff, h2o, tova, sagekv, snapkv, morphkv, pyramidkv": ["newest:64"],
        "budget is 37 or more, got 36": ["keydiff:36"],
        "budget is 13 or more, got 12": ["keydiff:12:8"],
        "after 1 position or more": ["keydiff:64:0"],
    }
    for message, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=message):
                CachePolicy.read(value)
