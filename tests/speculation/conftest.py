"""How many tokens dispatches draft."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from inferlib.engine.profit import Profit


@pytest.fixture
def counts(monkeypatch) -> Callable[..., None]:
    """`counts(*numbers)`: dispatches draft so many tokens in turn; by default as many as they may."""

    def choose(*numbers: int) -> None:
        turns = itertools.cycle(numbers)
        monkeypatch.setattr(Profit, "choose", lambda self, *_: next(turns))

    monkeypatch.setattr(Profit, "choose", lambda self, *_: self.counts[-1])
    return choose
