"""What the device stores of every row between dispatches, so that decoding needs nothing from the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inferlib.sampling.sampler import pack
from inferlib.sharding import axes


class RowState(NamedTuple):
    """The state of R rows; every program donates it.

    token [R]: last token, not yet in the cache; length [R]: tokens in the cache; active [R] bool;
    budget [R]: tokens still to generate; generated [R]: tokens generated; ints [R, NI], floats [R, NF]: packed
    sampling parameters; counts [R, V]: token counts for penalties (see `inferlib.sampling.sampler`); pages [R, M]:
    where the positions of a row lie in the cache (see `StepContext.table`), which `row_changes` alone changes.
    """

    token: jax.Array
    length: jax.Array
    active: jax.Array
    budget: jax.Array
    generated: jax.Array
    ints: jax.Array
    floats: jax.Array
    counts: jax.Array
    pages: jax.Array

    @staticmethod
    def zeros(rows: int, vocab: int, columns: int) -> RowState:
        def vector():
            return jnp.zeros((rows,), jnp.int32)

        ints, floats = pack([None] * rows)
        return RowState(
            token=vector(),
            length=vector(),
            active=jnp.zeros((rows,), bool),
            budget=vector(),
            generated=vector(),
            ints=jnp.array(ints),
            floats=jnp.array(floats),
            counts=jnp.zeros((rows, vocab), jnp.int32),
            pages=jnp.zeros((rows, columns), jnp.int32),
        )

    def head(self, rows: int) -> RowState:
        """The first `rows` rows, with the pages of all."""
        return RowState._make([*(x[:rows] for x in self[:-1]), self.pages])

    def with_head(self, head: RowState) -> RowState:
        """These rows with the first ones replaced."""
        rows = head.token.shape[0]
        if rows == self.token.shape[0]:
            return head
        new = (x.at[:rows].set(y) for x, y in zip(self[:-1], head[:-1], strict=True))
        return RowState._make([*new, self.pages])


_ROW = (axes.ROWS,)
# A `RowState` of the logical axes of every field.
STATE_AXES: Any = RowState._make([_ROW] * 5 + [(axes.ROWS, None)] * 2 + [(axes.ROWS, axes.VOCAB), (axes.ROWS, None)])
