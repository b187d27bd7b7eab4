"""Weights as Flax NNX parameters with named dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def param(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype,
    init: Literal["normal", "ones", "zeros", "range"] = "normal",
    *,
    contracting: tuple[int, ...] = (),
):
    """A parameter with one logical axis name per dimension.

    contracting: the dimensions (of one layer) that products sum over; a weight with such dimensions may be quantised.
    Weights that make one number for each head or expert (a step, a strength, a fading, a score) name none: they are a
    hundredth of the bytes, and their errors multiply along the sequence or change which weights are read.

    Modules are built under `nnx.eval_shape`, so nothing is allocated here; `init` says how random
    weights are drawn (see `random_leaf`).
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, init=init, contracting=contracting)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OfStack:
    """One layer of a stacked weight [L, ...]. `w[...]` slices; a kernel that indexes stacks takes `w.stack` and
    `w.layer`."""

    stack: jax.Array
    layer: jax.Array

    def __getitem__(self, index) -> jax.Array:
        if index is not Ellipsis:
            raise TypeError("a layer's parameter is read whole, as w[...]")
        return lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)


def random_leaf(key: jax.Array, shape: tuple[int, ...], dtype, init: str) -> jax.Array:
    """One random weight: N(0, 0.02 or less) for matrices, ones or zeros for norms and biases, 0, 1, ... for tables."""
    if init == "range":
        return jnp.broadcast_to(jnp.arange(shape[-1], dtype=dtype), shape)
    if init != "normal":
        return jnp.full(shape, 1.0 if init == "ones" else 0.0, dtype)
    std = min(0.02, 1 / math.sqrt(max(shape[0], 1)))
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)
