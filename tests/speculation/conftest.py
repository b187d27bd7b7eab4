"""How many tokens dispatches draft, and what models generate without drafts, such as each module's at `path`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest

from inferlib import LLM
from inferlib.engine.profit import Profit
from inferlib.outputs import RequestOutput
from tests.helpers.llms import build_llm
from tests.helpers.speculation import BUCKETS, JOBS, run


@pytest.fixture
def counts(monkeypatch) -> Callable[..., None]:
    """`counts(*numbers)`: dispatches draft so many tokens in turn; by default as many as they may."""

    def choose(*numbers: int) -> None:
        turns = itertools.cycle(numbers)
        monkeypatch.setattr(Profit, "choose", lambda self, *_: next(turns))

    monkeypatch.setattr(Profit, "choose", lambda self, *_: self.counts[-1])
    return choose


@pytest.fixture(scope="session")
def undrafted() -> Callable[..., LLM]:
    """`undrafted(path, **options)`: a shared LLM of `BUCKETS` that drafts nothing."""
    return functools.cache(lambda path, **options: build_llm(path, BUCKETS, decode_steps=1, **options))


@pytest.fixture(scope="module")
def without(path, undrafted) -> LLM:
    return undrafted(path)


@pytest.fixture(scope="module")
def expected(without) -> list[RequestOutput]:
    return run(without, JOBS)
