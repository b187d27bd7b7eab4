"""Which implementation an operation takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """The implementation that an operation takes for given shapes, and why not the preferred one.

    name: the implementation, such as "xla" or "pallas_tpu". reason: why the backend's preferred implementation cannot
    run; empty if `name` is the preferred one, or if the preferred one would not be faster, so that no warning is due.
    """

    name: str
    reason: str = ""

    @staticmethod
    def of(preferred: str, reason: str | None, fallback: str = "xla") -> Choice:
        """The preferred implementation, or the fallback if there is a reason against the preferred one."""
        return Choice(fallback, reason) if reason else Choice(preferred)
