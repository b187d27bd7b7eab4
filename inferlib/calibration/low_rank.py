"""A branch of low rank beside a rounded matrix (Zhang et al. 2024, "LQER"; Li et al. 2024, "SVDQuant").

The branch A B [I, R] [R, O] takes up what of the rounding error E costs most by H: the columns of V are the R largest
eigenvectors of E^T H E, and A B is E V V^T, which is the best by the singular values of H^1/2 E. Then W - A B is
rounded anew, and the branch fitted to that, as long as the cost falls.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.calibration.compiled import compiled
from inferlib.calibration.rounding import Rounded, Rounding, round_matrix
from inferlib.ops.low_rank import DTYPE
from inferlib.ops.quantized import Scheme

_ROUNDS = 3  # of rounding and fitting
_SPARE, _ITERATIONS = 16, 12  # more directions than the rank, and how often the subspace is multiplied


class Branch(NamedTuple):
    """Factors [I, R] and [R, O], as they are stored."""

    a: jax.Array
    b: jax.Array

    @property
    def whole(self) -> jax.Array:
        """[I, O] float32."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def round_with_branch(
    w: jax.Array, h: jax.Array, scheme: Scheme, group: int, rounding: Rounding, rank: int
) -> tuple[Rounded, Branch]:
    """Round w [I, O] by its H [I, I] with a branch of a rank beside it. The losses are those of both together."""
    best: tuple[float, Rounded, Branch] | None = None
    rest, nearest = w, None
    for _ in range(_ROUNDS):
        rounded = round_matrix(rest, h, scheme, group, rounding)
        nearest = rounded.nearest if nearest is None else nearest
        whole = rounded.values * jnp.repeat(rounded.scales, w.shape[0] // rounded.scales.shape[0], axis=0)
        branch = Branch(*fit(w - whole, h, rank))
        loss = _losses(w - whole - branch.whole, h)
        if best is not None and float(jnp.sum(loss)) >= best[0]:
            break
        best = float(jnp.sum(loss)), Rounded(rounded.values, rounded.scales, loss, nearest), branch
        rest = w - branch.whole
    assert best is not None
    return best[1:]


@compiled(static_argnames="rank")
def fit(error: jax.Array, h: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """The factors whose product is closest to an error [I, O] by H, in the type in which they are stored.

    Where H is zero, all inputs count alike. By subspace iteration, which decomposes no large matrix.
    """
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    weighted = jnp.where(jnp.max(jnp.diag(h)) > 0, product(h, error), error)
    count = min(rank + _SPARE, *error.shape)
    start = jnp.asarray(np.random.default_rng(0).standard_normal((error.shape[1], count)), error.dtype)

    def times(basis: jax.Array) -> jax.Array:
        """E^T H E times a basis [O, N]."""
        return product(weighted.T, product(error, basis))

    basis = lax.fori_loop(0, _ITERATIONS, lambda _, x: _orthonormal(times(x)), _orthonormal(start))
    basis = _orthonormal(basis)  # what the first time left
    vectors = product(basis, jnp.linalg.eigh(product(basis.T, times(basis)))[1][:, -rank:])
    a, b = product(error, vectors), vectors.T
    # Both of one size, so that half precision has them alike.
    balance = jnp.sqrt(jnp.linalg.norm(b) / jnp.maximum(jnp.linalg.norm(a), jnp.finfo(jnp.float32).tiny))
    balance = jnp.where(balance > 0, balance, 1.0)  # no error, no branch
    return (a * balance).astype(DTYPE), (b / balance).astype(DTYPE)


def _orthonormal(x: jax.Array) -> jax.Array:
    """An orthonormal basis of the columns of x [O, N], but for those that are noise beside the largest. By the product
    of x with itself: XLA decomposes a tall matrix slowly on CPUs."""
    precision = lax.Precision.HIGHEST
    sizes, vectors = jnp.linalg.eigh(jnp.matmul(x.T, x, precision=precision))
    least = jnp.maximum(sizes[-1] * jnp.finfo(x.dtype).eps, jnp.finfo(x.dtype).tiny)
    return jnp.matmul(x, vectors / jnp.sqrt(jnp.maximum(sizes, least)), precision=precision)


def _losses(error: jax.Array, h: jax.Array) -> jax.Array:
    return jnp.sum(error * jnp.matmul(h, error, precision=lax.Precision.HIGHEST), axis=0)
