"""Llama models of which a search took parts: they equal the whole ones in whose weights the same parts are zeros."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf
from inferlib.models.ffn_fusion import fused_layers
from inferlib.programs.unsettled import has_states
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, random_prompts
from tests.helpers.oracle import reference_logits
from tests.helpers.poison import tokens_of
from tests.helpers.searched import make_searched
from tests.models.test_parity import one_pass

BUCKETS = Buckets(prefill=(16,), batch=(2,), cache=(MAX_LEN,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> tuple[Path, Path]:
    return make_searched(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def llm(paths) -> LLM:
    return build_llm(paths[1], BUCKETS, decode_steps=1)


@pytest.mark.slow
def test_logits_equal_those_of_the_whole_model(paths):
    whole, searched = paths
    tokens = np.array(random_prompts([40])[0], np.int32)
    expected = reference_logits(whole, tokens)
    assert expected.std() > 0.9
    np.testing.assert_allclose(one_pass(searched, tokens, stacked=True), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_layers_without_attention_keep_nothing_of_a_row(llm, paths):
    """So prompts that begin alike share pages without snapshots."""
    assert not has_states(llm.model_config)
    assert not llm.engine.plan.snapshots
    prompt, before = random_prompts([48])[0], llm.stats.cached_tokens
    first, second = (tokens_of(llm, [prompt], GREEDY) for _ in range(2))
    assert first == second
    assert_greedy(paths[0], prompt, *first)
    assert llm.stats.cached_tokens - before >= 16


@pytest.mark.release
def test_the_same_logits_on_a_mesh(paths):
    (prompt,) = random_prompts([23])
    logits = build_llm(paths[1], BUCKETS, parallel="cp=2,tp=2").logits(prompt)
    np.testing.assert_allclose(logits, reference_logits(paths[0], prompt), rtol=0, atol=1e-4)


def test_feed_forwards_that_follow_one_another_can_be_fused(llm):
    assert fused_layers(llm.model_config) == ((0,), (1, 2, 3), (4,), (5, 6))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("attention", {"n_heads_in_group": 3}, "n_heads_in_group=3"),
        ("attention", {"replace_with_linear": True}, "replace_with_linear"),
        ("attention", {"window_length": 128}, "window_length"),
        ("ffn", {"sparsify": ["x"]}, "sparsify"),
        ("ffn", {"ffn_mult": None}, "neither ffn_mult nor"),
        (None, {"attention": {"no_op": True}, "ffn": {"no_op": True}}, "neither attention nor"),
        (None, {"attention": None}, "says nothing of attention"),
    ],
)
def test_what_a_layer_cannot_have_is_named(paths, part, change, message):
    hf = json.loads((paths[1] / "config.json").read_text())
    block = hf["block_configs"][0]
    (block if part is None else block[part]).update(change)
    with pytest.raises(ConfigError, match=message):
        config_from_hf(hf)


def test_every_layer_is_described(paths):
    hf = json.loads((paths[1] / "config.json").read_text())
    with pytest.raises(ConfigError, match="each of 7 layers"):
        config_from_hf(hf | {"block_configs": hf["block_configs"][1:]})
