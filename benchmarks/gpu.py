"""Kernels of a decode step on the GPU of this machine: caches in pages, and products of eight bits.

    python benchmarks/gpu.py pages --batch 1,16,64 --cache 2048
    python benchmarks/gpu.py products --rows 1,16,64,256,1024,8192

"pages": us of a layer's decode attention of Llama-3-8B from its projection on, its cells written, and of
DeepSeek-V2-Lite's over latents, with rows as pages and with shuffled pages of --page positions; "off" is the largest
difference of their outputs, which rounding alone may make. "products": us of Llama-3-8B's gate and up, in bfloat16 and
quantised; "inputs last": of a weight whose inputs lie side by side, as those of "_a8" do. Several layers run in one
program, so that none finds its cache or weight on chip.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from inferlib.attention_values import AttentionOptions, HeadTransforms, KvCache, LatentCache, NewCells
from inferlib.models.quantization import QUANTIZATIONS
from inferlib.ops.matmul import matmul
from inferlib.ops.mla_decode_attention import mla_decode_attention
from inferlib.ops.project_and_attend import project_and_attend
from inferlib.ops.quantized import quantize

LAYERS = 8


def microseconds(run: Callable[..., Any], *fixed: Any, donated: Any = None, repeats: int = 20) -> tuple[float, Any]:
    """Median us of a call, and its result. donated: the first argument, which a call returns as its second result."""
    times, result = [], None
    for _ in range(repeats + 3):
        start = time.perf_counter()
        for _ in range(5):
            result = run(*fixed) if donated is None else run(donated, *fixed)
            donated = donated if donated is None else result[1]
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 5)
    return statistics.median(times[3:]) * 1e6, result


# ---- pages


def shuffled(cells: jax.Array, page: int) -> tuple[jax.Array, jax.Array]:
    """Rows [B, K, S, h] as pages [N, K, page, h], two of which are no row's, and the table [B, S / page]."""
    rows, heads, slots, size = cells.shape
    table = np.random.default_rng(0).permutation(rows * slots // page + 2)[: rows * slots // page]
    split = jnp.moveaxis(cells.reshape(rows, heads, -1, page, size), 2, 1).reshape(-1, heads, page, size)
    pool = jnp.full((split.shape[0] + 2, *split.shape[1:]), jnp.nan, cells.dtype).at[table].set(split)
    return pool, jnp.asarray(table.reshape(rows, -1), jnp.int32)


def grouped(batch: int, cache: int, normal: Callable[..., jax.Array]) -> tuple[list[jax.Array], Callable]:
    """A layer's keys and values [B, K, S, h], and its attention."""
    qkv, lengths = normal(batch, 8, 6, 128), jnp.full((batch,), cache, jnp.int32)
    angles = jnp.zeros((batch, 64)) + 0.5
    transforms, options = HeadTransforms(rope=(jnp.cos(angles), jnp.sin(angles))), AttentionOptions(128**-0.5)

    def attend(arrays: list[jax.Array], pages: jax.Array | None) -> tuple[jax.Array, list[jax.Array]]:
        before = KvCache(*arrays, pages=pages, limit=cache)
        out, after = project_and_attend(qkv, before, lengths, transforms, options)
        return out, list(after.arrays)

    return [normal(batch, 8, cache, 128) for _ in range(2)], attend


def latent(batch: int, cache: int, normal: Callable[..., jax.Array]) -> tuple[list[jax.Array], Callable]:
    """Arrays and attention as above, for latents and rotary keys [B, 1, S, ...]."""
    q, rotary, lengths = normal(batch, 16, 512), normal(batch, 16, 64), jnp.full((batch,), cache, jnp.int32)
    new = NewCells([normal(batch, 1, 512), normal(batch, 1, 64)])

    def attend(arrays: list[jax.Array], pages: jax.Array | None) -> tuple[jax.Array, list[jax.Array]]:
        before = LatentCache(*arrays, pages=pages, limit=cache)
        out, _, after = mla_decode_attention(q, rotary, before, lengths, scale=0.05, new=new, backend="pallas_gpu")
        return out, list(after.arrays)

    return [normal(batch, 1, cache, 512), normal(batch, 1, cache, 64)], attend


def time_pages(kind: Callable, batch: int, cache: int, page: int, repeats: int) -> tuple[float, float, float]:
    """us of a layer with rows as pages and with pages, and the largest difference."""
    keys = iter(jax.random.split(jax.random.key(0), 100))
    arrays, attend = kind(batch, cache, lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16))
    pools, table = zip(*(shuffled(x, page) for x in arrays), strict=True)
    times, outs = [], []
    for stored, pages in ((arrays, None), (pools, table[0])):
        caches = [[x + 0 for x in stored] for _ in range(LAYERS)]

        def run(caches: list[list[jax.Array]], pages=pages) -> tuple[jax.Array, list[list[jax.Array]]]:
            out, written = zip(*(attend(each, pages) for each in caches), strict=True)
            return jnp.stack(out), list(written)

        us, (out, _) = microseconds(jax.jit(run, donate_argnums=0), donated=caches, repeats=repeats)
        times.append(us / LAYERS)
        outs.append(np.asarray(out[0].astype(jnp.float32)))
    return *times, float(np.abs(outs[0] - outs[1]).max())


# ---- products


def time_product(name: str, rows: int, shape: tuple[int, int], repeats: int, last: bool = False) -> float:
    """us of a product of bfloat16 rows with a weight of this shape. last: its inputs lie side by side."""
    keys = jax.random.split(jax.random.key(1), LAYERS + 1)
    x, weights = jax.random.normal(keys[0], (rows, shape[0]), jnp.bfloat16), []
    for key in keys[1:]:
        w: Any = jax.random.normal(key, shape, jnp.bfloat16)
        w = w if name == "bfloat16" else jax.jit(lambda w: quantize(w, (0,), QUANTIZATIONS[name]))(w)
        weights.append(replace(w, values=w.values.T) if last else w)

    def one(x: jax.Array, w: Any) -> jax.Array:
        return matmul(x, replace(w, values=w.values.T), backend="xla") if last else matmul(x, w)

    def run(x: jax.Array, weights: list) -> list[jax.Array]:
        results = []
        for w in weights:  # one after the other, each of its own rounding
            x, w = lax.optimization_barrier((x, w))
            results.append(one(x, w))
        return results

    return microseconds(jax.jit(run), x, weights, repeats=repeats)[0] / LAYERS


def products(rows: list[int], shape: tuple[int, int], repeats: int) -> Table:
    kinds = [("bfloat16", False), ("fp8", False), ("fp8", True), ("fp8_a8", True)]
    kinds += [("int8", False), ("int8", True), ("int8_a8", True)]
    table = Table("rows", *(f"{name}{', inputs last' * last}" for name, last in kinds), title=f"{shape}, us (TFLOP/s)")
    for count in rows:
        figures = [time_product(name, count, shape, repeats, last) for name, last in kinds]
        flops = 2e-6 * count * shape[0] * shape[1]
        table.add_row(str(count), *(f"{us:.1f} ({flops / us:.0f})" for us in figures))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pages", "products"))
    parser.add_argument("--batch", default="1,16,64", help="comma-separated")
    parser.add_argument("--cache", type=int, default=2048, help="positions of a row, a multiple of --page")
    parser.add_argument("--page", type=int, default=128, help="positions of a page")
    parser.add_argument("--rows", default="1,16,64,256,1024,8192", help="comma-separated")
    parser.add_argument("--shape", default="4096,28672", help="inputs and outputs of a weight")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if args.cache % args.page:
        parser.error(f"--cache {args.cache} is not a multiple of --page {args.page}")
    if args.what == "products":
        inputs, outputs = map(int, args.shape.split(","))
        table = products([int(n) for n in args.rows.split(",")], (inputs, outputs), args.repeats)
    else:
        table = Table("attention", "batch", "rows as pages", "pages", "ratio", "off", title=f"us, cache {args.cache}")
        for name, kind in {"8 heads of 128": grouped, "latents of 512": latent}.items():
            for batch in map(int, args.batch.split(",")):
                one, many, off = time_pages(kind, batch, args.cache, args.page, args.repeats)
                table.add_row(name, str(batch), f"{one:.1f}", f"{many:.1f}", f"{many / one:.3f}", f"{off:.1e}")
    console = Console(width=None if Console().is_terminal else 140)
    console.print(jax.devices()[0].device_kind)
    console.print(table)


if __name__ == "__main__":
    main()
