"""An EAGLE-3 head drafts: its drafts are the published ones, and tokens are what they are without it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferlib import LLM, Buckets, Speculation, explain
from inferlib.checkpoint.source import CheckpointError
from inferlib.option_checks import ConfigurationError
from inferlib.outputs import RequestOutput
from tests.helpers.eagle3 import make_head
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.poison import before_each_dispatch, poison
from tests.helpers.speculation import (
    ALONE,
    BUCKETS,
    CHOICE,
    GREEDY,
    IDS,
    JOBS,
    LONGER,
    SAMPLED,
    TAILS,
    TRUNK,
    Job,
    assert_nothing_compiles,
    assert_same,
    counted_drafts,
    run,
    tight,
)

pytestmark = pytest.mark.usefixtures("counts")


@pytest.fixture(scope="module")
def path(checkpoint) -> Path:
    return checkpoint("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def head(path, tmp_path_factory) -> Path:
    """A random head that chooses among `IDS`."""
    folder = make_head(tmp_path_factory.mktemp("head") / "head", path, len(IDS))
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"d2t": np.array(IDS) - np.arange(len(IDS))}, file)
    return folder


def drafting(path: Path, head: Path, tokens: int = 3, **more) -> LLM:
    return tight(path, BUCKETS, decode_steps=1, speculation=Speculation("eagle3", tokens, head), **more)


@pytest.fixture(scope="module")
def llm(path, head) -> LLM:
    return drafting(path, head)


def published_counts(path: Path, head: Path, output: RequestOutput) -> np.ndarray:
    """How many of three published drafts a step could stand, and how many do."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.helpers.published_eagle3 import PublishedHead

    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    text = torch.tensor(tokens)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(input_ids=text[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[n][0] for n in (1, 2, 2)], dim=-1)  # after the layers of `default_feature_layers`

    published = PublishedHead(head, path)

    @torch.no_grad()
    def drafts(cells: int) -> list[int]:
        oracle, positions, chosen = copy.copy(published), torch.arange(cells), []  # without keys and values
        state = oracle.step(text[1 : cells + 1], features[:cells], positions)[-1:]
        for i in range(3):
            _, token = oracle.choose(state)
            chosen.append(int(token))
            state = oracle.step(token, state, positions[-1:] + 1 + i)
        return chosen

    return counted_drafts(tokens, len(output.prompt_token_ids), drafts)


@pytest.mark.slow
def test_nothing_that_is_not_valid_is_read(llm, without):
    """Rows with cached prefixes, some of which lose their pages; the second time all is cached. Then what is not valid
    holds NaN before each dispatch, and as many drafts stand. In the end the head's weights are NaN, and so is all that
    it computes. Other numbers of drafts, and that nothing compiles, are below."""
    jobs = [(prompt, dataclasses.replace(CHOICE, max_tokens=28)) for prompt, _ in LONGER]
    expected = run(without, jobs)
    for _ in range(2):
        assert_same(run(llm, jobs), expected)
    wanted, stood, shares = run(without, ALONE), [], []
    for act in (lambda engine: None, lambda engine: shares.append(poison(engine))):
        with before_each_dispatch(llm, act):
            assert_same(run(llm, ALONE), wanted)
            stood.append((llm.stats.drafts, llm.stats.accepted_drafts))
    assert max(shares) > 0
    assert stood[0] == stood[1]
    assert stood[0][1] > 10
    assert_tokens_are_the_targets(llm, jobs, without)


@pytest.mark.slow
def test_drafts_are_the_published_ones(path, head, llm, without):
    """As many stand as by the published arithmetic, step by step from features and positions of its own."""
    wanted = np.zeros(2, int)
    with new_engine(llm, prefix_caching=False) as engine:
        for job in ALONE:
            outputs = run(llm, [job])
            assert_same(outputs, run(without, [job]))
            wanted += published_counts(path, head, outputs[0])
    assert (engine.stats.drafts, engine.stats.accepted_drafts) == tuple(wanted)
    assert wanted[1] / wanted[0] > 0.2


@pytest.mark.release
def test_all_options_in_one_batch(path, head, without, counts):
    """A model that drafts for another has them beside greedy rows: they reach no drafter."""
    counts(0, 1, 3)
    assert_tokens_are_the_targets(assert_nothing_compiles(lambda: drafting(path, head), without), JOBS, without)


def assert_tokens_are_the_targets(llm: LLM, jobs: Sequence[Job], without: LLM) -> None:
    """Prompts were cached, rows lost their pages and some drafts stood; with NaN as the head's weights, tokens are what
    they are without it."""
    assert_accounted(llm.engine)
    assert llm.engine.scheduler.preemptions
    assert llm.stats.cached_tokens
    assert 0 < llm.stats.accepted_drafts < llm.stats.drafts
    weights, count, drafts = llm.engine.weights, len(llm.engine.model.specs), llm.stats.drafts
    spoiled = (jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 1 << 20) for x in weights[count:])
    llm.engine.weights = (*weights[:count], *spoiled)
    llm.reset_prefix_cache()
    assert_same(run(llm, jobs), run(without, jobs))
    assert llm.stats.drafts > drafts
    llm.engine.weights = weights
    llm.reset_prefix_cache()


def test_what_is_refused(path, head, checkpoint, tmp_path):
    wide = make_head(tmp_path / "wide", checkpoint("llama", num_hidden_layers=2, hidden_size=144), 20, embeds=True)
    deep = make_head(tmp_path / "deep", path, 20, eagle_aux_hidden_state_layer_ids=[0, 1, 7])
    for folder, message in {
        wide: "head of another model: its fc takes 432 numbers",
        deep: "deep is of another model: it takes the output of layer 7; this one has 3",
        tmp_path / "none": "is no directory",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            build_llm(path, BUCKETS, speculation=f"eagle3:{folder}:3")
    with pytest.raises(ConfigurationError, match="draft 7, or take larger buckets"):
        build_llm(path, BUCKETS, speculation=f"eagle3:{head}:8")
    facts = explain(path, speculation=f"eagle3:{head}:3").facts()
    sizes = [x["cache_bytes"]["float32"]["per_token"] for x in (facts["draft"], facts)]
    assert 3 * sizes[0] == sizes[1]


# ---- further cases of each kind


@pytest.mark.release
def test_changing_counts_and_batches(path, head, without, counts):
    """Dispatches that draft nothing leave features that are pending, and rows move to smaller batches."""
    counts(3, 0, 1, 0, 0)
    jobs = [(TRUNK[:length], CHOICE) for length in (1, 7, 13, 22, 30)]
    wanted = run(without, jobs)
    buckets = Buckets(prefill=(8,), batch=(1, 4), cache=(64,))
    llm = build_llm(path, buckets, decode_steps=2, speculation=f"eagle3:{head}:3", page_size=8)
    assert_same(run(llm, jobs), wanted)
    assert llm.stats.accepted_drafts


@pytest.mark.release
@pytest.mark.parametrize(
    "more",
    [
        {"parallel": "dp=2,cp=2,tp=2"},
        {"scan": True, "kv_cache_dtype": "int8", "prefill_devices": [1], "page_size": 8},
    ],
    ids=str,
)
def test_kinds_of_engines(path, head, more):
    buckets = dataclasses.replace(BUCKETS, batch=(8,))
    wanted = run(build_llm(path, buckets, **{k: x for k, x in more.items() if k == "kv_cache_dtype"}), SAMPLED)
    llm = build_llm(path, buckets, decode_steps=2, speculation=f"eagle3:{head}:3", **more)
    assert_same(run(llm, SAMPLED), wanted)
    assert llm.stats.accepted_drafts


@pytest.mark.release
def test_a_target_with_latents(checkpoint, undrafted, tmp_path):
    """With a head that chooses among all tokens, and has embeddings of its own."""
    path = checkpoint("minicpm3")
    jobs, without = [(TRUNK, GREEDY), (TRUNK[:30] + TAILS[3], GREEDY)], undrafted(path)
    head = make_head(tmp_path / "head", path, without.model_config.vocab, embeds=True)
    llm = build_llm(path, BUCKETS, decode_steps=2, speculation=f"eagle3:{head}:3")
    for _ in range(2):
        assert_same(run(llm, jobs), run(without, jobs))
    assert llm.stats.drafts
