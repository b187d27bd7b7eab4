"""How many steps of a loop's core each row takes (see `inferlib.models.looped`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.models.config import ModelConfig


class Depth(NamedTuple):
    """The depth of one row.

    steps: how many it takes at most; 0: all of them. threshold: the bits, as an int32, of the float32 by which its
    tokens leave earlier (see `inferlib.models.early_exit`); 0: they do not.
    """

    steps: int
    threshold: int


class Taken(NamedTuple):
    """What a pass took of a loop's core, if tokens may leave it.

    counts [4] int32: passes, steps that they ran, tokens, and steps that these took; 0 of what another of the devices
    that prompts are dealt out to counts. steps [T] int32: how many each of this device's tokens took; 0 of padding.
    """

    counts: jax.Array
    steps: jax.Array


def depth_of(steps: int | None, threshold: float | None, config: ModelConfig) -> Depth | None:
    """The depth of a row that asks for so many steps and a threshold, or for neither; None of a model that repeats no
    layers.

    Raises ValueError for what the model does not have.
    """
    loop = config.loop
    if loop is None:
        for name, value in {"depth": steps, "exit_threshold": threshold}.items():
            if value is not None:
                raise ValueError(
                    f"{name} is for models that repeat layers, and {config.family} does not: leave {name}={value} out"
                )
        return None
    if steps is not None and not 1 <= steps <= loop.steps:
        more = f", or build LLM(..., loop_steps={steps})" if steps > loop.steps else ""
        raise ValueError(f"depth must be 1 to {loop.steps}, the model's loop_steps, got {steps}: give less{more}")
    if threshold and not loop.early_exit:
        raise ValueError(f"exit_threshold={threshold} needs programs for it: build LLM(..., early_exit=True)")
    bits = int(np.float32(threshold or 0).view(np.int32))
    return Depth(0 if steps is None or steps == loop.steps else steps, bits)


@dataclass(frozen=True)
class Depths:
    """steps [R] int32, thresholds [R] int32: of each row, see `Depth`; without the latter no token leaves early. whole
    (static): a pass runs all steps whatever its rows take, where a loop that ends by a condition costs more than it
    saves; it does not concern thresholds."""

    steps: jax.Array
    thresholds: jax.Array | None = None
    whole: bool = False

    def of(self, rows: jax.Array, steps: int) -> jax.Array:
        """How many of the core's `steps` these rows take at most; of rows that do not exist, any."""
        depths = jnp.take(self.steps, rows, mode="clip")
        return jnp.where(depths > 0, jnp.minimum(depths, steps), steps)

    def thresholds_of(self, rows: jax.Array) -> jax.Array:
        """The thresholds of these rows, float32."""
        assert self.thresholds is not None
        return lax.bitcast_convert_type(jnp.take(self.thresholds, rows, mode="clip"), jnp.float32)
