"""The kernels that `inferlib doctor` runs on each platform, and what they are held to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax

from inferlib.doctor import trials
from inferlib.doctor.findings import Finding, public
from inferlib.doctor.trials import TOLERANCE, Trial
from inferlib.pallas_kernels.generations_tpu import FLOAT4, GENERATIONS, planning_for
from inferlib.tuning.kernel_cases import chunk_write, decode_attention, prefill_attention
from inferlib.tuning.kernel_cases.chunk_write import ChunkWrite
from inferlib.tuning.kernel_cases.decode_attention import DecodeAttention
from inferlib.tuning.kernel_cases.expert_mlp import ExpertMlp
from inferlib.tuning.kernel_cases.group_order import GroupOrder
from inferlib.tuning.kernel_cases.grouped_matmul import GroupedMatmul
from inferlib.tuning.kernel_cases.mla_decode_attention import MlaDecodeAttention
from inferlib.tuning.kernel_cases.mla_prefill_attention import MlaPrefillAttention
from inferlib.tuning.kernel_cases.mx_matmul import MxMatmul
from inferlib.tuning.kernel_cases.prefill_attention import PrefillAttention

TPU, GPU = "pallas_tpu", "pallas_gpu"
AREA = "kernel"
PAGE = 128  # positions of a page, as engines have them
_ON_CPU = {
    ("decode attention", "4 rows, written"),
    ("prefill attention", "64 behind 100"),
    ("product", "int8, 16 rows"),
    ("product", "on chip, 16 rows"),
    ("product", "fetched, 16 rows"),
    ("latent decode attention (GPU)", "2 rows"),
}
_MOST_LOGITS = 1 << 28  # that XLA writes to memory, in float32


@dataclass(frozen=True)
class Check:
    """A kernel at some shapes. make: draws its arrays. real: shapes of models that people serve."""

    kernel: str
    case: str
    make: Callable[[], Trial]
    real: bool = False


def checks(platform: str, kind: str = "") -> list[Check]:
    """The checks of "tpu" or "gpu"; for "cpu" a few small ones, whose kernels are interpreted; else none. kind:
    JAX's name of the device."""
    if platform == "tpu":
        return [*_tpu_small(), *_tpu_real(GENERATIONS.get(kind) in FLOAT4)]
    if platform == "gpu":
        return [*_gpu_small(), *_gpu_real()]
    if platform != "cpu":
        return []
    return [check for check in (*_tpu_small(), *_gpu_small()) if (check.kernel, check.case) in _ON_CPU]


def run(check: Check) -> Finding:
    """Compile and run a check on the default device."""
    start, figures = time.perf_counter(), {}
    generation = GENERATIONS.get(jax.devices()[0].device_kind)
    try:
        with planning_for(generation):  # what kernels may take of this chip
            error = check.make().error()
    except Exception as problem:  # one kernel that fails must not hide the others
        return Finding(AREA, f"{check.kernel}, {check.case}", "wrong", public(f"{type(problem).__name__}: {problem}"))
    figures = {"error": error, "tolerance": TOLERANCE, "seconds": time.perf_counter() - start, "real": check.real}
    good = error <= TOLERANCE
    detail = (
        f"error {error:.1e} of a row's length" if good else f"error {error:.1e}, and at most {TOLERANCE} is rounding"
    )
    return Finding(AREA, f"{check.kernel}, {check.case}", "ok" if good else "wrong", detail, figures)


def _tpu_small() -> Iterator[Check]:
    rows = (5, 130, 256, 77)
    for name, case in {
        "4 rows": DecodeAttention(rows, heads=2),
        "4 rows, written": DecodeAttention(rows, heads=2, writes=True),
        "pages of 64": DecodeAttention(rows, heads=2, page=64),
        "int8": DecodeAttention(rows, heads=2, stored="int8"),
    }.items():
        yield Check("decode attention", name, partial(trials.decode, case, TPU))
    yield Check("prefill attention", "64 behind 100", partial(trials.prefill, PrefillAttention(64, 100, heads=2), TPU))
    yield Check("cache write", "48 tokens", partial(trials.write_chunk, ChunkWrite(48, start=100, heads=2), 256))
    latent = MlaDecodeAttention((5, 300), heads=16)
    yield Check("latent decode attention", "2 rows", partial(trials.mla_decode, latent, TPU))
    for scheme in ("bfloat16", "int8", "mxfp4"):
        yield Check("product", f"{scheme}, 16 rows", partial(trials.product, MxMatmul(scheme, 16, 256, 384), TPU))
    yield Check("product", "on chip, 16 rows", partial(trials.loop, MxMatmul("int8", 16, 256)))
    yield Check("product", "fetched, 16 rows", partial(trials.fetched, MxMatmul("int8", 16, 256)))
    some = GroupedMatmul(16, inner=256, outer=128, experts=8, chosen=2)
    yield Check("experts' product", "16 tokens", partial(trials.grouped, some, TPU))
    yield Check("experts", "16 tokens", partial(trials.experts, ExpertMlp(16, 256, 128, experts=8, chosen=2)))
    yield Check("order by expert", "64 tokens", partial(trials.order, GroupOrder(64, groups=16, chosen=2)))
    yield Check("sum of experts", "256 tokens", partial(trials.summed, GroupOrder(256, groups=16, chosen=2), 256))


def _tpu_real(float4: bool) -> Iterator[Check]:
    for name in ("F", "F, page 128", "F, int8", "F, fp8", "F, written", "F, window 1024"):
        case = decode_attention.CASES[name]
        yield Check("decode attention", f"32 rows of 4096, {name}", partial(trials.decode, case, TPU), True)
    for name, case in prefill_attention.CASES.items():
        if case.page is None and case.size == 128 and _logits(case) < _MOST_LOGITS:
            yield Check("prefill attention", f"{name} tokens", partial(trials.prefill, case, TPU), True)
    for name in ("512 tokens", "512 tokens, int8"):
        case = chunk_write.CASES[name]
        yield Check("cache write", name, partial(trials.write_chunk, case, chunk_write.SLOTS), True)
    latent = MlaDecodeAttention((4096,) * 16, heads=128)
    yield Check("latent decode attention", "16 rows of 4096", partial(trials.mla_decode, latent, TPU), True)
    chunk = MlaPrefillAttention(512, start=3584)
    yield Check("latent prefill attention", "512 behind 3584", partial(trials.mla_prefill, chunk), True)
    for scheme in ("bfloat16", "int8", "fp8", "mxfp8", "int4", "mxfp4", "fp8_block"):
        case = MxMatmul(scheme, rows=32)
        make = partial(trials.product, case, TPU, float4=float4)
        yield Check("product", f"{scheme}, 32 x 4096 x 14336", make, True)
    for scheme in ("int8", "int4", "mxfp4"):
        make = partial(trials.loop, MxMatmul(scheme, 16))
        yield Check("product", f"on chip, {scheme}, 16 x 4096 x 4096", make, True)
        make = partial(trials.fetched, MxMatmul(scheme, 16))
        yield Check("product", f"fetched, {scheme}, 16 x 4096 x 4096", make, True)
    for scheme in ("bfloat16", "int8", "mxfp4"):
        case = GroupedMatmul(32, experts=64, scheme=scheme)
        yield Check("experts' product", f"32 tokens, 64 experts, {scheme}", partial(trials.grouped, case, TPU), True)
        mlp = ExpertMlp(32, experts=64, scheme=scheme)
        yield Check("experts", f"32 tokens, 64 experts, {scheme}", partial(trials.experts, mlp), True)
    yield Check("order by expert", "4096 tokens", partial(trials.order, GroupOrder(4096)), True)
    yield Check("sum of experts", "4096 tokens", partial(trials.summed, GroupOrder(4096), 4096), True)


def _logits(case: PrefillAttention) -> int:
    return case.heads * case.group * case.width * (case.start + case.width)


def _gpu_small() -> Iterator[Check]:
    rows = (5, 130, 256, 77)
    yield Check("decode attention (GPU)", "rows as pages", partial(trials.decode, DecodeAttention(rows, heads=2), GPU))
    case = DecodeAttention(rows, heads=2, page=64)
    yield Check("decode attention (GPU)", "4 rows", partial(trials.decode, case, GPU))
    yield Check("decode attention from products on (GPU)", "4 rows", partial(trials.qkv, case))
    chunk = PrefillAttention(64, 100, heads=2, page=64)
    yield Check("prefill attention (GPU)", "64 behind 100", partial(trials.prefill, chunk, GPU))
    latent = MlaDecodeAttention((5, 300), heads=16, page=128)
    yield Check("latent decode attention (GPU)", "2 rows", partial(trials.mla_decode, latent, GPU))
    for scheme in ("bfloat16", "int8", "mxfp4"):
        yield Check("product (GPU)", f"{scheme}, 1 row", partial(trials.product, MxMatmul(scheme, 1, 512, 1024), GPU))
    some = GroupedMatmul(16, inner=256, outer=128, experts=8, chosen=2)
    yield Check("experts' product (GPU)", "16 tokens", partial(trials.grouped, some, GPU))
    yield Check("choice of experts (GPU)", "16 tokens", partial(trials.choice, 16, 64, 4))
    yield Check("residual and norm (GPU)", "4 rows", partial(trials.add_norm, 4, 1024))


def _gpu_real() -> Iterator[Check]:
    for name, lengths in {"1 row of 8192": (8192,), "32 rows of 4096": (4096,) * 32}.items():
        case = DecodeAttention(lengths, heads=8, page=PAGE)
        yield Check("decode attention (GPU)", name, partial(trials.decode, case, GPU), True)
        yield Check("decode attention from products on (GPU)", name, partial(trials.qkv, case), True)
    for width, start in ((512, 3584), (2048, 0)):
        case = PrefillAttention(width, start, page=PAGE)
        yield Check("prefill attention (GPU)", f"{width} behind {start}", partial(trials.prefill, case, GPU), True)
    latent = MlaDecodeAttention((4096,) * 16, heads=16, page=PAGE)
    yield Check("latent decode attention (GPU)", "16 rows of 4096", partial(trials.mla_decode, latent, GPU), True)
    yield Check("latent queries (GPU)", "16 rows", partial(trials.latent_queries, 16, 16), True)
    for scheme in ("int8", "fp8", "mxfp8", "int4", "mxfp4", "fp8_block"):
        for count in (1, 4 if scheme in ("int8", "fp8") else 16):  # more are XLA's
            case = MxMatmul(scheme, rows=count)
            yield Check("product (GPU)", f"{scheme}, {count} x 4096 x 14336", partial(trials.product, case, GPU), True)
    for scheme in ("bfloat16", "int8", "mxfp4"):
        for tokens in (1, 32):
            case = GroupedMatmul(tokens, experts=64, scheme=scheme)
            name = f"{tokens} tokens, 64 experts, {scheme}"
            yield Check("experts' product (GPU)", name, partial(trials.grouped, case, GPU), True)
    yield Check("choice of experts (GPU)", "64 tokens of 128", partial(trials.choice, 64, 128, 8), True)
    for tokens in (1, 16):
        yield Check("residual and norm (GPU)", f"{tokens} x 4096", partial(trials.add_norm, tokens, 4096), True)
