"""What a run shows and keeps: a display on a terminal, a log of JSON lines, a plot."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Record:
    """The log of a run, `file`, which goes on from a step that it has lines of; a context manager that shows a bar."""

    def __init__(self, file: Path, steps: int, begin: int, *, show: bool, title: str = "distilling"):
        self.file, self.begin = file, begin
        self.entries = [entry for entry in read_log(file) if entry["step"] <= begin]
        file.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not show)
        self.task = self.bar.add_task(title, total=steps, completed=begin, metrics="")
        self.started = time.perf_counter()

    def add(self, step: int, tokens: int, **metrics: Any) -> None:
        """Add the metrics after a step; the bar shows those that are numbers. tokens: of all steps of this process so
        far."""
        entry = {"step": step, **metrics, "tokens_per_s": round(tokens / (time.perf_counter() - self.started))}
        self.entries.append(entry)
        with self.file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        numbers = [f"{name} {value:.3f}" for name, value in metrics.items() if isinstance(value, float)]
        self.bar.update(self.task, completed=step, metrics="  ".join([*numbers, f"{entry['tokens_per_s']:,} tokens/s"]))

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()


def read_log(file: Path) -> list[dict[str, Any]]:
    """The entries of a log; none if there is no file. A line that was being written is left out."""
    entries = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def plot(entries: list[dict[str, Any]], file: Path) -> None:
    """Draw loss and acceptance over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = [entry["step"] for entry in entries]
    left.plot(steps, [entry["loss"] for entry in entries])
    left.set(xlabel="step", ylabel="loss")
    for number in range(len(entries[0]["agreeing"]) if entries else 0):
        right.plot(steps, [entry["agreeing"][number] for entry in entries], label=f"draft {number + 1}")
    right.set(xlabel="step", ylabel="drafts that the model chooses", ylim=(0, 1))
    if entries:
        right.legend(fontsize="small")
    figure.savefig(file, dpi=120)
