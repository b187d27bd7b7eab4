"""A quantised model's weights as they are trained, as they multiply meanwhile, and as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.ops.fake_quantized import FakeQuantizedWeight, fake_quantized, straight_through
from inferlib.ops.quantized import round_scales, round_values


class Trained(NamedTuple):
    """What is trained of one weight, float32.

    values: the weight, of a quantised one before it is rounded, in the shape of its stored values. growth: the
    logarithms of how much its scales have grown; None: they are powers of two, which stay, or it has none. factors: of
    the branch of low rank; empty: it has none.
    """

    values: jax.Array
    growth: jax.Array | None = None
    factors: tuple[jax.Array, ...] = ()


Scales = tuple[jax.Array | None, ...]  # of each weight, as training begins, float32; None: it is not quantised


def begin(model: AbstractModel, arrays: Sequence[jax.Array]) -> tuple[tuple[Trained, ...], Scales]:
    """What is trained of a model's weights, and their scales. arrays: in the order of `model.specs`."""
    rest, trained, scales = iter(arrays), [], []
    for weight in model.weights:
        values, *others = (jnp.asarray(next(rest)).astype(jnp.float32) for _ in weight.arrays)
        if weight.scheme is None:
            trained.append(Trained(values))
            scales.append(None)
            continue
        (of_weight, *factors) = others
        growth = jnp.zeros_like(of_weight) if _trains_scales(weight) else None
        trained.append(Trained(values * _expanded(weight, of_weight), growth, tuple(factors)))
        scales.append(of_weight)
    return tuple(trained), tuple(scales)


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of a model. stored: as its directory has them; dense: the same, not quantised, in the dtype of
    products."""

    stored: AbstractModel
    dense: AbstractModel

    def multiplied(self, trained: Sequence[Trained], scales: Scales) -> list[jax.Array | FakeQuantizedWeight]:
        """The weights by which the dense model computes what the stored one will. Traceable."""
        made: list[jax.Array | FakeQuantizedWeight] = []
        for weight, target, of_weight, first in zip(
            self.stored.weights, self.dense.weights, trained, scales, strict=True
        ):
            if weight.scheme is None or first is None:
                made.append(of_weight.values.astype(target.dtype))
                continue
            scale = _expanded(weight, _grown(weight, of_weight, first))
            rounded = fake_quantized(of_weight.values, scale, _values_type(weight)).reshape(weight.shape)
            if of_weight.factors:
                a, b = (x.astype(target.dtype).astype(jnp.float32) for x in of_weight.factors)
                rounded = rounded + jnp.tensordot(a, b, axes=1, precision=lax.Precision.HIGHEST)
            made.append(FakeQuantizedWeight(rounded.astype(target.dtype), weight.scheme))
        return made

    def rounded(self, weight: WeightSpec, trained: Trained, first: jax.Array | None) -> tuple[jax.Array, ...]:
        """The arrays that store a weight. first: its scales as training began."""
        if weight.scheme is None or first is None:
            return (trained.values.astype(weight.dtype),)
        dtypes = [array.dtype for array in weight.arrays]
        scale = _grown(weight, trained, first)
        values = round_values(trained.values / _expanded(weight, scale), _values_type(weight))
        parts = (values, scale, *trained.factors)
        return tuple(part.astype(dtype) for part, dtype in zip(parts, dtypes, strict=True))


def _values_type(weight: WeightSpec) -> np.dtype:
    assert weight.scheme is not None
    return np.dtype(weight.scheme.values)


def _trains_scales(weight: WeightSpec) -> bool:
    """False if scales are powers of two: between these a gradient says nothing."""
    return weight.scheme is not None and weight.scheme.scales != "float8_e8m0fnu"


def _grown(weight: WeightSpec, trained: Trained, first: jax.Array) -> jax.Array:
    """A weight's scales, rounded to their dtype."""
    if trained.growth is None or weight.scheme is None:
        return first
    scales = first * jnp.exp(trained.growth)
    return straight_through(scales, round_scales(scales, weight.scheme.scales))


def _expanded(weight: WeightSpec, scales: jax.Array) -> jax.Array:
    """A weight's scales with the dimensions along which numbers share them."""
    assert weight.scheme is not None
    grouped = weight.scheme.group is not None
    return jnp.expand_dims(scales, (weight.contracting[-1] + 1,) if grouped else weight.contracting)
