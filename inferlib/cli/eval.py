"""`inferlib eval`: how good a model is on a text and in small tasks, alone and against another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from inferlib.cli.arguments import AttentionPages, CachePolicy, DtypeArguments, Json, ModelName, Revision, grouped
from inferlib.cli.output import fail, json_line, user_errors, write


@dataclass(frozen=True, kw_only=True)
class MeasureArguments:
    panel: ClassVar = "What to measure"

    data: Annotated[
        Path | None, typer.Option(help='Text to measure on, JSONL: lines are "..." or {"text": "..."}.')
    ] = None
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text to use, spread evenly.")] = 16384
    window: Annotated[int, typer.Option(min=2, help="Tokens of a sequence; at most the model's context.")] = 512
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks, with commas between them, or all: copying, arithmetic, capitals, labels, retrieval, needle, "
            "needles, turns."
        ),
    ] = None
    questions: Annotated[int, typer.Option(min=2, help="Questions of a task.")] = 24
    context: Annotated[int, typer.Option(min=128, help="Tokens of the tasks' long prompts.")] = 512


@grouped
def evaluate(
    model: ModelName,
    *,
    measure: MeasureArguments,
    against: Annotated[
        str | None, typer.Option(help="Another model, such as the original, to measure the difference from.")
    ] = None,
    formats: DtypeArguments,
    attention_pages: AttentionPages = None,
    cache_policy: CachePolicy = None,
    revision: Revision = None,
    json: Json = False,
) -> None:
    """Measure a model on a text: perplexity, and with --against the KL divergence from another model and how often both
    find the same token most likely. Or in small tasks: how many questions it answers. With 95 % confidence intervals.
    """
    from inferlib.evaluation.evaluate import evaluate
    from inferlib.evaluation.score_tasks import evaluate_tasks
    from inferlib.evaluation.tasks import TASKS
    from inferlib.texts import TextSample

    if measure.data is None and measure.tasks is None:
        fail("give --data, a text to measure on, or --tasks, such as --tasks all")
    if attention_pages is not None and measure.data is not None:
        fail("--attention-pages changes what decode steps read, and a text takes none: leave it or --data out")
    if cache_policy is not None and measure.data is not None:
        fail("--cache-policy changes what tasks find again, and a text asks nothing: leave it or --data out")
    options: dict[str, Any] = dict(
        against=against,
        quantization=formats.quantization,
        kv_cache_dtype=formats.kv_cache_dtype,
        dtype=formats.dtype,
        revision=revision,
    )
    results: dict[str, Any] = {}
    with user_errors():
        if measure.tasks is not None:
            names = tuple(TASKS) if measure.tasks == "all" else tuple(measure.tasks.split(","))
            reads: dict[str, Any] = dict(attention_pages=attention_pages, cache_policy=cache_policy)
            sizes: dict[str, Any] = dict(count=measure.questions, context=measure.context)
            results["tasks"] = evaluate_tasks(model, names, **reads, **sizes, **options)
        if measure.data is not None:
            sample = TextSample(measure.data, measure.tokens, measure.window)
            results["text"] = evaluate(model, sample, **options)
    if json:
        facts = {name: result.to_json() for name, result in results.items()}
        write(json_line(facts if len(facts) > 1 else facts.popitem()[1]).decode())
        return
    for result in results.values():
        write(result.text())
