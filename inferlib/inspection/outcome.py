"""What became of one program that was compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from inferlib.programs.program import ProgramKey

Status = Literal["compiled", "lowered", "reused", "too large", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of a program. facts: as its worker told them (see `inferlib.aot.worker`); error: or why not.

    "lowered": ready for a compiler that is not installed here.
    """

    key: ProgramKey
    status: Status
    facts: dict[str, Any] | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("compiled", "lowered", "reused")
