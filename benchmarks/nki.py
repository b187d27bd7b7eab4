"""The Trainium kernels by the counters of the simulator: bytes, matrix slots, and each engine's estimated time.

python benchmarks/nki.py

Nothing here ran on a chip: the times of each engine follow from published rates, and say what could overlap.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib.attention_values import AttentionOptions, KvCache, LatentCache
from inferlib.nki_kernels import mx_pack, simulator
from inferlib.nki_kernels.decode_linear import rmsnorm_matmul, rmsnorm_mlp
from inferlib.nki_kernels.expert_mlp import expert_mlp
from inferlib.nki_kernels.flash_decode import flash_decode
from inferlib.nki_kernels.flash_prefill import flash_prefill
from inferlib.nki_kernels.mla_decode import mla_decode
from inferlib.nki_kernels.mx_matmul import mx_matmul

TARGETS = ("trn2", "trn3")
ENGINES = ("dma", "tensor", "vector", "scalar", "gpsimd")
# Llama-3-8B on 8 cores: 4 query heads and 1 KV head of 128 each.
GROUP, SIZE = 4, 128
# DeepSeek-V3's latents and rotary keys.
RANK, ROTARY = 512, 64
# Qwen3-30B-A3B: width and features of an expert.
EXPERT = 2048, 768


def decode(target: str, context: int, dtype: Any, page: int | None = None) -> tuple[simulator.Counters, int]:
    """(counters, bytes of live keys and values) of one token over `context` positions of one row."""
    rng = np.random.default_rng(0)
    q: Any = rng.normal(size=(1, 1, 1, GROUP, SIZE)).astype(ml_dtypes.bfloat16)
    k, v = rng.normal(size=(2, 1, 1, context, SIZE)).astype(dtype)
    table: Any = None
    lengths: Any = np.array([context], np.int32)
    if page:
        table = np.arange(context // page, dtype=np.int32)[None]
        k, v = (x.reshape(context // page, 1, page, SIZE) for x in (k, v))
    with simulator.session(target) as session:
        run = flash_decode(q, KvCache(k, v, pages=table), lengths, AttentionOptions(SIZE**-0.5), lnc=1)
        jax.block_until_ready(run)
    return session.cores[0], k.nbytes + v.nbytes


def prefill(target: str, width: int, context: int) -> tuple[simulator.Counters, int]:
    """(counters, bytes of visible keys and values) of a chunk of `width` tokens at the end of `context` positions."""
    rng = np.random.default_rng(0)
    q: Any = rng.normal(size=(1, width, 1, GROUP, SIZE)).astype(ml_dtypes.bfloat16)
    k, v = rng.normal(size=(2, 1, 1, context, SIZE)).astype(ml_dtypes.bfloat16)
    rows: Any = np.zeros(1, np.int32)
    positions: Any = np.arange(context - width, context, dtype=np.int32)[None]
    with simulator.session(target) as session:
        run = flash_prefill(q, KvCache(k, v), rows, positions, AttentionOptions(SIZE**-0.5), lnc=1)
        jax.block_until_ready(run)
    return session.cores[0], k.nbytes + v.nbytes


def latents(target: str, context: int, heads: int, tokens: int = 1) -> tuple[simulator.Counters, int]:
    """(counters, bytes of live latents and rotary keys) of DeepSeek-V3's decode attention, pages of 128."""
    rng = np.random.default_rng(0)
    arrays: Any = [
        rng.normal(size=(*shape, n)).astype(ml_dtypes.bfloat16)
        for shape in ((1, tokens, heads), (context // 128, 1, 128))
        for n in (RANK, ROTARY)
    ]
    q, rotary, cells, keys = arrays
    table: Any = np.arange(context // 128, dtype=np.int32)[None]
    lengths: Any = np.array([context], np.int32)
    with simulator.session(target) as session:
        cache = LatentCache(cells, keys, pages=table)
        jax.block_until_ready(mla_decode(q, rotary, cache, lengths, 0.07, lnc=1))
    return session.cores[0], cells.nbytes + keys.nbytes


def matmul(target: str, tokens: int, inner: int, outer: int, element: str) -> tuple[simulator.Counters, int, float]:
    """(counters, bytes of the packed weights, fraction of matrix slots that are useful)."""
    rng = np.random.default_rng(0)
    x: Any = rng.normal(size=(tokens, inner)).astype(ml_dtypes.bfloat16)
    w: Any
    scales: Any
    w, scales = mx_pack.quantise(rng.normal(size=(inner, outer)).astype(np.float32), element)
    if target == "trn2":
        w, scales = mx_pack.for_trn2(w, scales)
    packed: Any = mx_pack.pack(w)
    with simulator.session(target) as session:
        jax.block_until_ready(mx_matmul(x, packed, scales, element=element, lnc=1))
    core = session.cores[0]
    return core, packed.nbytes + scales.nbytes, tokens * inner * outer / core.matmul_slots


def linear(target: str, tokens: int) -> list[tuple[str, simulator.Counters, int]]:
    """(name, counters, bytes of the weights) of the two kernels, Llama-3-8B on 8 cores."""
    rng = np.random.default_rng(0)
    shapes = dict(qkv=(4096, 768), gate=(4096, 1792), up=(4096, 1792), down=(1792, 4096))
    w = {name: (rng.normal(size=s) / s[0] ** 0.5).astype(ml_dtypes.bfloat16) for name, s in shapes.items()}
    x: Any = rng.normal(size=(tokens, 4096)).astype(ml_dtypes.bfloat16)
    weight: Any = np.ones(4096, np.float32)
    measured = []
    for name, function, matrices in (
        ("norm and projection", rmsnorm_matmul, (w["qkv"],)),
        ("feed-forward", rmsnorm_mlp, (w["gate"], w["up"], w["down"])),
    ):
        with simulator.session(target) as session:
            jax.block_until_ready(function(x, weight, *matrices, eps=1e-5, lnc=1))
        measured.append((name, session.cores[0], sum(m.nbytes for m in matrices)))
    return measured


def experts(target: str, tokens: int, count: int, chosen: int, places: int) -> tuple[simulator.Counters, int]:
    """(counters, bytes of the chosen experts' weights) of tokens that all choose the same of `count` experts; places:
    the most that could be chosen."""
    rng, (width, features) = np.random.default_rng(0), EXPERT
    arrays: Any = [
        rng.normal(size=shape, scale=0.02).astype(ml_dtypes.bfloat16)
        for shape in ((tokens, width), (count, 2, width, features), (count, features, width))
    ]
    x, gate_up, down = arrays
    factors: Any = np.zeros((tokens, count), np.float32)
    factors[:, -chosen:] = 0.1
    with simulator.session(target) as session:
        jax.block_until_ready(expert_mlp(x, gate_up, down, factors, most=places, lnc=1))
    return session.cores[0], (gate_up.nbytes + down.nbytes) // count * chosen


def main() -> None:
    console = Console(width=None if Console().is_terminal else 130)
    attention = _table("Attention: bytes / live keys and values")
    for target in TARGETS:
        for name, dtype, page in (
            ("decode, bfloat16", ml_dtypes.bfloat16, None),
            ("decode, bfloat16, pages of 16", ml_dtypes.bfloat16, 16),
            ("decode, float8_e4m3", ml_dtypes.float8_e4m3, None),
        ):
            core, floor = decode(target, 8192, dtype, page)
            _row(attention, f"{target} {name}, 8192", core, f"{core.hbm_bytes / floor:.4f}")
        core, floor = prefill(target, 512, 2048)
        _row(attention, f"{target} prefill, 512 of 2048", core, f"{core.hbm_bytes / floor:.4f}")
        for heads, tokens in ((16, 1), (128, 1), (128, 4)):
            core, floor = latents(target, 4096, heads, tokens)
            name = f"{target} decode over latents, {heads} heads, {tokens} a row, 4096"
            _row(attention, name, core, f"{core.hbm_bytes / floor:.4f}")
    console.print(attention)
    products = _table("MX products, 4096 x 4096: bytes / packed weights; useful matrix slots")
    for target in TARGETS:
        for element in ("float8_e4m3fn", "float4_e2m1fn"):
            for tokens in (8, 128):
                core, floor, useful = matmul(target, tokens, 4096, 4096, element)
                name = f"{target} {element}, {tokens} tokens"
                _row(products, name, core, f"{core.hbm_bytes / floor:.4f}; {100 * useful:.1f} %")
    console.print(products)
    layers = _table("The rest of a decode layer, Llama-3-8B on 8 cores, bfloat16, and experts: bytes / weights")
    for target in TARGETS:
        for name, core, floor in linear(target, 8):
            _row(layers, f"{target} {name}, 8 tokens", core, f"{core.hbm_bytes / floor:.4f}")
        # Of 128 experts, 8 tokens choose 52 of the 64 that they could by expectation, as 8 of 10.
        core, floor = experts(target, 8, 12, 8, 10)
        _row(layers, f"{target} 8 experts of Qwen3-30B-A3B, 8 tokens", core, f"{core.hbm_bytes / floor:.4f}")
    console.print(layers)


def _table(title: str) -> Table:
    table = Table(title=f"{title}. Counters of the stand-in; us of each engine estimated from published rates")
    for column in ("", "ratio", *ENGINES, "SBUF KiB", "PSUM banks"):
        table.add_column(column, justify="right")
    return table


def _row(table: Table, name: str, core: simulator.Counters, ratio: str) -> None:
    times = [f"{core.busy_us.get(engine, 0.0):.1f}" for engine in ENGINES]
    table.add_row(name, ratio, *times, f"{core.sbuf_peak / 1024:.0f}", str(core.psum_peak))


if __name__ == "__main__":
    main()
