"""Pauses of streams while long prompts come: prefilled by the devices that decode, and by devices of their own.

    python benchmarks/handover.py --config llama3-8b --streams 16 --prompts 12 --length 6000

It takes two devices, and weights are random. A pause is the time between two tokens of a stream while the prompts are
prefilled; "prompts" is how long that takes, from when they all come to the last one's first token.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import jax
import numpy as np
from prefixes import shape_of
from rich.console import Console
from rich.table import Table

from inferlib import Buckets, configs
from inferlib.cache.plan import plan_cache
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.prefiller import prefiller_of
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import AbstractModel
from inferlib.platforms import prepare_jax
from inferlib.programs.counter import compilations
from inferlib.programs.program_set import ProgramSet
from inferlib.sampling.params import SamplingParams

ANSWER = 16  # tokens after a prompt
BEGUN = 8  # tokens of each stream before the prompts come


class Bench:
    """An engine with streams that never end by themselves."""

    def __init__(self, engine: Engine, args: argparse.Namespace):
        self.engine, self.args, self.rng = engine, args, np.random.default_rng(0)

    def sequence(self, length: int, answer: int) -> Sequence:
        tokens = self.rng.integers(0, self.engine.model.config.vocab, length).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        sequence = Sequence(tokens, params, answer, seed=0)
        self.engine.add(sequence)
        return sequence

    def drain(self) -> None:
        while self.engine.busy:
            self.engine.advance()

    def pauses(self) -> tuple[list[float], float]:
        """The seconds between tokens of streams while prompts are prefilled, and how long that takes."""
        streams = [self.sequence(32, self.args.length) for _ in range(self.args.streams)]
        while any(len(s.tokens) < BEGUN for s in streams):
            self.engine.advance()
        counts, pauses = [len(s.tokens) for s in streams], []
        begin = time.perf_counter()
        last = [begin] * len(streams)
        prompts = [self.sequence(self.args.length, ANSWER) for _ in range(self.args.prompts)]
        while not all(s.tokens for s in prompts):
            self.engine.advance()
            now = time.perf_counter()
            for number, stream in enumerate(streams):
                if (new := len(stream.tokens) - counts[number]) > 0:
                    pauses += [(now - last[number]) / new] * new
                    counts[number], last[number] = len(stream.tokens), now
        seconds = time.perf_counter() - begin
        for stream in streams:
            self.engine.cancel(stream)
        self.drain()
        return pauses, seconds

    def results(self, runs: int) -> dict[str, float]:
        """The results of some runs, and one before them that is not counted."""
        self.pauses()
        before, handed = compilations(), self.engine.stats.handed_tokens
        measured = [self.pauses() for _ in range(runs)]
        pauses = 1e3 * np.concatenate([pauses for pauses, _ in measured])
        return {
            "pause of a stream, median, ms": float(np.median(pauses)),
            "pause of a stream, 99 of 100, ms": float(np.percentile(pauses, 99)),
            "longest pause, ms": float(pauses.max()),
            "prompts, ms": 1e3 * float(np.median([seconds for _, seconds in measured])),
            "tokens handed over": (self.engine.stats.handed_tokens - handed) / runs,
            "programs compiled meanwhile": compilations() - before,
        }


def engine_config(args: argparse.Namespace, model: AbstractModel) -> EngineConfig:
    """Room for all that comes."""
    rows, longest = args.streams + args.prompts, args.length + 64
    buckets = Buckets(prefill=(128, min(2048, args.length)), batch=(rows,), cache=(longest,))
    options = EngineOptions(max_batch=rows, max_len=longest, buckets=buckets)
    config = options.resolve(DeviceKind.of(jax.devices()[0]), None, model.config)
    plan = plan_cache(model, rows=rows, max_len=longest, chunk=config.row_tokens, dtype=model.dtype, pool=config.pool)
    return replace(config, cache_memory=plan.nbytes)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), required=True, help="a shape, with random weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    for name, default in (("streams", 16), ("prompts", 12), ("length", 6000), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    prepare_jax()
    if len(jax.devices()) < 2:
        raise SystemExit("prompts that are prefilled apart take a second device, and this machine has one")
    model = shape_of(args.config, args.dtype)
    weights, columns = model.random_weights(), {}
    for name, devices in (("together", ()), ("apart", jax.devices()[1:2])):
        run = engine_config(args, model)
        programs = ProgramSet.make(model, run, None)
        engine = Engine(model, weights, run, programs=programs, source=prefiller_of(programs, weights, devices))
        engine.warmup(("greedy",))
        columns[name] = Bench(engine, args).results(args.runs)
        del engine, programs
    if args.json:
        print(json.dumps({"config": args.config, "device": jax.devices()[0].device_kind} | columns))
        return
    table = Table(title=f"{args.config}: {args.streams} streams, {args.prompts} prompts of {args.length} tokens")
    for column in ("", *columns):
        table.add_column(column, justify="left" if not column else "right")
    for row in columns["together"]:
        table.add_row(row, *(f"{column[row]:,.1f}" for column in columns.values()))
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
