"""Prompts that share a step as tiles: nothing changes but the number of steps."""

from __future__ import annotations

import numpy as np
import pytest

from inferlib import Buckets, SamplingParams
from inferlib.ops.backend import Backend
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, random_prompts, reference

LENGTHS = [1, 7, 8, 9, 31, 33, 16, 50]  # about tiles of 8 tokens and steps of 32
TWO_SIZES = Buckets((8, 32), (4,), (MAX_LEN,), tile=8)
ONE_SIZE = Buckets((32,), (4,), (MAX_LEN,), tile=8)  # one program less
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


# Full attention, rings, shared caches, chunked attention, latents, and recurrent layers; whether logits and prompts
# that have a step to themselves are compared too.
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(("llama", True), ("gpt_oss", True), ("qwen3_5_text", True)),
        ("minicpm3", False),
        *(pytest.param(family, False, marks=pytest.mark.slow) for family in ("gemma3n_text", "llama4_text")),
    ],
)
def test_packed_prompts_give_the_tokens_of_transformers(name, more, checkpoint):
    path, prompts = checkpoint(name), random_prompts(LENGTHS)
    llm = build_llm(path, TWO_SIZES if name == "llama" else ONE_SIZE)
    before = llm.stats.dispatches
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(path, prompt, output.outputs[0].token_ids)
    assert llm.stats.dispatches - before < sum(-(-n // 8) for n in LENGTHS)
    for prompt in prompts[2:4] if more else []:
        np.testing.assert_allclose(llm.logits(prompt), reference(path, prompt), atol=1e-4)
        alone = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
        assert alone == outputs[prompts.index(prompt)].outputs[0].token_ids


def test_a_step_holds_tiles_of_many_prompts(checkpoint):
    llm = build_llm(checkpoint("llama"), TWO_SIZES)
    before = llm.stats.dispatches
    llm.generate(random_prompts([8, 3, 16, 1]), SamplingParams(temperature=0.0, max_tokens=1))
    assert llm.stats.dispatches - before == 2  # five tiles, of which a step has four


def test_tiles_by_the_kernel_for_gpus_have_the_logits_of_xla(checkpoint):
    """Layers with rings and sinks, and full ones, in bfloat16. Each token takes every expert: where two experts score
    alike, the last bit of attention would choose between them."""
    path, prompts = checkpoint("gpt_oss", num_experts_per_tok=7), random_prompts([50, 33])
    by_xla, by_kernel = (
        build_llm(path, ONE_SIZE, dtype="bfloat16", backend=backend)
        for backend in (Backend(), Backend(prefill_attention="pallas_gpu"))
    )
    assert {choice.name for choice in by_kernel.engine.programs.choices.layers["prefill_attention"].values()} == {
        "pallas_gpu"
    }
    for prompt in prompts:
        want = by_xla.logits(prompt)
        np.testing.assert_allclose(by_kernel.logits(prompt), want, rtol=0, atol=0.05 * np.std(want))
