"""The curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(entries: list[dict[str, Any]], before: float, file: Path, *, kind: str) -> None:
    """Draw the loss over steps, and that of held-out rows. before: of these, as training began. kind: what it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([entry["step"] for entry in entries], [entry["loss"] for entry in entries], label="training")
    measured = [entry for entry in entries if "held_out" in entry]
    steps, losses = [0, *(e["step"] for e in measured)], [before, *(e["held_out"] for e in measured)]
    axes.plot(steps, losses, "o-", label="held-out texts")
    axes.set(xlabel="step", ylabel=f"{kind}, nats", yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
