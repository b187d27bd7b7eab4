"""First tokens behind a prefix: computed, still on the device, and brought back from the host's memory or from disk.

    python benchmarks/tiers.py --config llama3-8b --shared 2048,8192
    python benchmarks/tiers.py --config smollm2-135m --dtype float32 --shared 256

Weights are random. The cache has room for four prompts, so that others evict a prefix. A prefix comes back even where
it is computed sooner, against the engine's rule. GB/s are those that the engine measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import jax
import numpy as np
from prefixes import shape_of
from rich.console import Console
from rich.table import Table

from inferlib import Buckets, configs
from inferlib.cache.plan import plan_cache
from inferlib.config import DeviceKind, EngineConfig, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.fetch import SourceName
from inferlib.engine.fetch_rule import FetchRule
from inferlib.engine.sequence import Sequence
from inferlib.engine.tiers import Tiers
from inferlib.models.abstract import AbstractModel
from inferlib.platforms import prepare_jax
from inferlib.programs.counter import compilations
from inferlib.programs.program_set import ProgramSet
from inferlib.sampling.params import SamplingParams

FOLLOWING, ANSWER = 128, 16
ROOM = 4  # prompts that the device's cache has room for


class Bench:
    """An engine with one tier, "host" or "disk", and prompts for it."""

    def __init__(self, engine: Engine, vocab: int, tier: str):
        self.engine, self.vocab, self.tier, self.rng = engine, vocab, tier, np.random.default_rng(0)
        self.source = cast(Tiers, engine.source)
        measured, self.source.rule = self.source.rule, Always()
        self.source.rule.link = measured.link

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab, count).tolist()

    def first(self, prompt: list[int]) -> tuple[float, list[int], int]:
        """Milliseconds until the first token, the answer, and how many tokens were cached."""
        s = Sequence(prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True), ANSWER, seed=0)
        start = time.perf_counter()
        self.engine.add(s)
        while not s.tokens:
            self.engine.advance()
        seconds = time.perf_counter() - start
        while self.engine.busy:
            self.engine.advance()
        self.source.settle()  # a disk that does not keep up would get only part of what leaves the device
        return seconds * 1e3, list(s.tokens), s.cached or 0

    def results(self, length: int) -> Iterator[tuple[str, float]]:
        """What a row says, and its number. Of four rounds, the first is not counted."""
        times: dict[str, list[float]] = {"computed": [], "still on the device": [], f"from {self.tier}": []}
        other, before = 0, compilations()
        for _ in range(4):
            prompt, answers = self.tokens(length + FOLLOWING), []
            for way, measured in times.items():
                for _ in range(2 * ROOM if way.startswith("from") else 0):
                    self.first(self.tokens(length + FOLLOWING))
                milliseconds, answer, cached = self.first(prompt)
                if (cached >= length) == (way == "computed"):
                    raise RuntimeError(f"{way}: {cached} tokens were cached")
                measured.append(milliseconds)
                answers.append(answer)
            other += answers[1] != answers[2]
        for way, measured in times.items():
            yield f"first token behind {length} tokens {way}, ms", statistics.median(measured[1:])
        yield f"answers behind {length} tokens that differ from those of the device's cells", other
        yield f"programs compiled meanwhile, {length} tokens", compilations() - before

    def rates(self) -> Iterator[tuple[str, float]]:
        """GB/s as the engine measured them."""
        rule = self.source.rule
        for name, rate in (("to the device", rule.link), ("from files", rule.disk)):
            if rate.value:
                yield f"{name}, GB/s", rate.value / 1e9


class Always(FetchRule):
    """Fetches also where computing is faster."""

    def choose(self, tokens: int, nbytes: int) -> dict[SourceName, bool]:
        return {"host": True, "disk": True}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), required=True, help="a shape, with random weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--shared", default="2048,8192", help="tokens of prefixes, with commas between them")
    parser.add_argument("--tiers", default="host,disk")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    args.shared = [int(length) for length in args.shared.split(",")]
    return args


def engine_config(args: argparse.Namespace, model: AbstractModel, folder: str | None) -> EngineConfig:
    """Room for ROOM of the longest prompts on the device, and for four times as many on the host or in a folder."""
    longest = max(args.shared) + FOLLOWING + ANSWER
    buckets = Buckets(prefill=(FOLLOWING, min(2048, longest)), batch=(4,), cache=(longest,))
    options = EngineOptions(max_batch=4, max_len=longest, buckets=buckets, disk_cache=folder)
    config = options.resolve(DeviceKind.of(jax.devices()[0]), None, model.config)
    plan = plan_cache(model, rows=4, max_len=longest, chunk=config.row_tokens, dtype=model.dtype, pool=config.pool)
    pages = ROOM * -(-longest // plan.page) + 1
    size = plan.nbytes // plan.pages * pages
    return replace(config, cache_memory=size, host_cache=4 * size if folder is None else None)


def main() -> None:
    args = arguments()
    prepare_jax()
    model = shape_of(args.config, args.dtype)
    weights = model.random_weights()
    columns: dict[str, dict[str, float]] = {}
    for tier in args.tiers.split(","):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            run = engine_config(args, model, folder if tier == "disk" else None)
            engine = Engine(model, weights, run, programs=ProgramSet.make(model, run, None))
            engine.warmup(("greedy",))
            bench = Bench(engine, model.config.vocab, tier)
            columns[tier] = {name: number for length in args.shared for name, number in bench.results(length)}
            columns[tier] |= dict(bench.rates())
            engine.cache = engine.state = ()  # type: ignore[assignment]
    device = jax.devices()[0].device_kind
    if args.json:
        print(json.dumps({"config": args.config, "dtype": args.dtype, "device": device, **columns}))
        return
    table = Table("tier", "", "", title=f"{args.config}, {args.dtype}, {device}, random weights")
    for tier, rows in columns.items():
        for name, number in rows.items():
            table.add_row(tier, name, f"{number:,.1f}")
    Console(width=None if Console().is_terminal else 140).print(table, highlight=False)


if __name__ == "__main__":
    main()
