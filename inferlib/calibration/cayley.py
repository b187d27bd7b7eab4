"""Cayley SGD: descent with momentum among orthogonal matrices (Li et al. 2020, "Efficient Riemannian optimization on
the Stiefel manifold via the Cayley transform", https://arxiv.org/abs/2002.01113, algorithm 1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

_MOST = 1.0  # the norm of a step's skew matrix at most, 2 q of the paper


class CayleyState(NamedTuple):
    """momentum: of each matrix, in its tangent space. count: of steps, which the rate depends on."""

    momentum: optax.Updates
    count: jax.Array


def cayley_sgd(rate: optax.Schedule, decay: float = 0.9) -> optax.GradientTransformation:
    """The optimizer of a tree of orthogonal matrices [n, n], which its updates leave orthogonal.

    rate: of a step, by its number. decay: of the momentum. Each matrix X moves to
    (1 - a/2 W)^-1 (1 + a/2 W) X, where W is skew and W X the momentum; a is the rate, or less if the norm of a W would
    exceed 1. The paper approximates the inverse by two products; here it is a solution of linear equations.
    """

    def init(matrices: optax.Params) -> CayleyState:
        return CayleyState(jax.tree.map(jnp.zeros_like, matrices), jnp.zeros((), jnp.int32))

    def update(
        gradients: optax.Updates, state: CayleyState, matrices: optax.Params | None = None
    ) -> tuple[optax.Updates, CayleyState]:
        if matrices is None:
            raise ValueError("Cayley SGD turns matrices: give them to update as well")
        step = rate(state.count)
        skews = jax.tree.map(lambda m, g, x: _skew(decay * m - g, x), state.momentum, gradients, matrices)
        updates = jax.tree.map(lambda w, x: _turned(w, x, step) - x, skews, matrices)
        return updates, CayleyState(jax.tree.map(_product, skews, matrices), state.count + 1)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _skew(direction: jax.Array, x: jax.Array) -> jax.Array:
    """The skew matrix W of which W x is the part of a direction that is tangent to the orthogonal matrices at x."""
    product = _product(direction, x.T)
    return 0.5 * (product - product.T)


def _turned(w: jax.Array, x: jax.Array, rate: jax.typing.ArrayLike) -> jax.Array:
    """The Cayley transform of x along w."""
    half = 0.5 * jnp.minimum(rate, _MOST / (jnp.linalg.norm(w) + 1e-8)) * w
    return jnp.linalg.solve(jnp.eye(len(x), dtype=x.dtype) - half, x + _product(half, x))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
