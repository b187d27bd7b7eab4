"""`LLM.embed`: hidden states after the final norm are those of transformers, however prompts are cut and packed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from inferlib import AsyncLLM, Buckets, SamplingParams
from inferlib.option_checks import ConfigurationError
from inferlib.programs.program_set import UnplannedProgramError
from tests.helpers.llms import build_llm, random_prompts, reference_hidden
from tests.helpers.tokenizer import VOCAB

LENGTHS = [1, 7, 8, 9, 30, 64, 2, 17]
# Tiles of 8, of which a step has up to 4, of several prompts; chunks on a mesh; states beside attention; two devices.
CASES = {
    "tiles": ("llama", {"buckets": Buckets(prefill=(8, 32), batch=(4,), cache=(32, 64), tile=8)}),
    "streams of norms": ("gemma2", {"parallel": "dp=2,tp=2"}),
    "states": ("qwen3_5_text", {}),
    "tokens over devices": ("llama", {"parallel": "cp=2"}),
}
MARKS = dict.fromkeys(("states", "tokens over devices"), pytest.mark.release)


def built(checkpoint, case):
    family, options = CASES[case]
    path = checkpoint(family)
    return path, build_llm(path, options.pop("buckets", Buckets((8,), (4,), (64,))), **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES])
def test_embeddings_are_transformers_hidden_states(case, checkpoint):
    """Nothing compiles after a warm-up for them; in no order do prompts change each other."""
    path, llm = built(checkpoint, case)
    prompts = random_prompts(LENGTHS, seed=61)
    llm.warmup(["embed"])
    compiled = llm.compilations
    last = llm.embed(prompts, normalize=False)
    mean = llm.embed(prompts, "mean", normalize=False)
    assert last.shape == mean.shape == (len(prompts), llm.model_config.dim)
    assert last.dtype == mean.dtype == np.float32
    for prompt, a, b in zip(prompts, last, mean, strict=True):
        hidden = reference_hidden(path, prompt)
        np.testing.assert_allclose(a, hidden[-1], rtol=0, atol=1e-4)
        np.testing.assert_allclose(b, hidden.mean(0), rtol=0, atol=1e-4)
    unit = llm.embed(prompts[::-1])[::-1]
    np.testing.assert_allclose(np.linalg.norm(unit, axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(unit, last / np.linalg.norm(last, axis=-1, keepdims=True), rtol=0, atol=1e-5)
    assert llm.compilations == compiled
    if case == "tiles":
        prompts = random_prompts([8] * 4)
        before = llm.stats.dispatches
        llm.embed(prompts)
        assert llm.stats.dispatches == before + 1
    with pytest.raises(UnplannedProgramError, match=r"mode 'sample' was not compiled ahead of time; add it to warmup"):
        llm.generate(prompts)


def test_embeddings_beside_generation(small):
    """From other threads too; texts, one prompt and none."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = random_prompts([20, 5, 9], seed=62)
    tokens, vectors = small.generate(prompts, params), small.embed(prompts)

    async def main():
        llm = AsyncLLM(small)
        streams = [llm.generate(prompt, params) for prompt in prompts]
        read = [[output async for output in stream] for stream in streams[:1]]
        got, *_ = await asyncio.gather(llm.embed(prompts), *(anext(stream) for stream in streams[1:]))
        np.testing.assert_array_equal(got, vectors)
        assert read[0][-1].outputs == tokens[0].outputs

    asyncio.run(main())
    text = "some text"
    np.testing.assert_array_equal(small.embed(text), small.embed([small.tokenizer.encode(text)]))
    assert small.embed([]).shape == (0, small.model_config.dim)
    assert small.engine.scheduler.idle


def test_bad_input(small):
    dispatches = small.stats.dispatches
    for prompts, options, message in (
        ([[5], []], {}, "prompt 1: the prompt is empty"),
        ([[VOCAB]], {}, "outside the vocabulary"),
        ([[5] * 65], {}, "exceeds max_len 64"),
        (5, {}, "prompts must be text, token ids or a list"),
        ("a", {"pooling": "max"}, "pooling must be 'last' or 'mean', got 'max'"),
        ("a", {"normalize": 1}, "normalize must be"),
    ):
        with pytest.raises(ValueError, match=message):
            small.embed(prompts, **options)
    with pytest.raises(ConfigurationError, match=r"modes are a list of 'greedy', 'sample', .*'embed', got"):
        small.warmup(["mean"])
    assert small.stats.dispatches == dispatches
