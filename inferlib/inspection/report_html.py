"""The report of compiled programs as one HTML page that needs nothing else: tables, and plots as inline SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from inferlib.inspection.report import Report, gib
from inferlib.inspection.report_text import assumptions, collectives_text, latency_text, problems_of, settings_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .8rem; text-align: right }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left; white-space: nowrap }
tr:nth-child(even) { background: #f4f4f4 } .bad { color: #b00020 } .note { color: #666 } svg { max-width: 100% }
"""
_NOTE = (
    "Estimates are the compiled program's schedule, with operations by their listings and a model of the collectives; "
    "nothing was measured. The floor reads weights and cache once at the peak bandwidth, or does the FLOPs at the peak "
    "rate."
)
_PARTS = ("weights", "cache", "temporaries", "code")


def page(report: Report, name: str) -> str:
    """The whole page. name: the model's name."""
    made = report.deployment
    title = html.escape(f"{name} on {made.target}")
    fits = "fits" if report.copied else "fits, nothing copies the cache"
    state = fits if report.ok else "see what is red"
    problems = [line for p in report.programs for line in problems_of(p)] + report.advice()
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1><p>{html.escape(settings_text(report))}: {state}.</p>",
        *(f"<p class=bad>{html.escape(line)}</p>" for line in problems),
        "<h2>Memory of a device</h2>",
        _plot(lambda axes: _draw_memory(axes, report), len(report.programs)),
        _memory(report),
        _limits(report),
        f"<h2>Time of a step</h2><p class=note>{_NOTE}</p>",
        _plot(lambda axes: _draw_time(axes, report), len(report.programs)) if report.latencies() else "",
        _time(report),
        *(f"<p class=note>{html.escape(line)}</p>" for line in assumptions(report)),
        "<h2>Latency</h2>",
        "".join(f"<p>{html.escape(latency_text(x))}</p>" for x in report.latencies()),
        "<h2>Collectives of a step</h2>",
        _table(("program", "collectives"), [(str(p.key), collectives_text(p) or "none") for p in report.programs]),
        "</html>",
    ]
    return "\n".join(parts)


def _memory(report: Report) -> str:
    budget, rows = report.budget, []
    for p in report.programs:
        sizes = [gib(budget.weights), gib(budget.cache), *(_cell(v, gib) for v in (p.temporaries, p.code, p.peak))]
        rows.append((str(p.key), p.outcome.status, *sizes, len(p.copies)))
    return _table(("program", "", *_PARTS, "peak", "copies"), rows)


def _limits(report: Report) -> str:
    if not report.capacity:
        return ""
    return (
        f"<p>Capacity {gib(report.capacity)}. Largest batch of {report.deployment.max_len} tokens: "
        f"{report.largest_batch}; largest context at batch {report.deployment.max_batch}: {report.largest_context}.</p>"
    )


def _time(report: Report) -> str:
    rows = []
    for p in report.programs:
        moved = [_cell(p.moved_bytes, gib), gib(p.floor_bytes)]
        step = (p.step.computing, p.step.exposed) if p.step else (None, None)
        times = [_cell(v, lambda s: f"{1e3 * s:.2f} ms") for v in (*step, p.estimate, p.floor)]
        rows.append((str(p.key), *moved, *times, *(_cell(v, "{:.0%}".format) for v in (p.mbu, p.mfu))))
    return _table(
        ("program", "bytes moved", "floor", "operations", "collectives", "estimate", "floor", "MBU", "MFU"), rows
    )


def _cell(value, form) -> str:
    return "-" if value is None else form(value)


def _table(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    def line(cells: Sequence, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"


# ---- plots


def _plot(draw, bars: int) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.32 * bars), layout="constrained")
    draw(figure.add_subplot())
    out = io.StringIO()
    FigureCanvasSVG(figure).print_svg(out)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw_memory(axes: Axes, report: Report) -> None:
    names = [str(p.key) for p in report.programs]
    left = [0.0] * len(names)
    for part in _PARTS:
        sizes = [
            (getattr(report.budget, part) if part in ("weights", "cache") else getattr(p, part) or 0) / 2**30
            for p in report.programs
        ]
        axes.barh(names, sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if report.capacity:
        axes.axvline(report.capacity / 2**30, color="black", linestyle="--", label="capacity")
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each device")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_time(axes: Axes, report: Report) -> None:
    names = [str(p.key) for p in report.programs]
    places = range(len(names))
    axes.barh([i - 0.2 for i in places], [1e3 * (p.estimate or 0) for p in report.programs], 0.4, label="estimate")
    axes.barh([i + 0.2 for i in places], [1e3 * (p.floor or 0) for p in report.programs], 0.4, label="floor")
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
