"""`inferlib info`: describe a model and the memory it takes, from its configuration and file headers."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from inferlib.cli.arguments import (
    AdapterParts,
    AttentionPages,
    CachePolicy,
    FormatArguments,
    Json,
    MaxAdapterRank,
    MaxAdapters,
    ShapeArguments,
    Speculation,
    grouped,
)
from inferlib.cli.output import json_line, user_errors, write


@dataclass(frozen=True, kw_only=True)
class BesideArguments:
    """What takes memory beside the model."""

    speculation: Speculation = None
    attention_pages: AttentionPages = None
    cache_policy: CachePolicy = None
    max_adapters: MaxAdapters = None
    max_adapter_rank: MaxAdapterRank = None
    adapter_parts: AdapterParts = None


@grouped
def info(
    *,
    shape: ShapeArguments,
    max_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence in the cache; by default the context, at most 2048."),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(help="Also show what each device of this mesh stores and exchanges, such as tp=4,dp=2."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="With --parallel: sequences decoded together.")] = 8,
    cache_memory: Annotated[
        str | None, typer.Option(help="Also say how many tokens a cache of this size holds, such as 16GiB.")
    ] = None,
    formats: FormatArguments,
    beside: BesideArguments,
    json: Json = False,
) -> None:
    """Show a model's recipe, its parameters and the bytes of weights and cache.

    Loads no weights and needs no devices.
    """
    shape.check()
    from inferlib.deploy.explain import explain

    with user_errors():
        result = explain(
            shape.source(),
            parallel,
            max_batch=max_batch,
            max_len=max_len,
            quantization=formats.quantization,
            kv_cache_dtype=formats.kv_cache_dtype,
            cache_memory=cache_memory,
            **asdict(beside),
        )
    write(json_line(result.facts()).decode() if json else result.text(terminal=sys.stdout.isatty()))
