"""What XLA is told for a program beyond its defaults."""

from __future__ import annotations

import numpy as np

from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.ops.on_chip import OPTIONS
from inferlib.ops.packed import MEMORY_BOUND_ROWS

_ROWS = 32  # from which cuBLAS multiplies weights of half precision faster than what XLA generates
_HALF = (np.dtype("bfloat16"), np.dtype("float16"))


def compiler_options(
    model: AbstractModel, platform: str, tokens: int, *, on_chip: bool = False
) -> dict[str, str | bool]:
    """Compiler options of a program that multiplies weights by `tokens` rows at a time.

    On GPUs XLA tries kernels that it generates for a product beside those of cuBLAS, alone and with the weight in a
    cache. By that measure it takes slower ones for many rows: on an H100 a step of Llama-3-8B with 64 rows takes 7.6 ms
    instead of 7.1. To try them is most of the time that a program compiles. Without them cuBLAS has all products.
    Weights that XLA unpacks in the product need its kernels, and so do products of few rows.

    on_chip: weights of loops stay on chip, see `inferlib.ops.on_chip`.
    """
    if platform == "tpu" and on_chip and tokens <= MEMORY_BOUND_ROWS:
        return OPTIONS
    if platform != "gpu" or model.dtype not in _HALF:
        return {}
    products = [weight for weight in model.weights if weight.contracting]
    if not all(_by_cublas(weight, tokens) for weight in products):
        return {}
    return {"xla_gpu_enable_triton_gemm": False}


def _by_cublas(weight: WeightSpec, tokens: int) -> bool:
    if weight.scheme is None:
        return tokens >= _ROWS
    return weight.scheme.rounds_tokens
