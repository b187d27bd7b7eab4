"""Loops whose number of trips only the device knows."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import jax


def expected_trips(count: float) -> AbstractContextManager[Any, Any]:
    """A scope that marks the loops made in it: they run `count` times if load is balanced. `inferlib.inspection.hlo`
    reads the mark from compiled modules; it counts unmarked loops of unknown length once."""
    return jax.named_scope(f"expected_trips={max(round(count), 1)}")


def most_trips(count: int) -> AbstractContextManager[Any, Any]:
    """A scope for loops that run at most `count` times. Estimates count them as often."""
    return jax.named_scope(f"most_trips={count}")


def trips_in(scope: str) -> int:
    """How often a loop counts that lies in a scope: as `most_trips` says if it is marked so, else once."""
    marked = re.search(r"\bmost_trips=(\d+)$", scope)
    return int(marked[1]) if marked else 1
