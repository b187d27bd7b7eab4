"""Rows with a bounded cache generate the same alone and in batches, and keep what the policy says. About 25 s."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import long_contexts
from inferlib import LLM, Buckets, SamplingParams, StructuredOutputs, configs
from inferlib.cli import app
from inferlib.config import DeviceKind, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.models.config import AttentionSpec, LayerSpec, LoopSpec, MlpSpec, ModelConfig
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.programs.deployment import Deployment
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, new_engine, random_prompts
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.sequences import sequence
from tests.ops.test_cache_policy import Row, by_the_paper

BUDGET, INTERVAL, TILE = 16, 4, 16  # tokens of a prompt between two compactions are those of the largest bucket
POLICY = f"keydiff:{BUDGET}:{INTERVAL}"
BUCKETS = Buckets((16,), (1, 4), (96,), tile=8)
FOUR_ROWS = Buckets((16,), (4,), (96,), tile=8)  # one batch size: fewer programs
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
# Around the budget, what a row that decodes may have, and what a prompt may have; and longer ones.
PROMPTS = random_prompts([3, 16, 19, 20, 21, 31, 32, 33, 48, 49, 75])
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"page_size": 8, "buckets": BUCKETS, "decode_steps": 4},
    "llama scan h2o": {"scan": True, "cache_policy": f"h2o:{BUDGET}:{INTERVAL}"},
    # Levels of 16 and 48 positions.
    "llama pyramidkv": {"cache_policy": f"pyramidkv:{2 * BUDGET}:{INTERVAL}", "page_size": 8},
    "llama mesh": {"cache_policy": f"h2o:{BUDGET}:{INTERVAL}", "parallel": "dp=2,tp=2"},
    # Levels of 16, 40 and 64 positions, of one, three and one layer.
    "llama mesh pyramidkv": {
        "num_hidden_layers": 5,
        "cache_policy": "pyramidkv:40:4",
        "page_size": 8,
        "scan": True,
        "parallel": "dp=2,tp=2",
    },
    # Layers that read the cache of another.
    "gemma3n_text pyramidkv": {"cache_policy": f"pyramidkv:{2 * BUDGET}:{INTERVAL}", "page_size": 8},
    "gpt2": {"dtype": "bfloat16", "cache_policy": f"streaming:{BUDGET}:{INTERVAL}"},  # learned positions
    "llama tova": {"cache_policy": f"tova:{BUDGET}:{INTERVAL}"},  # below
    "llama moves": {
        "cache_policy": f"keydiff:{3 * BUDGET}:{INTERVAL}",
        "page_size": 8,
    },  # most cells stay where they are
}
# Levels and stacked layers are in `test_layer_preferences.py`; cells of each kind, and their counts, are below.
MARKS: dict[str, Any] = {"llama": []}
BELOW = ("llama tova",)


@pytest.fixture(scope="module")
def bounded(checkpoint):
    """`bounded(kind)`: a shared LLM of four rows."""

    @functools.cache
    def build(kind: str) -> LLM:
        options = {"buckets": FOUR_ROWS, "cache_policy": POLICY, "decode_steps": 1, **KINDS[kind]}
        layers = {name: options.pop(name) for name in ("num_hidden_layers",) if name in options}
        return build_llm(checkpoint(kind.split()[0], **layers), **options)

    return build


def free_pages(engine: Engine) -> list[int]:
    """Of each replica, in layers of each level."""
    counts = []
    for pages in engine.scheduler.pages:
        counts += [pages.free, *(pool.free for pool in (pages.levels.pools if pages.levels else ()))]
    return counts


def assert_as_alone(llm: LLM) -> None:
    """Rows of a batch have the tokens that they have alone, with NaN in all that is not valid too. Nothing compiles,
    and all pages come back."""
    llm.warmup(["greedy"])
    before, free = compilations(), free_pages(llm.engine)
    alone = [tokens_of(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert tokens_of(llm, PROMPTS, GREEDY) == alone
    assert compilations() == before
    assert free_pages(llm.engine) == free
    with before_each_dispatch(llm, poison):
        assert tokens_of(llm, PROMPTS, GREEDY) == alone


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=MARKS.get(kind, pytest.mark.release)) for kind in KINDS if kind not in BELOW],
)
@pytest.mark.fast_cases(1)
def test_rows_are_what_they_are_alone(kind, bounded):
    llm = bounded(kind)
    assert_as_alone(llm)
    assert llm.no_prefix_caching
    assert not llm.stats.cached_tokens


def run_until(engine: Engine, s: Sequence, count: int) -> None:
    """Generate `count` tokens of a sequence one by one."""
    if s.row < 0:
        engine.add(s)
    while len(s.tokens) < count:
        engine.advance(max_steps=1)


def keys_of(engine: Engine, s: Sequence) -> np.ndarray:
    """The keys [K, P, h] of a row's cells in the first layer, where they depend on a token and its position alone."""
    keys = np.asarray(engine.plan.view(engine.cache)[0].arrays[0])
    return np.concatenate([keys[page] for page in (s.level_pages or [s.pages])[-1]], axis=1)


def queries_behind(engine: Engine, tokens: list[int], heads: int, size: int) -> np.ndarray:
    """The queries [K, W, G, h] of the last tokens, the oldest first, likewise: of these tokens as a prompt."""
    run_until(engine, s := sequence(tokens, 2), 1)
    queries = np.asarray(engine.plan.view(engine.cache)[0].queries)[s.row]
    engine.cancel(s)
    places = (len(tokens) + np.arange(-queries.shape[1], 0)) % queries.shape[1]
    return queries[:, places].reshape(heads, len(places), -1, size)


def retained_by_hand(
    keys: np.ndarray, prompt: int, least: int, budget: int, choose: Callable[[list[list[int]]], list[list[int]]]
) -> list:
    """Which of the positions of each head's keys [K, n, h] its cache has, all dispatches done that come before the
    next. choose: those that stay of each head's, `budget` of more. Layers that keep `least` decide when."""
    retained: list[list[int]] = [[] for _ in keys]
    fewest = 0  # cells in these layers
    for position in range(keys.shape[1]):
        retained, fewest = [[*head, position] for head in retained], fewest + 1
        if fewest >= least + (TILE if position + 1 < prompt else INTERVAL):
            retained, fewest = choose(retained) if len(retained[0]) > budget else retained, least
    return retained


def chosen_by_hand(llm: LLM, other: Engine, keys: np.ndarray, tokens: list[int]) -> Callable[[list], list]:
    """What chooses of each head's positions, of all keys [K, n, h] of these tokens."""
    policy, spec = llm.engine.config.cache_policy, llm.engine.model.config.layers[0].attention
    budget = policy.budgets[-1]  # of the first layer

    def choose(heads: list[list[int]]) -> list[list[int]]:
        cells = np.stack([of_head[at] for of_head, at in zip(keys, heads, strict=True)])
        queries = cells[:, :, None]  # any, for policies without
        if policy.queries:
            queries = queries_behind(other, tokens[: heads[0][-1] + 1], spec.kv_heads, spec.head_dim)
        row = Row(cells, cells[..., 0], queries, spec.scale)
        stay = [by_the_paper(policy.method, row, head, budget, INTERVAL) for head in range(len(heads))]
        return [[at[i] for i in which] for at, which in zip(heads, stay, strict=True)]

    return choose


def as_they_lie(keys: np.ndarray, positions: list[int], cells: np.ndarray) -> list[int]:
    """These positions of keys [n, h] in the order in which cells [p, h] have them, the newest interval last."""
    nearest = [positions[np.abs(keys[positions] - cell).max(axis=1).argmin()] for cell in cells]
    assert sorted(nearest) == positions
    assert nearest != positions
    assert nearest[-INTERVAL:] == positions[-INTERVAL:]
    return nearest


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [("llama", prompt) for prompt in PROMPTS[-5:]]
    + [("llama tova", PROMPTS[-2]), ("llama moves", PROMPTS[-1])]
    + [("llama pyramidkv", PROMPTS[-4]), ("llama pyramidkv", PROMPTS[-1])],
    ids=lambda x: x if isinstance(x, str) else str(len(x)),
)
@pytest.mark.fast_cases(2)
def test_a_row_has_the_cells_that_its_policy_keeps(kind, prompt, bounded, llama):
    """Each KV head has its own, in the order of their positions or the newest interval last. A row gives back the pages
    that it needs no more."""
    llm = bounded(kind)
    budgets = llm.engine.config.compacted.budgets
    least, budget = budgets[0], budgets[-1]  # and that of the first layer
    engines = [new_engine(x, in_flight=1) for x in (llm, llm, llama)]
    with engines[0] as engine, engines[1] as other, engines[2] as unbounded:
        s, retained = sequence(prompt, 20), []
        for count in (2, 7, 16):
            run_until(engine, s, count)
            tokens = prompt + s.tokens[:-1]
            run_until(unbounded, every := sequence(tokens, 2), 1)
            expected, cells_of_row = keys_of(unbounded, every)[:, : len(tokens)], keys_of(engine, s)
            unbounded.cancel(every)
            cells = int(engine.state.length[s.row])
            if cells == least + INTERVAL:
                continue  # compacted before the next dispatch
            choose = chosen_by_hand(llm, other, expected, tokens)
            retained = retained_by_hand(expected, len(prompt), least, budget, choose)
            assert cells < len(tokens)
            assert int(engine.state.dropped[s.row]) == len(tokens) - cells
            cells += 0 if engine.state.ahead is None else int(engine.state.ahead[s.row, -1])
            assert cells == len(retained[0])
            for head, positions in enumerate(retained):
                if kind == "llama moves":
                    positions = as_they_lie(expected[head], positions, cells_of_row[head, :cells])
                np.testing.assert_allclose(cells_of_row[head, :cells], expected[head, positions], rtol=0, atol=1e-5)
        everything = retained[0] == list(range(len(retained[0])))
        assert (retained[0] == retained[1]) == ("tova" in kind or everything)
        page = engine.plan.page
        assert len(s.pages) == -(-(least + INTERVAL) // page)
        most = min(budget + INTERVAL, len(prompt) + 19)
        assert [len(x) for x in s.level_pages] == [-(-most // page)] * (budget > least)
        engine.cancel(s)


@pytest.mark.slow
def test_attention_is_counted_as_it_is_computed(bounded):
    """Each query's weights add up to one, and a row that is compacted drops those of the cells that it drops."""
    llm = bounded("llama scan h2o")
    with new_engine(llm, in_flight=1) as engine:
        s = sequence(PROMPTS[0], 24)
        for count in (2, 13, 22):
            run_until(engine, s, count)
            mass = np.asarray(engine.plan.view(engine.cache)[0].mass)[0]  # of the first layer
            cells = int(engine.state.length[s.row])
            total = np.concatenate([mass[page] for page in s.pages], axis=1)[:, :cells].sum(axis=1)
            spec, tokens = llm.engine.model.config.layers[0].attention, len(PROMPTS[0]) + count - 1
            most = spec.heads / spec.kv_heads * tokens
            assert (total < most - 1).all() if tokens > cells else np.allclose(total, most, rtol=1e-4)
        assert tokens > cells
        engine.cancel(s)


@pytest.mark.slow
def test_what_is_not_compacted_is_what_it_would_be(checkpoint, bounded, llama):
    """Tokens are those of a cache that keeps all until a row is compacted; log-probabilities too, bit by bit, if none
    ever is."""
    path, buckets = checkpoint("llama"), Buckets((16,), (1,), (96,))
    whole, every = (build_llm(path, buckets, decode_steps=1, cache_policy=x) for x in (None, "pyramidkv:96"))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    expected, of_every = (
        [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
        for output in (llm.generate([PROMPTS[0]], params)[0].outputs[0] for llm in (whole, every))
    )
    assert of_every == expected
    assert every.no_prefix_caching is None  # no row is ever compacted
    assert resolve(cache_policy="keydiff:512").compacted is None
    long = dataclasses.replace(GREEDY, max_tokens=60)
    (some,), (tokens,) = (tokens_of(llm, [PROMPTS[0]], long) for llm in (bounded("llama"), llama))
    same = BUDGET + INTERVAL + 1 - len(PROMPTS[0])
    assert some[:same] == tokens[:same]
    assert some != tokens


@pytest.mark.release
def test_penalties_and_grammars_go_on(bounded):
    """What was generated counts, whatever the cache still has of it; and the host may choose tokens. Together, so that
    programs are of one mode."""
    llm, prompt, form = bounded("llama"), PROMPTS[-1], StructuredOutputs(regex="[0-9]{12}")
    free = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=form)
    params = dataclasses.replace(free, frequency_penalty=2.0)
    with new_engine(llm) as engine:
        engine.programs.strict = False
        alone = llm.generate([prompt], params)[0].outputs[0].text
        again = llm.generate([PROMPTS[5], prompt], params)
        assert again[1].outputs[0].text == alone
        assert len(alone) == 12
        assert alone != llm.generate([prompt], free)[0].outputs[0].text
        assert max(map(alone.count, alone)) < 12 / 3


def test_rows_wait_for_all_pages_that_they_will_need(bounded):
    """So nobody is preempted for pages, of which there are fewer than one row without a policy takes."""
    llm = bounded("llama")
    plan = llm.engine.plan
    assert plan.columns * plan.page == BUDGET + TILE
    expected = tokens_of(llm, PROMPTS, GREEDY)
    with new_engine(llm, pages=9) as engine:
        assert tokens_of(llm, PROMPTS, GREEDY) == expected
        assert not engine.scheduler.preemptions
        assert free_pages(engine) == [9]


def test_traffic_changes_no_row(bounded):
    """Requests that come, stream and are cancelled at random, with few pages; and some are preempted by priority."""
    draw, llm = random.Random(1), bounded("llama")
    expected = tokens_of(llm, PROMPTS, GREEDY)
    with new_engine(llm, pages=9) as engine:
        free = free_pages(engine)
        sequences = [sequence(p, 20, priority=draw.choice([0, 0, 0, -1])) for p in PROMPTS * 2]
        waiting, cancelled = list(sequences), set()
        for _ in range(2000):
            if waiting and draw.random() < 0.5:
                engine.add(waiting.pop())
            if draw.random() < 0.03 and engine.scheduler.running:
                cancelled.add(s := draw.choice(list(engine.scheduler.running.values())))
                engine.cancel(s)
            engine.advance(max_steps=draw.choice([1, None]))
            assert_accounted(engine)
            if not waiting and not engine.busy:
                break
        whole = [(s.tokens, tokens) for s, tokens in zip(sequences, expected * 2, strict=True) if s not in cancelled]
        assert len(whole) > 15
        assert all(len(tokens) == 20 for tokens, _ in whole)
        assert sum(tokens != alone for tokens, alone in whole) <= engine.scheduler.preemptions < 8
        assert free_pages(engine) == free


def resolve(platform: str = "cpu", parallel: str | None = None, **options: Any):
    shards = None if parallel is None else planned_shards(Parallelism.parse(parallel))
    sizes = EngineOptions(max_batch=8, max_len=512, **{"cache_policy": "keydiff:128", **options})
    return sizes.resolve(DeviceKind(platform), shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_policy": "keydiff"}, "cache_policy is text such as 'keydiff:2048'"),
        ({"cache_policy": "keydiff:32"}, "budget is 37 or more"),
        ({"cache_policy": "keydiff:100"}, "keeps a multiple of 32 positions.*take 128"),
        ({"cache_policy": "pyramidkv:100"}, "keeps a multiple of 32 positions.*take 128"),
        ({"parallel": "cp=2"}, "leave cp out of parallel"),
        ({"platform": "neuron"}, "does not run on Trainium"),
        ({"kv_cache_dtype": "int8"}, "does not work with kv_cache_dtype yet"),
        ({"speculation": "ngram:3"}, "does not work with speculation yet"),
        ({"attention_pages": "quest:2"}, "does not work with attention_pages yet"),
        ({"sparse_prefill": "mean:0.9", "cache_policy": "keydiff:256"}, "does not work with sparse_prefill yet"),
        ({"cascade": True}, "leave cascade out"),
        ({"host_cache": 1 << 20}, "leave host_cache and disk_cache out"),
    ],
)
def test_what_cannot_be_compacted(options, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)


def test_models_that_cannot():
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None, window=8)
    model = ModelConfig("test", vocab=64, dim=2, layers=(LayerSpec(attention, MlpSpec(hidden=2)),), context=512)
    with pytest.raises(ConfigurationError, match="layer 0 of this one has a window: leave it out"):
        resolve().check_model(model)
    sinks = dataclasses.replace(attention, window=None, sinks=True)
    model = dataclasses.replace(model, layers=(LayerSpec(sinks, MlpSpec(hidden=2)),))
    resolve(cache_policy="h2o:128").check_model(model)
    with pytest.raises(ConfigurationError, match="without the learned sinks that layer 0 of this model has"):
        resolve(cache_policy="snapkv:128").check_model(model)
    pyramid = "pyramidkv:128"
    no_window = dataclasses.replace(attention, window=None)
    one = dataclasses.replace(model, layers=(LayerSpec(no_window, MlpSpec(hidden=2)),))
    two, three = (dataclasses.replace(one, layers=one.layers * count) for count in (2, 3))
    looped = dataclasses.replace(three, loop=LoopSpec(1, 2, 2, "add", "final_norm"))
    for broken, message in (
        (one, "has only one layer with a cache: take 'snapkv:128'"),
        (looped, "repeats layers, each time with other cells"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            resolve(cache_policy=pyramid).leveled(broken)
    with pytest.raises(ConfigurationError, match="give `resolve` the model"):
        resolve(cache_policy=pyramid).check_model(two)
    with pytest.raises(ConfigurationError, match=r"the same of all 2 layers.* multiples of 32 .*'snapkv:64'"):
        resolve(cache_policy="pyramidkv:64").leveled(two)
    assert resolve(cache_policy=pyramid).leveled(two).compacted.budgets == (64, 192)
    assert not resolve("gpu").cascade
    shape, split = configs.load("llama3-8b"), Parallelism.parse("tp=16")
    with pytest.raises(ConfigurationError, match="lower tp, or take a policy by keys"):
        Deployment(shape, "cpu", "bfloat16", Buckets((32,), (1,), (512,)), split, cache_policy="h2o:128").planned()


@pytest.mark.slow
def test_plans_commands_and_artifacts_know_them():
    """A row of 2048 positions keeps 512, and while its prompt is prefilled 512 more."""
    shown = [
        json.loads(CliRunner().invoke(app, ["info", "--config", "llama3-8b", "--json", *more]).stdout)
        for more in ([], *(["--cache-policy", f"{name}:512"] for name in ("keydiff", "snapkv", "pyramidkv")))
    ]
    each = [facts["cache_bytes"]["bfloat16"]["per_sequence"] for facts in shown]
    assert each[1] == each[0] // 2
    assert each[2] == each[3]
    levels = [shown[3]["layer_budgets"][str(layer)] for layer in (0, 8, 16, 24)]
    assert levels == [896, 640, 384, 128]
    assert shown[2]["layer_budgets"] == {}
    assert shown[1]["cache_policy"] == "keydiff:512"
    made = Deployment(configs.load("llama3-8b"), "cpu", "bfloat16", Buckets((16,), (2,), (256, 4096)), page_size=64)
    bounded = dataclasses.replace(made, cache_policy="keydiff:512:64")
    assert Deployment.from_json(json.loads(json.dumps(bounded.to_json()))) == bounded
    (key, *_), plan = made.keys(), bounded.planned().plan
    assert made.program_hash(key, None) != bounded.program_hash(key, None)
    assert set(bounded.planned().config.limits) == {256, 576}
    assert plan.columns == 576 // 64
    counting = dataclasses.replace(bounded, cache_policy="h2o:512:64").planned().plan
    assert counting.blocks[0].names == ("k", "v", "mass")
    assert counting.bytes_of()[0] * 128 == plan.bytes_of()[0] * 129  # 4 bytes beside 2 * 128 * 2
    for policy, queries in (("tova:512:64", 1), ("snapkv:512:64", 64)):
        newest = dataclasses.replace(bounded, cache_policy=policy).planned().plan
        assert newest.blocks[0].names == ("k", "v", "queries")
        assert newest.bytes_of() == (plan.bytes_of()[0], 32 * 2 * queries * 4096 * 2)  # layers, rows
        assert not newest.snapshots


@pytest.mark.release
@pytest.mark.usefixtures("optimized_programs")
def test_keys_tell_more_than_their_age():
    """Real weights: needles that are found again in less than half of the cache. Of the newest 128 positions one in
    three is."""
    right, text = {}, long_contexts.TEXT.read_text()
    for policy in ("keydiff:128", "streaming:128"):
        llm = long_contexts.build("smollm2", 384, None, cache_policy=policy, dtype="float32", scan=True)
        right[policy] = long_contexts.answers(llm, long_contexts.questions(llm, text, 384, contexts=2))
    assert right["keydiff:128"] >= 4
    assert right["streaming:128"] <= 2
