"""`inferlib compile`: compile all programs of a deployment ahead of time, for this machine or another."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer
from rich.console import Console

from inferlib.cli.arguments import (
    AttentionPages,
    Backend,
    BucketArguments,
    CachePolicy,
    DtypeArguments,
    Json,
    ShapeArguments,
    SparsePrefill,
    Speculation,
    grouped,
)
from inferlib.cli.compile_progress import CompileProgress, guessed_seconds
from inferlib.cli.output import check_output_file, fail, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.deploy.source import ModelSource
    from inferlib.programs.deployment import Deployment
    from inferlib.programs.keys import Mode


@dataclass(frozen=True, kw_only=True)
class SourceArguments(ShapeArguments):
    plan: Annotated[
        str | None,
        typer.Option(help="Instead of all that: a deployment plan that comes with inferlib, or a .yaml file."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DeploymentArguments:
    panel: ClassVar = "Deployment"

    target: Annotated[
        str | None, typer.Option(help="cpu, cuda, trn2, trn3 or a TPU slice such as v5e-8 (see inferlib targets).")
    ] = None
    parallel: Annotated[
        str | None,
        typer.Option(help="Devices to split the model over, such as tp=4,dp=2; by default all of a TPU slice on tp."),
    ] = None
    expert_placement: Annotated[
        Path | None,
        typer.Option(help="File of expert slots that inferlib place wrote; the programs run any with as many slots."),
    ] = None
    backend: Backend = "auto"
    cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the cache on each device, such as 16GiB; by default what the largest batch of the longest "
            "sequences takes."
        ),
    ] = None
    speculation: Speculation = None
    attention_pages: AttentionPages = None
    sparse_prefill: SparsePrefill = None
    cache_policy: CachePolicy = None
    modes: Annotated[str, typer.Option(help="Modes: greedy, sample, logprobs, embed.")] = "greedy,sample"

    def sampling_modes(self) -> tuple[Mode, ...]:
        """`Deployment` refuses unknown ones."""
        return cast("tuple[Mode, ...]", tuple(self.modes.split(",")))


@dataclass(frozen=True, kw_only=True)
class OutputArguments:
    panel: ClassVar = "Output"

    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the programs, their manifest and the report; by default only a report."),
    ] = None
    report: Annotated[Path | None, typer.Option(help="Also write the report to this HTML file.")] = None
    workers: Annotated[int, typer.Option(min=1, help="Programs compiled at a time, each in its own process.")] = 2
    json: Json = False


@grouped
def compile(
    *,
    source: SourceArguments,
    options: DeploymentArguments,
    formats: DtypeArguments,
    buckets: BucketArguments,
    output: OutputArguments,
) -> None:
    """Compile all programs of a model for a target; report what they need and how fast they can be.

    A TPU target needs no TPU. For Trainium the programs are lowered and checked, and compiled if neuronx-cc is there; a
    script has its commands. Exits with 1 if a program does not compile, does not fit, or copies the cache (not on a
    CPU).
    """
    if [source.model, source.config, source.plan].count(None) != 2:
        fail("give either a model, the name of a shape with --config, or a plan with --plan")
    if source.revision is not None and source.model is None:
        fail("--revision is of a model of the hub: give one")
    decided = (options.target, options.parallel, options.expert_placement, options.speculation)
    decided = *decided, options.attention_pages, options.sparse_prefill, options.cache_policy
    if source.plan and any((*decided, *vars(formats).values(), *vars(buckets).values())):
        fail(
            "--plan says target, split, dtypes, quantization, buckets, placement, speculation, pages, sparse prefill "
            "and cache policy: give none of these"
        )
    check_output_file("--report", output.report)
    from inferlib.aot.compile import check_compiler
    from inferlib.deploy.compile import compile_deployment

    with user_errors():
        if source.plan:
            deployment, checkpoint = _planned(source.plan, options), None
        else:
            deployment, checkpoint = _deployment(source, options, formats, buckets)
        check_compiler(deployment.slice)
        keys = deployment.keys()
    if source.config is not None and options.target is None:
        fail("--config is a shape to plan for: say what to compile it for with --target (see inferlib targets)")
    name = source.model or source.config or source.plan or ""
    names, guess = list(map(str, keys)), guessed_seconds(deployment)
    with user_errors(), CompileProgress.shown(names, output.workers, guess) as progress:
        result = compile_deployment(
            deployment,
            name,
            checkpoint=checkpoint,
            out=output.out,
            workers=output.workers,
            started=lambda key: progress.started(str(key)),
            done=lambda outcome: progress.done(str(outcome.key), outcome),
        )
    with user_errors():
        if output.report is not None:
            output.report.write_text(result.html(), encoding="utf-8")
    write(json_line(result.facts()).decode() if output.json else result.text(terminal=sys.stdout.isatty()))
    if output.out is not None:
        text = f"programs, manifest and report.html are in {output.out}"
        message = text if result.complete else f"nothing was written to {output.out}"
        Console(stderr=True, force_jupyter=False).print(message, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.ok else 1)


def deployment_of(
    source: ModelSource,
    target: str | None,
    buckets: BucketArguments,
    **settings: Any,
) -> Deployment:
    """The deployment that a command's options describe. settings: see `inferlib.compile`."""
    from inferlib.deploy import compile as deploying

    return deploying.deployment_of(source, target, **settings, buckets=buckets.parsed(source.config.context))


def _deployment(
    source: SourceArguments, options: DeploymentArguments, formats: DtypeArguments, buckets: BucketArguments
) -> tuple[Deployment, str | None]:
    """The deployment, and where the model's checkpoint is, if it has one."""
    model = source.source()
    deployment = deployment_of(
        model,
        options.target,
        buckets,
        parallel=options.parallel,
        dtype=formats.dtype,
        modes=options.sampling_modes(),
        quantization=formats.quantization,
        kv_cache_dtype=formats.kv_cache_dtype,
        expert_placement=options.expert_placement,
        backend=options.backend,
        cache_memory=options.cache_memory,
        speculation=options.speculation,
        attention_pages=options.attention_pages,
        sparse_prefill=options.sparse_prefill,
        cache_policy=options.cache_policy,
    )
    return deployment, model.checkpoint


def _planned(name: str, options: DeploymentArguments) -> Deployment:
    from inferlib.deploy.compile import deployment_of_plan
    from inferlib.planning.plans import load_plan

    return deployment_of_plan(load_plan(name), options.sampling_modes(), options.backend)
