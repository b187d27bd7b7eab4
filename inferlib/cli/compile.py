"""`inferlib compile`: compile all programs of a deployment ahead of time, for this machine or another."""

from __future__ import annotations

import contextlib
import json as json_module
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer
from rich.console import Console

from inferlib.cli.arguments import Backend, BucketArguments, DtypeArguments, Json, ShapeArguments, grouped
from inferlib.cli.compile_progress import CompileProgress, guessed_seconds
from inferlib.cli.info import described, quantization_of
from inferlib.cli.output import fail, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.aot.artifacts import ArtifactWriter
    from inferlib.inspection.outcome import Outcome
    from inferlib.inspection.report import Report
    from inferlib.programs.deployment import Deployment
    from inferlib.programs.program import Mode


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
    modes: Annotated[str, typer.Option(help="Sampling modes: greedy, sample, logprobs.")] = "greedy,sample"

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
    decided = (options.target, options.parallel, options.expert_placement, *vars(formats).values())
    if source.plan and any((*decided, *vars(buckets).values())):
        fail("--plan says target, split, dtypes, quantization, buckets and placement: give none of them beside it")
    from inferlib.aot.compile import check_compiler

    with user_errors():
        if source.plan:
            deployment, checkpoint = _planned(source.plan, options), None
        else:
            deployment, checkpoint = _deployment(source, options, formats, buckets)
        check_compiler(deployment.slice)
    name = source.model or source.config or source.plan or ""
    result, complete = _compile(deployment, name, checkpoint, output)
    if output.out is not None:
        text = f"programs, manifest and report.html are in {output.out}"
        message = text if complete else f"nothing was written to {output.out}"
        Console(stderr=True, force_jupyter=False).print(message, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.ok else 1)


def _compile(deployment: Deployment, name: str, checkpoint: str | None, output: OutputArguments) -> tuple[Report, bool]:
    """Compile, show and store the programs. Returns the report, and whether every program was compiled."""
    from inferlib.aot.artifacts import ArtifactWriter
    from inferlib.aot.compile import compile_programs
    from inferlib.inspection.report import Report
    from inferlib.inspection.report_html import page
    from inferlib.inspection.report_text import render

    with user_errors():
        keys = deployment.keys()
    with contextlib.ExitStack() as stack:
        writer = None if output.out is None else ArtifactWriter(output.out, deployment)
        if writer is not None:
            with user_errors():
                stack.enter_context(writer)
        folder = writer.staging if writer else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names, guess = list(map(str, keys)), guessed_seconds(deployment)
        with user_errors(), CompileProgress.shown(names, output.workers, guess) as progress:
            outcomes, layouts = compile_programs(
                deployment,
                keys,
                folder,
                checkpoint=checkpoint if writer else None,
                reuse=writer.reuse if writer else lambda key, layouts: None,
                started=lambda key: progress.started(str(key)),
                done=lambda outcome: progress.done(str(outcome.key), outcome),
                workers=output.workers,
            )
        result = Report.of(deployment, outcomes)
        complete = all(outcome.ok for outcome in outcomes)
        with user_errors():
            if output.report is not None:
                output.report.write_text(page(result, name), encoding="utf-8")
            if writer is not None and complete:
                _commit(writer, outcomes, layouts, result, page(result, name))
    write(json_line(result.facts()).decode() if output.json else render(result, name))
    return result, complete


def _commit(writer: ArtifactWriter, outcomes: Sequence[Outcome], layouts: Any, result: Report, html: str) -> None:
    """Write the programs with their manifest and reports; for Trainium also its compiler's commands."""
    from inferlib.aot.compile import file_name
    from inferlib.aot.neuron import script

    texts = {"report.json": json_module.dumps(result.facts(), indent=1), "report.html": html}
    target = writer.deployment.slice
    if target.platform == "neuron":
        keys = writer.deployment.keys()
        texts["compile.sh"] = script((file_name(key, target) for key in keys), target)
    writer.commit(outcomes, layouts, texts)


def deployment_of(
    hf: Mapping[str, Any],
    target: str | None,
    parallel: str | None,
    dtype: str | None,
    buckets: BucketArguments,
    **settings: Any,
) -> Deployment:
    """The deployment of a model that a command's options describe. settings: other fields of `Deployment`."""
    from inferlib.models.families import config_from_hf
    from inferlib.programs.deployment import Deployment
    from inferlib.sharding.mesh import Parallelism
    from inferlib.targets import parse_target

    slice_ = parse_target(target or "cpu")
    devices = slice_.devices if slice_.platform == "tpu" else 1
    return Deployment(
        hf,
        target=str(slice_),
        dtype=dtype or ("float32" if slice_.platform == "cpu" else "bfloat16"),
        buckets=buckets.parsed(config_from_hf(dict(hf)).context),
        parallel=Parallelism(tensor=devices) if parallel is None else Parallelism.parse(parallel),
        **settings,
    )


def _deployment(
    source: SourceArguments, options: DeploymentArguments, formats: DtypeArguments, buckets: BucketArguments
) -> tuple[Deployment, str | None]:
    """The deployment, and where the model's checkpoint is, if it has one."""
    hf, files = described(source)
    deployment = deployment_of(
        hf,
        options.target,
        options.parallel,
        formats.dtype,
        buckets,
        modes=options.sampling_modes(),
        quantization=quantization_of(files, formats.quantization),
        kv_cache_dtype=formats.kv_cache_dtype,
        expert_slots=_slots(hf, options.expert_placement),
        backend=options.backend,
    )
    return deployment, None if files is None else str(files.path)


def _slots(hf: Mapping[str, Any], file: Path | None) -> int | None:
    """Number of slots per layer of a placement file, checked against the model."""
    if file is None:
        return None
    from inferlib.models.families import config_from_hf
    from inferlib.placement import ExpertPlacement

    placement = ExpertPlacement.read(file)
    placement.check(config_from_hf(dict(hf)))
    return placement.slots


def _planned(name: str, options: DeploymentArguments) -> Deployment:
    from inferlib import configs
    from inferlib.planning.plans import load_plan
    from inferlib.programs.deployment import Deployment
    from inferlib.sharding.mesh import Parallelism

    plan = load_plan(name)
    return Deployment(
        configs.load(plan.model),
        target=str(plan.slice),
        dtype=plan.dtype,
        buckets=plan.engine.buckets,
        parallel=Parallelism.parse(plan.parallel),
        modes=options.sampling_modes(),
        quantization=plan.stored,
        kv_cache_dtype=plan.kv_cache_dtype,
        backend=options.backend,
    )
