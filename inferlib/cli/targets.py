"""`inferlib targets`: the chips that programs can be planned and compiled for."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inferlib.cli.output import json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.targets import Chip


def targets(
    name: Annotated[
        str | None,
        typer.Argument(help="One target, such as v5e-8, v5p:4x4x4 or cuda:h200-4.", show_default=False),
    ] = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the chips that can be planned and compiled for, their published figures and the sizes they come in."""
    from inferlib.targets import CHIPS, parse_target, target_names

    if name is not None:
        with user_errors():
            target = parse_target(name)
        facts = {"name": target.name, "devices": target.devices, "topology": target.topology}
        facts |= {"accelerator_type": target.accelerator_type, "chip": vars(target.chip)}
        chips = [target.chip]
    else:
        chips = list(CHIPS.values())
        facts = {"chips": [vars(chip) | {"targets": target_names(chip.name)} for chip in chips]}
    if json:
        write(json_line(facts).decode())
        return
    text = io.StringIO()
    terminal = sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 160)
    console.print(_table(chips), highlight=False)
    if name is not None:
        dims = " x ".join(map(str, target.topology))
        console.print(f"{target}: {dims} chips, {target.devices} devices {target.accelerator_type}", highlight=False)
    else:
        for chip in chips:
            console.print(f"[bold]{chip.name}[/] {' '.join(target_names(chip.name))}", highlight=False)
    for chip in chips:
        console.print(f"[dim]{chip.name}: {chip.source}[/]", highlight=False, soft_wrap=True)
    write(text.getvalue())


def _table(chips: list[Chip]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for title in ("chip", "devices", "HBM", "GB/s", "on-chip", "TFLOP/s (dense)", "links x GB/s", "network"):
        table.add_column(title, justify="left" if title in ("chip", "TFLOP/s (dense)", "network") else "right")
    for chip in chips:
        rates = ", ".join(f"{dtype} {rate / 1e12:,.0f}" for dtype, rate in chip.flops.items())
        network = "switch" if chip.links else "-"
        if chip.torus:
            network = f"{chip.torus}-D torus, rings from {chip.ring}"
        table.add_row(
            chip.name,
            str(chip.devices),
            f"{chip.hbm_bytes / 1024**3:.1f} GiB" if chip.hbm_bytes else "-",
            f"{chip.hbm_bandwidth / 1e9:,.0f}" if chip.hbm_bandwidth else "-",
            f"{chip.vmem_bytes // 1024**2} MiB" if chip.vmem_bytes else "-",
            rates or "-",
            f"{chip.links} x {chip.link_bandwidth / 1e9:.0f}" if chip.links else "-",
            network,
        )
    return table
