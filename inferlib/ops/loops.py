"""Loops whose number of trips is known on the device only."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax


def expected_trips(count: float) -> AbstractContextManager[Any, Any]:
    """A scope that marks a loop made in it as running `count` times where load is balanced. `inferlib.inspection.hlo`
    reads it from compiled modules, and takes unmarked loops of unknown length to run once."""
    return jax.named_scope(f"expected_trips={max(round(count), 1)}")
