"""`inferlib layer-preferences`: measure which layers need much of a cache of `--cache-policy cake:2048`."""

from __future__ import annotations

from typing import Annotated

import typer

from inferlib.cli.arguments import Revision, TextArguments, grouped
from inferlib.cli.output import user_errors, write


@grouped
def layer_preferences(
    model: Annotated[str, typer.Argument(help="Hugging Face directory or name of the hub.", show_default=False)],
    *,
    text: TextArguments,
    tau1: Annotated[
        float, typer.Option(help="Of how far attention is spread: the larger, the less it counts.", min=0.2, max=100)
    ] = 1.0,
    tau2: Annotated[
        float, typer.Option(help="Of how much attention changes: the larger, the less it counts.", min=0.2, max=100)
    ] = 1.0,
    revision: Revision = None,
) -> None:
    """Measure on a text which layers need much of a bounded cache, and write it beside the model.

    Other commands read it there for --cache-policy cake:2048.
    """
    from inferlib.calibration.layer_preferences import measure_layer_preferences
    from inferlib.texts import TextSample

    with user_errors():
        sample = TextSample(text.data, text.tokens, text.window)
        file = measure_layer_preferences(model, data=sample, tau1=tau1, tau2=tau2, revision=revision)
        write(f"{file}\n")
