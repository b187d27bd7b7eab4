"""Rows at different depths in one batch beside passes that wait for the deepest one, for a looped model whose tokens
leave its core early.

    python benchmarks/depthwise.py
    python benchmarks/depthwise.py --set n_embd=2048 n_heads=16 intermediate_size=5632 vocab_size=32768 --dtype bfloat16
    python benchmarks/depthwise.py --by rows

A shape from configs/ with random weights, by default a tiny Huginn. Each row samples --tokens tokens behind a short
random prompt: the most likely ones of random weights repeat, and with them their depths. The threshold is found by
itself: the one with which tokens take --share of the steps on average. With "--by rows" each row takes a depth of its
own instead, of this mean, and deep ones decode fewer tokens, so that all end together.

"steps" is how many steps of the core a token takes, "trips" how many are run for each token, and "phases" how often the
rest of the model is; "tokens/s" counts decoding alone, the best of four runs. "all steps" has no early exits.
"passes" are those of `early_exit`, and "depthwise" is `depthwise_batching`, with so many rows that wait if a number
follows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib import Buckets, SamplingParams, configs
from inferlib.config import DeviceKind, EngineOptions
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence as Request
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.families import config_from_hf
from inferlib.platforms import prepare_jax

TINY = {"n_embd": 96, "n_heads": 4, "intermediate_size": 320, "vocab_size": 512, "loop_steps": 16}
PROMPT = 16
RUNS = 4


class Measured(NamedTuple):
    """See the module. trips and phases: for each token."""

    form: str
    rows: int
    steps: float
    trips: float
    phases: float
    rate: float


class Bench:
    """An engine of one form, whose programs are compiled."""

    def __init__(self, model: AbstractModel, weights: tuple, options: EngineOptions):
        config = options.resolve(DeviceKind.of(jax.devices()[0]), None, model.config)
        config.check_model(model.config)
        self.engine = Engine(model, weights, config)
        self.engine.warmup(("sample",))

    def counts(self) -> np.ndarray:
        stats = self.engine.stats
        return np.array([stats.core_tokens, stats.core_steps, stats.core_runs, stats.core_passes])

    def run(self, rows: Sequence[tuple[SamplingParams, int]]) -> tuple[float, np.ndarray, list[list[int]]]:
        """Seconds of decoding, what was counted in them, and the tokens. rows: the options and tokens of each."""
        rng, vocab = np.random.default_rng(0), self.engine.model.config.vocab
        prompts = [rng.integers(0, vocab, PROMPT).tolist() for _ in rows]
        pairs = enumerate(zip(prompts, rows, strict=True))
        requests = [Request(prompt, *of_row, seed=i) for i, (prompt, of_row) in pairs]
        for request in requests:
            self.engine.add(request)
        while not all(request.tokens for request in requests):
            self.engine.advance()
        before, got, start = self.counts(), sum(len(x.tokens) for x in requests), time.perf_counter()
        while self.engine.busy:
            self.engine.advance()
        seconds = time.perf_counter() - start
        generated = sum(len(x.tokens) for x in requests) - got
        return seconds / generated, self.counts() - before, [x.tokens for x in requests]

    def measured(self, form: str, rows: int, runs: Sequence[tuple[float, np.ndarray, Any]]) -> Measured:
        """By the fastest of these runs."""
        seconds, (tokens, steps, trips, phases), _ = min(runs, key=lambda run: run[0])
        loop = self.engine.model.config.loop
        assert loop is not None
        if not tokens:  # nothing is counted without early exits
            return Measured(form, rows, loop.steps, loop.steps / rows, 1 / rows, 1 / seconds)
        return Measured(form, rows, steps / tokens, trips / tokens, phases / tokens, 1 / seconds)


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(ignore_eos=True, **params)


def threshold_for(bench: Bench, rows: int, share: float) -> float:
    """The threshold by which tokens take this share of the steps on average, by bisection."""
    loop = bench.engine.model.config.loop
    assert loop is not None
    low, high = -7.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        row = sampled(exit_threshold=10**middle, max_tokens=32), 32
        _, (tokens, steps, *_), _ = bench.run([row] * rows)
        low, high = (middle, high) if steps / tokens > share * loop.steps else (low, middle)
    return 10**high


def spread(rows: int, tokens: int, steps: int, share: float) -> list[tuple[SamplingParams, int]]:
    """Rows of depths around their mean, evenly spread and in no order, which end together."""
    low = max(1, round(steps * (2 * share - 1)))
    depths = np.linspace(low, steps, rows).round().astype(int) if rows > 1 else np.array([round(share * steps)])
    np.random.default_rng(0).shuffle(depths)
    counts = np.maximum(2, (tokens * share * steps / depths).round().astype(int))
    return [(sampled(depth=int(depth), max_tokens=int(n)), int(n)) for depth, n in zip(depths, counts, strict=True)]


def benches(args: argparse.Namespace) -> dict[str, Bench]:
    """By the name of each form."""
    hf = configs.load(args.config) | {k: json.loads(v) for k, v in (pair.split("=", 1) for pair in args.set)}
    hf = hf | ({} if args.set else TINY)
    length = PROMPT + 4 * args.tokens
    options = EngineOptions(
        max_batch=max(args.rows),
        max_len=length,
        buckets=Buckets((PROMPT,), tuple(sorted(args.rows)), (length,)),
        prefix_caching=False,
    )
    forms = {"all steps": options, "passes": options}
    for rows in args.waiting.split(","):
        name = "depthwise" if rows == "auto" else f"depthwise, {rows}"
        forms[name] = replace(options, depthwise_batching=rows == "auto" or int(rows))
    device, weights, early, made = DeviceKind.of(jax.devices()[0]), None, args.rule == "change" or "kl", {}
    for form, chosen in forms.items():
        config = config_from_hf(hf | {"early_exit": form != "all steps" and early})
        usual = options.resolve(device, None, config)
        model = abstract_model(config, args.dtype, backend=usual.backend, scan=usual.scan)
        weights = model.random_weights() if weights is None else weights
        made[form] = Bench(model, weights, chosen)
    return made


def measure(args: argparse.Namespace) -> Iterator[Measured]:
    """The forms take turns, so that whatever slows the machine down slows all of them down."""
    made = benches(args)
    loop = made["passes"].engine.model.config.loop
    assert loop is not None
    if args.by == "threshold":
        args.threshold = threshold_for(made["passes"], max(args.rows), args.share)
    for count in args.rows:
        whole = [(sampled(max_tokens=args.tokens), args.tokens)] * count
        if args.by == "rows":
            early = spread(count, args.tokens, loop.steps, args.share)
        else:
            early = [(replace(params, exit_threshold=args.threshold), n) for params, n in whole]
        rows = {form: whole if form == "all steps" else early for form in made}
        turns = [{form: bench.run(rows[form]) for form, bench in made.items()} for _ in range(RUNS)]
        for form, bench in made.items():
            yield bench.measured(form, count, [turn[form] for turn in turns])
            if form != "all steps" and turns[0][form][2] != turns[0]["passes"][2]:
                print(f"{count} rows: the tokens of {form} differ from those of passes")


def show(measured: Sequence[Measured], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps([one._asdict() for one in measured], indent=1))
        return
    device = jax.devices()[0].device_kind
    names = "tiny" if not args.set else " ".join(args.set)
    leave = f"threshold {args.threshold:.2g}" if args.by == "threshold" else "depths of rows"
    title = f"{args.config}, {names}, {args.dtype}, {device}, random weights, {leave}"
    table = Table(title=title, title_justify="left")
    for column in ("form", "rows", "steps", "trips", "phases", "tokens a trip", "tokens/s", "x all steps"):
        table.add_column(column, justify="left" if column == "form" else "right")
    whole = {one.rows: one.rate for one in measured if one.form == "all steps"}
    for one in sorted(measured, key=lambda one: one.rows):
        numbers = f"{one.steps:.2f}", f"{one.trips:.2f}", f"{one.phases:.2f}", f"{1 / one.trips:.2f}"
        table.add_row(one.form, str(one.rows), *numbers, f"{one.rate:,.1f}", f"{one.rate / whole[one.rows]:.2f}")
    Console(width=140).print(table, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), default="huginn-3.5b", help="a shape from configs/")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other values of its config.json")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--waiting", default="auto", help="rows that wait before the rest runs, such as auto,2,4,8")
    parser.add_argument("--share", type=float, default=0.6, help="of the steps, that tokens take on average")
    parser.add_argument("--by", choices=("threshold", "rows"), default="threshold")
    parser.add_argument("--rule", choices=("change", "kl"), default="change", help="what thresholds are compared with")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.rows = [int(x) for x in args.rows.split(",")]
    prepare_jax()
    show(list(measure(args)), args)


if __name__ == "__main__":
    main()
