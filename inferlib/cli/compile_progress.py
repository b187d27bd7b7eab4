"""What commands show on standard error while programs are compiled: a table on a terminal, else a line for each."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from inferlib.inspection.outcome import Outcome
    from inferlib.programs.deployment import Deployment

# CPU seconds to trace and compile a program, for each block of layers that it is traced from. Measured: smollm2-135m
# takes 4 s for a CPU, with a block for each layer, and llama3-8b 9 s for a TPU, with one for all.
_SECONDS = {"cpu": 0.1, "gpu": 0.1, "tpu": 8.0, "neuron": 0.1}


def guessed_seconds(deployment: Deployment) -> float:
    """About how long one of its programs takes to compile."""
    blocks = sum(1 for _ in deployment.planned().model.blocks())
    return 1 + blocks * _SECONDS[deployment.slice.platform]


class CompileProgress:
    """The states of programs while they are compiled, `workers` at a time.

    guess: seconds that a program takes, until one is done; None: unknown.
    """

    def __init__(self, names: Sequence[str], workers: int = 1, guess: float | None = None, *, lines: bool = False):
        self._names, self._workers, self._guess, self._lines = names, workers, guess, lines
        self._since: dict[str, float] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._seconds: list[float] = []  # of the programs that were compiled, not reused
        self._lock = threading.Lock()

    @classmethod
    @contextlib.contextmanager
    def shown(cls, names: Sequence[str], workers: int = 1, guess: float | None = None) -> Iterator[CompileProgress]:
        progress = cls(names, workers, guess, lines=not sys.stderr.isatty())
        if progress._lines:
            if names:
                typer.echo(progress._title(), err=True)
            yield progress
            return
        with Live(console=Console(stderr=True), transient=True, refresh_per_second=4) as live:
            live.get_renderable = progress._table
            yield progress

    def started(self, name: str) -> None:
        self._since[name] = time.monotonic()

    def done(self, name: str, outcome: Outcome) -> None:
        """Called by several threads."""
        with self._lock:
            seconds = self._since[name] = time.monotonic() - self._since[name]
            self._outcomes[name] = outcome
            if outcome.status != "reused":
                self._seconds.append(seconds)
            if self._lines:
                typer.echo(self._line(name, outcome, seconds), err=True)

    @property
    def _left(self) -> str:
        """About how long the rest takes, such as ", about 3 min left"; empty if nothing is left or known."""
        left = len(self._names) - len(self._outcomes)
        each = sum(self._seconds) / len(self._seconds) if self._seconds else self._guess
        if not left or each is None:
            return ""
        # The first is compiled alone: it decides how the weights of all others lie in memory.
        rounds = -(-left // self._workers) if self._outcomes else 1 - (1 - left) // self._workers
        return f", about {_duration(rounds * each)} left" if self._outcomes else f", about {_duration(rounds * each)}"

    def _title(self) -> str:
        count, workers = len(self._names), min(self._workers, len(self._names))
        several = f", {workers} at a time" if workers > 1 else ""
        return f"compiling {count} program{'s' if count > 1 else ''}{several}{self._left}"

    def _line(self, name: str, outcome: Outcome, seconds: float) -> str:
        number, count = len(self._outcomes), len(self._names)
        how = outcome.status if outcome.status == "reused" else f"{outcome.status} in {seconds:.1f} s"
        reason = f": {outcome.error.splitlines()[0][:200]}" if outcome.error else ""
        return f"[{number:{len(str(count))}}/{count}] {name}: {how}{reason}{self._left}"

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
        if self._names:
            table.add_row(f"{len(self._outcomes)} of {len(self._names)}{self._left}", "", "")
        return table


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
