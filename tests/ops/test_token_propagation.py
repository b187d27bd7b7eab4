"""Which tokens go on, by a numpy reading of the paper (`tests/helpers/propagation.py`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions
from inferlib.ops.token_propagation import TokenPropagation, chosen_tokens, saliency
from inferlib.option_checks import ConfigurationError, sparse_option
from tests.helpers.propagation import attention_weights, chosen

HEADS, GROUP, WIDTH, SIZE, SHARE = 2, 3, 128, 8, 0.5
LENGTHS = (0, 1, 7, 8, 9, 31, 32, 33, 39, 63, 64, 65, 96, 127, 128)


def test_the_choice_is_the_papers():
    """With NaN behind the tokens of a segment, and with heads that only pad."""
    rng, lengths = np.random.default_rng(0), np.array(LENGTHS, np.int32)
    q = 2 * rng.standard_normal((len(LENGTHS), WIDTH, HEADS, GROUP, SIZE)).astype(np.float32)
    k = rng.standard_normal((len(LENGTHS), WIDTH, HEADS, SIZE)).astype(np.float32)
    there = np.arange(WIDTH) < lengths[:, None]
    spoiled = [np.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, np.nan) for x in (q, k)]
    heads = np.array([[True] * GROUP, [True, True, False]])

    @jax.jit
    def choose(q, k, lengths, heads):
        how, scores = TokenPropagation(1, SHARE), saliency(q, k, lengths, AttentionOptions(0.3), heads)
        return chosen_tokens(scores, lengths, how.count(lengths), how.count(WIDTH))

    for counts in (None, heads):
        places = np.array(choose(*map(jnp.array, spoiled), lengths, counts))
        assert (places[0] == WIDTH).all()
        for i, n in list(enumerate(LENGTHS))[1:]:
            queries = q[i, :n].transpose(1, 2, 0, 3).reshape(-1, n, SIZE)
            weights = attention_weights(queries, k[i, :n].transpose(1, 0, 2), 0.3)
            expected = chosen(weights if counts is None else weights[heads.reshape(-1)], SHARE)
            assert places[i].tolist() == expected + [WIDTH] * (WIDTH // 2 - len(expected))


def test_counts_of_tokens():
    """Whole numbers on the host, and the same on devices."""
    how = TokenPropagation(20, 0.3, 128)
    tokens = np.array([0, 1, 31, 32, 33, 106, 107, 128, 2048], np.int32)
    expected = [0, 1, 31, 32, 32, 32, 64, 64, 640]
    assert [how.count(int(n)) for n in tokens] == expected == how.count(jnp.array(tokens)).tolist()
    assert TokenPropagation(1, 1.0).count(2048) == 2048
    lengths = [0, 32, 33, 128, 129, 160, 161, 256]
    assert [how.skipped(n) for n in lengths] == [0, 0, 1, 64, 64, 64, 65, 128]
    assert how.skipped(jnp.array(lengths)).tolist() == [how.skipped(n) for n in lengths]


def test_the_option():
    assert str(sparse_option("fastkv:20:0.30")) == "fastkv:20:0.3"
    assert sparse_option("fastkv:20:0.3") == sparse_option(TokenPropagation(20, 0.3)) == TokenPropagation(20, 0.3)
    assert sparse_option("fastkv:20:0.3:512") == TokenPropagation(20, 0.3, 512)
    assert str(TokenPropagation(20, 0.3, 512)) == "fastkv:20:0.3:512"
    errors = {
        "sparse_prefill fastkv is text such as 'fastkv:20:0.3'": ["fastkv", "fastkv:20", "fastkv:-1:0.3", "fastkv:x:1"],
        "first layer that sees fewer tokens, 1 or more": ["fastkv:0:0.3"],
        "is 0.001 to 1": ["fastkv:20:0", "fastkv:20:0.0001", "fastkv:20:1.5"],
        "has 1 token or more": ["fastkv:20:0.3:0"],
    }
    for message, values in errors.items():
        for value in values:
            with pytest.raises(ConfigurationError, match=message):
                sparse_option(value)
