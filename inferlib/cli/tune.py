"""`inferlib tune`: block sizes of the TPU kernels, searched for without a TPU."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inferlib.cli.compile import deployment_of
from inferlib.cli.info import described, quantization_of
from inferlib.cli.output import fail, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.targets import Target
    from inferlib.tuning.kernel_cases import Case
    from inferlib.tuning.tune import Failed, Found


def tune(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            help="Such as decode_attention; by default all but those of several devices.", show_default=False
        ),
    ] = None,
    *,
    target: Annotated[list[str], typer.Option(help="A TPU slice such as v5e-1; repeat it for others.")],
    case: Annotated[
        list[str] | None, typer.Option(help="One of benchmarks/kernels.py, by name; repeat it. By default all.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Instead, what the programs of this shape need on the whole slice, by its name.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="With --config: devices to split over; by default all on tp.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="With --config: of the weights, such as mxfp4.")] = None,
    prefill_buckets: Annotated[str | None, typer.Option(help="With --config: as of inferlib compile.")] = None,
    batch_buckets: Annotated[str | None, typer.Option(help="With --config: as of inferlib compile.")] = None,
    cache_buckets: Annotated[str | None, typer.Option(help="With --config: as of inferlib compile.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no tables.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Most seconds that a candidate may take to compile.")] = 120,
    workers: Annotated[int, typer.Option(min=1, help="Candidates compiled at a time, each in its own process.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search block sizes of the TPU kernels, by the TPU compiler's listings, and write those that beat the rule.

    Needs no TPU. Sizes that gain more than 2 % of the modelled time over the kernel's rule come into the table of the
    target's generation, from which the kernel takes them for exactly these shapes. Exits with 1 if a case cannot be
    compiled.
    """
    buckets = dict(prefill=prefill_buckets, batch=batch_buckets, cache=cache_buckets)
    if config is None and any([parallel, quantization, *buckets.values()]):
        fail("--parallel, --quantization and buckets say what a --config is deployed as: give that too")
    if config is not None and case:
        fail("give either cases by name, with --case, or a --config, whose programs say which")
    from inferlib.pallas_kernels.tuned_tpu import FOLDER
    from inferlib.targets import parse_target
    from inferlib.tuning.kernel_cases import check_devices
    from inferlib.tuning.tune import compiler_of, needed, tune, update

    results, complete = [], True
    with user_errors():
        targets = [parse_target(name) for name in target]
        if others := [str(one) for one in targets if one.platform != "tpu"]:
            raise ValueError(f"kernels are tuned for TPUs, not for {', '.join(others)}")
        if twice := [name for name, count in Counter(one.chip.name for one in targets).items() if count > 1]:
            raise ValueError(f"{twice[0]} is named twice, and there is one table for it")
        if not dry_run and not os.access(FOLDER if FOLDER.exists() else FOLDER.parent, os.W_OK):
            raise ValueError(f"{FOLDER} cannot be written: add --dry-run, or use an installation of your own")
        named = {} if config is not None else _named(kernels, case)
        check_devices(named, targets)
        hf = None if config is None else described(None, config)[0]
        stored = quantization_of(None, quantization)
        for one in targets:
            cases, unknown = named, []
            if hf is not None:
                options = dict(target=one.name, parallel=parallel, dtype=None, quantization=stored, kv_cache_dtype=None)
                cases, unknown = needed(deployment_of(hf, **options, buckets=buckets, modes=("greedy",)))
                cases, unknown = _of_kernels(kernels, cases), [x for x in unknown if x.kernel in (kernels or cases)]
            with _shown(one, sum(map(len, cases.values()))) as steps:
                found, failed = tune(one, cases, limit=limit, workers=workers, **steps)
            failed = [*unknown, *failed]
            file = FOLDER / f"{one.chip.name}.json"
            written = not dry_run and update(file, found, compiler_of(one))
            results.append((one, found, failed, file if written else None))
            complete &= not failed
    if json:
        write(json_line({one.name: _facts(found, failed) for one, found, failed, _ in results}).decode())
    else:
        for one, found, failed, file in results:
            write(_render(one, found, failed))
            told = f"wrote {file}" if file else "no table was changed"
            Console(stderr=True, force_jupyter=False).print(told, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if complete else 1)


def _named(kernels: list[str] | None, names: list[str] | None) -> dict[str, dict[str, Case]]:
    from inferlib.tuning.kernel_cases import CASES, RINGS, chosen_cases

    known = {**CASES, **RINGS}
    chosen = chosen_cases(kernels or list(known if names else CASES), names or None, known)
    return {kernel: {name: known[kernel][name] for name in some} for kernel, some in chosen.items()}


def _of_kernels(kernels: list[str] | None, cases: Mapping[str, Any]) -> dict[str, dict[str, Case]]:
    if unknown := [kernel for kernel in kernels or () if kernel not in cases]:
        raise ValueError(f"its programs do not use kernels {unknown}; they use {', '.join(cases)}")
    return {kernel: cases[kernel] for kernel in kernels or cases}


@contextmanager
def _shown(target: Target, total: int) -> Iterator[dict[str, Any]]:
    """A bar of the cases whose search has ended, and what is compiled, on a terminal's standard error."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[dim]{task.description}", markup=True)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(str(target), total=total)
        yield {
            "told": lambda text: progress.update(task, description=f"{target}: {text}"),
            "done": lambda cases: progress.advance(task, cases),
        }


def _facts(found: list[Found], failed: list[Failed]) -> dict[str, Any]:
    return {
        "found": [asdict(one) | {"kept": one.kept} for one in found],
        "failed": [asdict(one) for one in failed],
    }


def _render(target: Target, found: list[Found], failed: list[Failed]) -> str:
    from inferlib.tuning.tune import sizes_text

    text, terminal = io.StringIO(), sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 140)
    table = Table(box=SIMPLE_HEAD, title=f"{target}: modelled times, with waits for copies", title_justify="left")
    for title in ("kernel", "cases", "rule", "best"):
        table.add_column(title)
    for title in ("floor", "rule", "best", "gain", "tried", "refused"):
        table.add_column(title, justify="right")
    for one in found:
        changed = {name: size for name, size in one.best.items() if size != one.rule[name]}
        table.add_row(
            one.kernel,
            "\n".join(one.cases),
            sizes_text(one.rule, "\n"),
            sizes_text(changed, "\n") or "as it is",
            *(f"{1e6 * seconds:.1f} us" for seconds in (one.floor_seconds, one.rule_seconds, one.seconds)),
            f"[bold]{one.gain:.1%}[/]" if one.kept else f"{one.gain:.1%}",
            str(one.tried),
            str(len(one.refused)),
        )
    console.print(table, highlight=False)
    for one in found:
        for refused in one.refused:
            _tell(console, f"{one.kernel}, {one.cases[0]}: {sizes_text(refused.blocks)}", refused.reason)
    for one in failed:
        _tell(console, f"{one.kernel}, {one.case}, not tuned", one.reason)
    return text.getvalue()


def _tell(console: Console, what: str, why: str) -> None:
    console.print(f"{what}: {why.splitlines()[0][:200]}", style="dim", markup=False, highlight=False, soft_wrap=True)
