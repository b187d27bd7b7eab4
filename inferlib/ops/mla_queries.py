"""The inputs of decode attention over latents, from projections: queries in the latents' space, and new cells."""

from __future__ import annotations

from functools import partial

import jax

from inferlib.ops.choice import Choice
from inferlib.ops.interpreted import run_kernel

_DTYPES = ("bfloat16", "float16", "float32")


def choose(q: jax.Array, k: jax.Array, cos: jax.Array, backend: str) -> Choice:
    """The implementation for operands of `mla_queries`, which may be shapes. "xla": `Mla.rotated` and `Mla.absorb`.

    backend: that of decode attention.
    """
    return Choice.of(backend, _lacks(q, k, cos)) if backend == "pallas_gpu" else Choice("xla")


def _lacks(q: jax.Array, k: jax.Array, cos: jax.Array) -> str | None:
    from inferlib.pallas_kernels.mla_queries_gpu import ROWS

    (rows, *_), rank, rotary = q.shape, k.shape[2], 2 * cos.shape[1]
    if rows > ROWS:
        return f"it takes at most {ROWS} rows, not {rows}"
    if q.dtype.name not in _DTYPES or k.dtype != q.dtype:
        return f"it takes queries and their weight of one of {', '.join(_DTYPES)}, not {q.dtype} and {k.dtype}"
    if any(n < 16 or n & (n - 1) for n in (rank, rotary)):
        return f"latents of {rank} and rotary keys of {rotary} numbers are no powers of two from 16 on"
    return None


def mla_queries(
    q: jax.Array, down: jax.Array, weight: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q [B, H, n + r] and down [B, D] -> queries [B, H, R] and their rotary part [B, H, r], latents [B, 1, R] and
    rotary keys [B, 1, r], by the GPU kernel, which is interpreted on CPU; see `pallas_kernels.mla_queries_gpu`.

    The result equals `Mla.rotated` and `Mla.absorb` of decode rows. weight [R], eps: belong to the latents' RMS norm; k
    [H, n, R]; cos, sin [B, r / 2]. Raises ValueError for inputs that the kernel does not take.
    """
    if reason := _lacks(q, k, cos):
        raise ValueError(f"mla_queries cannot run these: {reason}")
    from inferlib.pallas_kernels.mla_queries_gpu import mla_queries as kernel

    return run_kernel(partial(kernel, eps=eps), q, down, weight, k, cos, sin)
