"""Real weights: SmolLM2-135M-Instruct against tokens and logits recorded from transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from inferlib import LLM, Buckets
from tests.helpers.llms import build_llm
from tests.helpers.sequences import run, sequence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized_programs")]

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m.json").read_text())
PROMPTS = GOLDEN["prompts"]
TOLERANCE = 2e-3  # on logits whose standard deviation is above 3
LOW_MARGIN = 0.02  # between the two best logits of a step: rounding may turn such a step


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Stacked: a thirtieth to compile. Notebook 1 runs the same weights in single layers."""
    return build_llm("smollm2", Buckets(prefill=(32,), batch=(3,), cache=(128,)), scan=True, decode_steps=1)


def certain_steps(prompt: dict) -> int:
    """How many steps come before the first that rounding could turn."""
    margins = [step["margin"] for step in prompt["steps"]]
    return next((i for i, margin in enumerate(margins) if margin < LOW_MARGIN), len(margins))


def test_prompts_are_tokenised_alike(llm):
    assert [llm.tokenizer.encode(p["prompt"]) for p in PROMPTS] == [p["prompt_ids"] for p in PROMPTS]


def test_greedy_tokens(llm):
    """All prompts in one batch, one of them longer than a prefill chunk. They take the program of `test_logits`, which
    has the logits of all steps; here are the first."""
    sequences = [sequence(prompt["prompt_ids"], 20, detail="logits") for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, run(llm.engine, sequences), strict=True):
        steps = min(certain_steps(prompt), 20)
        assert steps >= 10
        assert tokens[:steps] == prompt["greedy_ids"][:steps]
        assert llm.tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False) == prompt["greedy_text"]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["prompt"][:20])
def test_logits(prompt, llm):
    """At the end of the prompt and at every step after it, given the recorded tokens."""
    logits = llm.logits([*prompt["prompt_ids"], *prompt["greedy_ids"][:-1]])[len(prompt["prompt_ids"]) - 1 :]
    recorded = prompt["prompt_last_logits"]
    np.testing.assert_allclose(logits[0, :8], recorded["first8"], rtol=0, atol=TOLERANCE)
    summary = [logits[0].mean(), logits[0].std(), np.logaddexp.reduce(logits[0].astype(np.float64))]
    expected = [recorded[key] for key in ("mean", "std", "logsumexp")]
    np.testing.assert_allclose(summary, expected, rtol=0, atol=TOLERANCE)
    for row, step in zip(logits, prompt["steps"], strict=True):
        np.testing.assert_allclose(row[step["top5_ids"]], step["top5_logits"], rtol=0, atol=TOLERANCE)
        assert np.sort(row)[-5] == pytest.approx(step["top5_logits"][-1], abs=TOLERANCE)


@pytest.mark.release
def test_prompt_likelihood(llm):
    """Tiny models have the log-probabilities of their logits in `test_llm.py`."""
    for prompt, scores in zip(PROMPTS, llm.logprobs([p["prompt_ids"] for p in PROMPTS]), strict=True):
        assert -scores.mean() == pytest.approx(prompt["prompt_nll_per_token"], abs=1e-4)
