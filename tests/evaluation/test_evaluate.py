"""Perplexity, divergence and agreement against numpy and scipy, and what `inferlib eval` prints and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr, softmax

from inferlib import LLM, TextSample, evaluate
from inferlib.checkpoint.source import CheckpointError
from inferlib.evaluation.statistics import Mean, Scores
from inferlib.option_checks import ConfigurationError
from tests.helpers.cli_model import Commands, error_of, make_model
from tests.helpers.oracle import make_checkpoint

TEXTS = [" ".join(f"{n * n % 97} sheep and {n} goats" for n in range(start, start + 40)) for start in range(3)]
SAMPLE = TextSample(TEXTS, tokens=128, window=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", layers=1)


def test_scores_equal_those_of_scipy():
    generator = np.random.default_rng(0)
    tokens, logits, other = generator.integers(0, 7, 5), *generator.standard_normal((2, 5, 7)) * 3
    other[:, 6] = logits[:, 6] = -np.inf  # padding of a vocabulary
    tokens %= 6
    scores = Scores.of(tokens, logits, other)
    np.testing.assert_allclose(scores.surprisal, [-log_softmax(logits[i])[tokens[i + 1]] for i in range(4)])
    assert scores.divergence is not None
    assert scores.agreement is not None
    np.testing.assert_allclose(scores.divergence, rel_entr(softmax(other, axis=1), softmax(logits, axis=1)).sum(axis=1))
    np.testing.assert_array_equal(scores.agreement, logits.argmax(axis=1) == other.argmax(axis=1))
    assert np.all(scores.divergence >= 0)


def test_margins_cover_the_truth_as_often_as_they_say():
    """Windows whose tokens resemble each other, of different lengths."""
    generator, covered = np.random.default_rng(1), 0
    for _ in range(1000):
        shifts = generator.standard_normal(30)
        mean = Mean.of([shift + generator.standard_normal(20 + i) for i, shift in enumerate(shifts)])
        assert mean.margin is not None
        covered += abs(mean.value) <= mean.margin
    assert 910 < covered < 970


def test_a_single_window_has_no_margin():
    assert Mean.of([np.array([1.0, 3.0])]) == Mean(2.0, None)


def test_a_model_against_itself_differs_in_nothing(model):
    result = evaluate(model, SAMPLE, against=model, dtype="float32", progress=False)
    assert result.divergence == Mean(0.0, 0.0)
    assert result.agreement == Mean(1.0, 0.0)
    assert result.tokens == 128


@pytest.mark.slow
def test_results_are_those_of_the_logits(model):
    result = evaluate(model, SAMPLE, against=model, quantization="int4", dtype="float32", progress=False)
    options: dict[str, Any] = dict(dtype="float32", max_batch=1, max_len=64, progress=False)
    original, ours = LLM(model, **options), LLM(model, quantization="int4", **options)
    assert original.tokenizer is not None
    windows = SAMPLE.windows(original.tokenizer, 256)
    surprisals, divergences = [], []
    for window in windows:
        p, q = (log_softmax(llm.logits(window.tolist()).astype(np.float64), axis=1) for llm in (original, ours))
        surprisals += [-q[i, window[i + 1]] for i in range(len(window) - 1)]
        divergences += list((np.exp(p) * (p - q)).sum(axis=1))
    assert result.divergence is not None
    np.testing.assert_allclose(result.perplexity, math.exp(np.mean(surprisals)), rtol=1e-4)
    np.testing.assert_allclose(result.divergence.value, np.mean(divergences), rtol=1e-3)
    assert result.bits < 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int3"}, "int3"),
        ({"kv_cache_dtype": "int3"}, "int3"),
        ({"dtype": "int8"}, "dtype"),
        ({"data": []}, "0 tokens"),
        ({"against": "/nowhere"}, "does not exist"),
    ],
)
def test_wrong_options_name_the_fix(model, options, words):
    with pytest.raises(ValueError, match=words):
        evaluate(model, **{"data": SAMPLE, **options})


def test_models_that_cannot_be_compared_are_refused(model, tmp_path):
    other = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ConfigurationError, match="cannot be compared"):
        evaluate(model, SAMPLE, against=other)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        evaluate(other, SAMPLE)


def test_the_command_prints_a_table_or_json(model, tmp_path):
    commands, data = Commands(model), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    words = ["eval", model, "--data", data, "--tokens", "64", "--window", "32", "--against", model]
    assert "KL divergence" in commands(*words).stdout
    assert json.loads(commands(*words, "--json").stdout)["agreement"] == {"value": 1.0, "margin": 0.0}
    assert "tokens, and" in error_of(commands(*words, "--tokens", "100000"))
