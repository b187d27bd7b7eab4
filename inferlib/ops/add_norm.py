"""Residual sum and RMS norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def add_norm_fits(tokens: int, width: int) -> bool:
    """Whether `add_norm` takes rows [tokens, width]."""
    from inferlib.pallas_kernels.add_norm_gpu import fits

    return fits(tokens, width)


def add_norm(branch: jax.Array, residual: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """x = residual + branch, and its RMS norm times weight, by the GPU kernel, which is interpreted on CPU.

    branch, residual [T, D], weight [D]; see `pallas_kernels.add_norm_gpu`.
    """
    from inferlib.pallas_kernels.add_norm_gpu import add_norm as kernel

    forms = dict(cpu=partial(kernel, eps=eps, interpret=True), default=partial(kernel, eps=eps))
    return lax.platform_dependent(branch, residual, weight, **forms)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unscaled:
    """The RMS norm of x [T, D] but for its factor, which is of a row and so may follow the norm's products. y [T, D]: x
    times the norm's weight; squares [T, P] float32, whose sum over P is that of x squared."""

    y: jax.Array
    squares: jax.Array
    eps: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.y.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.y.dtype

    def whole(self) -> jax.Array:
        """The norm [T, D], of y's dtype."""
        factor = lax.rsqrt(jnp.sum(self.squares, axis=1, keepdims=True) / self.y.shape[1] + self.eps)
        return (self.y.astype(jnp.float32) * factor).astype(self.y.dtype)


def add_shares(shares: jax.Array, residual: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, Unscaled]:
    """x = residual + the shares' sum, and its RMS norm times weight but for the factor, by the GPU kernel, which is
    interpreted on CPU.

    shares [S, T, D] float32, residual [T, D], weight [D]; see `pallas_kernels.shares_gpu`.
    """
    from inferlib.pallas_kernels.shares_gpu import added

    forms = dict(cpu=partial(added, interpret=True), default=added)
    x, y, squares = lax.platform_dependent(shares, residual, weight, **forms)
    return x, Unscaled(y, squares, eps)
