"""`inferlib place`: choose a device for each expert, from how many tokens each expert got."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inferlib.cli.output import fail, user_errors


def place(
    load: Annotated[Path, typer.Argument(help="File that generate --expert-load wrote.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="File to write, for --expert-placement.", show_default=False)],
    *,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices on the expert axis.")],
    slots: Annotated[
        int | None,
        typer.Option(
            help="Slots of a layer, a multiple of the devices; slots beyond the experts get copies of busy experts."
        ),
    ] = None,
) -> None:
    """Place a model's experts so that all devices get about as many tokens."""
    from inferlib.placement import balanced, imbalance, read_load

    with user_errors():
        counts = read_load(load)
        placement = balanced(counts, devices, slots)
        if out.exists():
            fail(f"{out} exists; remove it or give another file")
        placement.write(out)
    worst = imbalance(counts, placement, devices).max()
    each = f"{placement.slots} slots in each of {len(counts)} layers"
    text = f"{out}: {each}, the busiest device at {worst:.2f} of the mean"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
