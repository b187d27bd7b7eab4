"""`inferlib calibrate-cache`: measure what a cache of `--kv-cache-dtype int4_calibrated` turns keys by."""

from __future__ import annotations

from typing import Annotated

import typer

from inferlib.cli.arguments import Revision, TextArguments, grouped
from inferlib.cli.output import user_errors, write


@grouped
def calibrate_cache(
    model: Annotated[str, typer.Argument(help="Hugging Face directory or name of the hub.", show_default=False)],
    *,
    text: TextArguments,
    revision: Revision = None,
) -> None:
    """Measure on a text how a model's keys and queries vary, and write beside the model what makes keys easy to round.

    Other commands read it there for --kv-cache-dtype int4_calibrated.
    """
    from inferlib.calibration.key_turns import calibrate_cache
    from inferlib.texts import TextSample

    with user_errors():
        sample = TextSample(text.data, text.tokens, text.window)
        write(f"{calibrate_cache(model, data=sample, revision=revision)}\n")
