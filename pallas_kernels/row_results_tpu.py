"""Results of attention, row by row on their way from a TPU kernel to memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from inferlib.pallas_kernels.arithmetic_tpu import LOG2E, MASKED, rem, wide


@dataclass
class RowResults:
    """Copies of outputs and LSEs to memory. Each row's copies queue behind copies of blocks that were started before.

    To wait for a pipelined output one row later would be to wait for those blocks too. memory: out [B, K, R, o] and lse
    [B, K, 128], in HBM; staged: the same of n rows on chip; semaphores [2, n].
    """

    memory: Sequence[Any]
    staged: Sequence[Any]
    semaphores: Any

    def make_room(self, row: jax.Array) -> None:
        """Wait until the place of a row's results is free."""

        @pl.when(row >= self._places)
        def _():
            self._wait(row)

    def put(self, row: jax.Array, results: Sequence[tuple[jax.Array, ...]], dead: Sequence[jax.Array]) -> None:
        """Store a row's output and LSE, from each head's maximum and sum [R, 128], lanes alike, and accumulator [R, h],
        whose last o numbers are the output. dead: for each head, whether its row is inactive."""
        (out, lse), place = self.staged, rem(row, self._places)
        shape = results[0][0].shape
        diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
        for head, ((top, total, acc), is_dead) in enumerate(zip(results, dead, strict=True)):
            empty = (top <= MASKED / 2) | is_dead
            total = jnp.where(empty, 1.0, total)
            acc = acc[:, acc.shape[1] - out.shape[-1] :]  # without what lies before a cell's values
            out[place, head] = (acc * wide(jnp.where(empty, 0.0, 1.0 / total), acc.shape[1])).astype(out.dtype)
            logs = jnp.where(empty, -jnp.inf, top / LOG2E + jnp.log(total))
            lse[place, head] = jnp.sum(jnp.where(diagonal, logs, 0.0), axis=0)

    def send(self, row: jax.Array) -> None:
        """Start the copies of a row's results to memory."""
        place = rem(row, self._places)
        for n, (memory, staged) in enumerate(zip(self.memory, self.staged, strict=True)):
            pltpu.make_async_copy(staged.at[place], memory.at[row], self.semaphores.at[n, place]).start()

    def end(self, rows: int) -> None:
        """Wait until all results are in memory."""
        lax.fori_loop(max(rows - self._places, 0), rows, lambda row, _: self._wait(row), None)

    @property
    def _places(self) -> int:
        return self.staged[0].shape[0]

    def _wait(self, row: jax.Array) -> None:
        place = rem(row, self._places)
        for n, staged in enumerate(self.staged):
            here = staged.at[place]
            pltpu.make_async_copy(here, here, self.semaphores.at[n, place]).wait()
