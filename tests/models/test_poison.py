"""The poison test: NaN in everything that is not valid changes no output.

Other caches are poisoned where their programs are compiled: `test_cache`, `test_attention_kinds`,
`test_kv_cache_dtypes`, and the tests of what engines can do.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import LLM, Buckets, SamplingParams
from tests.helpers.llms import MAX_LEN, build_llm, random_prompts
from tests.helpers.poison import before_each_dispatch, poison, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(seed=7, max_tokens=20, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5)


@pytest.mark.slow
def test_sampling_reads_nothing_that_is_not_valid(small):
    """Everything invalid is poisoned at the start and again before every dispatch."""
    assert_poison_changes_no_token(small, SAMPLED)


@pytest.mark.slow
def test_latents_of_eight_bits(checkpoint):
    """And, bit by bit, the logits of a prompt that takes several chunks."""
    sizes = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
    llm, (prompt,) = (
        build_llm(checkpoint("minicpm3", num_hidden_layers=1), sizes, kv_cache_dtype="fp8"),
        random_prompts([70], seed=11),
    )
    assert_poison_changes_no_token(llm, GREEDY)
    expected = llm.logits(prompt)
    with before_each_dispatch(llm, poison):
        np.testing.assert_array_equal(llm.logits(prompt), expected)


def assert_poison_changes_no_token(llm: LLM, params: SamplingParams) -> None:
    prompts, shares = random_prompts([20, 1, 9, 33, 16, 4], seed=10), []
    expected = tokens_of(llm, prompts, params)
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        assert tokens_of(llm, prompts, params) == expected
    assert len(shares) > 10
    assert shares[0] == 0
    assert 0 < max(shares) < 1


@pytest.mark.slow
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
