"""Sequences, and an engine that runs them to their end."""

from __future__ import annotations

import numpy as np

from inferlib import LLM, Buckets, SamplingParams
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import MAX_LEN

LEAST = Buckets((16,), (1, 4), (MAX_LEN,), tile=8)  # with few programs
FOUR_ROWS = Buckets((16,), (4,), (MAX_LEN,), tile=8)  # and with fewer
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def sequence(prompt: list[int], count: int, params: SamplingParams = GREEDY, **options) -> Sequence:
    """A prompt, to generate `count` tokens for."""
    return Sequence(prompt, params, count, seed=options.pop("seed", 0), **options)


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """What the sequences generate together."""
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.advance()
        assert_accounted(engine)
    return [s.tokens for s in sequences]


def logits_and_tokens(llm: LLM, prompts: list[list[int]], count: int) -> tuple[list[np.ndarray], list[list[int]]]:
    """Logits [T, V] of each prompt, and up to `count` greedy tokens behind it, of one run: two programs, where
    `LLM.logits` and `LLM.generate` have three."""
    sequences = [sequence(prompt, min(count, MAX_LEN - len(prompt)), detail="logits") for prompt in prompts]
    tokens, vocab = run(llm.engine, sequences), llm.model_config.vocab
    return [np.concatenate(s.prompt_details)[:, :vocab] for s in sequences], tokens
