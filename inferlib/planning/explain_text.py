"""What `inferlib.planning.explain` tells, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table

from inferlib.planning.explain import Explanation, Step


def tables(e: Explanation) -> Iterator[Table | str]:
    yield _placements(e)
    yield from _waste(e.waste)
    for step in e.steps:
        yield _collectives(step)
        yield from _experts(step)


def _placements(e: Explanation) -> Table:
    shards = e.shards
    mesh = "a device"
    if shards.mesh is not None:
        sizes = (f"{axis} {size}" for axis, size in shards.mesh.shape.items() if size > 1)
        mesh = f"{' x '.join(sizes)}, rules {shards.rules.name}"
    table = Table(box=SIMPLE_HEAD, title=f"Arrays on {mesh}", title_justify="left", show_footer=True)
    everything = (*e.weights, *e.cache, *e.state)
    table.add_column("array", footer="all", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("dimensions")
    table.add_column("shape", justify="right")
    table.add_column("on a device", justify="right")
    table.add_column("bytes", justify="right", footer=decimal(sum(p.nbytes for p in everything)), no_wrap=True)
    for title, placements in (("weights", e.weights), ("cache", e.cache), ("rows", e.state)):
        table.add_row(f"[bold]{title}", *[""] * 4, f"[bold]{decimal(sum(p.nbytes for p in placements))}")
        for p in placements:
            dimensions = [
                (name or "-") + (f"/{axis}" if axis else "") for name, axis in zip(p.axes, p.mesh_axes, strict=True)
            ]
            shapes = (" x ".join(map(str, s)) for s in (p.shape, p.local_shape))
            table.add_row(f"  {p.name}", str(p.count), ", ".join(dimensions), *shapes, decimal(p.nbytes))
        table.add_section()
    return table


def _waste(waste: dict[str, float]) -> list[str]:
    parts = [f"{share:.1%} of {what}" for what, share in waste.items() if share]
    return [f"Padding and copies: {', '.join(parts)}"] if parts else []


def _experts(step: Step) -> list[str]:
    return [f"Reads {decimal(step.expert_bytes)} of experts, expected"] if step.expert_bytes else []


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
