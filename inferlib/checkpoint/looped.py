"""Checkpoint tensors of what a loop has around its layers (see `inferlib.models.looped`). D: width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from inferlib.models.config import ModelConfig
from inferlib.models.pieces import Assembly, Piece, assembly


@dataclass(frozen=True)
class _Columns:
    """Columns `start` to `stop` of a matrix, transposed."""

    start: int
    stop: int

    def __call__(self, x: jax.Array) -> jax.Array:
        return x[:, self.start : self.stop].T


def loop_assembly(names: Mapping[str, str], config: ModelConfig, part: str) -> Assembly:
    """How `loop.input`, `loop.exit`, a norm or a part of `loop.injection` is made. names: tensors in full.

    A linear injection is one matrix [D, 2 D], for the state and for the prelude's output.
    """
    dim, loop = config.dim, config.loop
    assert loop is not None  # only models that have one name its parts
    if loop.injection == "linear" and part in ("loop.injection.state", "loop.input"):
        columns = _Columns(0, dim) if part == "loop.injection.state" else _Columns(dim, 2 * dim)
        return Assembly((Piece(names["loop.linear"], (dim, 2 * dim)),), columns)
    if part in ("loop.input", "loop.exit"):
        return assembly(Piece(names[part], (dim, dim)), "row column -> column row")
    return assembly(Piece(names[part], (dim,)), "d -> d")
