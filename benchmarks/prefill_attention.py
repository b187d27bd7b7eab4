"""Prefill attention on a GPU: microseconds a call, by each kernel that takes the case.

    python benchmarks/prefill_attention.py
    python benchmarks/prefill_attention.py --heads 8 --group 8 --size 64
    python benchmarks/prefill_attention.py --lists xattention:1 --prompt 32768 --steps 8192,2048,512

Prompts are tiles of 32 tokens, in shuffled pages of 128 positions. "PxT behind N": P prompts of T tokens, each behind
N that are in the cache. Counted are both products over the keys that a query sees. "hopper" and "every" are our
kernels, "cudnn" is `jax.nn.dot_product_attention` over whole prompts without pages, where nothing precedes them.
Each time is the median of five runs of 40 calls; a call costs the host some 20 us.

With --lists: the last step of a prompt, of so many tokens. "dense" is attention to all, in tiles of 32 tokens,
"estimate" makes the lists of tiles of 128 (XLA's form gathers the keys of each tile first), "listed" attends to them,
and "both" does one after the other. "listed blocks" is the share of the blocks that tiles see. `xattention:1` fills
each list: a quarter of the prompt's blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.ops.prefill_attention import prefill_attention
from inferlib.ops.sparse_prefill import BLOCK, Listing, SparsePrefill, block_list
from inferlib.pallas_kernels import prefill_attention_gpu as every
from inferlib.pallas_kernels import prefill_attention_hopper_gpu as hopper
from inferlib.platforms import prepare_jax

TILE, PAGE = 32, 128
CASES = (
    (1, 2000, 0),
    (4, 2000, 0),
    (8, 1000, 0),
    (64, 128, 0),
    (4, 512, 7680),
    (64, 128, 1920),
    (1, 512, 3584),
    (1, 128, 2048),
    (1, 128, 7680),
    (1, 32, 2048),
)


def seconds(run: Callable, *inputs) -> float:
    """Seconds of one call, where many are sent at once."""
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        results = [run(*inputs) for _ in range(40)]
        jax.block_until_ready(results[-1])
        times.append((time.perf_counter() - start) / 40)
    return statistics.median(times)


def inputs_of(case: tuple[int, int, int], heads: int, group: int, size: int, tile: int = TILE) -> tuple:
    """Queries, cache, rows and positions."""
    prompts, length, behind = case
    tiles, columns = -(-length // tile), -(-(behind + length + tile) // PAGE)
    count = prompts * columns
    keys = jax.random.split(jax.random.key(0), 3)
    cells = [jax.random.normal(key, (count, heads, PAGE, size), jnp.bfloat16) for key in keys[:2]]
    pages = np.random.default_rng(0).permutation(count).reshape(prompts, columns).astype(np.int32)
    positions = behind + np.arange(tiles * tile, dtype=np.int32).reshape(tiles, tile)
    q = jax.random.normal(keys[2], (prompts * tiles, tile, heads, group, size), jnp.bfloat16)
    rows = np.repeat(np.arange(prompts, dtype=np.int32), tiles)
    cache = KvCache(*cells, pages=jnp.asarray(pages))
    return q, cache, jnp.asarray(rows), jnp.asarray(np.tile(positions, (prompts, 1)))


def by_cudnn(case: tuple[int, int, int], heads: int, group: int, size: int) -> float | None:
    prompts, length, behind = case
    if behind:
        return None
    q, k, v = (jnp.ones((prompts, length, n, size), jnp.bfloat16) for n in (heads * group, heads, heads))
    run = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="cudnn"))
    return seconds(run, q, k, v)


def with_lists(text: str, prompt: int, steps: list[int], shape: tuple[int, int, int]) -> Table:
    """The last steps of a prompt, of some tokens each: attention to all, and to lists."""
    sparse, options = SparsePrefill.read(text), AttentionOptions(shape[2] ** -0.5)
    if sparse is None or any(step % BLOCK or step > prompt for step in steps):
        raise SystemExit(f"--lists takes text such as xattention:1, and --steps multiples of {BLOCK} up to --prompt")
    table = Table(title=f"{jax.devices()[0].device_kind}, {sparse}, {prompt} tokens, us")
    for name in ("step", "dense", "estimate by XLA", "estimate", "listed", "both", "dense / both", "listed blocks"):
        table.add_column(name, justify="right")

    def estimate(backend: str, q, cache, rows, positions):
        lengths, listing = jnp.full(len(rows), BLOCK), Listing(sparse, sparse.max_blocks(prompt, prompt), backend)
        return block_list(q, cache, rows, positions, lengths, options, listing)

    def attend(listed, q, cache, rows, positions):
        return prefill_attention(q, cache, rows, positions, options, listed=listed, backend="pallas_gpu")

    def both(*inputs):
        return attend(estimate("pallas_gpu", *inputs), *inputs)

    for step in steps:
        q, cache, rows, positions = inputs_of((1, step, prompt - step), *shape, BLOCK)
        inputs = q, replace(cache, limit=prompt), rows, positions
        small = [x.reshape(-1, TILE, *x.shape[2:]) for x in (q, positions)]
        listed = jax.jit(partial(estimate, "pallas_gpu"))(*inputs)
        times = [
            seconds(jax.jit(partial(attend, None)), small[0], inputs[1], rows.repeat(BLOCK // TILE), small[1]),
            *(seconds(jax.jit(partial(estimate, name)), *inputs) for name in ("xla", "pallas_gpu")),
            seconds(jax.jit(attend), listed, *inputs),
            seconds(jax.jit(both), *inputs),
        ]
        counts = np.asarray(listed.numbers >= 0).sum(axis=(1, 2, 3)) / shape[0]
        share = float(np.mean(counts / (np.asarray(positions)[:, -1] // BLOCK + 1)))
        table.add_row(str(step), *(f"{x * 1e6:.0f}" for x in times), f"{times[0] / times[-1]:.2f}", f"{share:.0%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 8), ("group", 4), ("size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lists", help="how a long prompt lists blocks, such as xattention:1")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of that prompt")
    parser.add_argument("--steps", default="8192,2048,512", help="tokens of its last step, several with commas")
    args = parser.parse_args()
    prepare_jax()
    if jax.default_backend() != "gpu":
        parser.error("the kernels need a GPU")
    shape, options = (args.heads, args.group, args.size), AttentionOptions(args.size**-0.5)
    if args.lists:
        steps = [int(x) for x in args.steps.split(",")]
        return Console(width=100).print(with_lists(args.lists, args.prompt, steps, shape))
    table = Table(title=f"{jax.devices()[0].device_kind}, {args.heads} KV heads of {args.group}, size {args.size}")
    for name in ("case", "every, us", "hopper, us", "cudnn, us", "hopper, TFLOP/s"):
        table.add_column(name, justify="right")
    for case in CASES:
        q, cache, rows, positions = inputs_of(case, *shape)
        attend = lambda kernel: jax.jit(partial(kernel, options=options))  # noqa: E731
        times: list[float | None] = [seconds(attend(every.prefill_attention), q, cache, rows, positions), None]
        if hopper.is_hopper() and hopper.unsupported(q, cache, options) is None:
            times[1] = seconds(attend(hopper.prefill_attention), q, cache, rows, positions)
        times.append(by_cudnn(case, *shape))
        rate = 4 * args.heads * args.group * args.size * float((np.asarray(positions) + 1.0).sum())
        figures = [f"{x * 1e6:.0f}" if x else "" for x in times]
        table.add_row("{}x{} behind {}".format(*case), *figures, f"{rate / times[1] / 1e12:.0f}" if times[1] else "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
