"""How exactly products of a dtype are computed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def precision_of(dtype) -> lax.Precision | None:
    """Float32 means float32: GPUs and TPUs would otherwise round the operands to tf32 or bf16."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None
