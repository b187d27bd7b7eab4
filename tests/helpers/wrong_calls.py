"""Calls with wrong values. Their errors must be ours: made by a `raise` of the library, and one line. What Python or
JAX say by themselves is not."""

from __future__ import annotations

import ast
import functools
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inferlib

SEED = 3
OURS = str(Path(inferlib.__file__).parent)

WRONG = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 10**30, 0.0, 1.5, -0.5, float("nan"), float("inf"), 1j),
    *("", " ", "nope", "a=b", "tp=", "tp=0", "tp=99", "dp=3,dp=3", "/proc/nowhere/at/all", "\ud800", "\0", "x" * 5000),
    *(b"abc", b"", bytearray(b"a"), [], [None], [1, "a"], [1.5], [[]], [[1], None], [-1], [10**30], [True]),
    *((), ("a", 1), {}, {"a": 1}, {1: 2}, {"role": "user"}, [{"role": "user"}], [{"role": 1, "content": None}]),
    *([[{"role": "user", "content": "hi"}], None], set(), {1}, range(3), object(), object, len, Path("/proc/nowhere")),
    *(np.array([1.5]), np.array(3), np.zeros(2, int), np.array([None]), np.float32(2), np.int64(2), iter([1])),
)


class Reached(Exception):
    """Work on the device would begin now: the input was taken."""


@functools.cache
def lines_of_raises(file: str) -> frozenset[int]:
    """Of the `raise` statements in a source file."""
    raises = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Raise))
    return frozenset(n for node in raises for n in range(node.lineno, (node.end_lineno or 0) + 1))


def raised_by_us(error: BaseException) -> bool:
    """True if the innermost frame is the library's and stands at a `raise` statement."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    return file.startswith(OURS) and line in lines_of_raises(file)


def check(call: Any, *args: Any, **options: Any) -> str:
    """Call it; returns what was wrong with how it ended, or nothing."""
    arguments = [*map(brief, args), *(f"{name}={brief(value)}" for name, value in options.items())]
    shown = f"{call.__qualname__}({', '.join(arguments)})"
    try:
        call(*args, **options)
    except Reached:
        return ""
    except Exception as error:
        lines = str(error).splitlines()
        if isinstance(error, ValueError | TypeError | OSError) and raised_by_us(error) and len(lines) == 1:
            return ""
        return f"{shown}: {type(error).__name__}: {error} at {traceback.extract_tb(error.__traceback__)[-1]}"
    return ""


def brief(value: Any) -> str:
    return repr(value)[:60]


def variants(good: dict[str, Any], names: list[str], most: int | None) -> Iterator[dict[str, Any]]:
    """The arguments with each of the named ones wrong in every way, or in `most`, then with two of them wrong at a
    time."""
    draw = random.Random(SEED)
    for name in names:
        for value in WRONG if most is None else draw.sample(WRONG, most):
            yield good | {name: value}
    for _ in range(30 if len(names) > 1 else 0):
        yield good | {name: draw.choice(WRONG) for name in draw.sample(names, 2)}


def problems(
    call: Callable[..., Any], good: dict[str, Any], names: list[str] | None = None, most: int | None = None
) -> list[str]:
    """most: in how many ways an argument is wrong, drawn by a fixed seed; None: in every way."""
    return [text for options in variants(good, names or list(good), most) if (text := check(call, **options))]


def report(wrong: list[str]) -> None:
    if wrong:
        pytest.fail(f"{len(wrong)} calls end as they should not:\n" + "\n".join(wrong), pytrace=False)
