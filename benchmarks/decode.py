"""Decode speed: ms per step, tokens/s, GB/s, and the fraction of the copy bandwidth measured in the same run.

    python benchmarks/decode.py --config llama3-8b --batch 1,64 --cache 2048 --peer hf
    python benchmarks/decode.py --model smollm2 --batch 1 --cache 512 --peer hf
    python benchmarks/decode.py --config llama3-8b --batch 1,16,64 --quantization fp8_a8 --prefill 32x2000
    python benchmarks/decode.py --config llama3-8b --batch 8 --cache 32768 --attention-pages quest:16
    python benchmarks/decode.py --config llama3-8b --batch 8 --cache 32768 --cache-policy keydiff:2048 --steps 512

--config takes a shape from configs/ with random weights, --model a checkpoint. Every row of the cache is full except
for the timed steps. --quantization stores the matrices in fewer bits, with --experts-only just those of experts;
--rotated and --rank add what calibrated weights may have: inputs of down projections that are rotated while the model
runs, and branches of low rank. "host us" is our own Python per dispatch, "enqueue us" the call that starts a program.
Both overlap with the device, and are medians, since pauses of Python's garbage collector fall on either by chance. The
floor of a step is the bytes that it must read (weights once, each live key and value once, and the experts that are
chosen if all are equally likely) over the copy bandwidth. --peer hf times Hugging Face `generate` on the same shape: on
a GPU with a static cache and torch.compile, on a CPU unchanged; hf-plain: unchanged on both. With --attention-pages the
floor has what is read of the cache, and the summaries. With --cache-policy rows begin with as many tokens as they keep,
a median is of as many steps as lie between two compactions, these included, and the floor has the cells that rows have
on average. --prefill NxL also times N prompts of L tokens, from the first's start to the last's first token;
--sparse-prefill is that option of `LLM` for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib import configs
from inferlib.cache.plan import BlockState, plan_cache
from inferlib.calibration.rotation import online_rotation
from inferlib.checkpoint.load import load_weights
from inferlib.config import DeviceKind, EngineConfig, EngineOptions, PoolSize
from inferlib.doctor.rates import copy_bandwidth
from inferlib.engine.engine import Engine, EngineStats
from inferlib.engine.sequence import Sequence, Status
from inferlib.llm import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.cache_levels import with_cache_levels
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf, family_of
from inferlib.models.quantization import QUANTIZATIONS, Quantization
from inferlib.ops.cache_policy import CachePolicy
from inferlib.ops.quantized import nbytes
from inferlib.ops.selected_pages import PageSelection
from inferlib.option_checks import backend_option, parts_option, sparse_option
from inferlib.platforms import prepare_jax
from inferlib.programs.memory import OutOfMemoryError, explained
from inferlib.programs.program_set import ProgramSet
from inferlib.programs.row_changes import Grant
from inferlib.sampling.params import SamplingParams
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def large_copies() -> float:
    """`copy_bandwidth` of 4 GiB on a GPU, and of 256 MiB elsewhere."""
    return copy_bandwidth(1 << 30 if jax.default_backend() == "gpu" else 1 << 26)


def step_bytes(model: AbstractModel, batch: int, length: int, selection: PageSelection | None = None) -> float:
    """Bytes that one decode step must read: the live cache, or what is selected of it and all summaries, and all
    weights but embedding tables, and the experts that tokens choose if all are equally likely."""
    config, total = model.config, 0.0
    for weight in model.weights:
        if model.looks_up(weight.name):
            continue
        share = 1.0
        if axes.EXPERTS in weight.axes:
            mlp: Any = config.layers[model.layers_of(weight.block or 0)[0]].mlp
            share = mlp.read_share(batch)
        total += share * sum(nbytes(array.shape, array.dtype) for array in weight.arrays)
    pool = PoolSize(selection=selection)
    plan = plan_cache(model, rows=1, max_len=length, chunk=1, dtype=model.dtype, pool=pool)
    for block, layers in zip(plan.blocks, model.blocks(), strict=True):
        if isinstance(block, BlockState):
            total += batch * len(layers) * block.row_bytes()
            continue
        seen = min(length, config.layers[layers[0]].attention.reach or length)
        cells, summaries = (sum(x.position_bytes() for x in part) for part in (block.arrays, block.summaries))
        read = seen if block.block is None or selection is None else min(seen, selection.count * block.block)
        total += batch * len(layers) * (read * (cells - summaries) + seen * summaries)
    return total


def occupy(engine: Engine, length: int, room: int) -> None:
    """Fill every row as if it had decoded up to `length` tokens, with random keys and values, and had `room` more to
    generate."""
    keys = jax.random.split(jax.random.key(1), len(engine.cache))
    fill = cache(lambda sharding: jax.jit(_noise, static_argnums=(1, 2), out_shardings=sharding))
    arrays = []
    for key, x in zip(keys, engine.cache, strict=True):
        x.delete()  # there is no room for both; jit would not donate what it does not read
        arrays.append(fill(x.sharding)(key, x.shape, x.dtype))
    engine.cache = tuple(arrays)
    rows, bounded = engine.config.max_batch, engine.scheduler.bounded
    budgets = (0,) if bounded is None else bounded.policy.budgets
    dropped = budgets[-1] - budgets[0]  # of layers that keep least, if others keep all tokens
    tokens = np.random.default_rng(0).integers(
        0, engine.model.config.vocab, rows
    )  # different tokens choose different experts
    values: dict[str, Any] = {"token": tokens, "length": length, "budget": room, "generated": 1, "active": 1}
    if dropped:
        values |= {"dropped": dropped, "ahead": np.array(budgets[1:]) - budgets[0]}
    fields = {
        name: jax.device_put(np.broadcast_to(np.asarray(value, x.dtype), x.shape), x.sharding)
        for name, value in values.items()
        for x in [getattr(engine.state, name)]
    }
    engine.state = engine.state._replace(**fields)
    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
    for row in range(rows):
        prompt = [0] * (length + dropped)
        s = Sequence(prompt, params, room, seed=0, status=Status.DECODE, row=row, prefilled=len(prompt), scheduled=1)
        s.tokens.append(int(tokens[row]))
        if bounded is not None:
            s.bound, s.dropped = bounded.policy.compacts_at, dropped
            bounded.decode(s)
        if (levels := engine.scheduler.pages[row // engine.config.rows].levels) is not None:
            engine.scheduler.changes.grants += [Grant(row, column, page) for column, page in levels.start(s)]
        engine.scheduler.running[row] = s


def _noise(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def of_experts(quantization: Quantization, config: ModelConfig, dtype: str) -> Quantization:
    """The quantization for a model's experts alone."""
    others = {w.part for w in abstract_model(config, dtype).weights if axes.EXPERTS not in w.axes}
    return replace(quantization, unquantized=tuple(sorted(others)))


def engine_config(model: ModelConfig, batch: int, cache: int, shards: Shards, **options: Any) -> EngineConfig:
    """The engine's defaults on the devices of this machine, without prefix caching: `occupy`'s rows have no prompt.
    options: of `EngineOptions`."""
    resolved = EngineOptions(max_batch=batch, max_len=cache, **options)
    config = resolved.resolve(DeviceKind.of(jax.devices()[0]), shards, model)
    config.check_model(model)
    return replace(config, prefix_caching=False)


def measure(model: AbstractModel, weights, batch: int, cache: int, steps: int, shards: Shards, **options: Any) -> dict:
    """Median ms per step of the engine's own loop, and the host's share. options: see `engine_config`."""
    config = engine_config(model.config, batch, cache, shards, **options)
    engine, policy = Engine(model, weights, config), config.compacted
    length = cache - steps - 1 if policy is None else policy.budgets[0]
    occupy(engine, length, steps + 1)
    block, times, hosts, enqueues = max(8, config.decode_steps, policy.interval if policy else 0), [], [], []
    mean = cache - steps // 2 if policy is None else policy.budget + policy.interval // 2
    engine.advance()
    engine.advance()
    while engine.busy:
        engine.stats = EngineStats()
        start = time.perf_counter()
        while engine.busy and engine.stats.generated_tokens < block * batch:
            engine.advance()
        stats = engine.stats
        if stats.generated_tokens >= block * batch and stats.dispatches:
            times.append((time.perf_counter() - start) * batch / stats.generated_tokens)
            hosts.append(stats.host_seconds / stats.dispatches)
            enqueues.append(stats.enqueue_seconds / stats.dispatches)
    step = statistics.median(times)
    return {
        "batch": batch,
        "cache": cache,
        "ms": step * 1e3,
        "tokens_per_second": batch / step,
        "gb_per_second": step_bytes(model, batch, mean, config.attention_pages) / step / 1e9,
        "host_us": statistics.median(hosts) * 1e6,
        "enqueue_us": statistics.median(enqueues) * 1e6,
    }


def prefill_rate(model: AbstractModel, weights, prompts: int, length: int, **options: Any) -> float:
    """Prompt tokens per second of an engine with a row for each prompt, which has compiled its programs. options: of
    `EngineOptions`."""
    engine = Engine(model, weights, engine_config(model.config, prompts, length + 8, Shards(), **options))
    rng, params = np.random.default_rng(2), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    seconds = []
    for _ in range(3):  # the first compiles
        start = time.perf_counter()
        for seed in range(prompts):
            tokens = rng.integers(0, model.config.vocab, length).tolist()
            engine.add(Sequence(tokens, params, max_tokens=1, seed=seed))
        while engine.busy:
            engine.advance()
        seconds.append(time.perf_counter() - start)
    return prompts * length / min(seconds[1:])


def in_child(function, *args):
    """Call the function in another process, so that neither takes memory that the other needs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def peer_hf(hf: dict, batch: int, cache: int, steps: int, dtype: str, unchanged: bool) -> float:
    """ms per step of Hugging Face `generate`, from two output lengths so that prefill drops out."""
    import torch
    import transformers

    gpu = torch.cuda.is_available()
    config = transformers.AutoConfig.for_model(
        hf.get("model_type", "llama"), **{k: v for k, v in hf.items() if k not in ("model_type", "quantization_config")}
    )
    torch.set_default_device("cuda" if gpu else "cpu")
    torch.set_default_dtype(getattr(torch, dtype))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    prompt = torch.randint(0, config.vocab_size, (batch, cache - steps - 1))
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    if gpu and not unchanged:
        options |= dict(cache_implementation="static")

    def seconds(new: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=new,
                max_new_tokens=new,
                **options,
            )
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    fewer = steps // 4
    for _ in range(2 if gpu else 1):
        seconds(steps)
    pairs = [(seconds(steps) - seconds(fewer)) / (steps - fewer) for _ in range(3)]
    return statistics.median(pairs) * 1e3


@contextmanager
def user_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """For code that reads a user's input: its errors end the program with one line and no traceback."""
    try:
        yield
    except (ValueError, OSError, OutOfMemoryError) as error:
        parser.error(str(error))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--config", choices=configs.names(), help="a shape from configs/, random weights")
    shape.add_argument("--model", help="a checkpoint")
    parser.add_argument("--batch", default="1", help="comma-separated batch sizes")
    parser.add_argument("--cache", type=int, default=2048, help="cache length in tokens")
    parser.add_argument("--steps", type=int, default=128, help="decode steps to time")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, else bfloat16")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument(
        "--rotated", action="store_true", help="rotate the inputs of down projections, as hadamard does"
    )
    parser.add_argument("--rank", type=int, default=0, help="of a branch beside each quantized weight; default: none")
    parser.add_argument("--branches", help="the parts that have one, such as mlp; default: all")
    parser.add_argument("--experts-only", action="store_true", help="quantize nothing but experts")
    parser.add_argument(
        "--backend", default="auto", help="xla, or for example decode_attention=xla: see inferlib generate"
    )
    parser.add_argument("--attention-pages", help="what a step reads of a row, such as quest:16; default: all")
    parser.add_argument("--cache-policy", help="what a row keeps, such as keydiff:2048; default: all")
    parser.add_argument("--peer", choices=("hf", "hf-plain"), help="also time this peer")
    parser.add_argument("--prefill", metavar="NxL", help="also time N prompts of L tokens")
    parser.add_argument("--sparse-prefill", help="`sparse_prefill` of these, such as xattention:1; default: none")
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    args = parser.parse_args()
    with user_errors(parser):
        args.batches = [int(b) for b in args.batch.split(",")]
        prefill = args.prefill.split("x") if args.prefill else []
        if len(prefill) not in (0, 2) or not all(n.isdecimal() and int(n) for n in prefill):
            raise ValueError(f"--prefill {args.prefill}: write prompts x tokens, such as 32x2000")
        args.prefill = [int(n) for n in prefill]
        if args.sparse_prefill and not prefill:
            raise ValueError("--sparse-prefill is of prompts: give --prefill")
        sparse_option(args.sparse_prefill)
        args.branches = parts_option("--branches", args.branches) or ()
        if args.branches and not args.rank:
            raise ValueError("--branches are of low rank: give --rank")
        if args.rank < 0 or ((args.rotated or args.rank) and not args.quantization):
            raise ValueError("--rotated, and a --rank of 1 or more, are of quantized weights: give --quantization")
        args.files = ModelFiles.open(args.model) if args.model else None
        backend_option(args.backend)
    args.parser, args.name = parser, args.config or args.model
    return args


def main() -> None:
    args = arguments()
    hf = args.files.hf if args.files else configs.load(args.config)
    prepare_jax()
    # The peer first: this process reserves most of a GPU's memory as soon as JAX starts.
    on_cpu = in_child(jax.default_backend) == "cpu"
    dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    options = args.cache, args.steps, dtype, args.peer == "hf-plain"
    peers = [in_child(peer_hf, hf, b, *options) for b in args.batches] if args.peer else []
    config, quantization = config_from_hf(hf), args.quantization and Quantization.named(args.quantization)
    if quantization and args.experts_only:
        quantization = of_experts(quantization, config, dtype)
    if quantization:
        rotation = online_rotation(abstract_model(config, dtype).weights) if args.rotated else 0
        quantization = replace(quantization, rotation=rotation, rank=args.rank, branches=args.branches)
    reads = {"attention_pages": args.attention_pages, "cache_policy": args.cache_policy}
    how: dict[str, Any] = {"backend": args.backend, **reads}
    with user_errors(args.parser):
        config = with_cache_levels(config, CachePolicy.read(args.cache_policy))
        run = engine_config(config, args.batches[0], args.cache, Shards(), **how)
        if run.compacted and args.steps < (fewest := 2 * run.compacted.interval):
            raise ValueError(f"--steps {args.steps}: rows are compacted every {fewest // 2}, give {fewest}")
    model = abstract_model(config, dtype, quantization=quantization, backend=run.backend, scan=run.scan)
    programs = ProgramSet.make(model, run)
    with user_errors(args.parser), explained("making the weights", programs.demand):
        if args.files:
            weights = load_weights(args.files.source, family_of(hf), model, formats=programs.formats)
        else:
            weights = programs.random_weights()
    copy = large_copies()
    rows = [measure(model, weights, b, args.cache, args.steps, Shards(), **how) for b in args.batches]
    for i, row in enumerate(rows):
        row |= {"share": row["gb_per_second"] * 1e9 / copy, "copy_gb_per_second": copy / 1e9}
        if args.peer:
            row |= {"peer_ms": peers[i], "ratio": peers[i] / row["ms"]}
    device = jax.devices()[0].device_kind
    sparse = {"sparse_prefill": args.sparse_prefill}
    prefill = prefill_rate(model, weights, *args.prefill, backend=args.backend, **sparse) if args.prefill else None
    if args.json:
        for row in rows:
            print(json.dumps({"model": args.name, "dtype": dtype, "device": device, **reads, **row}))
        if prefill:
            print(json.dumps({"model": args.name, "device": device, **sparse, "prefill_tokens_per_second": prefill}))
    else:
        parts = "rotated inputs" if args.rotated else None, f"a branch of rank {args.rank}" if args.rank else None
        stored = ", ".join(filter(None, (args.quantization or dtype, *parts, *reads.values())))
        show(f"{args.name}, {stored}, {device}; copy {copy / 1e9:.0f} GB/s", rows)
        if prefill:
            which = f", {args.sparse_prefill}" if args.sparse_prefill else ""
            print(f"{args.prefill[0]} prompts of {args.prefill[1]} tokens{which}: {prefill:,.0f} tokens/s")


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title, min_width=100)
    figures = ("batch", "cache", "ms/step", "tokens/s", "GB/s", "of copy", "host us", "enqueue us")
    for name in (*figures, "HF ms/step", "HF / ours"):
        table.add_column(name, justify="right")
    for row in rows:
        peer = (f"{row['peer_ms']:.2f}", f"{row['ratio']:.2f}x") if "peer_ms" in row else ("", "")
        table.add_row(
            str(row["batch"]),
            str(row["cache"]),
            f"{row['ms']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['gb_per_second']:.0f}",
            f"{row['share']:.0%}",
            f"{row['host_us']:.0f}",
            f"{row['enqueue_us']:.0f}",
            *peer,
        )
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
