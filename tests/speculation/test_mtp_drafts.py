"""A model's own layer for further tokens drafts: its drafts are the published ones, and tokens are the same without."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from inferlib import LLM, Speculation, convert, explain
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.config import ConfigError
from inferlib.outputs import RequestOutput
from tests.helpers.llms import build_llm
from tests.helpers.mtp import MTP_LAYERS, PublishedMtp, make_target
from tests.helpers.speculation import (
    ALONE,
    BUCKETS,
    IDS,
    SAMPLED,
    assert_same,
    counted_drafts,
    run,
)
from tests.helpers.tokenizer import write_tokenizer

pytestmark = pytest.mark.usefixtures("counts")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"), "deepseek_v3")
    write_tokenizer(folder)
    return folder


@torch.no_grad()
def published_counts(path: Path, output: RequestOutput) -> np.ndarray:
    """How many of three published drafts a step could stand, and how many do."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    text = torch.tensor(tokens)
    published = PublishedMtp(path)
    features = published.features(text)

    def drafts(cells: int) -> list[int]:
        layer, chosen = copy.copy(published), []  # without inputs
        state = layer.step(text[1 : cells + 1], features[:cells])[-1:]
        for _ in range(3):
            chosen.append(IDS[int(layer.logits(state)[0, IDS].argmax())])
            state = layer.step(torch.tensor(chosen[-1:]), layer.passed_on(state))[-1:]
        return chosen

    return counted_drafts(tokens, len(output.prompt_token_ids), drafts)


def assert_published(path: Path, without: LLM) -> None:
    """As many stand as by the published arithmetic, step by step from features and positions of its own.

    Each request runs alone, as steps that prefill draft nothing.
    """
    llm = build_llm(path, BUCKETS, decode_steps=1, speculation="mtp:3", prefix_caching=False)
    wanted = np.zeros(2, int)
    for job in ALONE:
        outputs = run(llm, [job])
        assert_same(outputs, run(without, [job]))
        wanted += published_counts(path, outputs[0])
    assert (llm.stats.drafts, llm.stats.accepted_drafts) == tuple(wanted)
    assert wanted[1] > 5


@pytest.mark.slow
def test_drafts_are_the_published_ones(path, without):
    assert_published(path, without)


def test_what_is_refused(path, checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="llama has no layer for predicting further tokens"):
        build_llm(checkpoint("llama"), BUCKETS, speculation="mtp:3")
    with pytest.raises(ConfigError, match="llama has no layer for predicting further tokens"):
        explain("llama3-8b", speculation="mtp:3")
    convert(path, tmp_path / "converted", dtype="float32", progress=False)
    with pytest.raises(CheckpointError, match="converted, which leaves the layer for predicting further tokens out"):
        build_llm(tmp_path / "converted", BUCKETS, speculation="mtp:3")
    with pytest.raises(ValueError, match="speculation by 'mtp' takes no model: leave 'NAME' out"):
        Speculation.read("mtp:NAME:3")


def test_its_weights_are_counted(path):
    """A layer like the last one, the projection and two norms more; and a cache of one layer of three."""
    facts = explain(path, speculation="mtp:3").facts()
    sizes = [x["cache_bytes"]["float32"]["per_token"] for x in (facts["draft"], facts)]
    assert MTP_LAYERS * sizes[0] == sizes[1]


@pytest.mark.release
def test_stacked_layers_and_caches_of_eight_bits_in_tiers(path, undrafted):
    kinds, jobs = {"scan": True, "kv_cache_dtype": "int8"}, SAMPLED[1:3] + ALONE
    llm = build_llm(path, BUCKETS, decode_steps=3, speculation="mtp:3", host_cache="1MiB", **kinds)
    for _ in range(2):
        assert_same(run(llm, jobs), run(undrafted(path, **kinds), jobs))
    assert llm.stats.accepted_drafts


@pytest.mark.release
def test_several_devices(path, without):
    llm = build_llm(path, BUCKETS, decode_steps=3, speculation="mtp:3", parallel="ep=2,cp=2,tp=2")
    for _ in range(2):
        assert_same(run(llm, ALONE), run(without, ALONE))
    assert llm.stats.accepted_drafts


@pytest.mark.release
def test_a_target_with_states(tmp_path):
    path = make_target(tmp_path, "qwen3_5_text")
    assert_published(path, build_llm(path, BUCKETS, decode_steps=3))
