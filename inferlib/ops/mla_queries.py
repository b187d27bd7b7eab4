"""What decode attention over latents takes, of projected tokens: queries in the latents' space and new cells."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax

_DTYPES = ("bfloat16", "float16", "float32")


def mla_queries_lacks(q: jax.Array, k: jax.Array, cos: jax.Array) -> str:
    """What the kernel cannot do of these, "" if nothing; see `mla_queries`."""
    from inferlib.pallas_kernels.mla_queries_gpu import ROWS

    (rows, *_), rank, rotary = q.shape, k.shape[2], 2 * cos.shape[1]
    if rows > ROWS:
        return f"it takes at most {ROWS} rows, not {rows}"
    if q.dtype.name not in _DTYPES or k.dtype != q.dtype:
        return f"it takes queries and their weight of one of {', '.join(_DTYPES)}, not {q.dtype} and {k.dtype}"
    if any(n < 16 or n & (n - 1) for n in (rank, rotary)):
        return f"latents of {rank} and rotary keys of {rotary} numbers are no powers of two from 16 on"
    return ""


def mla_queries(
    q: jax.Array, down: jax.Array, weight: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries [B, H, R] and their rotary part [B, H, r], latents [B, 1, R] and rotary keys [B, 1, r] of q [B, H, n + r]
    and down [B, D], by the GPU kernel, which is interpreted on CPU; see `pallas_kernels.mla_queries_gpu`.

    What `Mla.placed` and `Mla.absorb` compute of decode rows. Raises ValueError for what the kernel lacks.
    """
    if reason := mla_queries_lacks(q, k, cos):
        raise ValueError(f"mla_queries cannot run these: {reason}")
    from inferlib.pallas_kernels.mla_queries_gpu import mla_queries as kernel

    forms = dict(cpu=partial(kernel, eps=eps, interpret=True), default=partial(kernel, eps=eps))
    return lax.platform_dependent(q, down, weight, k, cos, sin, **forms)
