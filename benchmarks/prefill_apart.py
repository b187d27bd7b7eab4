"""How many chats a second two slices serve, by the simulated engine: each doing both, or one that prefills apart.

    python benchmarks/prefill_apart.py --target v6e-4 --parallel tp=4 --first 4000 --more 100 --turns 5

A chat begins with `--first` tokens of its own, lognormal, and each later turn has all before it and about `--more`
tokens more. Rates of chats are tried in steps of a quarter until less than 90 % of the first tokens come within
`--ttft` seconds, or answers take more than `--itl` seconds a token on average. Needs no device; times are estimates.
"""

from __future__ import annotations

import argparse
import random

from rich.console import Console
from rich.table import Table

from inferlib.configs import load
from inferlib.models.families import config_from_hf
from inferlib.planning.apart import SPLITS, Split, simulate_splits
from inferlib.planning.costs import Deployed
from inferlib.planning.simulator import engine_config
from inferlib.planning.trace import Offer, percentiles
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target

PAUSE = 5.0  # seconds between turns, on average, beside what the answer takes at 10 ms a token


def chats(count: int, rate: float, first: int, more: int, turns: int) -> list[Offer]:
    """So many chats, `rate` of them a second."""
    rng, offers, start = random.Random(0), [], 0.0
    for _ in range(count):
        start += rng.expovariate(rate)
        at, prompt = start, _text(rng, first)
        for _ in range(turns):
            answer = 8 + round(200 * rng.lognormvariate(0.0, 0.5))
            offers.append(Offer(len(prompt), answer, at, tuple(prompt)))
            prompt = prompt + [1] * answer + _text(rng, more)
            at += 0.01 * answer + rng.expovariate(1 / PAUSE)
    return sorted(offers, key=lambda offer: offer.arrival)


def _text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(2, 30_000) for _ in range(max(8, round(tokens * rng.lognormvariate(0.0, 0.5))))]


def keeps(split: Split, ttft: float, itl: float) -> bool:
    first, between = percentiles(split.service.ttft), percentiles(split.service.itl)
    return first["p90"] <= ttft and between["mean"] <= itl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3-8b")
    parser.add_argument("--target", default="v6e-4")
    parser.add_argument("--parallel", default="tp=4")
    parser.add_argument("--chats", type=int, default=100)
    for name, default in (("first", 4000), ("more", 100), ("turns", 5), ("max-batch", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=1.0, help="chats a second of the first trial")
    parser.add_argument("--ttft", type=float, default=0.5)
    parser.add_argument("--itl", type=float, default=0.02)
    args = parser.parse_args()
    shape, target = config_from_hf(load(args.config)), parse_target(args.target)
    deployed = Deployed(shape, target, Parallelism.parse(args.parallel))
    best, rate, left = dict.fromkeys(SPLITS, (0.0, None)), args.rate, set(SPLITS)
    while left:
        offers = chats(args.chats, rate, args.first, args.more, args.turns)
        config = engine_config(deployed, args.max_batch, max(x.input_len + x.output_len for x in offers))
        for split in simulate_splits(deployed, config, offers):
            if split.name in left and keeps(split, args.ttft, args.itl):
                best[split.name] = rate, split
            else:
                left.discard(split.name)
        rate *= 1.25
    table = Table(title=f"{args.config} on two {args.target}, {args.first} + {args.turns - 1} x {args.more} tokens")
    for column in ("", "chats/s", "TTFT p50 / p90, ms", "ITL mean / p99, ms", "tokens handed over"):
        table.add_column(column, justify="left" if not column else "right")
    for name, (most, split) in best.items():
        if split is None:
            table.add_row(name, f"below {args.rate}")
            continue
        ttft, itl = percentiles(split.service.ttft), percentiles(split.service.itl)
        times = [
            f"{1e3 * ttft['p50']:.0f} / {1e3 * ttft['p90']:.0f}",
            f"{1e3 * itl['mean']:.1f} / {1e3 * itl['p99']:.1f}",
        ]
        table.add_row(name, f"{most:.1f}", *times, f"{split.handed:,}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
