"""Products whose sums the next kernel finishes."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialSums:
    """A product [T, *O] that is not summed yet: the sum of splits [S, T, *O] float32 over S, plus addend [T, *O].

    The addend is what a branch of low rank adds, see `inferlib.ops.low_rank`; None if the weight has none.
    """

    splits: jax.Array
    addend: jax.Array | None = None

    def total(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The product [T, *O]."""
        y = self.splits.sum(axis=0)
        return (y if self.addend is None else y + self.addend).astype(dtype)
