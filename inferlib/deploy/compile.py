"""`inferlib.compile`: all programs of a deployment, compiled ahead of time, for this machine or another."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from inferlib.aot.artifacts import ArtifactWriter
from inferlib.aot.compile import Compilers, check_compiler, compile_programs, file_name
from inferlib.aot.neuron import script
from inferlib.buckets import Buckets
from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.configs import load
from inferlib.deploy.source import ModelSource, model_source
from inferlib.draft_files import LayerFiles, check_tokenizers
from inferlib.inspection.outcome import Outcome
from inferlib.inspection.report import ProgramReport, Report
from inferlib.inspection.report_html import page
from inferlib.inspection.report_text import parts
from inferlib.option_checks import ConfigurationError, brief, bytes_option, check_flag, checked_path, speculation_option
from inferlib.placement import ExpertPlacement
from inferlib.planning.plans import Plan
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import Mode, ProgramKey
from inferlib.progress import CountProgress, on_terminal
from inferlib.sharding.mesh import Parallelism
from inferlib.speculation.settings import Speculation
from inferlib.tables import Part, Tables
from inferlib.targets import parse_target

__all__ = ["CompileResult", "CompileSettings", "compile"]

LONGEST = 2048  # positions of the default cache bucket
_CHUNKS = (32, 128, 512)


class CompileSettings(TypedDict, total=False):
    """What programs are compiled for, beside the model and the target; see `compile`."""

    parallel: str | Parallelism | None
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    buckets: Buckets | None
    modes: Sequence[Mode]
    expert_placement: str | Path | None
    backend: str
    cache_memory: int | str | None
    speculation: str | None
    attention_pages: str | None
    sparse_prefill: str | None
    cache_policy: str | None


def compile(
    model: str | Path | Mapping[str, Any] | ModelSource | Deployment,
    target: str | None = None,
    *,
    out: str | Path | None = None,
    workers: int = 2,
    progress: bool | None = None,
    revision: str | None = None,
    **settings: Unpack[CompileSettings],
) -> CompileResult:
    """Compile all programs of a model for a target; the result says what they need and how fast they can be.

    A TPU target needs no TPU. For Trainium the programs are lowered and checked, and compiled if neuronx-cc is there.

    model: a model as for `LLM`, the name of a shape that comes with inferlib ("llama3-70b"), a Hugging Face config as a
        mapping; or a `Deployment`, such as `PlanResult.deployment()`, which says the target and the settings.
    target: "cpu", "cuda", "trn2", "trn3" or a TPU slice such as "v6e-8"; by default "cpu".
    out: a directory for the programs, which `LLM(artifacts=...)` runs; by default only the report is made.
    workers: programs compiled at a time, each in a process of its own.
    progress: show a bar; by default if standard error is a terminal.
    revision: branch, tag or commit of a model of the hub.
    settings: parallel ("tp=4,dp=2"; by default all of a TPU slice on tp), dtype (by default "float32" on CPU, else
        "bfloat16"), quantization and kv_cache_dtype (as for `LLM`), buckets (by default chunks of 32, 128 and 512
        tokens, batches of 1 and 8 rows, and a cache of the model's context, at most 2048), modes (of "greedy",
        "sample", "logprobs", "embed"; by default the first two), expert_placement (a file; see `inferlib place`),
        backend, cache_memory (of a device's cache, bytes or "16GiB"; by default what the largest batch of the longest
        sequences takes), speculation ("ngram:3", "draft:NAME:3" or "eagle3:DIR:3"), attention_pages ("quest:64") and
        sparse_prefill ("xattention:0.9") and cache_policy ("keydiff:2048"), all as for `LLM`.

    Raises ArtifactError, CheckpointError, CompileError, ConfigError, ConfigurationError, ShardingError or TargetError
    before anything is compiled. A program that does not compile is no exception: see `CompileResult.ok`.
    """
    check_flag("progress", progress, optional=True)
    if isinstance(model, Deployment):
        if target is not None or settings or revision is not None:
            raise ConfigurationError("a Deployment says the target and the settings: give none of them beside it")
        made, checkpoint, name = model, None, str(model.hf.get("model_type", "model"))
    else:
        if unknown := sorted(set(settings) - set(CompileSettings.__annotations__)):
            known = ", ".join(CompileSettings.__annotations__)
            raise TypeError(f"compile() got an unexpected keyword argument {unknown[0]!r}; settings are {known}")
        source = model_source(model, revision)
        made, checkpoint, name = deployment_of(source, target, **settings), source.checkpoint, source.name
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigurationError(f"workers must be a whole number of at least 1, got {brief(workers)}")
    show = on_terminal() if progress is None else progress
    check_compiler(made.slice)
    with CountProgress("compiling", len(made.keys()), show=show) as bar:
        return compile_deployment(
            made, name, checkpoint=checkpoint, out=out, workers=workers, done=lambda outcome: bar.advance(1)
        )


@dataclass(frozen=True, repr=False)
class CompileResult(Tables):
    """The programs of a deployment as they were compiled; `print` it, or show it in a notebook.

    name: the model's. report: memory, bytes, collectives and times of each program. folder: the directory with the
    programs, None if none was written.
    """

    name: str
    report: Report
    folder: Path | None = None

    @property
    def ok(self) -> bool:
        """True if everything compiled and fits, and nothing copies the cache (which a CPU may)."""
        return self.report.ok

    @property
    def complete(self) -> bool:
        """True if every program was compiled."""
        return all(program.outcome.ok for program in self.programs)

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        return self.report.programs

    def facts(self) -> dict[str, Any]:
        """The report as JSON values: bytes of a device, and seconds of a step."""
        return self.report.facts()

    def html(self) -> str:
        """The report as one HTML page that needs nothing else."""
        return page(self.report, self.name)

    def parts(self) -> Sequence[Part]:
        return parts(self.report, self.name)

    def __repr__(self) -> str:
        states = f"{sum(p.outcome.ok for p in self.programs)} of {len(self.programs)} programs"
        return f"CompileResult({self.name} on {self.report.deployment.target}: {states})"


def deployment_of(source: ModelSource, target: str | None = None, **settings: Unpack[CompileSettings]) -> Deployment:
    """The deployment of a model for a target; settings: see `compile`."""
    if not isinstance(target, str | None):
        raise ConfigurationError(f"target must be text such as 'v6e-8', got {brief(target)}")
    slice_, parallel = parse_target(target or "cpu"), settings.get("parallel")
    if not isinstance(parallel, str | Parallelism | None):
        raise ConfigurationError(f"parallel must be text such as 'tp=4,dp=2', got {brief(parallel)}")
    if isinstance(parallel, str):
        parallel = Parallelism.parse(parallel)
    modes: Any = settings.get("modes", ("greedy", "sample"))
    if isinstance(modes, str) or not isinstance(modes, Sequence):
        raise ConfigurationError(f"modes must be a list such as ['greedy', 'sample'], got {brief(modes)}")
    buckets = settings.get("buckets")
    if not isinstance(buckets, Buckets | None):
        raise ConfigurationError(f"buckets must be Buckets(prefill=..., batch=..., cache=...), got {brief(buckets)}")
    dtype = settings.get("dtype")
    return Deployment(
        source.hf,
        target=str(slice_),
        dtype=dtype if dtype is not None else ("float32" if slice_.platform == "cpu" else "bfloat16"),
        buckets=buckets or buckets_for(source.config.context),
        parallel=parallel or Parallelism(tensor=slice_.devices if slice_.platform == "tpu" else 1),
        modes=tuple(modes),
        quantization=source.quantization(settings.get("quantization")),
        kv_cache_dtype=settings.get("kv_cache_dtype"),
        expert_slots=_slots(source, settings.get("expert_placement")),
        backend=settings.get("backend", "auto"),
        cache_memory=bytes_option(settings.get("cache_memory")),
        speculation=settings.get("speculation"),
        attention_pages=settings.get("attention_pages"),
        sparse_prefill=settings.get("sparse_prefill"),
        cache_policy=settings.get("cache_policy"),
        **_draft(source, speculation_option(settings.get("speculation")), settings.get("quantization")),
    )


def _draft(target: ModelSource, speculation: Speculation | None, quantization: str | None) -> dict[str, Any]:
    """The fields of a deployment that say what drafts for a target; none if no model or head does."""
    if speculation is None:
        return {}
    if speculation.method == "mtp" and target.files is not None:
        LayerFiles.open(target.files, quantization)  # which may lack the layer
    if speculation.model is None:
        return {}
    if speculation.method == "eagle3":
        head = Eagle3Files.open(speculation.model, target.config)
        return {"draft": head.hf, "draft_embeds": head.config.embeds}
    draft = model_source(speculation.model)
    if target.files is not None:
        if draft.files is None:
            raise ConfigurationError(
                f"the model that drafts, {speculation.model!r}, is a shape without weights, and {target.name!r} has "
                "some: give files of both, or shapes"
            )
        check_tokenizers(draft.files.tokenizer, target.files.tokenizer)
    return {"draft": draft.hf, "draft_quantization": draft.quantization(None) or draft.quantization(quantization)}


def buckets_for(
    context: int,
    prefill: tuple[int, ...] | None = None,
    batch: tuple[int, ...] | None = None,
    cache: tuple[int, ...] | None = None,
    tile: int | None = None,
) -> Buckets:
    """These buckets, and where there are None those that a model of this context, in tokens, is compiled for. Raises
    ConfigurationError."""
    cache = (min(LONGEST, context),) if cache is None else cache
    if prefill is None:
        most = _CHUNKS[-1] if tile else min(_CHUNKS[-1], max(cache[-1], 1))
        prefill = (*(size for size in _CHUNKS if size < most), most)
    return Buckets(prefill=prefill, batch=batch or (1, 8), cache=cache, tile=tile)


def deployment_of_plan(plan: Plan, modes: Sequence[Mode], backend: str = "auto") -> Deployment:
    """The deployment of a plan in `configs/plans`, or of a file like these; see `inferlib.planning.plans.load_plan`."""
    return Deployment(
        load(plan.model),
        target=str(plan.slice),
        dtype=plan.dtype,
        buckets=plan.engine.buckets,
        parallel=Parallelism.parse(plan.parallel),
        modes=tuple(modes),
        quantization=plan.stored,
        kv_cache_dtype=plan.kv_cache_dtype,
        backend=backend,
    )


def compile_deployment(
    deployment: Deployment,
    name: str,
    *,
    checkpoint: str | None = None,
    out: str | Path | None = None,
    workers: int = 2,
    started: Callable[[ProgramKey], None] = lambda key: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> CompileResult:
    """Compile the programs of a deployment, and write them to `out` if all were compiled.

    name: the model's, for titles. checkpoint: where the model is, if it has files. started, done: called before and
    after each program. Raises ArtifactError, CompileError or OSError.
    """
    if not isinstance(deployment, Deployment):
        raise ConfigurationError(f"deployment must be a Deployment, got {brief(deployment)}")
    with contextlib.ExitStack() as stack:
        writer = None
        if out is not None:
            writer = stack.enter_context(ArtifactWriter(checked_path("out", out), deployment))
        folder = writer.staging if writer else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = deployment.keys()
        outcomes, layouts = compile_programs(
            deployment,
            keys,
            folder,
            checkpoint=checkpoint if writer else None,
            reuse=writer.reuse if writer else lambda key, layouts: None,
            started=started,
            done=done,
            compilers=stack.enter_context(Compilers(deployment.slice, min(workers, len(keys)))),
        )
        result = CompileResult(name, Report.of(deployment, outcomes), writer and writer.folder)
        if writer is None or not result.complete:
            return CompileResult(name, result.report)
        writer.commit(outcomes, layouts, _texts(result))
        return result


def _texts(result: CompileResult) -> dict[str, str]:
    """The reports, and for Trainium its compiler's commands, by the file's name."""
    deployment = result.report.deployment
    texts = {"report.json": json.dumps(result.facts(), indent=1), "report.html": result.html()}
    if deployment.slice.platform == "neuron":
        keys = deployment.keys()
        texts["compile.sh"] = script((file_name(key, deployment.slice) for key in keys), deployment.slice)
    return texts


def _slots(source: ModelSource, file: str | Path | None) -> int | None:
    """Number of slots per layer of a placement file, checked against the model."""
    if file is None:
        return None
    placement = ExpertPlacement.read(checked_path("expert_placement", file))
    placement.check(source.config)
    return placement.slots
