"""Weights as matrices [E, I, O]: E experts (1 for other weights), the inputs I that a product sums over, outputs O."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.models.abstract import WeightSpec
from inferlib.ops.quantized import Scheme
from inferlib.sharding import axes


@dataclass(frozen=True)
class MatrixForm:
    """How a weight's dimensions become those of matrices.

    shape: of the weight. inputs: the dimensions that products sum over. experts: the first dimension is of experts.
    """

    shape: tuple[int, ...]
    inputs: tuple[int, ...]
    experts: bool

    @staticmethod
    def of(weight: WeightSpec) -> MatrixForm:
        return MatrixForm(weight.shape, weight.contracting, axes.EXPERTS in weight.axes)

    @property
    def order(self) -> tuple[int, ...]:
        """The weight's dimensions in the order of the matrices'."""
        first = (0,) if self.experts else ()
        rest = tuple(i for i in range(len(self.shape)) if i not in (*first, *self.inputs))
        return (*first, *self.inputs, *rest)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, I, O."""
        count = self.shape[0] if self.experts else 1
        inner = math.prod(self.shape[i] for i in self.inputs)
        return count, inner, math.prod(self.shape) // (count * inner)

    def group(self, scheme: Scheme) -> int:
        """How many consecutive inputs share a scale."""
        return self.sizes[1] if scheme.group is None else scheme.group_of(self.shape[self.inputs[-1]])

    def matrices(self, w: jax.Array) -> jax.Array:
        return jnp.transpose(w, self.order).reshape(self.sizes)

    def weight(self, matrices: jax.Array | np.ndarray) -> np.ndarray:
        """The weight of matrices [E, I, O]."""
        shape = [self.shape[i] for i in self.order]
        return np.transpose(np.asarray(matrices).reshape(shape), np.argsort(self.order))

    def factors(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Factors [I, R] and [R, O] in the weight's dimensions, of which products sum over the first ones."""
        count = len(self.inputs)
        assert self.inputs == tuple(range(count))
        assert not self.experts
        return a.reshape(*self.shape[:count], -1), b.reshape(-1, *self.shape[count:])

    def stored(self, scheme: Scheme, values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of a scheme. values [E, I, O] and scales [E, I / group, O] are float32 numbers of its types."""
        expected = scheme.arrays(self.shape, (None,) * len(self.shape), self.inputs)
        (values_shape, _, values_type), (scales_shape, _, scales_type) = expected["values"], expected["scales"]
        groups = list(self.shape)
        for dim in self.inputs:
            groups[dim] = 1 if scheme.group is None else groups[dim]
        if scheme.group is not None:
            groups[self.inputs[-1]] //= self.group(scheme)
        shared = np.transpose(scales.reshape([groups[i] for i in self.order]), np.argsort(self.order))
        whole = np.ascontiguousarray(self.weight(values)).reshape(values_shape)
        return whole.astype(values_type), np.ascontiguousarray(shared).reshape(scales_shape).astype(scales_type)
