"""What XLA is told for a program beyond its defaults."""

from __future__ import annotations

import numpy as np

from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.ops.on_chip import OPTIONS
from inferlib.ops.packed import MEMORY_BOUND_ROWS

_ROWS = 32  # from which cuBLAS multiplies weights of half precision faster than what XLA generates
_TIMED = "3"  # the level at which XLA's autotuner times, and compares no results
_HALF = (np.dtype("bfloat16"), np.dtype("float16"))
# Of programs with products of low rank beside weights, see `inferlib.ops.thin_products`. XLA would join a weight and
# factors that multiply the same inputs, and copy the weight for that: XLA of jax 0.10 all weights in each step.
# Launches that do not depend on each other start together in CUDA graphs.
_SIDE_BY_SIDE = {"xla_gpu_dot_merger_threshold_mb": "0", "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}

# Of programs that copy separate weights to on-chip memory ahead: XLA:TPU places the largest first. Otherwise it leaves
# out most of those above 50 MB in deep models, such as more than 54 layers of 70B with 32 rows on eight v6e. And it
# copies no weight for the next call of the program: it would choose the head, which then lies there in the whole step.
_LARGE = 32 * 2**20
_COPIED_AHEAD: dict[str, str | bool] = {
    "xla_tpu_msa_sort_order_overrides": f"overrides {{ hlo_position_matcher {{ size_gte: {_LARGE} }} "
    "override_options { assign_first: true } }",
    "xla_max_cross_program_prefetches": "0",
}


def compiler_options(
    model: AbstractModel, platform: str, tokens: int, *, on_chip: bool = False
) -> dict[str, str | bool]:
    """Compiler options of a program that multiplies weights by `tokens` rows at a time.

    On GPUs XLA tries kernels that it generates for a product beside those of cuBLAS, alone and with the weight in a
    cache. By that measure it takes slower ones for many rows: on an H100 a step of Llama-3-8B with 64 rows takes 7.6 ms
    instead of 7.1. To try them is most of the time that a program compiles. Without them cuBLAS has all products.
    Weights that XLA unpacks in the product need its kernels, and so do products of few rows. XLA also compares what
    each form of a product computes; for cuBLAS's alone that is left out, as it takes longer than to time them.

    On TPUs those with separate weights place the largest arrays on chip first, and none for the next call.

    on_chip: weights of loops stay on chip, or arrive there ahead; see `inferlib.ops.on_chip` and `fetch_ahead`.
    """
    if platform == "tpu" and on_chip and tokens <= MEMORY_BOUND_ROWS:
        return OPTIONS
    if platform == "tpu" and any(weight.separate for weight in model.weights):
        return _COPIED_AHEAD
    if platform != "gpu":
        return {}
    options: dict[str, str | bool] = {}
    if model.adapters is not None or any(weight.rank for weight in model.weights):
        options |= _SIDE_BY_SIDE
    products = [weight for weight in model.weights if weight.contracting]
    if model.dtype in _HALF and all(_by_cublas(weight, tokens) for weight in products):
        options |= {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": _TIMED}
    return options


def _by_cublas(weight: WeightSpec, tokens: int) -> bool:
    if weight.scheme is None:
        return tokens >= _ROWS
    return weight.scheme.rounds_tokens
