"""The report of compiled programs as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from inferlib.inspection.report import Latency, ProgramReport, Report, StepEstimate, gib
from inferlib.tables import Part

_HIDES = 1 << 20  # bytes of weights whose fetch hides a part of a collective that is worth a word


def parts(report: Report, name: str) -> list[Part]:
    """Tables of memory and time, then lines on collectives, copies and errors. name: the model's name."""
    made = report.deployment
    title = f"[bold]{escape(name)} on {made.target}[/bold], {escape(settings_text(report))}"
    lines = *_limits(report), *assumptions(report), *_collectives(report), *_kernels(report), *_problems(report)
    return [title, _memory(report), _time(report), *map(escape, lines)]


def settings_text(report: Report) -> str:
    """The settings of the programs other than model and target."""
    made = report.deployment
    stored = {"weights": made.quantization, "cache": made.kv_cache_dtype}
    parts = [f"{how} {what}" for what, how in stored.items() if how]
    return ", ".join([str(made.parallel), made.dtype, *parts, f"backend {made.backend}"])


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("program", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _memory(report: Report) -> Table:
    budget = report.budget
    table = _table("Memory of a device", "", "weights", "cache", "temporaries", "code", "peak", "of capacity", "copies")
    for p in report.programs:
        share = f"{p.peak / report.capacity:.0%}" if p.peak is not None and report.capacity else "-"
        cells = [gib(budget.weights), gib(budget.cache), *(_or(v, _mib) for v in (p.temporaries, p.code))]
        known = p.outcome.ok and p.outcome.status != "lowered"
        copies = str(sum(c["count"] for c in p.copies)) if known else "-"
        table.add_row(str(p.key), p.outcome.status, *cells, _or(p.peak, gib), share, copies)
    return table


def _time(report: Report) -> Table:
    title = "A step on a device; times are estimates by the compiled program, not measured"
    table = _table(title, "moved", "floor", "", "operations", "collectives", "estimate", "floor", "MBU", "MFU")
    for p in report.programs:
        moved, ratio = _or(p.moved_bytes, gib), _or(p.moved_bytes and p.moved_bytes / p.floor_bytes, "{:.2f}x".format)
        step = (p.step.computing, p.step.exposed) if p.step else (None, None)
        times = [_or(v, _ms) for v in (*step, p.estimate, p.floor)]
        table.add_row(
            str(p.key), moved, gib(p.floor_bytes), ratio, *times, *(_or(v, "{:.0%}".format) for v in (p.mbu, p.mfu))
        )
    return table


def _limits(report: Report) -> list[str]:
    lines = []
    if report.largest_batch is not None and any(p.outcome.ok for p in report.programs):
        lines.append(
            f"Largest batch of {report.deployment.max_len} tokens that would fit: {report.largest_batch}; "
            f"largest context at batch {report.deployment.max_batch}: {report.largest_context}"
        )
    lines += [latency_text(x) for x in report.latencies() if x.estimate or x.floor]
    return lines


def assumptions(report: Report) -> list[str]:
    """What the estimates rest on."""
    return [*_priced(report), *_balanced(report)]


def _priced(report: Report) -> list[str]:
    """How the operations of programs are priced, and what of the collectives is hidden."""
    texts = {"listing": "by their listings", "estimate": "as the compiler estimates", "bytes": "by their bytes"}
    lines = []
    for p in report.programs:
        if p.step is None:
            continue
        parts = [f"{_ms(s)} {texts[how]}" + _named(p, how) for how, s in p.step.operations.items() if s]
        parts += [f"{_ms(p.step.waits)} are waits for copies"] if p.step.waits else []
        lines.append(f"Operations of {p.key}: " + ", ".join(parts) + _network(p.step))
    return lines


def _network(step: StepEstimate) -> str:
    """The collectives, which the cost model prices: their time, what of it is hidden, and their algorithms."""
    counts: Counter[str] = Counter()
    for c in step.collectives:
        counts[c["name"]] += c["count"]
    if not counts:
        return ""
    kinds = "; ".join(f"{count} {name}" for name, count in counts.items())
    hidden = step.network - step.exposed
    times = f"{_ms(step.network)}, {_ms(hidden)} of it behind weights and operations"
    return f". Collectives by the cost model: {times} ({kinds})"


def _named(p: ProgramReport, how: str) -> str:
    """The dearest operations that have no listing."""
    if how == "listing" or p.step is None:
        return ""
    names = dict.fromkeys(price["name"] for price in p.step.prices if price["how"] == how)
    return f" ({', '.join(list(names)[:3])}{', ...' if len(names) > 3 else ''})"


def _balanced(report: Report) -> list[str]:
    keys = [str(p.key) for p in report.programs if p.balanced]
    what = "moved bytes and cycles are those of experts chosen equally often; other choices are computed in more rounds"
    return [f"{'; '.join(keys)}: {what}"] if keys else []


def latency_text(x: Latency) -> str:
    what = f"TTFT of {x.size} tokens" if x.kind == "TTFT" else f"ITL of {x.size} rows"
    return f"{what} at cache {x.limit}: {_or(x.estimate, _ms)} estimated, {_or(x.floor, _ms)} at the floor"


def _collectives(report: Report) -> list[str]:
    """The collectives, in one line for programs that have the same."""
    groups: dict[str, list[str]] = {}
    for p in report.programs:
        if p.collectives:
            groups.setdefault(collectives_text(p), []).append(str(p.key))
    return [f"Collectives of {'; '.join(keys)}: {text}" for text, keys in groups.items()]


def collectives_text(p: ProgramReport) -> str:
    text = ", ".join(f"{c['count']} {c['kind']} of {_mib(c['nbytes'])}" for c in p.collectives)
    if not p.overlaps:
        return text
    ahead = [o["ahead"] for o in p.overlaps for _ in range(o["count"])]
    hidden = sum(size >= _HIDES for size in ahead)
    bytes_text = f", {_mib(median(ahead))} in the median" if hidden else ""
    return f"{text}; {hidden} of {len(ahead)} run while {_mib(_HIDES)} of weights or more are fetched{bytes_text}"


def _kernels(report: Report) -> list[str]:
    """The NKI kernels of programs for Trainium, in one line for programs that have the same."""
    groups: dict[str, list[str]] = {}
    for p in report.programs:
        counts = (p.outcome.facts or {}).get("nki")
        if counts is not None:
            calls = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none, XLA does all"
            groups.setdefault(calls, []).append(str(p.key))
    return [f"NKI kernels of {'; '.join(keys)}: {calls}" for calls, keys in groups.items()]


def _problems(report: Report) -> list[str]:
    lines = [line for p in report.programs for line in problems_of(p)]
    return lines + [f"Does not fit: {line}" for line in report.advice()]


def problems_of(p: ProgramReport) -> list[str]:
    facts = p.outcome.facts or {}
    lines = []
    for name, what in (("cache_copies", "the cache"), ("weight_copies", "weights")):
        counts: Counter[tuple[str, int]] = Counter()
        for copy in facts.get(name, ()):
            counts[copy["array"], copy["nbytes"]] += copy["count"]
        for (array, size), count in counts.items():
            lines.append(f"{p.key} copies {what}: {array}, {count} x {_mib(size)} a step")
    return lines + ([f"{p.key}: {p.outcome.error}"] if p.outcome.error else [])


def _or(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if value is None else form(value)


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 1 << 14 else f"{count} bytes"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
