"""Host work per decode dispatch: our own Python between a result and the start of the next program.

    JAX_PLATFORMS=cpu python benchmarks/host.py --batch 1,64

The device is a stand-in that answers at once, so only the host is timed. "hot": one dispatch directly after the other.
"cold": 5 ms of sleep and a copy of 480 MB in between, which empty the CPU's caches as a wait for a device does. Figures
are the median and the lowest of a hundred. The size of a model does not matter here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib.config import EngineConfig
from inferlib.engine.engine import Engine, EngineStats
from inferlib.engine.sequence import Sequence, Status
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.programs.arguments import StepOutput
from inferlib.programs.keys import ProgramKey
from inferlib.sampling.params import SamplingParams


class Idle:
    """Stands in for the programs of a device that answers at once."""

    misses = 0

    def __init__(self, config: EngineConfig):
        self._output = StepOutput(jnp.ones((config.decode_steps, config.rows), jnp.int32))

    def ready(self, key: ProgramKey) -> Callable:
        return lambda weights, cache, state, control: (cache, state, self._output)

    def change_rows(self, cache, state, changes) -> tuple:
        return cache, state


def decoding(batch: int) -> Engine:
    """An engine whose rows all decode, for as long as it runs."""
    layer = LayerSpec(AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None), MlpSpec(hidden=2))
    model = abstract_model(ModelConfig("none", vocab=64, dim=2, layers=(layer,), context=1 << 20), "float32")
    engine = Engine(model, (), EngineConfig.make("gpu", batch, 1 << 20))
    engine.programs = cast(Any, Idle(engine.config))
    params = SamplingParams(temperature=0.0, max_tokens=1 << 19, ignore_eos=True)
    for row in range(batch):
        s = Sequence([0], params, 1 << 19, seed=0, status=Status.DECODE, row=row, prefilled=1, scheduled=1, tokens=[1])
        engine.scheduler.running[row] = s
    return engine


def microseconds(engine: Engine, between: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(100):
        between()
        engine.stats = EngineStats()
        engine.advance()
        times.append(engine.stats.host_seconds / engine.stats.dispatches * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,64", help="comma-separated")
    args = parser.parse_args()
    large, other = np.zeros(30_000_000), np.ones(30_000_000)

    def wait() -> None:
        time.sleep(0.005)
        np.copyto(large, other)

    table = Table(title="host work per decode dispatch, us", min_width=60)
    for name in ("batch", "hot", "hot, lowest", "cold", "cold, lowest"):
        table.add_column(name, justify="right")
    for batch in map(int, args.batch.split(",")):
        engine = decoding(batch)
        hot = microseconds(engine, lambda: None)
        cold = microseconds(engine, wait)
        figures = (statistics.median(hot), min(hot), statistics.median(cold), min(cold))
        table.add_row(str(batch), *(f"{x:.1f}" for x in figures))
    Console(width=None if Console().is_terminal else 100).print(table)


if __name__ == "__main__":
    main()
