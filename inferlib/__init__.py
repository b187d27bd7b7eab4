"""inferlib: model-parallel LLM inference in JAX, for TPU, Trainium, GPU and CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferlib.async_llm import AsyncLLM, AsyncStream
    from inferlib.buckets import Buckets
    from inferlib.calibration.calibrate import calibrate
    from inferlib.calibration.fuse import FusionReport, fuse_feed_forwards
    from inferlib.calibration.report import CalibrationReport
    from inferlib.config import EngineConfig, EngineOptions
    from inferlib.conversion import convert
    from inferlib.deploy.compile import CompileResult, compile
    from inferlib.deploy.explain import ModelExplanation, explain
    from inferlib.deploy.plan import PlanResult, Slo, Workload, plan
    from inferlib.evaluation.evaluate import Evaluation, evaluate
    from inferlib.evaluation.score_tasks import TaskScores, evaluate_tasks
    from inferlib.exporting import export
    from inferlib.llm import LLM, Stream
    from inferlib.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from inferlib.sampling.beam_search import BeamSearchParams
    from inferlib.sampling.params import SamplingParams
    from inferlib.sampling.structured import StructuredOutputs
    from inferlib.sharding.mesh import Parallelism
    from inferlib.speculation.settings import Speculation
    from inferlib.texts import TextSample

_MODULES = {
    "LLM": "inferlib.llm",
    "AsyncLLM": "inferlib.async_llm",
    "AsyncStream": "inferlib.async_llm",
    "BeamSearchOutput": "inferlib.outputs",
    "BeamSearchParams": "inferlib.sampling.beam_search",
    "BeamSearchSequence": "inferlib.outputs",
    "Buckets": "inferlib.buckets",
    "CalibrationReport": "inferlib.calibration.report",
    "CompileResult": "inferlib.deploy.compile",
    "CompletionOutput": "inferlib.outputs",
    "EngineConfig": "inferlib.config",
    "EngineOptions": "inferlib.config",
    "Evaluation": "inferlib.evaluation.evaluate",
    "FusionReport": "inferlib.calibration.fuse",
    "Logprob": "inferlib.outputs",
    "ModelExplanation": "inferlib.deploy.explain",
    "Parallelism": "inferlib.sharding.mesh",
    "PlanResult": "inferlib.deploy.plan",
    "RequestMetrics": "inferlib.outputs",
    "RequestOutput": "inferlib.outputs",
    "SamplingParams": "inferlib.sampling.params",
    "Slo": "inferlib.deploy.plan",
    "Speculation": "inferlib.speculation.settings",
    "Stream": "inferlib.llm",
    "StructuredOutputs": "inferlib.sampling.structured",
    "TaskScores": "inferlib.evaluation.score_tasks",
    "TextSample": "inferlib.texts",
    "Workload": "inferlib.deploy.plan",
    "calibrate": "inferlib.calibration.calibrate",
    "compile": "inferlib.deploy.compile",
    "convert": "inferlib.conversion",
    "evaluate": "inferlib.evaluation.evaluate",
    "evaluate_tasks": "inferlib.evaluation.score_tasks",
    "explain": "inferlib.deploy.explain",
    "export": "inferlib.exporting",
    "fuse_feed_forwards": "inferlib.calibration.fuse",
    "plan": "inferlib.deploy.plan",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncStream",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Buckets",
    "CalibrationReport",
    "CompileResult",
    "CompletionOutput",
    "EngineConfig",
    "EngineOptions",
    "Evaluation",
    "FusionReport",
    "Logprob",
    "ModelExplanation",
    "Parallelism",
    "PlanResult",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Slo",
    "Speculation",
    "Stream",
    "StructuredOutputs",
    "TaskScores",
    "TextSample",
    "Workload",
    "calibrate",
    "compile",
    "convert",
    "evaluate",
    "evaluate_tasks",
    "explain",
    "export",
    "fuse_feed_forwards",
    "plan",
]


def __getattr__(name: str):
    if name == "__version__":
        from importlib import metadata  # takes longer than all else here

        return metadata.version("inferlib")
    # Importing a module of a low level (a kernel, a config) must not import everything above it.
    if name not in _MODULES:
        raise AttributeError(f"module 'inferlib' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
