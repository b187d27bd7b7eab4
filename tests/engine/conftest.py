"""Models that several files of this folder run, compiled once per session."""

from __future__ import annotations

import functools

import pytest

from inferlib import LLM, Buckets
from inferlib.engine.fetch_rule import FetchRule
from tests.helpers.llms import build_llm, new_engine
from tests.helpers.sequences import GREEDY, run, sequence
from tests.helpers.shared_beginnings import PENALIZED, SAMPLED, build_tight


@pytest.fixture(scope="session")
def tight(checkpoint):
    """`tight(kind)`: a shared LLM whose rows have few pages; see `build_tight`. Take a new engine of it."""
    return functools.cache(lambda kind: build_tight(checkpoint(kind.split()[0]), kind))


@pytest.fixture(scope="session")
def alone(tight):
    """`alone(kind, prompt, count, params)`: what a prompt generates alone, without a cache of prefixes."""

    @functools.cache
    def tokens(kind: str, prompt: tuple[int, ...], count: int, params: int, seed: int) -> list[int]:
        with new_engine(tight(kind), prefix_caching=False, host_cache=None, disk_cache=None) as engine:
            return run(engine, [sequence(list(prompt), count, [GREEDY, SAMPLED, PENALIZED][params], seed=seed)])[0]

    def of(kind: str, prompt: list[int], count: int, params=GREEDY, seed: int = 0) -> list[int]:
        return tokens(kind, tuple(prompt), count, [GREEDY, SAMPLED, PENALIZED].index(params), seed)

    return of


@pytest.fixture
def always_fetched(monkeypatch) -> None:
    """What a tier has is fetched, however fast a tiny model computes."""
    monkeypatch.setattr(FetchRule, "choose", lambda self, *_: {"host": True, "disk": True})


@pytest.fixture(scope="session")
def changed(checkpoint) -> LLM:
    """One layer, four rows and a step a dispatch, for what changes logits on the host. Leave it idle."""
    return build_llm(checkpoint("llama", num_hidden_layers=1), Buckets((8,), (4,), (64,)), decode_steps=1)
