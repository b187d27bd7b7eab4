"""Counts every XLA compilation of this process, whatever triggers it."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_total = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _total
    if event == _EVENT:
        _total += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """XLA compilations since this module was imported."""
    return _total
