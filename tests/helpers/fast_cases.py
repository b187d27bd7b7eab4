"""Which cases of a test run in the quick part, where a mark says how many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest


def mark_further_cases(items: Sequence[pytest.Item]) -> None:
    """Mark cases slow of tests with the mark `fast_cases(n)`, but for n of them. What is marked already stays as it is,
    and does not count."""
    marked = (item for item in items if item.get_closest_marker("fast_cases") and not _is_marked(item))
    for _, group in groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        fast = spread(cases[0].get_closest_marker("fast_cases").args[0], len(cases))
        for number, case in enumerate(cases):
            if number not in fast:
                case.add_marker(pytest.mark.slow)


def _is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "release"))


def spread(count: int, total: int) -> set[int]:
    """`count` of the numbers from 0 to total - 1, at equal distances; all, if there are no more."""
    if count >= total:
        return set(range(total))
    return {round(i * (total - 1) / max(count - 1, 1)) for i in range(count)}
