"""Residual sum and RMS norm."""

from __future__ import annotations

from functools import partial

import jax
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
