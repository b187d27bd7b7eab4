"""The matrices of gate and up as two weights.

XLA:TPU copies whole arrays to on-chip memory while it waits for a collective, and one array of both may be too large
for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from inferlib.ops.quantized import QuantizedTensor
from inferlib.ops.read_whole import ReadWhole


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeparateGateUp(ReadWhole):
    """gate [D, F] and up [D, F] in place of one weight [D, 2, F]."""

    gate: jax.Array | QuantizedTensor
    up: jax.Array | QuantizedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values in one weight."""
        inputs, hidden = self.gate.shape
        return inputs, 2, hidden
