"""`inferlib finetune`: train the weights of a quantised model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inferlib.cli.arguments import grouped
from inferlib.cli.output import user_errors
from inferlib.cli.training import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(TrainingArguments):
    """Fields of `FinetuneSettings`."""

    samples: Annotated[
        int,
        typer.Option(
            help="Rows that the teacher writes itself, to learn from beside the texts; as many as the texts have help."
        ),
    ] = 0


@grouped
def finetune(
    model: Annotated[str, typer.Argument(help="Directory that inferlib quantize wrote.", show_default=False)],
    out: Annotated[
        Path,
        typer.Argument(
            help="Directory to write; if it has a run with the same options, that goes on.", show_default=False
        ),
    ],
    *,
    data: Annotated[
        Path,
        typer.Option(help='JSON lines with a "text" each, and maybe "split": "held_out".', show_default=False),
    ],
    teacher: Annotated[
        str | None, typer.Option(help="The original, which the model learns from; by default it learns the texts.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16, of products; by default float32 on CPU, else bfloat16.")
    ] = None,
    training: FinetuneArguments,
) -> None:
    """Train a quantised model's weights with their rounding, so that what it lost comes back."""
    with user_errors():
        from inferlib.distillation.settings import FinetuneSettings
        from inferlib.finetuning.finetune import finetune as train
        from inferlib.progress import on_terminal

        settings = FinetuneSettings(**vars(training))
        result = train(model, data, out, settings, teacher=teacher, dtype=dtype, progress=on_terminal())
    what = (
        "cross entropy with held-out texts" if teacher is None else "KL divergence from the teacher on held-out texts"
    )
    text = f"{out}: {what} {result.before:.4f} -> {result.after:.4f}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
