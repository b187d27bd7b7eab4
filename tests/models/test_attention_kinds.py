"""Kinds of attention beside grouped queries, through the engine: what `test_cache` and `test_poison` ask of the others.

Prefill chunks of 16, windows and chunks of 8. A minute, nearly all of it compilation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inferlib import Buckets, SamplingParams, configs
from inferlib.config import EngineConfig
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.programs.program_set import ProgramSet
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, random_prompts, reference
from tests.helpers.poison import before_each_dispatch, poison, tokens_of
from tests.helpers.sequences import logits_and_tokens

# Latents; a cache that layers share; states; convolutions; states again; a ring of chunks; more states; learned
# positions; heads of other sizes on some layers, and shared; values smaller than keys; two attentions over latents a
# layer, and experts beside them. Programs of experts take long to compile.
# Families of experts beside grouped queries (Mixtral, Qwen2-MoE, OLMoE, Phi-MoE, Granite-MoE, GLM-4.5 MoE, dots1, ERNIE
# 4.5 MoE, MiniMax-M2) or latents (DeepSeek-V2 and V3, GLM-4 MoE Lite, Mistral 4) have no kind of layer or cache that is
# not here or in `test_cache`; `test_parity` holds their logits to transformers'.
# Sinks decode in `test_packed_prefill`.
SLOW = ("lfm2", "nemotron_h", "llama4_text", "minimax", "kimi_linear", "gpt2", "mimo_v2_flash")
# Delta rules as in Qwen3.5, shared caches as in Gemma 3n, latents as in MiniCPM3.
FURTHER = ("olmo_hybrid", "gemma4_text", "longcat_flash")
KINDS = [
    *("minicpm3", "gemma3n_text", "qwen3_5_text"),
    *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW),
    *(pytest.param(family, marks=pytest.mark.release) for family in FURTHER),
]
# Others decode in `test_cache` and in the tests of speculation; unrolled, these do above.
STACKED = ["minicpm3", "gemma3n_text"]
# Of patterns that repeat in `TINY` one layer of each kind.
_LINEAR, _FULL = "linear_attention", "full_attention"
FEWER: dict[str, dict[str, Any]] = {
    "minicpm3": {"num_hidden_layers": 1},
    "gpt2": {"num_hidden_layers": 1},
    "gemma3n_text": {"num_hidden_layers": 2, "layer_types": (_FULL, _FULL), "num_kv_shared_layers": 1}
    | {"activation_sparsity_pattern": (0.7, 0.0)},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": (_LINEAR, _FULL)},
    "minimax": {"num_hidden_layers": 2, "layer_types": (_LINEAR, _FULL)},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ("conv", _FULL)},
    "kimi_linear": {"num_hidden_layers": 2, "layer_types": (_LINEAR, _FULL), "mlp_layer_types": ("dense", "dense")},
    "nemotron_h": {"layers_block_type": ("mamba", "attention", "mlp", "mlp")},
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2},
}
TOLERANCE = 1e-4  # absolute, on logits with a standard deviation above 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def model(request, checkpoint):
    """An LLM of four rows, its layers unrolled, and its checkpoint. It has two cache buckets where layers expand what
    they read. Several steps in a program, which know nothing of layers, are latents' alone; `test_cache` and the tests
    of speculation have others."""
    path, latents = checkpoint(request.param, **FEWER.get(request.param, {})), request.param == "minicpm3"
    buckets = Buckets(prefill=(16,), batch=(4,), cache=(32, MAX_LEN) if latents else (MAX_LEN,))
    return build_llm(path, buckets, decode_steps=None if latents else 1), path


@pytest.mark.slow
def test_prompts_and_tokens_are_those_of_one_pass_of_transformers(model):
    """More prompts than rows, of different lengths; and NaN in every cell that is not valid changes nothing: neither a
    token nor, bit by bit, a logit."""
    llm, path = model
    prompts, shares = random_prompts([7, 16, 33, 1, 24, MAX_LEN - 6], seed=1), []
    logits, tokens = logits_and_tokens(llm, prompts, 20)
    for prompt, of_prompt, out in zip(prompts, logits, tokens, strict=True):
        expected = reference(path, prompt)
        np.testing.assert_allclose(of_prompt, expected, rtol=0, atol=TOLERANCE)
        assert_greedy(path, prompt, out)
    assert expected.std() > 0.9
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        again, same = logits_and_tokens(llm, prompts, 20)
    assert same == tokens
    np.testing.assert_array_equal(np.concatenate(again), np.concatenate(logits))
    assert shares[0] == 0
    assert 0 < max(shares) < 0.9


@pytest.mark.parametrize(
    ("platform", "name", "ragged", "reasons"),
    [
        (
            "gpu",
            "deepseek-v2-lite",
            False,
            ["prefill attention in 27 of 27 layers runs in XLA, not in the GPU kernel: latent attention"],
        ),
        (
            "gpu",
            "llama4-scout",
            True,
            ["decode attention in 36 of 48 layers runs in XLA, not in the GPU kernel: chunked attention"],
        ),
        (
            "tpu",
            "llama4-scout",
            False,
            [
                f"{x} attention in 36 of 48 layers runs in XLA, not in the TPU kernel: chunked attention"
                for x in ("decode", "prefill")
            ],
        ),
        ("gpu", "gpt-oss-20b", True, []),
        ("tpu", "gpt-oss-20b", False, []),
        ("tpu", "qwen3-8b", False, []),
        ("tpu", "deepseek-v3", False, []),
    ],
)
def test_what_the_kernel_lacks_is_said(platform, name, ragged, reasons, caplog):
    """Where XLA reads a bucket whole, or expands its latents, there are several; layers in chunks read their ring."""
    model = config_from_hf(configs.load(name))
    config = EngineConfig.make(platform, 4, 4096, model=model)
    assert config.backend.decode_attention == f"pallas_{platform}"
    assert (len(config.buckets.cache) == 1) == ragged
    ProgramSet.make(abstract_model(model, "bfloat16", backend=config.backend, scan=True), config)
    said = [message for message in caplog.messages if "layers" in message]
    assert len(said) == len(reasons)
    assert all(result.startswith(reason) for result, reason in zip(said, reasons, strict=True))


@pytest.mark.release
@pytest.mark.parametrize("family", STACKED)
def test_stacked_layers_decode_as_transformers_does(family, checkpoint, llm_of):
    """Their logits are those of `test_parity`."""
    path, stacked = checkpoint(family), llm_of(family, True)
    assert any(segment.count > 1 for segment in stacked.engine.model.segments)
    (prompt,) = random_prompts([20], seed=3)
    assert_greedy(path, prompt, *tokens_of(stacked, [prompt], GREEDY))
