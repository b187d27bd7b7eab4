"""The table that commands show while programs are compiled."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from inferlib.inspection.outcome import Outcome


class CompileProgress:
    """A table of programs and their states, shown on a terminal's standard error while they are compiled."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._since: dict[str, float] = {}
        self._outcomes: dict[str, Outcome] = {}

    @classmethod
    @contextlib.contextmanager
    def shown(cls, names: Sequence[str]) -> Iterator[CompileProgress]:
        progress = cls(names)
        if not sys.stderr.isatty():
            yield progress
            return
        with Live(console=Console(stderr=True), transient=True, refresh_per_second=4) as live:
            live.get_renderable = progress._table
            yield progress

    def started(self, name: str) -> None:
        self._since[name] = time.monotonic()

    def done(self, name: str, outcome: Outcome) -> None:
        self._since[name] = time.monotonic() - self._since[name]
        self._outcomes[name] = outcome

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name in self._names:
            outcome, seconds = self._outcomes.get(name), self._since.get(name)
            if outcome is not None:
                state, style = outcome.status, "green" if outcome.ok else "red"
            elif seconds is not None:
                state, style, seconds = "compiling", "yellow", time.monotonic() - seconds
            else:
                state, style = "waiting", "dim"
            table.add_row(name, f"[{style}]{state}", "" if seconds is None else f"{seconds:.1f} s")
        return table
