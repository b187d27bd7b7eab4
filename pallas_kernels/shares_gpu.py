"""Sums of the shares of products of few rows on NVIDIA GPUs (Triton lowering), with what follows them: an activation,
or the residual and the next norm but for its factor, which the sums of that norm's products get.

A norm's factor is one number of a row, and products are linear: without it every column is on its own, and no kernel
has to see a whole row before the next product begins.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

TILE = 128  # columns of a program, of 4 warps, or of 8 where most shares are read: 4 took 0.3 us more there


def summed(
    shares: jax.Array,
    squares: jax.Array | None = None,
    *,
    inputs: int | None = None,
    eps: float = 0.0,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """shares [S, M, O] -> their sum [M, O], or the activation [M, O / 2] of its halves, rounded to the dtype before.

    squares [M, P]: of the norm of rows of `inputs` numbers that was multiplied, whose factor is to come; see `added`.
    """
    _, rows, columns = shares.shape
    halves = 2 if activation else 1
    outputs = columns // halves

    def kernel(shares_ref, squares_ref, out_ref):
        row, at = pl.program_id(1), pl.program_id(0) * TILE + jnp.arange(TILE)
        factor = norm_factor(squares_ref, row, inputs, eps) if squares_ref is not None else 1.0
        y = [_sum(shares_ref, row, n * outputs + at, at < outputs) * factor for n in range(halves)]
        y = [part.astype(dtype) for part in y]
        y = activation(*(part.astype(jnp.float32) for part in y)).astype(dtype) if activation else y[0]
        plgpu.store(out_ref.at[row, at], y, mask=at < outputs)

    out = jax.ShapeDtypeStruct((rows, outputs), dtype)
    return _call(kernel, "summed", (shares, squares), out, (pl.cdiv(outputs, TILE), rows), 4, interpret)


def added(
    shares: jax.Array, residual: jax.Array, weight: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """shares [S, M, D], residual [M, D], weight [D] -> x [M, D], the sum of all, rounded before the residual is added;
    y [M, D], x times weight; squares [M, P] float32, whose sum over P is that of x squared."""
    rows, width = residual.shape
    tiles = pl.cdiv(width, TILE)

    def kernel(shares_ref, residual_ref, weight_ref, x_ref, y_ref, squares_ref):
        tile, row = pl.program_id(0), pl.program_id(1)
        at = tile * TILE + jnp.arange(TILE)
        real = at < width
        load = lambda ref, *place: plgpu.load(ref.at[(*place, at)], mask=real, other=0).astype(jnp.float32)  # noqa: E731
        branch = _sum(shares_ref, row, at, real).astype(x_ref.dtype).astype(jnp.float32)
        x = (load(residual_ref, row) + branch).astype(x_ref.dtype)
        plgpu.store(x_ref.at[row, at], x, mask=real)
        x = x.astype(jnp.float32)
        plgpu.store(y_ref.at[row, at], (x * load(weight_ref)).astype(y_ref.dtype), mask=real)
        plgpu.store(squares_ref.at[row, tile], jnp.sum(x * x))

    like = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    out = [like, like, jax.ShapeDtypeStruct((rows, tiles), jnp.float32)]
    return _call(kernel, "added", (shares, residual, weight), out, (tiles, rows), 8, interpret)


def _sum(shares_ref, row, at, real):
    """[TILE] of the columns `at`."""
    splits = shares_ref.shape[0]
    share = jnp.arange(pl.next_power_of_2(splits))[:, None]
    return plgpu.load(shares_ref.at[share, row, at[None]], mask=(share < splits) & real[None], other=0).sum(axis=0)


def norm_factor(squares_ref, row, inputs: int, eps: float):
    """Of a row's norm, by squares [M, P] of its `inputs` numbers."""
    count = squares_ref.shape[1]
    part = jnp.arange(pl.next_power_of_2(count))
    total = jnp.sum(plgpu.load(squares_ref.at[row, part], mask=part < count, other=0))
    return lax.rsqrt(total / inputs + eps)


def _call(kernel, name: str, operands: tuple, out_shape, grid: tuple, warps: int, interpret: bool):
    whole = lambda x: None if x is None else pl.BlockSpec(x.shape, lambda n, m: (0,) * len(x.shape))  # noqa: E731
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole(x) for x in operands],
        out_specs=jax.tree.map(whole, out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)
