"""`inferlib key-bases`: measure the directions of a model's keys, by which `--attention-pages loki:64` selects."""

from __future__ import annotations

from typing import Annotated

import typer

from inferlib.cli.arguments import Revision, TextArguments, grouped
from inferlib.cli.output import user_errors, write


@grouped
def key_bases(
    model: Annotated[str, typer.Argument(help="Hugging Face directory or name of the hub.", show_default=False)],
    *,
    text: TextArguments,
    revision: Revision = None,
) -> None:
    """Measure on a text in which directions a model's keys vary most, and write them beside the model.

    Other commands read them there for --attention-pages loki:64.
    """
    from inferlib.calibration.key_bases import measure_key_bases
    from inferlib.texts import TextSample

    with user_errors():
        sample = TextSample(text.data, text.tokens, text.window)
        write(f"{measure_key_bases(model, data=sample, revision=revision)}\n")
