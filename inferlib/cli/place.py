"""`inferlib place`: from the tokens that experts got to where experts should lie."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inferlib.cli.output import fail, user_errors


def place(
    load: Annotated[Path, typer.Argument(help="The load that generate --expert-load wrote.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="File to write; for --expert-placement.", show_default=False)],
    *,
    devices: Annotated[int, typer.Option(min=1, help="Devices of the expert axis.")],
    slots: Annotated[
        int | None,
        typer.Option(help="Of a layer, a multiple of the devices; those beyond the experts hold copies of hot ones."),
    ] = None,
) -> None:
    """Place a model's experts so that devices get equally many tokens."""
    from inferlib.placement import balanced, imbalance, read_load

    with user_errors():
        counts = read_load(load)
        placement = balanced(counts, devices, slots)
        if out.exists():
            fail(f"{out} exists; remove it or give another file")
        placement.write(out)
    worst = imbalance(counts, placement, devices).max()
    each = f"{placement.slots} slots in each of {len(counts)} layers"
    told = f"{out}: {each}, the busiest device at {worst:.2f} of the mean"
    Console(stderr=True).print(told, highlight=False, soft_wrap=True)
