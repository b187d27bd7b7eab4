"""Prompts that share a step as tiles: nothing changes but the number of steps."""

from __future__ import annotations

import numpy as np
import pytest

from inferlib import Buckets, SamplingParams
from tests.helpers.llms import MAX_LEN, assert_greedy, build_llm, random_prompts, reference

LENGTHS = [1, 7, 8, 9, 31, 33, 16, 50]  # about tiles of 8 tokens and steps of 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


# Full attention, rings, shared caches, chunked attention, latents, and recurrent layers.
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3n_text", "llama4_text", "minicpm3", "qwen3_5_text"])
def test_packed_prompts_give_the_tokens_of_transformers(name, checkpoint):
    path, prompts = checkpoint(name), random_prompts(LENGTHS)
    llm = build_llm(path, Buckets((8, 32), (4,), (MAX_LEN,), tile=8))
    before = llm.stats.dispatches
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(path, prompt, output.outputs[0].token_ids)
    assert llm.stats.dispatches - before < sum(-(-n // 8) for n in LENGTHS)
    for prompt in prompts[2:4]:
        np.testing.assert_allclose(llm.logits(prompt), reference(path, prompt), atol=1e-4)
        alone = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
        assert alone == outputs[prompts.index(prompt)].outputs[0].token_ids


def test_a_step_holds_tiles_of_many_prompts(checkpoint):
    llm = build_llm(checkpoint("llama"), Buckets((8, 32), (4,), (MAX_LEN,), tile=8))
    before = llm.stats.dispatches
    llm.generate(random_prompts([8, 3, 16, 1]), SamplingParams(temperature=0.0, max_tokens=1))
    assert llm.stats.dispatches - before == 2  # five tiles, of which a step has four
