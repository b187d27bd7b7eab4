"""The kernel that multiplies by a weight at a number of rows, and so its rate: from the choices of `inferlib.ops`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from inferlib.models.abstract import WeightSpec
from inferlib.models.config import LayerSpec, MlaSpec, MoeSpec
from inferlib.ops import eight_bits, grouped_matmul, matmul
from inferlib.ops.backend import Backend
from inferlib.ops.expert_mlp import MOST_TOKENS, MOST_TOKENS_4_BIT
from inferlib.ops.packed import MEMORY_BOUND_ROWS
from inferlib.ops.quantized import Scheme
from inferlib.pallas_kernels.decode_attention_gpu import power_of_two, tiling
from inferlib.planning import rates
from inferlib.planning.network import ATTAINED
from inferlib.planning.rates import Rate
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards
from inferlib.targets import Target


@lru_cache(maxsize=4096)
def product_rate(weight: WeightSpec, rows: int, backend: Backend) -> tuple[Rate, bool]:
    """The rate of a product with a weight, of one layer on one device, and whether each row reads a weight of its own.

    rows: of the product; of experts, all rows of all of them.
    """
    if weight.scheme is None or backend.matmul != "pallas_gpu":
        return rates.PEAK, False
    value: Any = replace(weight, rank=0).value
    if axes.EXPERTS in weight.axes:
        name = grouped_matmul.choose(rows, value, jnp.bfloat16, backend.grouped_matmul).name
    else:
        options: dict[str, Any] = dict(contract=len(weight.contracting), backend=backend.matmul)
        name = matmul.choose(value, rows, jnp.bfloat16, **options).name
    return _of_gpu(name, value.values.dtype.name, value.grouped), name == grouped_matmul.UNSORTED


def numbers_of(weight: WeightSpec, rows: int, backend: Backend) -> str:
    """The numbers that a product of `rows` rows multiplies, by the names of `Chip.flops`."""
    if weight.scheme is None or not eight_bits.rounds(weight.scheme, rows, gpu=backend.matmul == "pallas_gpu"):
        return "bfloat16"
    return "int8" if weight.scheme.values == "int8" else "float8"


def dense_rate(tokens: float, backend: Backend) -> Rate:
    """The rate of products with weights that are stored as they are, in a step of `tokens` tokens."""
    if not fetches_ahead(tokens, backend):
        return of_tpu("mx_matmul", backend)
    return rates.XLA_GPU if backend.matmul == "pallas_gpu" else rates.PEAK


def of_tpu(kernel: str, backend: Backend) -> Rate:
    """The rate of a kernel for TPUs, by the ratio of its listing to the published rates. What all programs attain of
    these is less than that of most listings, and waits for copies are a part of it."""
    ratio = rates.RATIOS[kernel].get(backend.generation or "", 1.0)
    return Rate(share=min(1 / (ratio * ATTAINED.memory), 1.0), compute=min(1 / (ratio * ATTAINED.compute), 1.0))


def _of_gpu(name: str, dtype: str, grouped: bool) -> Rate:
    four = dtype in rates.TILES
    match name:
        case "row_matmul" | "pallas_gpu_unsorted":
            return rates.ROWS_4_BIT if four else rates.ROWS_8_BIT
        case "grouped_matmul":
            return rates.TILES.get(dtype, rates.TILES_8_BIT)
        case "pallas_gpu":
            return rates.EXPERT_TILES_4_BIT if four else rates.TILES_8_BIT
        case "eight_bits":
            return rates.XLA_GPU
    return rates.XLA_GROUPS if grouped else rates.XLA_CHANNEL


def attention_rate(latent: bool, decode: bool, backend: Backend) -> Rate:
    """The rate of attention, which reads the cache."""
    if (backend.decode_attention if decode else backend.prefill_attention) == "pallas_tpu":
        return of_tpu(f"{'mla_' * latent}{'decode' if decode else 'prefill'}_attention", backend)
    if not decode and backend.prefill_attention == "pallas_gpu":
        return rates.PREFILL_GPU
    return rates.LATENTS if latent and decode and backend.decode_attention == "pallas_gpu" else rates.PEAK


def shares(heads: int, size: int, longest: int) -> int:
    """Shares of the positions of a row that decode attention's kernel for GPUs computes apart, in bfloat16: `heads` of
    the cache, of all rows, of this size."""
    return tiling(heads, power_of_two(size) * 2, longest)[1]


def fetches_ahead(tokens: float, backend: Backend) -> bool:
    """True if XLA multiplies by the weights, so that it can fetch the next ones during a collective. Our kernels read
    their weights when they run."""
    return backend.matmul != "pallas_tpu" or tokens > MEMORY_BOUND_ROWS


@dataclass(frozen=True)
class Tokens:
    """A step's tokens on a device. width: the width of the residual there. chunk: they are tokens of a prompt."""

    count: float
    width: int
    chunk: bool


def small_seconds(layer: LayerSpec, tokens: Tokens, scheme: Scheme | None, target: Target, shards: Shards) -> float:
    """Seconds of one layer's small operations. scheme: of its experts."""
    small, attention = rates.SMALL.get(target.platform, rates.NO_SMALL), layer.attention
    norms = (getattr(attention, "qk_norm", None) is not None) + 2 * layer.post_norm
    elements = tokens.count * tokens.width
    split = shards.size(axes.MLP) if shards.splits_tokens else 1  # the residual, and so its norms and sums
    seconds = max(small.layer + norms * small.norm, small.element * elements / (split * target.chip.cores))
    seconds += (small.latent + small.cell * tokens.count) * isinstance(attention, MlaSpec)
    if not isinstance(layer.mlp, MoeSpec):
        return seconds
    seconds += small.experts + tokens.chunk * small.sorted
    devices, elements = shards.size(axes.EXPERTS), elements * layer.mlp.router.chosen
    if devices == 1:
        return seconds
    if tokens.chunk:
        return seconds + small.exchange + small.sent + small.exchanged * elements
    # Few tokens go to all devices, and through all experts there, or sorted by expert.
    four = scheme is not None and scheme.values in rates.TILES
    most = MOST_TOKENS_4_BIT if four else MOST_TOKENS
    sorted_ = tokens.count * shards.mlp_row_shards * devices > most
    return seconds + small.exchange + sorted_ * small.exchanged * elements * devices
