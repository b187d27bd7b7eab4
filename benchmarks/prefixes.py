"""What prompts that begin alike save: first tokens, throughput, and decode steps over one prefix.

    python benchmarks/prefixes.py --config llama3-8b
    python benchmarks/prefixes.py --config smollm2-135m --dtype float32 --shared 256 --groups 4 --rows 16 --long 512

Each of --groups prefixes of --shared tokens begins 8 prompts of 128 tokens more, which generate 128 tokens each, all at
once. A first token is that of a prompt of --shared + 128 tokens alone, before and after one that begins alike. Last,
--rows rows decode behind one prefix of --long tokens. Weights are random. Columns: with prefix caching and cascade
attention, without cascade attention, and without both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib import configs
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.memory import device_memory, with_memory
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.families import config_from_hf
from inferlib.platforms import prepare_jax
from inferlib.programs.counter import compilations
from inferlib.programs.program_set import ProgramSet
from inferlib.sampling.params import SamplingParams

FOLLOWING, ANSWER, MEMBERS = 128, 128, 8
COLUMNS = {
    "prefix caching, cascade": {"prefix_caching": True, "cascade": True},
    "prefix caching": {"prefix_caching": True, "cascade": False},
    "neither": {"prefix_caching": False, "cascade": False},
}


class Bench:
    """An engine, and random prompts for it."""

    def __init__(self, engine: Engine, vocab: int):
        self.engine, self.vocab, self.rng = engine, vocab, np.random.default_rng(0)
        self.compilations = 0

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab, count).tolist()

    def seconds(self, prompts: list[list[int]], count: int) -> float:
        """Seconds of generating `count` tokens for each prompt, all at once."""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        start, before = time.perf_counter(), compilations()
        for prompt in prompts:
            self.engine.add(Sequence(prompt, params, count, seed=0))
        while self.engine.busy:
            self.engine.advance()
        self.compilations += compilations() - before
        return time.perf_counter() - start

    def results(self, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
        """What a row says, and its number."""
        for length in args.shared:
            first, again = [], []
            for _ in range(3):
                prefix = self.tokens(length)
                for times in (first, again):
                    times.append(self.seconds([prefix + self.tokens(FOLLOWING)], 1))
            yield f"first token of {length} + {FOLLOWING} tokens, ms", statistics.median(first) * 1e3
            yield f"first token behind {length} cached tokens, ms", statistics.median(again) * 1e3
        for length in args.shared:
            prefixes = [self.tokens(length) for _ in range(args.groups)]
            prompts = [prefix + self.tokens(FOLLOWING) for _ in range(MEMBERS) for prefix in prefixes]
            rate = len(prompts) * ANSWER / self.seconds(prompts, ANSWER)
            yield f"{args.groups} x {MEMBERS} prompts of {length} + {FOLLOWING}, output tokens/s", rate
        prefix = self.tokens(args.long)
        self.seconds([prefix + self.tokens(8)], 1)
        short, long = (self.seconds([prefix + self.tokens(8) for _ in range(args.rows)], n) for n in (20, 148))
        yield f"{args.rows} rows over one prefix of {args.long}, ms a step", (long - short) / 128 * 1e3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), required=True, help="a shape, with random weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--shared", default="2048,4096", help="tokens of a group's prefix, with commas between them")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--long", type=int, default=7800)
    parser.add_argument("--columns", default="0,1,2", help="which of the three columns")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    args.shared = [int(length) for length in args.shared.split(",")]
    return args


def shape_of(name: str, dtype: str) -> AbstractModel:
    """The model of a shape in configs/, for this machine's devices."""
    config = config_from_hf(configs.load(name))
    usual = EngineConfig.make(DeviceKind.of(jax.devices()[0]), 8, 1024, None, None, config)
    return abstract_model(config, dtype, backend=usual.backend, scan=usual.scan)


def run_config(args: argparse.Namespace, model: AbstractModel, **options) -> EngineConfig:
    """For the most rows and the longest prompt, with the default memory of the cache."""
    rows = max(args.groups * MEMBERS, args.rows)
    longest = max([*(length + FOLLOWING + ANSWER for length in args.shared), args.long + 8 + 148])
    device = jax.devices()[0]
    return with_memory(
        EngineOptions(max_batch=rows, max_len=longest, **options),
        lambda asked: asked.resolve(DeviceKind.of(device), None, model.config),
        model,
        lambda config: device_memory(device, alone=False),
    )


def main() -> None:
    args = arguments()
    prepare_jax()
    model = shape_of(args.config, args.dtype)
    weights = model.random_weights()
    columns: dict[str, dict[str, float]] = {}
    for name in [list(COLUMNS)[int(i)] for i in args.columns.split(",")]:
        run = run_config(args, model, **COLUMNS[name])
        engine = Engine(model, weights, run, programs=ProgramSet.make(model, run, None))
        engine.warmup(("greedy",))
        bench = Bench(engine, model.config.vocab)
        sizes = [1900] + [500] * (args.rows - 1)
        bench.seconds([bench.tokens(min(size, run.max_len - 8)) for size in sizes], 8)
        columns[name] = dict(bench.results(args)) | {"programs compiled after warm-up": bench.compilations}
        engine.cache = engine.state = ()  # type: ignore[assignment]
    device = jax.devices()[0].device_kind
    if args.json:
        print(json.dumps({"config": args.config, "dtype": args.dtype, "device": device, **columns}))
        return
    table = Table(title=f"{args.config}, {args.dtype}, {device}, random weights")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in next(iter(columns.values())):
        table.add_row(row, *(f"{column[row]:,.1f}" for column in columns.values()))
    Console(width=None if Console().is_terminal else 140).print(table, highlight=False)


if __name__ == "__main__":
    main()
