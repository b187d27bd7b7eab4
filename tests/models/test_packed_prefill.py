"""Prompts that share a step as tiles: nothing changes but the number of steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.ops.backend import Backend
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, random_prompts, reference
from tests.helpers.poison import tokens_of

LENGTHS = [1, 7, 8, 9, 31, 33, 16, 50]  # about tiles of 8 tokens and steps of 32
TWO_SIZES = Buckets((8, 32), (4,), (MAX_LEN,), tile=8)
ONE_SIZE = Buckets((32,), (4,), (MAX_LEN,), tile=8)  # one program less
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(checkpoint) -> LLM:
    return build_llm(checkpoint("llama", num_hidden_layers=1), TWO_SIZES, decode_steps=1)


# Rings, states and latents.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("ministral", {"num_hidden_layers": 1, "layer_types": ("sliding_attention",)}),
        ("qwen3_5_text", {"num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention")}),
        ("minicpm3", {"num_hidden_layers": 1}),
    ],
)
def test_packed_prompts_give_the_tokens_of_transformers(family, sizes, checkpoint):
    path = checkpoint(family, **sizes)
    assert_packed(build_llm(path, ONE_SIZE, decode_steps=1), path)


def assert_packed(llm: LLM, path: Path) -> list[list[int]]:
    """Tokens of prompts in fewer steps than they have tiles are those of transformers."""
    prompts, before = random_prompts(LENGTHS), llm.stats.dispatches
    tokens = tokens_of(llm, prompts, GREEDY)
    for prompt, of_prompt in zip(prompts, tokens, strict=True):
        assert_greedy(path, prompt, of_prompt)
    assert llm.stats.dispatches - before < sum(-(-n // 8) for n in LENGTHS)
    return tokens


@pytest.mark.slow
def test_prompts_alone_have_the_same_tokens_and_logits(llama, checkpoint):
    """In steps of both sizes."""
    path, prompts = checkpoint("llama", num_hidden_layers=1), random_prompts(LENGTHS)
    tokens = assert_packed(llama, path)
    for number in (2, 3):
        assert tokens_of(llama, [prompts[number]], GREEDY) == [tokens[number]]
    np.testing.assert_allclose(llama.logits(prompts[3]), reference(path, prompts[3]), atol=1e-4)


@pytest.mark.slow
def test_a_step_holds_tiles_of_many_prompts(llama):
    before = llama.stats.dispatches
    llama.generate(random_prompts([8, 3, 16, 1], seed=1), SamplingParams(temperature=0.0, max_tokens=1))
    assert llama.stats.dispatches - before == 2  # five tiles, of which a step has four


@pytest.mark.release
def test_tiles_by_the_kernel_for_gpus_have_the_logits_of_xla(checkpoint):
    """Layers with rings and sinks, and full ones, in bfloat16. Each token takes every expert: where two experts score
    alike, the last bit of attention would choose between them."""
    path, (prompt,) = checkpoint("gpt_oss", num_experts_per_tok=7), random_prompts([50])
    by_xla, by_kernel = (
        build_llm(path, ONE_SIZE, dtype="bfloat16", backend=backend)
        for backend in (Backend(), Backend(prefill_attention="pallas_gpu"))
    )
    assert {choice.name for choice in by_kernel.engine.programs.choices.layers["prefill_attention"].values()} == {
        "pallas_gpu"
    }
    want = by_xla.logits(prompt)
    np.testing.assert_allclose(by_kernel.logits(prompt), want, rtol=0, atol=0.05 * np.std(want))
