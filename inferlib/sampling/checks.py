"""Checks of the fields of sampling parameters: errors name the field, its value and what is allowed."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

_INT32_MAX = 2**31 - 1


def is_a(kind: type, value: Any) -> bool:
    """isinstance for numbers; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_int(name: str, value: Any, low: int, high: int = _INT32_MAX) -> None:
    if not is_a(Integral, value) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")


def check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    # NaN fails every comparison.
    if not is_a(Real, value) or not low <= value <= high or (low_open and value == low):
        allowed = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a number in {allowed}, got {value!r}")
