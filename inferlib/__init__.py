"""inferlib: model-parallel LLM inference in JAX, for TPU, Trainium, GPU and CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferlib.config import Buckets
    from inferlib.conversion import convert
    from inferlib.llm import LLM, Stream
    from inferlib.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from inferlib.sampling.params import SamplingParams
    from inferlib.sharding.mesh import Parallelism

_HOME = {
    "LLM": "inferlib.llm",
    "Buckets": "inferlib.config",
    "CompletionOutput": "inferlib.outputs",
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
    "Logprob",
    "Parallelism",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "convert",
]


def __getattr__(name: str):
    # Importing a low floor (a kernel, a config) must not import everything above it.
    if name not in _HOME:
        raise AttributeError(f"module 'inferlib' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
