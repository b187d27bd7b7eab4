"""`inferlib plan`: how to split a model over a target, and how fast that can be."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from inferlib.cli.arguments import CacheDtype, CachePolicy, Json, ShapeArguments, grouped
from inferlib.cli.compile_progress import CompileProgress
from inferlib.cli.output import check_output_file, json_line, user_errors, write
from inferlib.cli.trace import TraceArguments, rendered, simulated


@dataclass(frozen=True, kw_only=True)
class WorkloadArguments:
    panel: ClassVar = "Workload"

    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024
    output_len: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256
    concurrency: Annotated[int, typer.Option(help="Number of requests at a time.")] = 64
    depth: Annotated[
        int | None, typer.Option(help="For a looped model: how many steps of its core a pass runs; by default all.")
    ] = None
    slo: Annotated[str, typer.Option(help="Limits in seconds that must hold, such as ttft=0.5,itl=0.02.")] = ""
    speculation: Annotated[
        str | None,
        typer.Option(
            help="Drafts that a step may verify, such as ngram:3, draft:NAME:3, eagle3:DIRECTORY:3 or mtp:3; each plan "
            "takes as many as pay."
        ),
    ] = None
    acceptance: Annotated[
        float | None, typer.Option(help="With --speculation: the share of drafts that stand, such as 0.7.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class FormatsArguments:
    panel: ClassVar = "Number formats"

    quantization: Annotated[
        str | None,
        typer.Option(
            help="Formats of the weights, with commas between them: none (bfloat16), int8, int4, fp8, fp8_block, "
            "mxfp8, mxfp4; by default as the model is shipped, or none,int8."
        ),
    ] = None
    kv_cache_dtype: CacheDtype = None
    cache_policy: CachePolicy = None


@dataclass(frozen=True, kw_only=True)
class OutputArguments:
    panel: ClassVar = "Output"

    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 8
    plot: Annotated[Path | None, typer.Option(help="Write the frontier as a picture (.png, .svg, .pdf).")] = None
    verify: Annotated[
        int,
        typer.Option(
            min=0, help="Number of meshes whose best plans are compiled with the TPU compiler and ranked again."
        ),
    ] = 0
    json: Json = False


@grouped
def plan(
    *,
    shape: ShapeArguments,
    target: Annotated[str, typer.Option(help="What to run on, such as v5e-8; see `inferlib targets`.")],
    work: WorkloadArguments,
    formats: FormatsArguments,
    output: OutputArguments,
    trace: TraceArguments,
) -> None:
    """Rank meshes, presets, weight dtypes and batch sizes for a workload, by an analytical cost model; or simulate how
    the engine would serve the requests of a file.

    Needs no devices and no weights. Times are estimates from published figures. Exits with 1 if no plan meets the
    --slo, and with --verify if a plan does not compile or does not fit.
    """
    shape.check()
    check_output_file("--plot", output.plot)
    from inferlib.deploy.plan import Workload, drafts_option
    from inferlib.deploy.plan import plan as rank
    from inferlib.planning.simulator import mean_workload

    with user_errors():
        others = {"cache-policy": formats.cache_policy, "depth": work.depth}
        trace.check(verify=output.verify, plot=output.plot, speculation=work.speculation, **others)
        source = shape.source(files=False)
        drafts = drafts_option(work.speculation, work.acceptance, source)
        offers = trace.offers() if trace.trace else None
        if offers is None:
            workload = Workload(work.input_len, work.output_len, work.concurrency, work.depth)
        else:
            workload = mean_workload(offers, work.concurrency)
        result = rank(
            source,
            target,
            workload,
            slo=work.slo,
            quantization=formats.quantization,
            kv_cache_dtype=formats.kv_cache_dtype,
            cache_policy=formats.cache_policy,
            drafts=drafts,
        )
        if offers is not None:
            facts = {"model": shape.name, "target": result.target.name} | simulated(result.ranking, offers, trace)
            write(json_line(facts).decode() if output.json else rendered(facts))
            raise typer.Exit(0 if facts["meets_slo"] else 1)
        names = result.names(output.verify) if output.verify else []
        if output.plot is not None:
            result.plot(output.plot)
    if names:
        with CompileProgress.shown(names) as progress:
            result = result.verify(output.verify, started=progress.started, done=progress.done)
    if output.json:
        write(json_line(result.facts()).decode())
    else:
        write(result.text(terminal=sys.stdout.isatty(), top=output.top))
    raise typer.Exit(0 if result.ok else 1)
