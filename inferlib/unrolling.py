"""Whether a decode step hides its collectives behind weights: layers one after the other, products by XLA.

Where a mesh splits the layers of a model, each waits for two all-reduces, some 27 us on eight TPUs, during which HBM is
idle. XLA fetches the next weights to on-chip memory meanwhile, if each weight is an array of its own: it fetches whole
arrays, no slices of stacks, and a kernel reads its weights when it runs. So such layers are unrolled and their products
left to XLA. What that costs is compilation, and bytes of code.
"""

from __future__ import annotations

from dataclasses import replace

from inferlib.models.config import ModelConfig
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.ops.quantized import Scheme
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# The TPU compiler takes 0.15 to 0.35 s for each unrolled layer of a decode step. A step of more layers would take more
# than half a minute.
MOST_LAYERS = 128


# On these, next to nothing is fetched during a collective: of the collectives of a step of Llama-3-8B on four chips,
# 0.04 of 0.86 ms are hidden on v5p, and 0.06 of 0.88 on v7x.
_WITHOUT_FETCHES = ("v4", "v5p", "v7x")


def unrolls(
    model: ModelConfig,
    quantization: Quantization | None,
    shards: Shards,
    backend: Backend,
    generation: str | None,
) -> bool:
    """True if layers are unrolled on TPUs of a generation, such as "v5e" (None: of any), because the next weights hide
    the collectives of a decode step.

    That needs collectives between a layer's products, whose weights XLA reads as fast as memory allows. Where tokens
    are split, kernels fuse products with collectives; experts are read by kernels that take all layers' as one array,
    and kernels fetch the other weights of such layers (`inferlib.models.fetched_weights`).
    """
    between = shards.size(axes.MLP) > 1 or shards.size(axes.KV_HEADS) > 1
    products = backend.collective_matmul == "xla" and not shards.splits_tokens and not model.mixtures
    read = quantization is None or by_channel(quantization.scheme)
    fetches = generation not in _WITHOUT_FETCHES
    return between and products and read and fetches and len(model.layers) <= MOST_LAYERS


def by_channel(scheme: Scheme) -> bool:
    """True if XLA reads weights of this scheme as fast as memory allows: they have one scale for each channel."""
    return scheme.group is None and not scheme.zeros


def tpu_backend(
    backend: Backend,
    model: ModelConfig,
    quantization: Quantization | None,
    shards: Shards,
    generation: str | None,
) -> Backend:
    """The backend on TPUs. If layers are unrolled, XLA multiplies, and gate and up are separate arrays: one of both
    would be the largest of a layer, and XLA fetches none that is larger than on-chip memory."""
    if not unrolls(model, quantization, shards, backend, generation):
        return backend
    return replace(backend, matmul="xla", gate_up="separate")
