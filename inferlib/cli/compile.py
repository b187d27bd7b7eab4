"""`inferlib compile`: all programs of a deployment, compiled ahead of time for a machine that need not be here."""

from __future__ import annotations

import contextlib
import json as json_module
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from inferlib.cli.compile_progress import CompileProgress
from inferlib.cli.info import described, quantization_of
from inferlib.cli.output import fail, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.models.quantization import Quantization
    from inferlib.programs.deployment import Deployment

_BUCKETS = {"prefill": "32,128,512", "batch": "1,8", "cache": "2048"}


def compile(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face directory, .gguf file or known name.", show_default=False),
    ] = None,
    *,
    config: Annotated[
        str | None, typer.Option(help="Instead of a model, a shape that comes with inferlib, by name.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Instead of all that, a deployment plan that comes with inferlib, or a .yaml file."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="cpu, cuda, trn2, trn3 or a TPU slice such as v5e-8 (see inferlib targets).")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Devices to split over, such as tp=4,dp=2; by default all of a TPU's on tp.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default float32 on CPU, else bfloat16.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of the weights: int8, int4, fp8, fp8_block, mxfp8(_a8) or mxfp4(_a8).")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Of the cache: int8 or fp8; by default dtype.")] = None,
    expert_placement: Annotated[
        Path | None,
        typer.Option(help="File of expert slots, as inferlib place writes it; the programs serve any with as many."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="auto: kernels wherever they run; xla: none; decode_attention=xla,matmul=xla: none for these "
            "operations (also prefill_attention, qkv_attention, grouped_matmul, expert_mlp, choose_experts, add_norm, "
            "all_reduce, collective_matmul)."
        ),
    ] = "auto",
    prefill_buckets: Annotated[
        str | None, typer.Option(help="Tokens of prefill chunks, ascending; by default 32,128,512.")
    ] = None,
    batch_buckets: Annotated[
        str | None, typer.Option(help="Rows decoded together, the last being the largest batch; by default 1,8.")
    ] = None,
    cache_buckets: Annotated[
        str | None,
        typer.Option(help="Positions that attention reads, the last being the longest sequence; by default 2048."),
    ] = None,
    modes: Annotated[str, typer.Option(help="Sampling modes: greedy, sample, logprobs.")] = "greedy,sample",
    out: Annotated[
        Path | None, typer.Option(help="Directory for the programs, their manifest and the report; without: a report.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report as an HTML page here too.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Programs compiled at a time, each in its own process.")] = 2,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Compile all programs of a model for a target, and report what they take and how fast they can be.

    For a TPU no TPU is needed. For Trainium the programs are lowered and checked, and compiled if neuronx-cc is there;
    a script has its commands. Exits with 1 if something does not compile or fit, or copies the cache (not on a CPU).
    """
    if [model, config, plan].count(None) != 2:
        fail("give either a model, the name of a shape with --config, or a plan with --plan")
    settings = dict(target=target, parallel=parallel, dtype=dtype, quantization=quantization)
    settings["kv_cache_dtype"] = kv_cache_dtype
    buckets = dict(prefill=prefill_buckets, batch=batch_buckets, cache=cache_buckets)
    if plan and any((settings | buckets | {"placement": expert_placement}).values()):
        fail("--plan says target, split, dtypes, quantization, buckets and placement: give none of them beside it")
    from inferlib.aot.artifacts import ArtifactWriter
    from inferlib.aot.compile import check_compiler, compile_programs, file_name
    from inferlib.aot.neuron import script
    from inferlib.inspection.report import Report
    from inferlib.inspection.report_html import page
    from inferlib.inspection.report_text import render

    with user_errors():
        words = tuple(modes.split(","))
        if plan:
            deployment = _planned(plan, words, backend)
        else:
            hf, files = described(model, config)
            settings["quantization"] = quantization_of(files, quantization)
            slots = _slots(hf, expert_placement)
            deployment = deployment_of(
                hf, **settings, buckets=buckets, modes=words, expert_slots=slots, backend=backend
            )
        check_compiler(deployment.slice)
        keys = deployment.keys()
    name = model or config or plan
    with contextlib.ExitStack() as stack:
        writer = ArtifactWriter(out, deployment) if out is not None else None
        if writer is not None:
            with user_errors():
                stack.enter_context(writer)
        folder = writer.staging if writer else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with user_errors(), CompileProgress.shown(list(map(str, keys))) as progress:
            outcomes, layouts = compile_programs(
                deployment,
                keys,
                folder,
                checkpoint=model if writer else None,
                reuse=writer.reuse if writer else lambda key, layouts: None,
                started=lambda key: progress.started(str(key)),
                done=lambda outcome: progress.done(str(outcome.key), outcome),
                workers=workers,
            )
        result = Report.of(deployment, outcomes)
        complete = all(outcome.ok for outcome in outcomes)
        with user_errors():
            if report is not None:
                report.write_text(page(result, name), encoding="utf-8")
            if writer is not None and complete:
                facts = json_module.dumps(result.facts(), indent=1)
                texts = {"report.json": facts, "report.html": page(result, name)}
                if deployment.slice.platform == "neuron":
                    texts["compile.sh"] = script((file_name(key, deployment.slice) for key in keys), deployment.slice)
                writer.commit(outcomes, layouts, texts)
    write(json_line(result.facts()).decode() if json else render(result, name))
    if out is not None:
        told = f"programs, manifest and report.html are in {out}" if complete else f"nothing was written to {out}"
        Console(stderr=True, force_jupyter=False).print(told, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result.ok else 1)


def deployment_of(
    hf: Mapping[str, Any],
    *,
    target: str | None,
    parallel: str | None,
    dtype: str | None,
    quantization: Quantization | None,
    kv_cache_dtype: str | None,
    buckets: Mapping[str, str | None],
    modes: tuple[str, ...],
    expert_slots: int | None = None,
    backend: str = "auto",
) -> Deployment:
    """What a command's options say, with their defaults."""
    from inferlib.config import Buckets
    from inferlib.programs.deployment import Deployment
    from inferlib.sharding.mesh import Parallelism
    from inferlib.targets import parse_target

    chosen = parse_target(target or "cpu")
    devices = chosen.devices if chosen.platform == "tpu" else 1
    return Deployment(
        hf,
        target=str(chosen),
        dtype=dtype or ("float32" if chosen.platform == "cpu" else "bfloat16"),
        buckets=Buckets(**{name: _sizes(_BUCKETS[name] if text is None else text) for name, text in buckets.items()}),
        parallel=Parallelism(tensor=devices) if parallel is None else Parallelism.parse(parallel),
        modes=modes,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        expert_slots=expert_slots,
        backend=backend,
    )


def _slots(hf: Mapping[str, Any], file: Path | None) -> int | None:
    """How many a file places experts of a model in."""
    if file is None:
        return None
    from inferlib.models.families import config_from_hf
    from inferlib.placement import ExpertPlacement

    placement = ExpertPlacement.read(file)
    placement.check(config_from_hf(hf))
    return placement.slots


def _planned(name: str, modes: tuple[str, ...], backend: str) -> Deployment:
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
        modes=modes,
        quantization=plan.stored,
        kv_cache_dtype=plan.kv_cache_dtype,
        backend=backend,
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"buckets are numbers with commas between them, such as 1,8,64, not {text!r}") from None
