"""Prompts that begin alike, for rows that share few pages, and traffic of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from inferlib import LLM, SamplingParams
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence, Status
from tests.helpers.engines import assert_accounted
from tests.helpers.llms import build_llm, random_prompts
from tests.helpers.poison import poison
from tests.helpers.sequences import FOUR_ROWS, LEAST, run, sequence

PAGE, UNIT = 16, 8  # tiles of a step have 8 tokens
TRUNK = random_prompts([48], seed=50)[0]
TAILS = random_prompts([30] * 6, seed=51)
STRANGERS = random_prompts([40, 41, 42, 43], seed=60)
SAMPLED = SamplingParams(seed=5, top_p=0.9, ignore_eos=True)
PENALIZED = dataclasses.replace(SAMPLED, frequency_penalty=0.7, repetition_penalty=1.3)

# Keys and values, in int8 too; latents.
PAGED = {
    "llama stacked": {"scan": True},
    "llama int8": {"kv_cache_dtype": "int8"},
    "minicpm3": {},
}
# Cells of bytes: so coarse a rounding shows the last bit of a sum, so tokens may differ by the shapes of programs.
PACKED = {"llama int4": {"scan": True, "kv_cache_dtype": "int4"}}
# Rings or states beside pages, with snapshots of them.
BESIDE = {
    "gpt_oss": {},  # rings, with sinks
    "qwen3_5_text": {"scan": True},  # states
    "llama4_text": {"scan": True},  # chunks
    "gemma4_text": {},  # rings that other layers read
    "ministral": {"scan": True, "kv_cache_dtype": "int8"},
    "kimi_linear": {},  # states beside latents
}
FAST = ("gpt_oss", "qwen3_5_text")


def build_tight(path: Path, kind: str) -> LLM:
    """Four rows that share pages for a sequence and a half, and three snapshots of what is beside pages. Only rows of
    kinds that end with "moving" go to smaller batches, and only those that many tests run decode several steps at a
    time: the others have fewer programs."""
    kind, moving, _ = kind.partition(" moving")
    buckets = LEAST if moving else FOUR_ROWS
    steps = 4 if kind in ("llama stacked", *FAST) else 1
    options: dict[str, Any] = {"page_size": PAGE, "decode_steps": steps, **(PAGED | PACKED | BESIDE)[kind]}
    options |= {"snapshots": 3} if kind in BESIDE else {}
    whole = build_llm(path, buckets, **options).engine.plan
    of_page, of_rows = whole.bytes_of()
    return build_llm(path, buckets, cache_memory=of_rows + of_page * (whole.columns * 3 // 2), **options)


def prompt_of(shared: int, tail: int, length: int) -> list[int]:
    """`shared` tokens that other prompts begin with, then `length` tokens of a tail."""
    return TRUNK[:shared] + TAILS[tail][:length]


# Shared tokens, the tail and its length; the round of its arrival, its priority, rounds until it is aborted, its salt.
JOB = st.tuples(
    st.sampled_from([0, 15, 16, 24, 33, 48]),
    st.integers(0, 2),
    st.sampled_from([1, 8, 9, 17]),
    st.integers(0, 20),
    st.sampled_from([0, 0, 0, -1, 1.5]),
    st.sampled_from([None, None, None, 0, 3, 9]),
    st.sampled_from([None, None, None, "a"]),
)


def assert_as_if_alone(
    engine: Engine, alone: Callable[[list[int], int], list[int]], jobs: list[tuple], *, every: int = 8, count: int = 30
) -> None:
    """What a sequence of the jobs has generated is the start of what it does alone, whatever is evicted, preempted and
    aborted.

    alone: prompt and count -> those tokens. every: so many rounds, NaN is written where nobody may read.
    """
    sequences = [
        sequence(prompt_of(shared, tail, length), count, priority=priority, salt=salt)
        for shared, tail, length, _, priority, _, salt in jobs
    ]
    run_as_told(engine, sequences, [(arrival, abort) for *_, arrival, _, abort, _ in jobs], every)
    for s, (*_, abort, _) in zip(sequences, jobs, strict=True):
        assert s.tokens == alone(s.prompt, count)[: None if abort is None else len(s.tokens)]
    assert all(pages.free == pages.pool.count for pages in engine.scheduler.pages)


def run_as_told(engine: Engine, sequences: list[Sequence], times: list[tuple[int, int | None]], every: int) -> None:
    """times: of each sequence the round of its arrival, and how many rounds later it is aborted, if at all."""
    for round_ in range(4000):
        for s, (arrival, abort) in zip(sequences, times, strict=True):
            if arrival == round_:
                engine.add(s)
            if abort is not None and arrival + abort == round_ and s.status is not Status.FINISHED:
                engine.cancel(s)
        if every and round_ % every == 0:
            poison(engine)
        engine.advance()
        assert_accounted(engine)
        if round_ > 30 and not engine.busy:
            return
    raise AssertionError("the engine is busy without end")


def poisoned(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """What they generate, with NaN before each dispatch in all that nobody may read."""
    for s in sequences:
        engine.add(s)
    while engine.busy:
        poison(engine)
        engine.advance()
        assert_accounted(engine)
    return [s.tokens for s in sequences]


def crowd_out(engine: Engine) -> None:
    """Run other prompts until no page and no snapshot of earlier ones is on the device, and all are in the tiers."""
    for prompt in STRANGERS:
        run(engine, [sequence(prompt, 20)])
    engine.source.settle()


def crowd(salts: bool = False) -> list[Sequence]:
    """More than there are pages for."""
    return [sequence(prompt_of(8 * i % 40, i % 6, 5 + i), 20, salt=str(i % 2) if salts else None) for i in range(14)]
