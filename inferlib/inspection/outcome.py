"""The outcome of compiling one program ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from inferlib.programs.keys import ProgramKey

Status = Literal["compiled", "lowered", "reused", "too large", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program. facts: what its worker reported (see `inferlib.aot.worker`). error: why it failed.

    Status "lowered": ready for a compiler that is not installed here.
    """

    key: ProgramKey
    status: Status
    facts: dict[str, Any] | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("compiled", "lowered", "reused")
