"""Tables, lines and the picture of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from inferlib.aot.verify import Check
from inferlib.models.cache_levels import budgets_text, layer_budgets
from inferlib.planning.drafts import Drafts
from inferlib.planning.network import ATTAINED
from inferlib.planning.planner import Option, Ranking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 30  # characters of the longest bar
_FAR = 0.15  # the model's times are held within this share of the compiler's

NOTE = (
    f"[dim]Estimates from published figures, of which memory attains {ATTAINED.memory:.0%}, matrix products "
    f"{ATTAINED.compute:.0%} and links {ATTAINED.link:.0%}; a hop takes {ATTAINED.latency:.1f} times as long. "
    "The floor is a decode step with all attained and overlapped.[/]"
)


def title(ranking: Ranking, model: str) -> str:
    work, target, best = ranking.workload, ranking.target, ranking.best.deployed
    cache = f"; cache of {best.kv_cache_dtype}" if best.kv_cache_dtype else ""
    budgets = budgets_text(layer_budgets(best.config, best.cache_policy))
    cache += f"; cache by {best.cache_policy}{f', {budgets}' if budgets else ''}" if best.cache_policy else ""
    cache += f"; {work.depth} steps of the core" if work.depth else ""
    return (
        f"{model} on {target}, devices: {target.devices}; prompts of {work.input_len} tokens, answers of "
        f"{work.output_len}, {work.concurrency} at a time{cache}"
    )


def drafted(drafts: Drafts | None) -> str:
    """What a plan takes for granted of speculation, behind its title."""
    return "" if drafts is None else f"; {drafts.speculation}, {drafts.acceptance:.0%} of the drafts stand"


def best_lines(ranking: Ranking, drafts: Drafts | None = None) -> list[str]:
    """The best plan as lines, and whether it meets the SLO."""
    best, cache_dtype, policy = ranking.best, ranking.best.deployed.kv_cache_dtype, ranking.best.deployed.cache_policy
    missed = [] if ranking.meets else [f"[bold]Nothing meets {_slo(ranking)}[/]; the nearest:"]
    return [
        *missed,
        f"[bold]Best[/]: --parallel {best.deployed.parallel} --max-batch {best.batch} "
        f"--max-len {ranking.workload.max_len}"
        f"{f' --kv-cache-dtype {cache_dtype}' if cache_dtype else ''}"
        f"{f' --cache-policy {policy}' if policy else ''}"
        f"{f' --speculation {replace(drafts.speculation, tokens=best.drafts)}' if drafts and best.drafts else ''}, "
        f"{best.deployed.weights} weights: TTFT {_ms(best.ttft)}, ITL {_ms(best.itl)}, "
        f"{best.throughput:,.0f} tokens/s. The cache can hold {best.pool_tokens:,} tokens.",
    ]


def compared(checks: Sequence[Check]) -> Table:
    title = "The best meshes by the TPU compiler: its cycles; kernels and collectives by the cost model; not measured"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("parallel", "program"):
        table.add_column(column, no_wrap=True)
    for column in ("batch", "model", "compiler", "off", "memory", "compiler", "bytes", "compiler", ""):
        table.add_column(column, justify="right")
    for check in checks:
        facts = check.facts()
        cells = []
        for figure, form in (("seconds", _ms), ("memory", _gib), ("bytes", _gib)):
            compiled = facts["compiler"][figure]
            cells += [form(facts["model"][figure]), "-" if compiled is None else form(compiled)]
        cells.insert(2, "-" if check.difference is None else f"{check.difference:+.0%}")
        table.add_row(
            f"{facts['parallel']} {facts['weights']}", facts["program"], str(facts["batch"]), *cells, facts["status"]
        )
    return table


def remarks(checks: Sequence[Check]) -> list[str]:
    """Why plans did not compile, and where the compiler's time is far from the model's."""
    lines = []
    for check in checks:
        facts, difference = check.facts(), check.difference
        name = f"{facts['parallel']}, {facts['program']}"
        if not check.compiled.outcome.ok:
            lines.append(f"{name}: {facts['error']}")
        elif difference is not None and abs(difference) > _FAR:
            more = "more" if difference > 0 else "less"
            lines.append(f"{name}: the compiler's time is {abs(difference):.0%} {more} than the cost model's")
    return lines


def ranked(ranking: Ranking, top: int) -> Table:
    """The best batch of each mesh and dtype."""
    table = Table(box=SIMPLE_HEAD)
    for title in ("parallel", "weights"):
        table.add_column(title, no_wrap=True)
    drafts = any(option.drafts for option in ranking.options)
    for title in (
        "batch",
        "TTFT",
        "ITL",
        "step",
        *["drafts"] * drafts,
        "floor",
        "tokens/s",
        "per chip",
        "HBM",
        "of it",
    ):
        table.add_column(title, justify="right")
    table.add_column("bound by")
    cores = any(option.core for option in ranking.options)
    if cores:
        table.add_column("core")
    seen: dict[tuple[str, str], Option] = {}
    for option in ranking.options:
        seen.setdefault((str(option.deployed.parallel), option.deployed.weights), option)
    for (parallel, weights), option in list(seen.items())[:top]:
        table.add_row(
            parallel,
            weights,
            str(option.batch),
            _ms(option.ttft),
            _ms(option.itl),
            _ms(option.step),
            *[str(option.drafts)] * drafts,
            _ms(option.decode.floor),
            f"{option.throughput:,.0f}",
            f"{option.per_chip:,.0f}",
            f"{option.memory.total / 1024**3:.1f} GiB",
            f"{option.memory.total / ranking.target.hbm_bytes:.0%}",
            option.decode.bound,
            *[option.core] * cores,
        )
    return table


def frontier(options: tuple[Option, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Frontier: speed for a user against throughput", title_justify="left")
    for title in ("tokens/s of a user", "TTFT", "batch"):
        table.add_column(title, justify="right")
    table.add_column("parallel, weights", no_wrap=True)
    table.add_column("tokens/s per chip", no_wrap=True)
    most = max(option.per_chip for option in options)
    for option in options:
        bar = "█" * max(1, round(_BAR * option.per_chip / most))
        how = f"{option.deployed.parallel} {option.deployed.weights}"
        table.add_row(
            f"{1 / option.itl:,.0f}", _ms(option.ttft), str(option.batch), how, f"{bar} {option.per_chip:,.0f}"
        )
    return table


def _slo(ranking: Ranking) -> str:
    limits = (("TTFT", ranking.slo.ttft), ("ITL", ranking.slo.itl))
    return " and ".join(f"{name} {_ms(seconds)}" for name, seconds in limits if seconds is not None)


def _gib(count: float) -> str:
    return f"{count / 1024**3:.2f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def plot(ranking: Ranking, model: str) -> Figure:
    """Every option by its speed for a user and its throughput, with the frontier."""
    from matplotlib.figure import Figure  # takes a second

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for weights in dict.fromkeys(o.deployed.weights for o in ranking.options):
        options = [o for o in ranking.options if o.deployed.weights == weights]
        speeds, rates = [1 / o.itl for o in options], [o.per_chip for o in options]
        axes.scatter(speeds, rates, s=12, alpha=0.4, label=f"{weights} weights")
    front = ranking.frontier
    axes.plot([1 / o.itl for o in front], [o.per_chip for o in front], "k.-", label="frontier")
    for option in dict.fromkeys((front[0], ranking.best)):
        label = f"{option.deployed.parallel}, batch {option.batch} "
        axes.annotate(label, (1 / option.itl, option.per_chip), fontsize=8, ha="right", va="top")
    axes.set(xscale="log", yscale="log", xlabel="tokens/s of a user", ylabel="tokens/s per chip")
    work = ranking.workload
    axes.set_title(f"{model} on {ranking.target}, {work.input_len} + {work.output_len} tokens (estimates)", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
