"""How many cases of a test are quick."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.helpers.fast_cases import mark_further_cases, spread


class Case:
    """As much of a collected test as is read."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator):
        self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks[name].mark if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark

    @property
    def slow(self) -> bool:
        return "slow" in self.marks


@pytest.mark.parametrize(
    ("count", "total", "numbers"),
    [(1, 5, {0}), (2, 5, {0, 4}), (3, 5, {0, 2, 4}), (4, 10, {0, 3, 6, 9}), (5, 5, {0, 1, 2, 3, 4}), (9, 2, {0, 1})],
)
def test_cases_lie_at_equal_distances(count, total, numbers):
    assert spread(count, total) == numbers


def test_as_many_cases_are_quick_as_the_mark_says():
    two = pytest.mark.fast_cases(2)
    cases = [Case(f"test_a.py::test_many[{n}]", two) for n in range(4)]
    marked = [
        Case("test_a.py::test_many[4]", two, pytest.mark.slow),
        Case("test_a.py::test_many[5]", two, pytest.mark.release),
    ]
    others = [Case("test_a.py::test_one", two), Case("test_b.py::test_many[0]"), Case("test_b.py::test_many[1]")]
    mark_further_cases(cast(Any, [*cases, *marked, *others]))
    assert [case.slow for case in cases] == [False, True, True, False]
    assert [case.slow for case in (*marked, *others)] == [True, False, False, False, False]
