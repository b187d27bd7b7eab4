"""Decode steps of a small model with random weights, beside the planner's estimate."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import numpy as np

from inferlib.buckets import Buckets
from inferlib.config import DeviceKind, EngineConfig
from inferlib.configs import load
from inferlib.doctor.findings import Finding
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.planning.costs import Deployed, step_time
from inferlib.sampling.params import SamplingParams
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards
from inferlib.targets import Chip, parse_target

AREA = "step"
PLATFORMS = ("cpu", "gpu", "tpu")  # that the engine runs on
MOST = 1.5  # times the estimate
_ON_CHIP = "llama3-1b"
_ON_CPU = {"num_hidden_layers": 2}  # of smollm2-135m
_PROMPT = 64  # tokens


def measured(chip: Chip | None) -> Iterator[Finding]:
    """Steps of 1 and 8 rows on the default device. chip: its data sheet, None if there is none."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        name, hf, length, dtype = "two layers of smollm2-135m", load("smollm2-135m") | _ON_CPU, 256, "float32"
    else:
        name, hf, length, dtype = _ON_CHIP, load(_ON_CHIP), 1024, "bfloat16"
    config = config_from_hf(hf)
    for rows in (1, 8):
        seconds = step_seconds(config, dtype, rows, length)
        yield _compared(
            f"{name} in {dtype}, {rows} {'rows' if rows > 1 else 'row'}", seconds, estimate(config, chip, rows, length)
        )


def estimate(config: ModelConfig, chip: Chip | None, rows: int, length: int) -> float | None:
    """Seconds of a step by the cost model, in bfloat16, with a cache that is on average as full as `step_seconds` has
    it; None without a data sheet, or of a chip that is several devices."""
    if chip is None or chip.devices > 1:  # plans are of whole chips
        return None
    single = {2: f"{chip.name}:1x1", 3: f"{chip.name}:1x1x1"}  # by the dimensions of the torus
    target = parse_target(single.get(chip.torus, f"cuda:{chip.name}"))
    deployed = Deployed(config, target, Parallelism())
    return step_time(deployed.decode(rows, (_PROMPT + length) / 2), deployed.network).seconds


def step_seconds(config: ModelConfig, dtype: str, rows: int, length: int) -> float:
    """Seconds of a decode step of all rows, from prompts of 64 tokens on until the cache of `length` is full."""
    buckets = Buckets((_PROMPT,), (rows,), (length,))  # as few programs as possible
    run = EngineConfig.make(DeviceKind.of(jax.devices()[0]), rows, length, buckets, Shards(), config)
    model = abstract_model(config, dtype, backend=run.backend, scan=run.scan)
    engine = Engine(model, model.random_weights(), run)
    engine.warmup(["greedy"])
    rng, params = np.random.default_rng(0), SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    sequences = [
        Sequence(rng.integers(0, config.vocab, _PROMPT).tolist(), params, length - _PROMPT, seed=0) for _ in range(rows)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.busy and not all(sequence.tokens for sequence in sequences):
        engine.advance()
    start, before = time.perf_counter(), sum(len(sequence.tokens) for sequence in sequences)
    while engine.busy:
        engine.advance()
    tokens = sum(len(sequence.tokens) for sequence in sequences) - before
    return (time.perf_counter() - start) * rows / tokens


def _compared(name: str, seconds: float, estimated: float | None) -> Finding:
    figures = {"seconds": seconds, "estimated": estimated, "most_ratio": MOST}
    if estimated is None:
        return Finding(AREA, name, "note", f"{1e3 * seconds:.2f} ms; there is no estimate to compare", figures)
    ratio = seconds / estimated
    text = f"{1e3 * seconds:.2f} ms, and {1e3 * estimated:.2f} ms by the planner: {ratio - 1:+.0%}"
    return Finding(AREA, name, "ok" if ratio <= MOST else "wrong", text, figures)
