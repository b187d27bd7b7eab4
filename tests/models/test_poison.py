"""The poison test: NaN in everything that is not valid changes no output."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import SamplingParams
from tests.helpers.llms import random_prompts
from tests.helpers.poison import before_each_dispatch, poison, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(seed=7, max_tokens=20, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5)


@pytest.mark.parametrize(
    ("family", "scan", "kv_dtype", "params"),
    [
        ("llama", False, None, GREEDY),
        ("gemma2", False, None, GREEDY),
        ("ministral", True, None, GREEDY),
        ("qwen3_moe", True, None, GREEDY),
        ("gemma2", False, "int8", GREEDY),
        ("ministral", True, "int4", GREEDY),
        ("minicpm3", False, "fp8", GREEDY),
        ("small", False, None, SAMPLED),
    ],
    ids=["llama", "gemma2", "ministral stacked", "experts stacked", "int8", "int4 stacked", "fp8 latents", "sampled"],
)
def test_poison_changes_no_token(family, scan, kv_dtype, params, llm_of, small):
    """Everything invalid is poisoned at the start and again before every dispatch."""
    llm = small if family == "small" else llm_of(family, scan, kv_dtype)
    prompts, shares = random_prompts([20, 1, 9, 33, 16, 4], seed=10), []
    expected = tokens_of(llm, prompts, params)
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert tokens_of(llm, prompts, params) == expected
    assert len(shares) > 10
    assert shares[0] == 0
    assert 0 < max(shares) < 1


@pytest.mark.parametrize(
    ("family", "scan", "kv_dtype"),
    [
        ("llama", False, None),
        ("gemma2", False, None),
        ("ministral", True, None),
        ("qwen3_moe", True, None),
        ("gemma2", False, "int8"),
        ("ministral", True, "int4"),
        ("minicpm3", False, "fp8"),
    ],
)
def test_poison_changes_no_logit(family, scan, kv_dtype, llm_of):
    """The logits of a prompt that takes several chunks, bit by bit."""
    llm, (prompt,) = llm_of(family, scan, kv_dtype), random_prompts([70], seed=11)
    expected = llm.logits(prompt)
    with before_each_dispatch(llm, poison):
        np.testing.assert_array_equal(llm.logits(prompt), expected)


def test_the_poison_kills(llm_of):
    """One valid cell of one row gone bad shows in that row, and in that row alone."""
    llm, prompts, calls = llm_of("llama"), random_prompts([20, 9], seed=12), []
    expected = tokens_of(llm, prompts, GREEDY)

    def spoil_once(engine):
        calls.append(1)
        if len(calls) == 4:
            engine.cache = (engine.cache[0].at[0, 0, 5].set(jnp.nan), *engine.cache[1:])

    with before_each_dispatch(llm, spoil_once):
        tokens = tokens_of(llm, prompts, GREEDY)
    assert tokens[0] != expected[0]
    assert tokens[1] == expected[1]
