"""How many steps of a loop's core each row takes (see `inferlib.models.looped`)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from inferlib.models.config import ModelConfig


def checked_depth(depth: int | None, config: ModelConfig) -> int | None:
    """The depth of a row that asks for `depth`, as `Depths` has it; None of a model that repeats no layers.

    Raises ValueError for a depth that the model does not have.
    """
    if config.loop is None:
        if depth is not None:
            raise ValueError(
                f"depth is for models that repeat layers, and {config.family} does not: leave depth={depth} out"
            )
        return None
    steps = config.loop.steps
    if depth is not None and not 1 <= depth <= steps:
        more = f", or build LLM(..., loop_steps={depth})" if depth > steps else ""
        raise ValueError(f"depth must be 1 to {steps}, the model's loop_steps, got {depth}: give less{more}")
    return 0 if depth is None or depth == steps else depth


@dataclass(frozen=True)
class Depths:
    """rows [R] int32: how many steps of the core each row takes; 0: all of them. whole (static): a pass runs all steps
    whatever its rows take, where a loop that ends by a condition costs more than it saves."""

    rows: jax.Array
    whole: bool = False

    def of(self, rows: jax.Array, steps: int) -> jax.Array:
        """How many of the core's `steps` these rows take; of rows that do not exist, any."""
        depths = jnp.take(self.rows, rows, mode="clip")
        return jnp.where(depths > 0, jnp.minimum(depths, steps), steps)
