"""Sampling after several drafts at once: the tokens of sampling after one after another."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.sampling import SamplingParams, count_tokens, follow_bad_words, pack, sample, unpack
from inferlib.sampling.drafted import sample_drafted

VOCAB = 40
ROWS = [
    SamplingParams(temperature=0),
    SamplingParams(top_k=3, presence_penalty=1.5),
    SamplingParams(top_p=0.6, frequency_penalty=2.0),
    SamplingParams(min_p=0.1, repetition_penalty=1.7, temperature=0.7),
    SamplingParams(min_tokens=6, stop_token_ids=[1, 2], logit_bias={3: 4.0}),
    SamplingParams(bad_words=[[5, 6], [6, 7, 8], [9]], temperature=1.3),
    SamplingParams(allowed_token_ids=[5, 6, 7, 8, 9]),
]


@functools.partial(jax.jit, static_argnames="mode")
def one_by_one(logits, ints, floats, counts, generated, drafts, mode):
    everywhere, outs = jnp.ones(len(ROWS), bool), []
    for i in range(logits.shape[1]):
        params = unpack(ints, floats)
        outs.append(sample(logits[:, i], params, counts, generated + i, mode=mode))
        if i < drafts.shape[1]:
            counts = count_tokens(counts, drafts[:, i], everywhere)
            floats = follow_bad_words(params, floats, drafts[:, i])
    return jax.tree.map(lambda *x: jnp.stack(x), *outs)


@functools.partial(jax.jit, static_argnames="mode")
def at_once(logits, ints, floats, counts, generated, drafts, mode):
    return sample_drafted(logits, unpack(ints, floats), counts, generated, drafts, mode=mode)


@pytest.mark.parametrize("mode", ["greedy", "logprobs"])
@pytest.mark.fast_cases(1)
def test_tokens_are_those_of_one_after_another(mode):
    rng = np.random.default_rng(3)
    ints, floats = pack([(params, 17 + i, (1,), [4, 5]) for i, params in enumerate(ROWS)])
    counts = rng.integers(0, 3, (len(ROWS), VOCAB)).astype(np.int32)
    generated = np.arange(len(ROWS), dtype=np.int32)
    for _ in range(5):
        logits = rng.normal(size=(len(ROWS), 4, VOCAB)).astype(np.float32) * 3
        drafts = rng.choice([-1, 5, 6, 7, 8, 9, 30], (len(ROWS), 4)).astype(np.int32)
        inputs = logits, ints, floats, counts, generated, drafts
        jax.tree.map(np.testing.assert_array_equal, at_once(*inputs, mode), one_by_one(*inputs, mode))
