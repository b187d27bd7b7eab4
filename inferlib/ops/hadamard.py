"""Hadamard rotations: of inputs while a model runs, and as matrices.

A Hadamard matrix has entries +-1 and orthogonal rows. A rotation by one spreads outliers over all channels, so numbers
are easier to round (Ashkboos et al. 2024, "QuaRot", https://arxiv.org/abs/2404.00456).
"""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inferlib.ops.precision import precision_of

_MOST = 128  # the largest factor that is multiplied at once: as wide as matrix units are


def rotated(x: jax.Array, size: int, *, back: bool = False) -> jax.Array:
    """x [..., I] with each `size` consecutive numbers multiplied by `rotation_matrix(size)`, of x's dtype. back: by its
    transpose, which undoes that.

    The fast Walsh-Hadamard transform by its Kronecker factors: one small product for each, of +-1, which half precision
    has exactly. The rotation of W rows that undoes it makes the product x W what it was.
    """
    factors, shape = factors_of(size), x.shape
    precision = precision_of(x.dtype)
    for number, order in enumerate(factors):
        rest = math.prod(factors[number + 1 :])
        x = x.reshape(-1, order, rest) if rest > 1 else x.reshape(-1, order)
        matrix = jnp.asarray(hadamard(order), x.dtype)
        dimensions = (((1,), (1 if back else 0,)), ((), ()))
        y = lax.dot_general(x, matrix, dimensions, precision, preferred_element_type=jnp.float32)
        y = (y * order**-0.5).astype(x.dtype)
        x = jnp.swapaxes(y, 1, 2) if rest > 1 else y
    return x.reshape(shape)


def rotation_matrix(size: int) -> np.ndarray:
    """The orthogonal matrix [size, size], float64, by which `rotated` multiplies."""
    matrix = np.ones((1, 1))
    for order in factors_of(size):
        signs = hadamard(order)
        assert signs is not None  # of all factors
        matrix = np.kron(matrix, signs)
    return matrix / math.sqrt(size)


def operations(size: int) -> int:
    """Operations of `rotated` for each number."""
    return 2 * sum(factors_of(size))


@cache
def factors_of(size: int) -> tuple[int, ...]:
    """The orders of the Kronecker factors, those that are no powers of two first. Raises ValueError if no Hadamard
    matrix of this size is known here."""
    power = size & -size
    odd, orders, powers = size // max(power, 1), [], []
    if odd != 1:
        orders = [order for order in (odd << n for n in range(2, power.bit_length())) if _paley(order) is not None][:1]
        if size < 1 or not orders:
            raise ValueError(f"no Hadamard matrix of size {size} is known")
        power = size // orders[0]
    while power > 1:
        powers.append(min(power, _MOST))
        power //= powers[-1]
    return (*orders, *powers)


@cache
def hadamard(size: int) -> np.ndarray | None:
    """A Hadamard matrix [size, size] of +-1, by Sylvester's construction and Paley's; None if they make none."""
    if size == 1:
        return np.ones((1, 1))
    for order in range(size, 1, -1):
        if size % order == 0 and (factor := _factor(order)) is not None:
            rest = hadamard(size // order)
            if rest is not None:
                return np.kron(factor, rest)
    return None


def _factor(order: int) -> np.ndarray | None:
    return np.array([[1.0, 1.0], [1.0, -1.0]]) if order == 2 else _paley(order)


def _paley(order: int) -> np.ndarray | None:
    """Paley's first matrix, of order q + 1 for a prime q that is 3 modulo 4, or his second, of order 2 (q + 1) for one
    that is 1 modulo 4. None for other orders."""
    if order % 4 or order > 200:
        return None
    if _is_prime(order - 1):
        matrix = _jacobsthal(order - 1, sign=-1.0)
        return matrix + np.eye(order)
    q = order // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        matrix = _jacobsthal(q, sign=1.0)
        return np.kron(matrix, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(np.eye(q + 1), [[1.0, -1.0], [-1.0, -1.0]])
    return None


def _jacobsthal(q: int, sign: float) -> np.ndarray:
    """The matrix [q + 1, q + 1] of quadratic residues modulo q, with ones above them and `sign` beside them."""
    residues = {i * i % q for i in range(1, q)}
    character = np.array([0.0] + [1.0 if i in residues else -1.0 for i in range(1, q)])
    matrix = np.zeros((q + 1, q + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = character[(np.arange(q)[None, :] - np.arange(q)[:, None]) % q]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % n for n in range(2, math.isqrt(number) + 1))
