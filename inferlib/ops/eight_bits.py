"""Products of inputs and weights that both have eight bits, for matrix units that multiply such numbers faster.

A weight has a scale for each channel, and inputs are rounded to its type with a scale for each token, which is computed
on the way (W8A8 with dynamic scales by token: Yao et al. 2022, "ZeroQuant", https://arxiv.org/abs/2206.01861). Where
inputs are split over devices, each has a scale for its part of a token's: products are summed later, so none are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.ops.by_platform import by_platform
from inferlib.ops.quantized import largest_value

# By rates alone, products with weights of eight bits are bound by compute from 120 rows on (v5e), 150 (H100), 160 (v7x)
# or 280 (v6e). With fewer, reading the weight takes the time, and inputs are used as they are.
MANY_ROWS = 256

# GPUs round any number of rows: their matrix units read a weight of eight bits as it is stored, if its inputs lie side
# by side in memory, and XLA's kernels that widen it take longer. Of fewer rows than these XLA makes products of
# vectors, which take several times as long.
_GPU_ROWS = 16


class Rounding(Protocol):
    """A scheme, or a weight."""

    @property
    def rounds_tokens(self) -> bool: ...


def rounds(w: Rounding, rows: int, gpu: bool = False) -> bool:
    """Whether a product with a weight, or with one of a scheme, rounds its `rows` rows. gpu: it runs on one."""
    return w.rounds_tokens and (gpu or rows >= MANY_ROWS)


def gpu_order(rank: int, contracting: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a weight of `rank` on GPUs, from major to minor: those that are summed over come last."""
    return *(i for i in range(rank) if i not in contracting), *contracting


def product(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    summed: tuple[Sequence[int], Sequence[int]],
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """x [T, *I], rounded to the type of `values`, times values with `scales` -> [T, *O].

    values: int8 or float8_e4m3fn; summed: the dimensions of x, all but the first, and of values that are summed over.
    scales: of the results, [*O]. Sums are rounded to x's dtype before they are scaled if that is bfloat16, as they
    would be twice the bytes. An input that is not finite spoils its token's results.
    """
    rounded, of_tokens = by_token(x, values.dtype)
    sums = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    y = _sums(rounded, values, summed, sums).astype(jnp.float32)
    of_tokens = of_tokens.reshape(-1, *[1] * (y.ndim - 1))
    return (y * (of_tokens * scales.astype(jnp.float32))).astype(out_dtype)


def by_token(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """x [T, *I] as numbers of `dtype`, int8 or float8_e4m3fn, and the scale [T] float32 of each token's.

    The largest magnitude becomes the dtype's largest value. Written so that XLA:GPU makes one kernel of it and of a
    norm before it: as one matrix, and without `quantize`, whose bits of exponents would need another.
    """
    rows, most = x.reshape(x.shape[0], -1).astype(jnp.float32), largest_value(dtype)
    sizes = jnp.abs(rows)
    sizes = jnp.where(sizes <= jnp.finfo(jnp.float32).max, sizes, jnp.inf)  # a maximum may pass over NaN
    scales = jnp.max(sizes, axis=1) / most
    scales = jnp.where(scales == 0, 1.0, scales)
    scaled = jnp.clip(rows / scales[:, None], -most, most)
    scaled = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
    return scaled.astype(dtype).reshape(x.shape), scales


def _sums(x: jax.Array, w: jax.Array, summed: tuple[Sequence[int], Sequence[int]], dtype) -> jax.Array:
    """The sums of products, exact but for the accumulator: in eight bits where the device multiplies them."""
    from inferlib.pallas_kernels.generations_tpu import multiplies

    dimensions = (tuple(summed[0]), tuple(summed[1])), ((), ())
    accumulator = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else dtype

    def in_eight_bits(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, dimensions, preferred_element_type=accumulator).astype(dtype)

    def on_gpu(x: jax.Array, w: jax.Array) -> jax.Array:
        """The sums on a GPU, of one matrix, whose inputs lie side by side already (see `gpu_order`)."""
        w = lax.transpose(w, gpu_order(w.ndim, summed[1]))
        outer = w.shape[: w.ndim - len(summed[1])]
        rows, matrix = x.shape[0], w.reshape(math.prod(outer), -1)
        x = jnp.pad(x.reshape(rows, -1), ((0, max(_GPU_ROWS - rows, 0)), (0, 0)))
        y = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=accumulator)
        return y[:rows].astype(dtype).reshape(rows, *outer)

    def widened(x: jax.Array, w: jax.Array) -> jax.Array:
        operands = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)  # which holds them exactly
        return lax.dot_general(*operands, dimensions, preferred_element_type=jnp.float32).astype(dtype)

    on_tpu = in_eight_bits if multiplies(x.dtype) else widened
    return by_platform(x, w, cuda=on_gpu, tpu=on_tpu, default=widened)
