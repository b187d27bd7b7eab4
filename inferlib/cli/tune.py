"""`inferlib tune`: block sizes of the TPU kernels, searched for without a TPU."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferlib.cli.arguments import BucketArguments, Json, grouped
from inferlib.cli.compile import deployment_of
from inferlib.cli.output import fail, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.targets import Target
    from inferlib.tuning.kernel_cases import Case
    from inferlib.tuning.tune import Failed, Result


@dataclass(frozen=True, kw_only=True)
class ProgramArguments:
    """The deployment whose programs say which shapes kernels are tuned for."""

    panel: ClassVar = "Shapes of a deployment, in place of cases"

    config: Annotated[
        str | None,
        typer.Option(help="Tune for the programs of a model shape, by its name, on the whole slice."),
    ] = None
    parallel: Annotated[
        str | None, typer.Option(help="With --config: devices to split over; by default all on tp.")
    ] = None
    quantization: Annotated[str | None, typer.Option(help="With --config: format of the weights, such as mxfp4.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class SearchArguments:
    panel: ClassVar = "Search"

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no tables.")] = False
    limit: Annotated[
        float, typer.Option(min=1, help="Longest time that a candidate may take to compile, in seconds.")
    ] = 120
    workers: Annotated[int, typer.Option(min=1, help="Candidates compiled at a time, each in its own process.")] = 2


@grouped
def tune(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kernel to tune, such as decode_attention; by default all but those of several devices.",
            show_default=False,
        ),
    ] = None,
    *,
    target: Annotated[list[str], typer.Option(help="A TPU slice such as v5e-1; repeatable.")],
    case: Annotated[
        list[str] | None, typer.Option(help="A case of benchmarks/kernels.py, by name; repeatable. By default all.")
    ] = None,
    programs: ProgramArguments,
    buckets: BucketArguments,
    search: SearchArguments,
    json: Json = False,
) -> None:
    """Search block sizes of the TPU kernels, by the TPU compiler's listings, and write those that beat the rule.

    Needs no TPU. Sizes that gain more than 2 % of the modelled time over the kernel's rule come into the table of the
    target's generation, from which the kernel takes them for exactly these shapes. Exits with 1 if a case cannot be
    compiled.
    """
    if programs.config is None and any([programs.parallel, programs.quantization, *vars(buckets).values()]):
        fail("--parallel, --quantization and buckets say what a --config is deployed as: give that too")
    if programs.config is not None and case:
        fail("give either cases by name, with --case, or a --config, whose programs say which")
    from inferlib.tuning.kernel_cases import check_devices
    from inferlib.tuning.tune import compiler_of, tune, update

    results = []
    with user_errors():
        targets = _targets(target)
        folder = _tables(search.dry_run)
        named = {} if programs.config is not None else _named(kernels, case)
        check_devices(named, targets)
        for one in targets:
            cases, unknown = _needed(one, programs, buckets, kernels) if programs.config is not None else (named, [])
            with _shown(one, sum(map(len, cases.values()))) as steps:
                tuned, failed = tune(one, cases, limit=search.limit, workers=search.workers, **steps)
            file = folder / f"{one.chip.name}.json"
            written = not search.dry_run and update(file, tuned, compiler_of(one))
            results.append((one, tuned, [*unknown, *failed], file if written else None))
    if json:
        write(json_line({one.name: _facts(tuned, failed) for one, tuned, failed, _ in results}).decode())
    else:
        for one, tuned, failed, file in results:
            write(_render(one, tuned, failed))
            message = f"wrote {file}" if file else "no table was changed"
            Console(stderr=True, force_jupyter=False).print(message, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(failed for _, _, failed, _ in results) else 0)


def _targets(names: list[str]) -> list[Target]:
    from inferlib.targets import parse_target

    targets = [parse_target(name) for name in names]
    if others := [str(one) for one in targets if one.platform != "tpu"]:
        raise ValueError(f"kernels are tuned for TPUs, not for {', '.join(others)}")
    if twice := [name for name, count in Counter(one.chip.name for one in targets).items() if count > 1]:
        raise ValueError(f"{twice[0]} is named twice, and there is one table for it")
    return targets


def _tables(dry_run: bool) -> Path:
    """The folder of the tables. Raises ValueError if it cannot be written."""
    from inferlib.pallas_kernels.tuned_tpu import FOLDER

    if not dry_run and not os.access(FOLDER if FOLDER.exists() else FOLDER.parent, os.W_OK):
        raise ValueError(f"{FOLDER} cannot be written: add --dry-run, or use an installation of your own")
    return FOLDER


def _needed(
    target: Target, programs: ProgramArguments, buckets: BucketArguments, kernels: list[str] | None
) -> tuple[dict[str, dict[str, Case]], list[Failed]]:
    """The cases of a deployment's programs, and shapes that no case can express."""
    from inferlib.deploy.source import shape_source
    from inferlib.tuning.tune import needed

    deployment = deployment_of(
        shape_source(programs.config or ""),
        target.name,
        buckets,
        parallel=programs.parallel,
        quantization=programs.quantization,
        modes=("greedy",),
    )
    cases, unknown = needed(deployment)
    return _of_kernels(kernels, cases), [one for one in unknown if one.kernel in (kernels or cases)]


def _named(kernels: list[str] | None, names: list[str] | None) -> dict[str, dict[str, Case]]:
    from inferlib.tuning.kernel_cases import CASES, RINGS, chosen_cases

    known = {**CASES, **RINGS}
    chosen = chosen_cases(kernels or list(known if names else CASES), names or None, known)
    return {kernel: {name: known[kernel][name] for name in names} for kernel, names in chosen.items()}


def _of_kernels(kernels: list[str] | None, cases: Mapping[str, Any]) -> dict[str, dict[str, Case]]:
    if unknown := [kernel for kernel in kernels or () if kernel not in cases]:
        raise ValueError(f"its programs do not use kernels {unknown}; they use {', '.join(cases)}")
    return {kernel: cases[kernel] for kernel in kernels or cases}


@contextmanager
def _shown(target: Target, total: int) -> Iterator[dict[str, Any]]:
    """Show, on a terminal's standard error, how many cases are done and what is being compiled."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[dim]{task.description}", markup=True)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(str(target), total=total)
        yield {
            "told": lambda text: progress.update(task, description=f"{target}: {text}"),
            "done": lambda cases: progress.advance(task, cases),
        }


def _facts(tuned: list[Result], failed: list[Failed]) -> dict[str, Any]:
    return {
        "found": [asdict(one) | {"kept": one.pays} for one in tuned],
        "failed": [asdict(one) for one in failed],
    }


def _render(target: Target, tuned: list[Result], failed: list[Failed]) -> str:
    from inferlib.tuning.tune import sizes_text

    text, terminal = io.StringIO(), sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 140)
    table = Table(box=SIMPLE_HEAD, title=f"{target}: modelled times, with waits for copies", title_justify="left")
    for title in ("kernel", "cases", "rule", "best"):
        table.add_column(title)
    for title in ("floor", "rule", "best", "gain", "tried", "refused"):
        table.add_column(title, justify="right")
    for one in tuned:
        changed = {name: size for name, size in one.best.items() if size != one.rule[name]}
        table.add_row(
            one.kernel,
            "\n".join(one.cases),
            sizes_text(one.rule, "\n"),
            sizes_text(changed, "\n") or "as it is",
            *(f"{1e6 * seconds:.1f} us" for seconds in (one.floor_seconds, one.rule_seconds, one.seconds)),
            f"[bold]{one.gain:.1%}[/]" if one.pays else f"{one.gain:.1%}",
            str(one.tried),
            str(len(one.refused)),
        )
    console.print(table, highlight=False)
    for one in tuned:
        for refused in one.refused:
            _tell(console, f"{one.kernel}, {one.cases[0]}: {sizes_text(refused.blocks)}", refused.reason)
    for one in failed:
        _tell(console, f"{one.kernel}, {one.case}, not tuned", one.reason)
    return text.getvalue()


def _tell(console: Console, what: str, why: str) -> None:
    console.print(f"{what}: {why.splitlines()[0][:200]}", style="dim", markup=False, highlight=False, soft_wrap=True)
