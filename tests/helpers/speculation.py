"""Requests whose tokens are the same with speculation and without, and their comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from inferlib import LLM, Buckets, SamplingParams
from inferlib.outputs import RequestOutput
from inferlib.programs.counter import compilations
from tests.helpers.drafters import Kind, Prompter
from tests.helpers.llms import build_llm, random_prompts

MIXED: tuple[Kind, ...] = ("right", "right", "wrong", "right", "beyond", "right", "right", "right", "negative", "none")
BUCKETS = Buckets(prefill=(8,), batch=(4,), cache=(64,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
TRUNK = random_prompts([34], seed=3)[0]
TAILS = random_prompts([4, 11, 6, 1, 17, 9, 3], seed=4)
Job = tuple[list[int], SamplingParams]


def options(**more) -> SamplingParams:
    return SamplingParams(**{"seed": 5, "temperature": 0.9, "max_tokens": 26, "ignore_eos": True} | more)


# Some prompts begin alike, and some outputs are as long as the cache allows. All have log-probabilities, so that there
# are programs of one mode.
JOBS: list[Job] = [
    (TAILS[0], options(top_k=9)),
    (TRUNK + TAILS[1], options(top_p=0.8, repetition_penalty=1.4, presence_penalty=0.3, max_tokens=19)),
    (TRUNK + TAILS[0], options(min_p=0.05, frequency_penalty=0.7, max_tokens=64 - 34 - 4)),
    (TRUNK[:20], options(logit_bias={9: 6.0, 40: 6.0, 41: 5.0}, bad_words=[[9, 40], [41]])),
    (TAILS[4], options(stop_token_ids=list(range(60, 74)), min_tokens=7)),
    (TAILS[5], options(n=2, max_tokens=64 - 9)),
    (TAILS[2], GREEDY),
    (TAILS[3], options(max_tokens=1)),
]
JOBS = [(prompt, dataclasses.replace(params, logprobs=1 + i % 2)) for i, (prompt, params) in enumerate(JOBS)]
# Sampled, one row for each, without log-probabilities; and greedy: modes of smaller programs.
SAMPLED = [(p, dataclasses.replace(x, logprobs=None)) for p, x in JOBS if x.n == 1 and x.temperature]
LONGER = [(p, dataclasses.replace(GREEDY, max_tokens=28)) for p in (TRUNK, TAILS[1], TRUNK + TAILS[3], TRUNK[:20])]

# Answers of three tokens alone, so that many drafts stand.
IDS = [9, 40, 41]
CHOICE = dataclasses.replace(GREEDY, logit_bias=dict.fromkeys(IDS, 60.0))
ALONE: list[Job] = [(TRUNK, CHOICE), (TAILS[4], dataclasses.replace(CHOICE, max_tokens=47))]


def run(llm: LLM, jobs: Sequence[Job]) -> list[RequestOutput]:
    prompts, params = zip(*jobs, strict=True)
    return llm.generate(list(prompts), list(params))


def drafter_of(outputs: Sequence[RequestOutput], *kinds: Kind) -> Prompter:
    texts = [(*o.prompt_token_ids, *completion.token_ids) for o in outputs for completion in o.outputs]
    return Prompter.of(texts, *kinds)


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for job, wanted in zip(outputs, expected, strict=True):
        for one, without in zip(job.outputs, wanted.outputs, strict=True):
            assert one.token_ids == without.token_ids
            assert (one.text, one.finish_reason, one.stop_reason) == (
                without.text,
                without.finish_reason,
                without.stop_reason,
            )
            for step, other in zip(one.logprobs or (), without.logprobs or (), strict=True):
                assert list(step) == list(other)
                pairs = [[entry.logprob for entry in x.values()] for x in (step, other)]
                np.testing.assert_allclose(*pairs, rtol=0, atol=1e-4)


def tight(path, buckets: Buckets, **more) -> LLM:
    """An engine whose pool has room for a sequence and a half, so that rows lose their pages."""
    whole = build_llm(path, buckets, **more).engine.plan
    of_page, of_rows = whole.bytes_of()
    memory = of_rows + of_page * (whole.columns * 3 // 2)
    return build_llm(path, buckets, cache_memory=memory, snapshots=whole.snapshots, **more)


def counted_drafts(text: Sequence[int], cells: int, drafts: Callable[[int], Sequence[int]]) -> np.ndarray:
    """How many drafts could stand if each step of a row verifies those behind so many `cells`, and how many do."""
    tried = stood = 0
    while cells < len(text) - 1:
        guessed = drafts(cells)
        for i in range(len(guessed) + 1):
            cells += 1
            if i == len(guessed) or cells == len(text) - 1:
                break
            tried += 1
            if guessed[i] != text[cells]:
                break
            stood += 1
    return np.array([tried, stood])


def assert_nothing_compiles(drafting: Callable[[], LLM], without: LLM) -> LLM:
    """Batches and streams of a model that drafts, whose programs are compiled: the tokens of one that does not. Returns
    the model that drafts."""
    expected, text = run(without, JOBS), "".join(without.stream(*JOBS[6]))
    llm = drafting()
    llm.engine.warmup(("logprobs",))
    before = compilations()
    for _ in range(2):
        assert_same(run(llm, JOBS), expected)
    assert "".join(llm.stream(*JOBS[6])) == text
    assert llm.stats.drafts
    assert compilations() == before
    return llm
