"""inferlib: model-parallel LLM inference in JAX, for TPU, Trainium, GPU and CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferlib.config import Buckets, EngineConfig, EngineOptions
    from inferlib.conversion import convert
    from inferlib.llm import LLM, Stream
    from inferlib.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from inferlib.sampling.params import SamplingParams
    from inferlib.sharding.mesh import Parallelism

_MODULES = {
    "LLM": "inferlib.llm",
    "Buckets": "inferlib.config",
    "CompletionOutput": "inferlib.outputs",
    "EngineConfig": "inferlib.config",
    "EngineOptions": "inferlib.config",
    "Logprob": "inferlib.outputs",
    "Parallelism": "inferlib.sharding.mesh",
    "RequestMetrics": "inferlib.outputs",
    "RequestOutput": "inferlib.outputs",
    "SamplingParams": "inferlib.sampling.params",
    "Stream": "inferlib.llm",
    "convert": "inferlib.conversion",
}

__all__ = [
    "LLM",
    "Buckets",
    "CompletionOutput",
    "EngineConfig",
    "EngineOptions",
    "Logprob",
    "Parallelism",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "convert",
]


def __getattr__(name: str):
    if name == "__version__":
        return importlib.metadata.version("inferlib")
    # Importing a module of a low level (a kernel, a config) must not import everything above it.
    if name not in _MODULES:
        raise AttributeError(f"module 'inferlib' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
