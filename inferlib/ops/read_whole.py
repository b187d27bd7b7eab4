"""What weights that are no plain arrays have in common with arrays."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp


class ReadWhole:
    """A weight that `nnx.Param` reads by `w[...]`, and that has no parts to index."""

    def __getitem__(self, index) -> Self:
        """The weight itself. Raises TypeError for an index."""
        if index is not Ellipsis:
            raise TypeError(f"a weight of type {type(self).__name__} is read whole, as w[...]")
        return self


class ArrayWeight(ReadWhole):
    """A weight whose matrix is one array, `values`, and that has its shape and dtype."""

    values: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    def size(self) -> int:
        return self.values.size
