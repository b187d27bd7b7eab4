"""What was measured: percentiles, rates, goodput, as a table, as JSON values and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from inferlib.bench.client import Measured
from inferlib.tables import Part, Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Limits:
    """Seconds that a request must keep: to its first token, between tokens on average, and to its end."""

    ttft: float = math.inf
    itl: float = math.inf
    e2e: float = math.inf

    @staticmethod
    def parse(text: str) -> Limits:
        """Read "ttft=0.5,itl=0.05,e2e=10". Raises ValueError."""
        values: dict[str, float] = {}
        for part in filter(None, (x.strip() for x in text.split(","))):
            name, _, value = part.partition("=")
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if name not in ("ttft", "itl", "e2e") or name in values or not 0 < seconds < math.inf:
                raise ValueError(f"cannot read {part!r:.100} of --slo: write seconds, such as ttft=0.5,itl=0.05,e2e=10")
            values[name] = seconds
        return Limits(**values)

    def met(self, x: Measured) -> bool:
        if x.error is not None or x.ttft is None:
            return False
        return x.ttft <= self.ttft and (x.itl or 0.0) <= self.itl and x.e2e <= self.e2e


@dataclass(frozen=True)
class Report(Tables):
    """All requests of a run. what: the server and the load in words."""

    what: str
    measured: Sequence[Measured]
    limits: Limits

    @cached_property
    def answered(self) -> list[Measured]:
        return [x for x in self.measured if x.error is None and x.first is not None]

    @property
    def seconds(self) -> float:
        """The time from the first request to the end of the last answer."""
        if not self.measured:
            return 0.0
        return max(x.end for x in self.measured) - min(x.sent for x in self.measured)

    @cached_property
    def times(self) -> dict[str, list[float]]:
        """Seconds by name: to the first token, means between tokens, gaps between events, and to the end."""
        return {
            "ttft": [x.ttft for x in self.answered if x.ttft is not None],
            "itl": [x.itl for x in self.answered if x.itl is not None],
            "gap": [gap for x in self.answered for gap in x.gaps],
            "e2e": [x.e2e for x in self.answered],
        }

    def facts(self) -> dict[str, Any]:
        """The results as JSON values; times are seconds."""
        seconds, good = max(self.seconds, 1e-9), sum(map(self.limits.met, self.measured))
        prompt, output = (sum(getattr(x, f"{name}_tokens") for x in self.answered) for name in ("prompt", "output"))
        return {
            "what": self.what,
            "requests": len(self.measured),
            "answered": len(self.answered),
            "errors": dict(Counter(x.error for x in self.measured if x.error is not None).most_common(10)),
            "seconds": seconds,
            "prompt_tokens": prompt,
            "cached_tokens": sum(x.cached_tokens for x in self.answered),
            "output_tokens": output,
            "requests_per_second": len(self.answered) / seconds,
            "output_tokens_per_second": output / seconds,
            "total_tokens_per_second": (prompt + output) / seconds,
            "slo": {name: value for name, value in vars(self.limits).items() if value < math.inf},
            "good": good,
            "goodput": good / seconds,
            "times": {name: _summary(values) for name, values in self.times.items()},
        }

    def parts(self) -> Sequence[Part]:
        facts = self.facts()
        table = Table(title=self.what, title_justify="left")
        table.add_column("")
        for name in ("mean", *(f"p{p}" for p in _PERCENTILES), "max"):
            table.add_column(name, justify="right")
        for name, text in (("ttft", "TTFT"), ("itl", "ITL"), ("gap", "between events"), ("e2e", "E2E")):
            if summary := facts["times"][name]:
                table.add_row(text, *(_seconds(value) for value in summary.values()))
        lines = [
            f"{facts['answered']} of {facts['requests']} requests answered in {facts['seconds']:.1f} s: "
            f"{facts['requests_per_second']:.2f} requests/s",
            f"{facts['prompt_tokens']} prompt tokens, {facts['cached_tokens']} of them cached; "
            f"{facts['output_tokens']} generated: {facts['output_tokens_per_second']:.1f} tokens/s, "
            f"{facts['total_tokens_per_second']:.1f} with prompts",
        ]
        if facts["slo"]:
            limits = ", ".join(f"{name.upper()} {_seconds(value)}" for name, value in facts["slo"].items())
            lines.append(f"goodput under {limits}: {facts['goodput']:.2f} requests/s, {facts['good']} requests")
        lines += [f"{count} failed: {error}".replace("[", r"\[") for error, count in facts["errors"].items()]
        return [table, *lines]

    def plot(self) -> Figure:
        """The share of requests that are faster, over time; dashed lines are limits."""
        from matplotlib.figure import Figure  # takes a second

        figure = Figure(figsize=(10, 3.5), layout="constrained")
        names = {"ttft": "to the first token", "itl": "between tokens, mean", "e2e": "to the end"}
        for axes, (name, title) in zip(figure.subplots(1, 3, sharey=True), names.items(), strict=True):
            values = np.sort(self.times[name])
            axes.step(values, np.arange(1, len(values) + 1) / max(len(values), 1), where="post")
            if (limit := getattr(self.limits, name)) < math.inf:
                axes.axvline(limit, color="k", linestyle="--", linewidth=1)
            axes.set(title=title, xlabel="seconds", ylim=(0, 1))
            axes.grid(alpha=0.3)
        figure.suptitle(self.what, fontsize=10)
        return figure


def _summary(values: list[float]) -> dict[str, float]:
    """Mean, percentiles and maximum; nothing of nothing."""
    if not values:
        return {}
    levels = np.percentile(values, _PERCENTILES)
    middle = {f"p{p}": float(value) for p, value in zip(_PERCENTILES, levels, strict=True)}
    return {"mean": float(np.mean(values)), **middle, "max": max(values)}


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
