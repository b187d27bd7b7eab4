"""`inferlib doctor`: check the installation and the device, and write a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from inferlib.cli.arguments import Json
from inferlib.cli.output import json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.doctor.findings import Finding


def doctor(
    *,
    only: Annotated[
        str, typer.Option(help="What to look at: installation, rate, kernel, step, with commas between them.")
    ] = "installation,rate,kernel,step",
    case: Annotated[
        str | None, typer.Option(help="Only kernels whose name or case has this text, such as mxfp4.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the report to this name with .json and with .txt behind it.")] = Path(
        "inferlib-doctor"
    ),
    json: Json = False,
) -> None:
    """Check what is installed, the device's rates, every kernel against its XLA form, and step times.

    Runs on the first device: minutes on a TPU, a GPU or Trainium; on a CPU a few kernels are interpreted.
    The report holds no paths, host names or user names: send it with an issue. Exits with 1 if anything is wrong.
    """
    from inferlib.doctor.examine import examine
    from inferlib.option_checks import checked_output

    console = Console(stderr=True, force_jupyter=False)
    with user_errors():
        checked_output("--out", out)
        with console.status("starting") as status:

            def started(name: str) -> None:
                status.update(name)

            def done(finding: Finding) -> None:
                if not console.is_terminal:
                    typer.echo(f"{finding.area}: {finding.name}: {finding.status}", err=True)

            report = examine(only.split(","), cases=case, started=started, done=done)
        files = report.write(out)
    write(json_line(report.facts()).decode() if json else report.text(terminal=sys.stdout.isatty()))
    names = " and ".join(str(file) for file in files)
    console.print(f"the report is in {names}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.ok else 1)
