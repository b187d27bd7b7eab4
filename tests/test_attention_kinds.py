"""Kinds of attention beside grouped queries, through the engine: what `test_cache` and `test_poison` ask of the others.

Prefill chunks of 16, windows and chunks of 8. A minute, nearly all of it compilation.
"""

from __future__ import annotations

import numpy as np
import pytest

from inferlib import Buckets, SamplingParams, configs
from inferlib.config import EngineConfig
from inferlib.models.families import config_from_hf
from tests.conftest import MAX_LEN, assert_greedy, build_llm, random_prompts, reference
from tests.test_poison import before_each_dispatch, poison, tokens_of

# Latents; a cache that layers share; states; sinks, and a ring on every other layer; a ring of chunks. Programs of
# experts take long to compile.
KINDS = [
    "minicpm3",
    "gemma3n_text",
    "qwen3_5_text",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("gpt_oss", "llama4_text")),
]
TOLERANCE = 1e-4  # absolute, on logits with a standard deviation above 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def model(request, checkpoint):
    """An LLM of four rows and two cache buckets, its layers unrolled, and its checkpoint."""
    path = checkpoint(request.param)
    return build_llm(path, Buckets(prefill=(16,), batch=(4,), cache=(32, MAX_LEN))), path


def test_prefill_equals_one_pass_of_transformers(model):
    llm, path = model
    (tokens,) = random_prompts([MAX_LEN])
    expected = reference(path, tokens)
    assert expected.std() > 0.9
    for length in (1, 16, 17, MAX_LEN):
        np.testing.assert_allclose(llm.logits(tokens[:length]), expected[:length], rtol=0, atol=TOLERANCE)


def test_decoding_equals_one_pass_of_transformers(model):
    """More prompts than rows, of different lengths, over both cache buckets; and NaN in every cell that is not valid
    changes nothing: neither a token nor, bit by bit, a logit."""
    llm, path = model
    prompts, shares = random_prompts([7, 16, 33, 1, 24], seed=1), []
    tokens = tokens_of(llm, prompts, GREEDY)
    for prompt, out in zip(prompts, tokens, strict=True):
        assert_greedy(path, prompt, out)
    logits = llm.logits(prompts[2])
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert tokens_of(llm, prompts, GREEDY) == tokens
        np.testing.assert_array_equal(llm.logits(prompts[2]), logits)
    assert shares[0] == 0
    assert 0 < max(shares) < 0.9


@pytest.mark.parametrize(
    ("platform", "name", "ragged", "reasons"),
    [
        ("gpu", "deepseek-v2-lite", False, ["latent attention: XLA decodes 27 of 27 layers"]),
        ("gpu", "llama4-scout", True, ["chunked attention: XLA decodes 36 of 48 layers"]),
        ("gpu", "gpt-oss-20b", True, []),
        ("tpu", "gpt-oss-20b", False, []),
        ("tpu", "qwen3-8b", False, []),
        ("tpu", "deepseek-v3", False, []),
    ],
)
def test_what_the_kernel_lacks_is_said(platform, name, ragged, reasons, caplog):
    """Where XLA reads a bucket whole, there are several; layers in chunks read their ring in any case."""
    config = EngineConfig.make(platform, 4, 4096, model=config_from_hf(configs.load(name)))
    assert config.backend.decode_attention == f"pallas_{platform}"
    assert (len(config.buckets.cache) == 1) == ragged
    assert len(caplog.messages) == len(reasons)
    assert all(found.startswith(reason) for found, reason in zip(caplog.messages, reasons, strict=True))


def test_stacked_layers_equal_unrolled_layers(model):
    llm, path = model
    stacked = build_llm(path, llm.engine.config.buckets, scan=True)
    (prompt,) = random_prompts([20], seed=3)
    np.testing.assert_allclose(stacked.logits(prompt), llm.logits(prompt), rtol=0, atol=TOLERANCE)
    assert tokens_of(stacked, [prompt], GREEDY) == tokens_of(llm, [prompt], GREEDY)
