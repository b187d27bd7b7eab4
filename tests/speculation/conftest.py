"""How many tokens dispatches draft, and what each module's model at `path` generates without drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from inferlib import LLM
from inferlib.engine.profit import Profit
from inferlib.outputs import RequestOutput
from tests.helpers.llms import build_llm
from tests.helpers.speculation import BUCKETS, DRAWN, JOBS, run


@pytest.fixture
def counts(monkeypatch) -> Callable[..., None]:
    """`counts(*numbers)`: dispatches draft so many tokens in turn; by default as many as they may."""

    def choose(*numbers: int) -> None:
        turns = itertools.cycle(numbers)
        monkeypatch.setattr(Profit, "choose", lambda self, *_: next(turns))

    monkeypatch.setattr(Profit, "choose", lambda self, *_: self.counts[-1])
    return choose


@pytest.fixture(scope="module")
def without(path) -> LLM:
    return build_llm(path, BUCKETS, decode_steps=3)


@pytest.fixture(scope="module")
def expected(without) -> list[RequestOutput]:
    return run(without, JOBS)


@pytest.fixture(scope="module")
def drawn(without) -> list[RequestOutput]:
    return run(without, DRAWN)
