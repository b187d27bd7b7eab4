"""`inferlib distill`: train what drafts a model's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from inferlib.cli.arguments import Revision, grouped
from inferlib.cli.output import fail, user_errors
from inferlib.cli.training import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class DistillArguments(TrainingArguments):
    """Fields of `DistillSettings`."""

    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 6000
    batch: Annotated[int, typer.Option(help="Rows of a step, over all devices.")] = 16
    lr: Annotated[float, typer.Option(help="Highest learning rate; a cosine follows its warm-up.")] = 3e-4
    warmup: Annotated[int, typer.Option(help="Steps until it is reached.")] = 200
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Tokens that can be drafted, the most frequent ones of the texts; by default up to 8192."),
    ] = None
    unroll: Annotated[int, typer.Option(help="Drafts in a row that the head is trained on.")] = 5
    decay: Annotated[float, typer.Option(help="Weight of each of them, relative to the one before.")] = 0.8
    continuations: Annotated[
        int,
        typer.Option(
            help="Number of texts that the model itself continues first, greedily; half of each batch is of these. "
            "They are what the head will draft."
        ),
    ] = 0
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the rows' order.")] = 0


@grouped
def distill(
    method: Annotated[str, typer.Argument(help="What to train: eagle3, an EAGLE-3 head.", show_default=False)],
    *,
    model: Annotated[
        str, typer.Option(help="Hugging Face directory, .gguf file, known name or name of the hub.", show_default=False)
    ],
    data: Annotated[
        Path,
        typer.Option(
            help='JSON lines with a "text" each, and maybe "split": "held_out"; or with "messages", which the model '
            "answers first.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Directory of the head; if it has a run with the same options, that goes on.", show_default=False
        ),
    ],
    revision: Revision = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; by default float32 on CPU, else bfloat16.")
    ] = None,
    training: DistillArguments,
) -> None:
    """Train a head that drafts a model's tokens, on texts, and measure it on those that are held out."""
    if method != "eagle3":
        fail(f"distill trains eagle3, got {method[:100]!r}")
    with user_errors():
        from inferlib.distillation.eagle3 import distill_eagle3
        from inferlib.distillation.settings import DistillSettings
        from inferlib.progress import on_terminal

        settings = DistillSettings(**vars(training))
        options: dict[str, Any] = dict(dtype=dtype, revision=revision, progress=on_terminal())
        result = distill_eagle3(model, data, out, settings, **options)
    tokens = (
        f"{result.tokens:.2f} tokens a verification with chains of 4 drafts, {result.acceptance:.0%} of drafts stand"
    )
    text = f"{out}: {tokens}; greedy, on texts that were held out"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
