"""`inferlib eval`: how good a model is on a text, alone and against another."""

from __future__ import annotations

from typing import Annotated

import typer

from inferlib.cli.arguments import DtypeArguments, Json, ModelName, Revision, TextArguments, grouped
from inferlib.cli.output import json_line, user_errors, write


@grouped
def evaluate(
    model: ModelName,
    *,
    text: TextArguments,
    against: Annotated[
        str | None, typer.Option(help="Another model, such as the original, to measure the difference from.")
    ] = None,
    formats: DtypeArguments,
    revision: Revision = None,
    json: Json = False,
) -> None:
    """Measure a model on a text: perplexity, and with --against the KL divergence from another model and how often both
    find the same token most likely, with 95 % confidence intervals."""
    from inferlib.evaluation.evaluate import evaluate
    from inferlib.texts import TextSample

    with user_errors():
        result = evaluate(
            model,
            TextSample(text.data, text.tokens, text.window),
            against=against,
            quantization=formats.quantization,
            kv_cache_dtype=formats.kv_cache_dtype,
            dtype=formats.dtype,
            revision=revision,
        )
    write(json_line(result.to_json()).decode() if json else result.text())
