"""Progress bars on standard error, only when it is a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


class ByteProgress:
    """A bar that counts bytes and shows the rate; a context manager. Silent if `show` is false."""

    def __init__(self, title: str, total: int, *, show: bool):
        columns = (
            TextColumn(title),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)
        self._task = self._bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


def on_terminal() -> bool:
    return sys.stderr.isatty()


class CountProgress:
    """A bar of finished items out of `total` (None: unknown); a context manager. Silent if `show` is false."""

    def __init__(self, title: str, total: int | None, *, show: bool):
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)
        self._task = self._bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def __enter__(self) -> CountProgress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()
