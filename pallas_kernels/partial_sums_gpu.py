"""Sums of split-K partial sums on NVIDIA GPUs (Triton), with the operation that follows: an activation, or the residual
and the next norm without its factor, by which the sums of that norm's products are multiplied later.

A norm's factor is one number for a row, and products are linear: without it columns do not depend on each other, and no
kernel has to see a whole row before the next product begins.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.pallas_kernels.lowered_once import call_lowered

# Numbers that a program of 4 warps loads at once. (Sums of 8 partial sums and a norm of 16 rows x 4,096 columns on an
# H200, us: 2.2 by tiles of 128 columns with 8 warps, 1.4 by tiles of 512 with 4; an activation 2.1 and 1.6.)
LOADED = 4096


def summed(
    partials: jax.Array,
    squares: jax.Array | None = None,
    addend: jax.Array | None = None,
    *,
    inputs: int = 0,
    eps: float = 0.0,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Sum `partials` [S, M, O] over S, plus addend [M, O] -> [M, O], or the activation [M, O / 2] of the sum's halves.

    Both are rounded to the dtype, before the activation too.

    squares [M, P]: see `added`; the rows multiplied were a norm of `inputs` numbers without its factor, which the sums
    get here.
    """
    how = inputs, eps, activation, jnp.dtype(dtype)
    return call_lowered(_summed, how, partials, squares, addend, interpret=interpret)


def _summed(inputs, eps, activation, dtype, partials, squares, addend, *, interpret: bool = False) -> jax.Array:
    _, rows, columns = partials.shape
    halves = 2 if activation else 1
    outputs = columns // halves
    tile, warps = _tile(partials.shape[0], most=256)

    def kernel(partials_ref, squares_ref, addend_ref, out_ref):
        row, at = pl.program_id(1), pl.program_id(0) * tile + jnp.arange(tile)
        squares, real = load_squares(squares_ref, row), at < outputs
        tiles = [_load_sums(partials_ref, addend_ref, row, n * outputs + at, real) for n in range(halves)]
        factor = norm_factor(squares, inputs, eps)
        y = [((parts.sum(axis=0) + addend) * factor).astype(dtype) for parts, addend in tiles]
        y = activation(*(part.astype(jnp.float32) for part in y)).astype(dtype) if activation else y[0]
        plgpu.store(out_ref.at[row, at], y, mask=at < outputs)

    out = jax.ShapeDtypeStruct((rows, outputs), dtype)
    return _call(kernel, "summed", (partials, squares, addend), out, (pl.cdiv(outputs, tile), rows), warps, interpret)


def added(
    partials: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    addend: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partials` [S, M, D], residual [M, D], weight [D], addend [M, D] -> x [M, D], the sum over S plus addend,
    rounded, plus the residual; y [M, D], x times weight; squares [M, P] float32, whose sum over P is the sum of x
    squared."""
    return call_lowered(_added, (), partials, residual, weight, addend, interpret=interpret)


def _added(partials, residual, weight, addend, *, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, width = residual.shape
    size, warps = _tile(partials.shape[0], most=512)
    tiles = pl.cdiv(width, size)

    def kernel(partials_ref, residual_ref, weight_ref, addend_ref, x_ref, y_ref, squares_ref):
        tile, row = pl.program_id(0), pl.program_id(1)
        at = tile * size + jnp.arange(size)
        real = at < width
        load = lambda ref, *place: plgpu.load(ref.at[(*place, at)], mask=real, other=0).astype(jnp.float32)  # noqa: E731
        parts, more = _load_sums(partials_ref, addend_ref, row, at, real)
        before, scale = load(residual_ref, row), load(weight_ref)
        branch = (parts.sum(axis=0) + more).astype(x_ref.dtype)
        x = (before + branch.astype(jnp.float32)).astype(x_ref.dtype)
        plgpu.store(x_ref.at[row, at], x, mask=real)
        x = x.astype(jnp.float32)
        plgpu.store(y_ref.at[row, at], (x * scale).astype(y_ref.dtype), mask=real)
        plgpu.store(squares_ref.at[row, tile], jnp.sum(x * x))

    like = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    out = [like, like, jax.ShapeDtypeStruct((rows, tiles), jnp.float32)]
    return _call(kernel, "added", (partials, residual, weight, addend), out, (tiles, rows), warps, interpret)


def _tile(splits: int, most: int) -> tuple[int, int]:
    """The columns of a program that adds so many partial sums, at least 128, and its warps."""
    splits = pl.next_power_of_2(splits)
    columns = max(min(LOADED // splits, most), 128)
    return columns, 4 if columns * splits <= LOADED else 8


# A sum over a program's warps waits for them, and no load moves across it. So kernels load all that they need before
# the first one: decode steps of one row take 2 % less with it.


def _load_sums(partials_ref, addend_ref, row, at, real) -> tuple:
    """Partial sums [S, C] of a row's columns `at`, [C], and what is added to their sum, [C] or 0."""
    splits = partials_ref.shape[0]
    part = jnp.arange(pl.next_power_of_2(splits))[:, None]
    parts = plgpu.load(partials_ref.at[part, row, at[None]], mask=(part < splits) & real[None], other=0)
    if addend_ref is None:
        return parts, 0.0
    return parts, plgpu.load(addend_ref.at[row, at], mask=real, other=0).astype(jnp.float32)


def load_squares(squares_ref, row) -> jax.Array | None:
    """The squares [P] of a row, or [R, P] of rows [R], of [M, P] or None."""
    if squares_ref is None:
        return None
    count = squares_ref.shape[1]
    part = jnp.arange(pl.next_power_of_2(count))
    if getattr(row, "ndim", 0) == 0:
        return plgpu.load(squares_ref.at[row, part], mask=part < count, other=0)
    real = jnp.broadcast_to((part < count)[None], (row.size, part.size))
    return plgpu.load(squares_ref.at[row[:, None], part[None]], mask=real, other=0)


def norm_factor(squares: jax.Array | None, inputs: int, eps: float) -> jax.Array | float:
    """The factor of a row's RMS norm, from the squares [..., P] of its `inputs` numbers; 1 without squares."""
    return 1.0 if squares is None else lax.rsqrt(jnp.sum(squares, axis=-1) / inputs + eps)


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
