"""Pages are fetched where that takes less time than to compute them."""

from __future__ import annotations

import pytest

from inferlib.engine.fetch_rule import FetchRule, Rate


def test_a_rate_follows_what_was_measured_last():
    rate = Rate()
    assert rate.value is None
    rate.add(10, 2)
    assert rate.value == 5
    for _ in range(100):
        rate.add(300, 3)
    assert rate.value == pytest.approx(100, rel=1e-3)
    rate.add(0, 0)
    assert rate.value == pytest.approx(100, rel=1e-3)


# A hundred tokens are computed in 0.1 s.
@pytest.mark.parametrize(
    ("link", "disk", "expected"),
    [
        (None, None, (True, True)),
        (1e9, None, (True, True)),
        (1e9, 1e9, (True, True)),
        (1e9, 1e7, (True, False)),
        (2e7, 2e7, (True, False)),
        (1e7, 1e9, (False, False)),
    ],
)
def test_the_rule_compares_times(link, disk, expected):
    rule = FetchRule()
    rule.computed.add(1000, 1)
    for rate, measured in ((rule.link, link), (rule.disk, disk)):
        if measured:
            rate.add(measured, 1)
    assert tuple(rule.choose(100, 1_000_001).values()) == expected


def test_without_a_measure_of_prompts_all_is_fetched():
    rule = FetchRule()
    rule.link.add(1, 1)
    assert rule.choose(100, 1000) == {"host": True, "disk": True}


def test_the_disk_is_tried_now_and_then():
    rule = FetchRule()
    rule.computed.add(1000, 1)
    rule.link.add(1e9, 1)
    rule.disk.add(1e3, 1)
    assert [rule.choose(100, 1000)["disk"] for _ in range(32)] == ([False] * 15 + [True]) * 2
