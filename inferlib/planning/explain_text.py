"""Tables for a terminal: the placement of arrays on a mesh, and the collectives of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table

from inferlib.planning.collectives import Placement, Step
from inferlib.sharding.shards import Shards

_TITLES = {"state": "rows"}


def placements(shards: Shards, arrays: Mapping[str, Sequence[Placement]]) -> Table:
    """A table of the arrays on each device, in groups."""
    mesh = "a device"
    if shards.mesh is not None and shards.rules is not None:
        sizes = (f"{axis} {size}" for axis, size in shards.mesh.shape.items() if size > 1)
        mesh = f"{' x '.join(sizes)}, rules {shards.rules.name}"
    table = Table(box=SIMPLE_HEAD, title=f"Arrays on {mesh}", title_justify="left", show_footer=True)
    total = sum(p.nbytes for group in arrays.values() for p in group)
    table.add_column("array", footer="all", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("dimensions")
    table.add_column("shape", justify="right")
    table.add_column("on a device", justify="right")
    table.add_column("bytes", justify="right", footer=decimal(total), no_wrap=True)
    for name, group in arrays.items():
        title = f"[bold]{_TITLES.get(name, name)}"
        table.add_row(title, *[""] * 4, f"[bold]{decimal(sum(p.nbytes for p in group))}")
        for p in group:
            dimensions = [
                (name or "-") + (f"/{axis}" if axis else "") for name, axis in zip(p.axes, p.mesh_axes, strict=True)
            ]
            shapes = (" x ".join(map(str, s)) for s in (p.shape, p.local_shape))
            table.add_row(f"  {p.name}", str(p.count), ", ".join(dimensions), *shapes, decimal(p.nbytes))
        table.add_section()
    return table


def waste(shares: Mapping[str, float]) -> Iterator[str]:
    """A line about padding and copies, if there are any."""
    parts = [f"{share:.1%} of {what}" for what, share in shares.items() if share]
    if parts:
        yield f"Padding and copies: {', '.join(parts)}"


def steps(steps: Sequence[Step]) -> Iterator[Table | str]:
    """The collectives of each step, and the bytes of experts that it reads."""
    for step in steps:
        yield _collectives(step)
        if step.expert_bytes:
            yield f"Reads {decimal(step.expert_bytes)} of experts, expected"


def _collectives(step: Step) -> Table | str:
    if not step.collectives:
        return f"A step of {step.key} takes no collectives"
    table = Table(box=SIMPLE_HEAD, title=f"A step of {step.key}", title_justify="left", show_footer=True)
    table.add_column("collective", footer="all", no_wrap=True)
    table.add_column("over")
    table.add_column("for", footer=f"{decimal(step.nbytes // step.tokens)} per token")
    table.add_column("count", justify="right", footer=str(sum(c.count for c in step.collectives)))
    table.add_column("bytes of one", justify="right")
    table.add_column("bytes", justify="right", footer=decimal(step.nbytes))
    for c in step.collectives:
        table.add_row(c.kind, c.axis, c.purpose, str(c.count), decimal(c.nbytes), decimal(c.count * c.nbytes))
    return table
