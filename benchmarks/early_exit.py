"""What tokens that leave a looped model's core early save, and what that costs: steps of the core, and likelihood.

    python benchmarks/early_exit.py --model org/name --thresholds 0.01,0.03,0.1 --depths 4,8
    python benchmarks/early_exit.py --model org/name --rule kl --thresholds 5e-4,5e-3
    python benchmarks/early_exit.py --model org/name --depthwise-batching

Each row is a threshold or a depth (see `SamplingParams`); the first takes all steps. "nats" is the mean negative
log-likelihood of a token of a text, in windows, and "steps" how many steps of the core its tokens take. "run" is how
many steps a pass runs that decodes one row, and several rows, of which the deepest token decides; "tokens/s" is the
rate at these. With --depthwise-batching, rows are at different depths in one batch, and "run" is how many trips a row
waits for a token; `benchmarks/depthwise.py` compares both on random weights.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib import LLM, Buckets, SamplingParams

TEXT = Path(__file__).parents[1] / "LICENSE"
GENERATED = 64
PROMPT = 32


class Decoded(NamedTuple):
    """What passes take that decode `rows` rows. run: steps of the core that they run; rate: tokens/s."""

    rows: int
    run: float
    rate: float


class Row(NamedTuple):
    """params: what differs from taking all steps. See the module."""

    params: dict[str, float]
    steps: float
    nats: float
    decoded: tuple[Decoded, ...]


class Counted:
    """What the core does from here on, by the statistics of an LLM."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.before = self._now()

    def _now(self) -> np.ndarray:
        stats = self.llm.stats
        return np.array([stats.core_passes, stats.core_runs, stats.core_tokens, stats.core_steps])

    def trips_for(self, tokens: int) -> float:
        """How often the core ran for each of so many tokens of a row."""
        return float((self._now() - self.before)[1] / tokens)

    def per_pass_and_token(self) -> tuple[float, float]:
        """Steps that a pass ran, and that a token took."""
        passes, runs, tokens, steps = self._now() - self.before
        return float(runs / passes), float(steps / tokens)


def likelihood(llm: LLM, windows: Sequence[list[int]], params: dict[str, Any]) -> tuple[float, float]:
    """Steps of a token, and nats."""
    counted = Counted(llm)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, **params)
    outputs = llm.generate(list(windows), scored, progress=False)
    nats = [
        -step[token].logprob
        for output, window in zip(outputs, windows, strict=True)
        for step, token in zip((output.prompt_logprobs or [])[1:], window[1:], strict=True)
        if step is not None
    ]
    return counted.per_pass_and_token()[1], float(np.mean(nats))


def decoded(llm: LLM, windows: Sequence[list[int]], rows: int, params: dict[str, Any]) -> Decoded:
    """Passes over the prompts count too: a few beside those that decode."""
    prompts = [window[:PROMPT] for window in [*windows] * rows][:rows]
    greedy = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, **params)
    counted, start = Counted(llm), time.perf_counter()
    llm.generate(prompts, greedy, progress=False)
    seconds = time.perf_counter() - start
    depthwise = bool(llm.config.depthwise_batching)
    run = counted.trips_for(GENERATED) if depthwise else counted.per_pass_and_token()[0]
    return Decoded(rows, run, rows * GENERATED / seconds)


def measure(
    llm: LLM, windows: Sequence[list[int]], every: Sequence[dict[str, Any]], rows: Sequence[int]
) -> Iterator[Row]:
    llm.warmup(["greedy", "logprobs"])
    decoded(llm, windows, max(rows), {})
    for params in ({}, *every):
        steps, nats = likelihood(llm, windows, params)
        yield Row(params, steps, nats, tuple(decoded(llm, windows, count, params) for count in rows))


def windows_of(llm: LLM, text: str, tokens: int, size: int) -> list[list[int]]:
    ids = llm.tokenizer.encode(text)[:tokens] if llm.tokenizer is not None else []
    windows = [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]
    if not windows:
        raise SystemExit(f"the text has {len(ids)} tokens, or the model no tokenizer: give --text of at least {size}")
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--loop-steps", type=int)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rule", choices=("change", "kl"), default="change", help="what thresholds are compared with")
    parser.add_argument("--thresholds", default="0.01,0.03,0.1")
    parser.add_argument("--depths", default="", help="fixed depths to compare with")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--depthwise-batching", action="store_true")
    parser.add_argument("--dtype")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [int(x) for x in args.rows.split(",")]
    length = max(args.window, PROMPT + GENERATED) + 1
    llm = LLM(
        args.model,
        early_exit=args.rule == "change" or "kl",
        depthwise_batching=args.depthwise_batching,
        loop_steps=args.loop_steps,
        dtype=args.dtype,
        prefix_caching=False,
        max_batch=max(rows),
        max_len=length,
        progress=False,
        buckets=Buckets((min(args.window, 256),), tuple(sorted(rows)), (length,)),
    )
    windows = windows_of(llm, args.text.read_text(encoding="utf-8"), args.tokens, args.window)
    every: list[dict[str, Any]] = [{"depth": int(x)} for x in args.depths.split(",") if x]
    every += [{"exit_threshold": float(x)} for x in args.thresholds.split(",") if x]
    show(list(measure(llm, windows, every, rows)), args)


def show(rows: Sequence[Row], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps([row._asdict() | {"decoded": [x._asdict() for x in row.decoded]} for row in rows], indent=1))
        return
    whole, table = rows[0], Table(title=f"{args.model}, {args.tokens} tokens of {args.text.name}", title_justify="left")
    several = [f"{name}, {x.rows} rows" for x in whole.decoded for name in ("run", "tokens/s")]
    for column in ("takes", "steps", "saved", "nats", "change", *several):
        table.add_column(column, justify="left" if column == "takes" else "right")
    for row in rows:
        name = ", ".join(f"{name} {value:g}" for name, value in row.params.items()) or "all steps"
        shares = f"{1 - row.steps / whole.steps:.1%}", f"{row.nats:.4f}", f"{row.nats / whole.nats - 1:+.2%}"
        rates = (text for x in row.decoded for text in (f"{x.run:.2f}", f"{x.rate:.1f}"))
        table.add_row(name, f"{row.steps:.2f}", *shares, *rates)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
