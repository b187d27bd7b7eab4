"""Options of the commands that train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Fields of `TrainingSettings`."""

    panel: ClassVar = "Training"

    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 2400
    batch: Annotated[int, typer.Option(help="Rows of a step, over all devices.")] = 32
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512
    lr: Annotated[float, typer.Option(help="Highest learning rate; a cosine follows its warm-up.")] = 1e-4
    warmup: Annotated[int, typer.Option(help="Steps until it is reached.")] = 100
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient.")] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of the rows' order.")] = 0
    devices: Annotated[int | None, typer.Option(help="Number of devices that share each batch; by default all.")] = None
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 1000
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 20
