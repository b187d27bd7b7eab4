"""Loops whose number of trips is known on the device only."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax


def expected_trips(count: float) -> AbstractContextManager[None]:
    """Within it a loop is made that runs so often where load is balanced: compiled modules are read by it, see
    `inferlib.inspection.hlo`, which takes others of unknown length to run once."""
    return jax.named_scope(f"expected_trips={max(round(count), 1)}")
