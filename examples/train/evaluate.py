"""Held-out loss of trained models: `python -m examples.train.evaluate runs/*-0 runs/*-1 --data runs/data`.

Each model is loaded by `LLM`, as any other. Looped ones are measured with several numbers of steps, and with tokens
that leave the core early, by both rules, of at most as many steps as in training on average. Runs that differ in their
seeds are one line. It writes table.md and curves.png.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.train.model import core_steps
from examples.train.train import Settings, plot
from inferlib import LLM, Buckets, SamplingParams
from inferlib.distillation.record import read_log
from inferlib.distillation.texts import rows_of

DEPTHS = (4, 5, 6, 8, 10, 12, 16)
THRESHOLDS = {True: (0.01, 0.03, 0.1, 0.3), "kl": (5e-4, 5e-3, 5e-2)}  # of the rules of `LLM(early_exit=...)`


class Measured(NamedTuple):
    """Of one run. model: the preset and what differs from the defaults; takes: how many steps of the core, or the
    threshold; steps: that a token takes on average; nats: mean negative log-likelihood, NaN if training diverged."""

    model: str
    takes: str
    seed: int
    steps: float
    nats: float


def likelihood(llm: LLM, rows: Sequence[list[int]], **params: Any) -> tuple[float, float]:
    """Steps of the core that a token takes on average, where those are counted, and nats."""
    before = llm.stats.core_tokens, llm.stats.core_steps
    outputs = llm.generate(list(rows), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, **params))
    tokens, steps = (
        getattr(llm.stats, name) - old for name, old in zip(("core_tokens", "core_steps"), before, strict=True)
    )
    nats = [
        -step[token].logprob
        for output, row in zip(outputs, rows, strict=True)
        for step, token in zip((output.prompt_logprobs or [])[1:], row[1:], strict=True)
        if step is not None
    ]
    return steps / tokens if tokens else 1.0, float(np.mean(nats))


def measure(run: Path, rows: Sequence[list[int]], dtype: str | None) -> Iterator[Measured]:
    """The lines of a run."""
    settings = json.loads((run / "training" / "settings.json").read_text(encoding="utf-8"))
    preset, seed, length = settings["preset"], settings["seed"], len(rows[0])
    mean = settings.get("core_steps") or core_steps(preset)
    injection = "" if settings["injection"] == "diagonal" else f", {settings['injection']} injection"
    long = f"{settings['minutes']:g} minutes" if settings["minutes"] else f"{settings['steps']} steps"
    width = "" if settings["width"] == Settings.width else f", width {settings['width']}"
    norm = ", normed states" if settings.get("state_norm") else ""
    core = f", core {mean} times" if settings.get("core_steps") else ""
    name = f"{preset}{width}{injection}{norm}{core}, learning rate {settings['learning_rate']:g}, {long}"
    result = json.loads((run / "training" / "result.json").read_text(encoding="utf-8"))
    if result["diverged"]:
        yield Measured(name, f"diverged at step {result['step']}", seed, np.nan, np.nan)
        return
    if mean == 1:
        yield Measured(name, "layers once", seed, *likelihood(opened(run, length, dtype), rows))
        return
    llm = opened(run, length, dtype, loop_steps=max(DEPTHS))
    for depth in DEPTHS:
        yield Measured(name, f"{depth} steps", seed, float(depth), likelihood(llm, rows, depth=depth)[1])
    for rule, thresholds in THRESHOLDS.items():
        del llm  # its memory
        llm = opened(run, length, dtype, early_exit=rule)
        for threshold in thresholds:
            takes = f"leaves by {'KL' if rule == 'kl' else 'change'} below {threshold:g}"
            yield Measured(name, takes, seed, *likelihood(llm, rows, exit_threshold=threshold))


def opened(run: Path, length: int, dtype: str | None, **options: Any) -> LLM:
    """The model that a run wrote, to measure rows of `length` tokens."""
    gc.collect()  # the memory of one before
    buckets = Buckets((min(length, 256),), (8,), (length + 1,))
    options |= {"dtype": dtype, "max_batch": 8, "max_len": length + 1, "buckets": buckets}
    return LLM(run, prefix_caching=False, progress=False, **options)


def lines_of(measured: Sequence[Measured]) -> list[dict[str, str]]:
    """One line for all seeds of a model."""
    lines = defaultdict(list)
    for one in measured:
        lines[one.model, one.takes].append(one)
    return [
        {
            "model": model,
            "takes": takes,
            "steps of a token": f"{np.mean([x.steps for x in seeds]):.2f}",
            "held-out nats": f"{np.mean([x.nats for x in seeds]):.4f}",
            "each seed": ", ".join(f"{x.nats:.4f}" for x in sorted(seeds, key=lambda x: x.seed)),
        }
        for (model, takes), seeds in lines.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="the folder of tokens that the runs share")
    parser.add_argument("--out", type=Path, help="folder; by default beside the data")
    parser.add_argument("--rows", type=int, default=64, help="held-out rows, spread over all")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype")
    args = parser.parse_args()
    out = args.out or args.data.parent
    with np.load(args.data / "tokens.npz") as arrays:
        rows = rows_of(arrays["held_out"], args.length)
    rows = [rows[at].tolist() for at in np.linspace(0, len(rows) - 1, min(args.rows, len(rows))).astype(int)]
    measured: list[Measured] = []
    for run in args.runs:
        measured += measure(run, rows, args.dtype)
    lines = lines_of(measured)
    table = [
        "| " + " | ".join(cells) + " |" for cells in (lines[0], ["---"] * len(lines[0]), *(x.values() for x in lines))
    ]
    (out / "table.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    plot({run.name: read_log(run / "training" / "log.jsonl") for run in args.runs}, out / "curves.png")
    print("\n".join(table))


if __name__ == "__main__":
    main()
