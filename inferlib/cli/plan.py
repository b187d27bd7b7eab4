"""`inferlib plan`: how to split a model over a target, and how fast that can be."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inferlib.cli.arguments import CacheDtype, Json, ShapeArguments, grouped
from inferlib.cli.compile_progress import CompileProgress
from inferlib.cli.info import shape_config
from inferlib.cli.output import json_line, user_errors, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferlib.aot.verify import Check
    from inferlib.planning.planner import Option, Ranking
    from inferlib.programs.program import ProgramKey

_BAR = 30  # characters of the longest bar
_FAR = 0.15  # the model's times are held within this share of the compiler's


@dataclass(frozen=True, kw_only=True)
class WorkloadArguments:
    panel: ClassVar = "Workload"

    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 64
    slo: Annotated[str, typer.Option(help="Limits in seconds that must hold, such as ttft=0.5,itl=0.02.")] = ""


@dataclass(frozen=True, kw_only=True)
class FormatsArguments:
    panel: ClassVar = "Number formats"

    quantization: Annotated[
        str | None,
        typer.Option(
            help="Formats of the weights, with commas between them: none (bfloat16), int8, int4, fp8, fp8_block, "
            "mxfp8, mxfp4; by default as the model is shipped, or none,int8."
        ),
    ] = None
    kv_cache_dtype: CacheDtype = None


@dataclass(frozen=True, kw_only=True)
class OutputArguments:
    panel: ClassVar = "Output"

    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 8
    plot: Annotated[Path | None, typer.Option(help="Write the frontier as a picture (.png, .svg, .pdf).")] = None
    verify: Annotated[
        int,
        typer.Option(
            min=0, help="Compile the best plans of so many meshes with the TPU compiler, and rank them again."
        ),
    ] = 0
    json: Json = False


@grouped
def plan(
    *,
    shape: ShapeArguments,
    target: Annotated[str, typer.Option(help="What to run on, such as v5e-8; see `inferlib targets`.")],
    work: WorkloadArguments,
    formats: FormatsArguments,
    output: OutputArguments,
) -> None:
    """Rank meshes, presets, weight dtypes and batch sizes for a workload, by an analytical cost model.

    Needs no devices and no weights. Times are estimates from published figures. Exits with 1 if no plan meets the
    --slo, and with --verify if a plan does not compile or does not fit.
    """
    shape.check()
    from inferlib.aot.verify import by_compiler, candidates
    from inferlib.checkpoint.load import described_quantization
    from inferlib.model_files import read_config
    from inferlib.models.families import config_from_hf
    from inferlib.planning import planner
    from inferlib.targets import parse_target

    with user_errors():
        workload = planner.Workload(work.input_len, work.output_len, work.concurrency)
        goal, slice_ = planner.Slo.parse(work.slo), parse_target(target)
        hf = read_config(shape.model, shape.revision) if shape.model else shape_config(shape.config)
        config = config_from_hf(dict(hf))
        stored = planner.formats(described_quantization(hf, config), formats.quantization)
        ranking = planner.rank(config, slice_, workload, goal, stored, formats.kv_cache_dtype)
        chosen = candidates(ranking, output.verify) if output.verify else []
        if output.plot is not None:
            _plot(ranking, shape.name, output.plot)
    checks = _verified(hf, chosen)
    again = by_compiler(ranking, checks)
    if output.json:
        write(json_line(_facts(ranking, shape.name, checks, again)).decode())
    else:
        write(_render(ranking, shape.name, output.top, checks, again))
    meets = (again or ranking).meets
    raise typer.Exit(0 if meets and all(check.compiled.outcome.ok for check in checks) else 1)


def _verified(hf: Mapping[str, Any], options: list[Option]) -> list[Check]:
    from inferlib.aot.verify import deployment, programs, verify

    def name(option: Option, key: ProgramKey) -> str:
        return f"{option.deployed.parallel}, batch {option.batch}: {key}"

    names = [name(option, key) for option in options for key in programs(deployment(hf, option))]
    with CompileProgress.shown(names) as progress:
        return verify(
            hf,
            options,
            started=lambda option, key: progress.started(name(option, key)),
            done=lambda option, outcome: progress.done(name(option, outcome.key), outcome),
        )


def _facts(ranking: Ranking, model: str, checks: list[Check], again: Ranking | None) -> dict[str, Any]:
    """again: the plans that were verified, by the compiler's times."""
    return {
        "model": model,
        "target": ranking.target.name,
        "workload": vars(ranking.workload),
        "slo": vars(ranking.slo),
        "meets_slo": (again or ranking).meets,
        "best": ranking.best.facts(),
        "frontier": [option.facts() for option in ranking.frontier],
        "options": [option.facts() for option in ranking.options],
        "verified": [check.facts() for check in checks],
        "best_verified": again and again.best.facts(),
    }


def _render(ranking: Ranking, model: str, top: int, checks: list[Check], again: Ranking | None) -> str:
    """again: the plans that were verified, by the compiler's times."""
    from inferlib.planning.network import ATTAINED

    text, terminal = io.StringIO(), sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 160)
    work, target, best = ranking.workload, ranking.target, ranking.best
    cache_dtype = best.deployed.kv_cache_dtype
    console.print(
        f"{model} on {target}, devices: {target.devices}; prompts of {work.input_len} tokens, answers of "
        f"{work.output_len}, {work.concurrency} at a time{f'; cache of {cache_dtype}' if cache_dtype else ''}",
        highlight=False,
    )
    console.print(_ranked(ranking, top), _frontier(ranking.frontier), highlight=False)
    console.print(*_best(ranking), sep="\n", highlight=False, soft_wrap=True)
    console.print(
        f"[dim]Estimates from published figures, of which memory attains {ATTAINED.memory:.0%}, matrix products "
        f"{ATTAINED.compute:.0%} and links {ATTAINED.link:.0%}; a hop takes {ATTAINED.latency:.1f} times as long. "
        "The floor is a decode step with all attained and overlapped.[/]",
        highlight=False,
        soft_wrap=True,
    )
    if checks:
        console.print(_compared(checks), highlight=False)
    for line in _remarks(checks):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if again is not None:
        console.print("With the compiler's times:", *_best(again), sep="\n", highlight=False, soft_wrap=True)
    return text.getvalue()


def _best(ranking: Ranking) -> list[str]:
    """The best plan as lines, and whether it meets the SLO."""
    best, cache_dtype = ranking.best, ranking.best.deployed.kv_cache_dtype
    missed = [] if ranking.meets else [f"[bold]Nothing meets {_slo(ranking)}[/]; the nearest:"]
    return [
        *missed,
        f"[bold]Best[/]: --parallel {best.deployed.parallel} --max-batch {best.batch} "
        f"--max-len {ranking.workload.max_len}"
        f"{f' --kv-cache-dtype {cache_dtype}' if cache_dtype else ''}, "
        f"{best.deployed.weights} weights: TTFT {_ms(best.ttft)}, ITL {_ms(best.itl)}, "
        f"{best.throughput:,.0f} tokens/s",
    ]


def _compared(checks: list[Check]) -> Table:
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


def _remarks(checks: list[Check]) -> list[str]:
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


def _ranked(ranking: Ranking, top: int) -> Table:
    """The best batch of each mesh and dtype."""
    table = Table(box=SIMPLE_HEAD)
    for title in ("parallel", "weights"):
        table.add_column(title, no_wrap=True)
    for title in ("batch", "TTFT", "ITL", "step", "floor", "tokens/s", "per chip", "HBM", "of it"):
        table.add_column(title, justify="right")
    table.add_column("bound by")
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
            _ms(option.decode.seconds),
            _ms(option.decode.floor),
            f"{option.throughput:,.0f}",
            f"{option.per_chip:,.0f}",
            f"{option.memory.total / 1024**3:.1f} GiB",
            f"{option.memory.total / ranking.target.hbm_bytes:.0%}",
            option.decode.bound,
        )
    return table


def _frontier(options: tuple[Option, ...]) -> Table:
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


def _plot(ranking: Ranking, model: str, path: Path) -> None:
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
    figure.savefig(path)
