"""Progress bars on standard error, only when it is a terminal."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


class _Bar:
    """A bar on standard error; a context manager. Silent if `show` is false."""

    def __init__(self, title: str, total: int | None, columns: tuple[ProgressColumn, ...], *, show: bool):
        columns = (TextColumn(title), BarColumn(), *columns, TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)
        self._task = self._bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


class ByteProgress(_Bar):
    """A bar that counts bytes and shows their rate."""

    def __init__(self, title: str, total: int, *, show: bool):
        super().__init__(title, total, (DownloadColumn(), TransferSpeedColumn()), show=show)


class CountProgress(_Bar):
    """A bar of finished items out of `total`; None if that is unknown."""

    def __init__(self, title: str, total: int | None, *, show: bool):
        super().__init__(title, total, (MofNCompleteColumn(),), show=show)


def on_terminal() -> bool:
    return sys.stderr.isatty()
