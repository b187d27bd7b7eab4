"""The steps before decode attention over latents (MLA) of a few rows, in one kernel on NVIDIA GPUs (Triton lowering).

The steps take queries to the latents' space, rotate them, norm the new latent and rotate the new key. XLA takes a
kernel or two for each step, and computes the products of a single row as a multiplication and a reduction.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS = 16  # rows of a tile of the tensor cores, and the most that the kernel takes
COLUMNS = 64  # dimensions of the latents that a program computes


def mla_queries(
    q: jax.Array,
    down: jax.Array,
    weight: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute decode attention's queries and new cells from the projections q [B, H, n + r] and down [B, D].

    The last r numbers of a query are rotated by cos and sin [B, r / 2] float32, and k [H, n, R] takes the others to the
    latents' dimensions. The last R + r numbers of `down` are a latent, whose RMS norm has weight [R] and eps, and a
    key, which is rotated. R and r: powers of two from 16 on; B at most `ROWS`.
    Returns queries [B, H, R] and their rotary part [B, H, r], latents [B, 1, R] and rotary keys [B, 1, r], each rounded
    once, to q's dtype. Raises ValueError for more rows.
    """
    (rows, heads, _), (_, _, rank), size = q.shape, k.shape, 2 * cos.shape[1]
    if rows > ROWS:
        raise ValueError(f"mla_queries takes at most {ROWS} rows, not {rows}")
    shapes = (rows, heads, rank), (rows, heads, size), (rows, 1, rank), (rows, 1, size)
    whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))  # noqa: E731
    made = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in shapes]
    operands = q, down, weight, k, cos, sin
    return pl.pallas_call(
        partial(_kernel, eps=eps),
        grid=(heads, pl.cdiv(rank, COLUMNS) + 1),
        in_specs=[whole(x) for x in operands],
        out_specs=[whole(x) for x in made],
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="mla_queries",
    )(*operands)


def _kernel(q_ref, down_ref, weight_ref, k_ref, cos_ref, sin_ref, queries_ref, rotary_ref, latent_ref, key_ref, *, eps):
    """A head's last program rotates its query, the others multiply; the first head's last one also makes the new
    cells."""
    (count, _, _), (_, n, rank), half = q_ref.shape, k_ref.shape, cos_ref.shape[1]
    head, part = pl.program_id(0), pl.program_id(1)
    rows, places, before = jnp.arange(ROWS)[:, None], jnp.arange(half)[None], down_ref.shape[1] - rank - 2 * half
    real = rows < count
    load = partial(plgpu.load, mask=real, other=0)

    @pl.when(part < pl.num_programs(1) - 1)
    def _():
        inner, columns = jnp.arange(pl.next_power_of_2(max(n, 16))), part * COLUMNS + jnp.arange(min(COLUMNS, rank))
        real_inner = inner < n
        q = plgpu.load(q_ref.at[rows, head, inner[None]], mask=real & real_inner[None], other=0)
        k = plgpu.load(k_ref.at[head, inner[:, None], columns[None]], mask=real_inner[:, None], other=0)
        y = plgpu.dot(q, k, precision=lax.Precision.HIGHEST)
        plgpu.store(queries_ref.at[rows, head, columns[None]], y.astype(queries_ref.dtype), mask=real)

    def rotate(source, index, start, target):
        a, b = (load(source.at[(rows, *index, start + i + places)]).astype(jnp.float32) for i in (0, half))
        cos, sin = load(cos_ref.at[rows, places]), load(sin_ref.at[rows, places])
        of = head if index else 0
        for i, y in ((0, a * cos - b * sin), (half, b * cos + a * sin)):
            plgpu.store(target.at[rows, of, i + places], y.astype(target.dtype), mask=real)

    @pl.when(part == pl.num_programs(1) - 1)
    def _():
        rotate(q_ref, (head,), n, rotary_ref)

        @pl.when(head == 0)
        def _():
            rotate(down_ref, (), before + rank, key_ref)
            columns = jnp.arange(rank)[None]
            x = load(down_ref.at[rows, before + columns]).astype(jnp.float32)
            x = x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / rank + eps)
            y = x * plgpu.load(weight_ref.at[jnp.arange(rank)]).astype(jnp.float32)[None]
            plgpu.store(latent_ref.at[rows, 0, columns], y.astype(latent_ref.dtype), mask=real)
