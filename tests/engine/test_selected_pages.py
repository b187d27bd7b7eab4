"""Rows that select the pages they read generate the same alone, in batches, behind prefixes and with drafts.
About 25 s."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import long_contexts
from inferlib import LLM, Buckets, SamplingParams, configs
from inferlib.cli import app
from inferlib.config import DeviceKind, EngineOptions
from inferlib.deploy.explain import explain
from inferlib.engine.engine import Engine
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.ops.int4_cells import decoded_keys
from inferlib.option_checks import ConfigurationError
from inferlib.programs.counter import compilations
from inferlib.programs.deployment import Deployment
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.poison import before_each_dispatch, cached_pages, poison, tokens_of
from tests.helpers.shared_beginnings import TAILS, crowd, run_as_told

PAGES = "quest:3:8"  # three blocks of 8 positions: half a page each
BUCKETS = Buckets((16,), (4,), (96,), tile=8)  # one batch size: fewer programs
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
# Around the ends of blocks, pages and what is read whole, which all of them pass later on.
PROMPTS = [tail[:length] for length, tail in zip([7, 8, 9, 15, 16, 17, 23, 24, 25], TAILS * 2, strict=False)]

# How each kind of cache is stacked and stored. Layers without selection are beside some in `test_host_pages.py`.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama int4": {"scan": True, "kv_cache_dtype": "int4"},
    "llama mesh": {"parallel": "dp=2,tp=2"},
    "gemma3n_text": {"scan": True},  # layers that read the cache of another
}


@pytest.fixture(scope="module")
def selecting(checkpoint):
    """`selecting(kind)`: a shared LLM of four rows."""

    @functools.cache
    def build(kind: str) -> LLM:
        options = {"buckets": BUCKETS, "attention_pages": PAGES, "decode_steps": 4, **KINDS[kind]}
        return build_llm(checkpoint(kind.split()[0]), **options)

    return build


def assert_summaries(engine: Engine) -> None:
    """Of every whole block of cells that prompts can take: its smallest and largest keys."""
    assert engine.plan.blocks
    for block, cache in zip(engine.plan.blocks, engine.plan.view(engine.cache), strict=True):
        if cache.summaries is None:
            continue
        size, (keys, *others) = block.block, [np.asarray(decoded_keys(x, np.float32), np.float32) for x in cache.arrays]
        if block.scaled:
            keys = keys * others[1][..., None]
        keys, summaries = (x if x.ndim == n + 1 else x[None] for x, n in ((keys, 4), (np.asarray(cache.summaries), 4)))
        checked = 0
        for page, count in cached_pages(engine):
            for i in range(count // size):
                cells = keys[:, page, :, i * size : (i + 1) * size]
                expected = np.concatenate([cells.min(axis=2), cells.max(axis=2)], axis=-1)
                np.testing.assert_array_equal(summaries[:, page, i], expected)
                checked += 1
        assert checked > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.release) for kind in KINDS if kind != "llama")]
)
def test_rows_are_what_they_are_alone(kind, selecting):
    """With NaN in all that is not valid, and behind prompts that were there before. Nothing compiles."""
    llm = selecting(kind)
    llm.warmup(["greedy"])
    before = compilations()
    alone = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        alone += tokens_of(llm, [prompt], GREEDY)
    for _ in range(2):  # the second time each prompt goes on from the cells of the first
        assert tokens_of(llm, PROMPTS, GREEDY) == alone
    assert compilations() == before
    assert llm.stats.cached_tokens or llm.engine.plan.snapshots  # which none of them is long enough for
    assert_summaries(llm.engine)
    with before_each_dispatch(llm, poison):
        assert tokens_of(llm, PROMPTS, GREEDY) == alone


@pytest.mark.slow
def test_what_is_read_whole_is_read_in_full(checkpoint, selecting, llama):
    """Log-probabilities are those of full attention, bit by bit, where rows have no more blocks than are read; tokens
    are until a row has more, and others then."""
    path, buckets = checkpoint("llama", num_hidden_layers=1), Buckets((16,), (1,), (96,))
    whole, every = (build_llm(path, buckets, decode_steps=1, attention_pages=x) for x in (None, "quest:12:8"))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    outputs = [llm.generate([TAILS[0][:9]], params)[0].outputs[0] for llm in (whole, every)]
    assert outputs[0].token_ids == outputs[1].token_ids
    expected, of_every = (
        [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
        for output in outputs
    )
    assert of_every == expected
    long = dataclasses.replace(GREEDY, max_tokens=60)
    (some,), (tokens,) = (tokens_of(llm, [TAILS[0][:9]], long) for llm in (selecting("llama"), llama))
    same = 24 - 9
    assert some[:same] == tokens[:same]
    assert some != tokens


@pytest.mark.slow
def test_pages_that_are_copied_evicted_and_given_away(selecting):
    """Parts of pages are taken, sequences are preempted; summaries are of the cells that are there."""
    llm = selecting("llama")
    with new_engine(llm, pages=llm.engine.plan.columns * 3 // 2) as engine:
        sequences = crowd()
        run_as_told(engine, sequences, [(i // 2, None) for i in range(len(sequences))], 0)
        assert engine.scheduler.preemptions
        engine.count_pages()
        assert engine.stats.evicted_pages
        assert_summaries(engine)
    assert all(len(s.tokens) == 20 for s in sequences)


@pytest.mark.release
def test_drafts_change_no_token(selecting, checkpoint):
    """Each of several queries of a row selects for itself, as if tokens came one by one. By bases of keys they do so in
    `test_key_bases.py`."""
    prompts = [[*tail[:5] * 4, *tail[:3]] for tail in TAILS[:3]]
    drafting = build_llm(checkpoint("llama"), BUCKETS, attention_pages=PAGES, decode_steps=1, speculation="ngram:3")
    assert tokens_of(drafting, prompts, GREEDY) == tokens_of(selecting("llama"), prompts, GREEDY)
    assert drafting.stats.drafts
    assert_summaries(drafting.engine)


def resolve(platform: str = "cpu", parallel: str | None = None, **options: Any):
    shards = None if parallel is None else planned_shards(Parallelism.parse(parallel))
    sizes = EngineOptions(max_batch=8, max_len=512, **{"attention_pages": "quest:2", **options})
    return sizes.resolve(DeviceKind(platform), shards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_pages": "quest"}, "attention_pages is text such as 'quest:64'"),
        ({"attention_pages": "quest:1"}, "reads 2 pages or more"),
        ({"parallel": "cp=2"}, "leave cp out of parallel"),
        ({"platform": "neuron"}, "does not run on Trainium"),
        ({"platform": "tpu", "kv_cache_dtype": "int8"}, "leave kv_cache_dtype out"),
        ({"cascade": True}, "leave cascade out"),
    ],
)
def test_what_cannot_select(options, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)


def test_models_and_pages_that_cannot():
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None, window=8)
    model = ModelConfig("test", vocab=64, dim=2, layers=(LayerSpec(attention, MlpSpec(hidden=2)),), context=512)
    with pytest.raises(ConfigurationError, match="only windows, latents or states: leave it out"):
        resolve().check_model(model)
    with pytest.raises(ConfigurationError, match="blocks of 256 positions, and a page has 128: take blocks of 128"):
        LLM("smollm2", max_batch=1, max_len=512, attention_pages="quest:2:256", progress=False)
    assert not resolve("gpu").cascade


@pytest.mark.slow
def test_plans_commands_and_artifacts_know_them():
    """A page of 128 positions has a summary of two numbers for each of a key: 1/128 of keys and values."""
    shown = [
        json.loads(CliRunner().invoke(app, ["info", "--config", "llama3-8b", "--json", *more]).stdout)
        for more in ([], ["--attention-pages", "quest:64"], ["--attention-pages", "quest:64:16"])
    ]
    mesh = explain("llama3-8b", "tp=4", max_len=2048, attention_pages="quest:64").mesh
    assert {p.name: p.local_shape for p in mesh.cache} == {
        "cache": (128, 2, 128, 128),
        "cache summaries": (128, 1, 2, 256),
    }
    tokens = [facts["cache_bytes"]["bfloat16"]["per_token"] for facts in shown]
    assert tokens[1:] == [tokens[0] * 129 // 128, tokens[0] * 17 // 16]
    assert shown[1]["attention_pages"] == "quest:64"
    made = Deployment(configs.load("llama3-8b"), "cpu", "bfloat16", Buckets((16,), (2,), (4096,)), page_size=64)
    selecting = dataclasses.replace(made, attention_pages="quest:8")
    assert Deployment.from_json(json.loads(json.dumps(selecting.to_json()))) == selecting
    (key, *_), plan = made.keys(), selecting.planned().plan
    assert made.program_hash(key, None) != selecting.program_hash(key, None)
    assert plan.bytes_of()[0] * 64 == made.planned().plan.bytes_of()[0] * 65
    assert plan.blocks[0].names == ("k", "v", "summaries")


@pytest.mark.release
@pytest.mark.usefixtures("optimized_programs")
def test_needles_are_found_in_a_third_of_the_cache():
    """Real weights: one in three is in the newest blocks, which have the question's cells."""
    llm = long_contexts.build("smollm2", 800, "quest:16:16", dtype="float32", scan=True)
    asked = long_contexts.questions(llm, long_contexts.TEXT.read_text(), 800, contexts=2)
    assert long_contexts.answers(llm, asked) >= len(asked) - 1
