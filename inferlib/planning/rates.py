"""A few measured numbers on how fast the kernels of each platform are, given their bytes and operations.

GPUs: an H200, from steps of decoding (`configs/measurements/h200-decode.yaml`) and single products
(docs/kernels/measurements.md). TPUs: listings of kernels, and of the small operations of the programs of
`configs/plans` (docs/guide/planning.md). Other platforms have no such numbers, and are priced by bytes and operations
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

from inferlib.planning.network import Efficiency
from inferlib.targets import Target


@dataclass(frozen=True)
class Rate:
    """How fast a kernel is.

    flops: FLOP/s, None for the rate of the chip's matrix products, of which it attains the share `compute`. unpack:
    packed elements that it unpacks per second. power: operations and bytes together take the norm of this power of
    their times: inf where the shorter is hidden, 1 where neither is. start: seconds of each launch. share: the attained
    share of the memory bandwidth of large copies.
    """

    flops: float | None = None
    unpack: float = inf
    power: float = inf
    start: float = 0.0
    share: float = 1.0
    compute: float = 1.0


PEAK = Rate()
# XLA's products of thousands of tokens on GPUs, and the kernel of prefill attention, from steps of 2048 tokens of
# Llama-3-8B on an H200 (`configs/measurements/h200-engine.yaml`).
XLA_GPU = Rate(compute=0.77, power=2)
PREFILL_GPU = Rate(flops=280e12)
# Of TPU kernels, r of `benchmarks/kernels.py` for the usual case of each: seconds by its listing, with waits for
# copies, over its bytes or operations at the published rates (docs/kernels/measurements.md).
RATIOS: Mapping[str, Mapping[str, float]] = {
    "decode_attention": {"v5e": 1.03, "v6e": 1.06, "v5p": 1.10, "v7x": 1.13},
    "mla_decode_attention": {"v5e": 1.10, "v6e": 1.03, "v5p": 2.27, "v7x": 1.90},
    "prefill_attention": {"v5e": 1.25, "v6e": 3.1, "v5p": 1.28, "v7x": 3.4},
    "mla_prefill_attention": {"v5e": 1.22, "v6e": 1.76, "v5p": 1.22, "v7x": 1.92},
    "mx_matmul": {"v5e": 1.02, "v6e": 1.03, "v5p": 1.05, "v7x": 1.30},
    "grouped_matmul": {"v5e": 1.01, "v6e": 1.01, "v5p": 1.05, "v7x": 1.07},
    "expert_mlp": {"v5e": 1.01, "v6e": 1.02, "v5p": 1.05, "v7x": 1.14},
    "collective_matmul": {"v5e": 1.08, "v6e": 1.20, "v5p": 2.0, "v7x": 1.2},
}
# The kernel of products with weights that are on chip already, from the listings of Parcae-370M's decode step
# (docs/guide/tpu.md): by TPU generation. Copying them there first takes its own time.
ON_CHIP = {None: Rate(unpack=2.4e12, power=1), "v6e": Rate(unpack=3.1e12, power=1)}
# Products on GPUs, by the names that `ops.matmul.choose` and `ops.grouped_matmul.choose` return. XLA converts weights
# with a scale for each channel in the product, and writes those in groups to memory first.
XLA_CHANNEL = Rate(unpack=7.8e12, power=1)
XLA_GROUPS = Rate(unpack=5e11, power=1)
# The kernel of few rows adds partial sums in another kernel. It serves four rows in the time of two.
ROWS_4_BIT = Rate(flops=118e12, unpack=6.8e12, start=1.8e-6)
ROWS_8_BIT = Rate(flops=118e12, unpack=5.0e12, start=1.8e-6)
ROWS_STEP = 4
# XLA's small products, with the factors of a rotation or of a branch of low rank, take as long to start.
THIN_GPU = Rate(start=1.8e-6)
# The two launches of a branch run beside its weight's product. What a step of Llama-3-8B in int4 took longer for them
# on an H100 was 0.22 ms with 1 row, 0.33 with 16, and nothing with 64.
THIN_LAUNCHES_GPU = 1
# The kernel of tiles, whose tiles have up to 64 rows of one weight, and mostly 16 of an expert.
TILES = {
    "float4_e2m1fn": Rate(flops=265e12, unpack=1.1e12, power=1),
    "int4": Rate(flops=265e12, unpack=6.9e12, power=1),
}
TILES_8_BIT = Rate(flops=265e12, power=1)
EXPERT_TILES_4_BIT = Rate(flops=265e12, unpack=3e12, power=1)
# Decode attention over latents, from DeepSeek-V2-Lite at 16 and 64 rows.
LATENTS = Rate(share=0.5)


@dataclass(frozen=True)
class Part:
    """Work of one kind of kernel in a step. launches: of the kernel; elements: of packed weights."""

    rate: Rate
    flops: float
    nbytes: float
    elements: float = 0.0
    launches: float = 0.0

    def seconds(self, target: Target, efficiency: Efficiency) -> tuple[float, float, float]:
        """Seconds of its operations, of its bytes, and of all together."""
        rate = self.rate
        attained = rate.flops or target.rate("bfloat16") * efficiency.compute * rate.compute
        compute = self.flops / attained + self.elements / rate.unpack
        memory = self.nbytes / (target.hbm_bandwidth * efficiency.memory * rate.share)
        busy = (
            max(compute, memory)
            if rate.power == inf
            else (compute**rate.power + memory**rate.power) ** (1 / rate.power)
        )
        return compute, memory, busy + self.launches * rate.start


def rounded(rate: Rate, rows: float) -> float:
    """The number of rows that a kernel multiplies, as a multiple of the rows there are."""
    if rate not in (ROWS_4_BIT, ROWS_8_BIT) or rows <= 1:
        return 1.0
    return ceil(rows / ROWS_STEP) * ROWS_STEP / rows


@dataclass(frozen=True)
class Small:
    """Seconds of a layer's small operations, such as norms, rotary embedding, residual sums and routing.

    layer: of any layer. norm: of each norm beyond the two that precede the branches. latent, experts: of a layer with
    them, beside that; cell: to write the latents of a token. exchange: of tokens that go to experts of other devices,
    beside that. sorted, sent: of a chunk whose tokens are sorted by expert, and go to other devices; exchanged: of each
    element that does. element: of the residual, on one core, if that takes longer than `layer`.
    """

    layer: float = 0.0
    norm: float = 0.0
    latent: float = 0.0
    cell: float = 0.0
    experts: float = 0.0
    exchange: float = 0.0
    sorted: float = 0.0
    sent: float = 0.0
    exchanged: float = 0.0
    element: float = 0.0


SMALL = {
    "gpu": Small(layer=15e-6, latent=14e-6, experts=15e-6, element=9.5e-12),
    "tpu": Small(
        layer=5.2e-6,
        norm=1.9e-6,
        latent=12e-6,
        cell=0.69e-6,
        experts=16e-6,
        exchange=5.6e-6,
        sorted=200e-6,
        sent=620e-6,
        exchanged=100e-12,
        element=16e-12,
    ),
}
NO_SMALL = Small()
