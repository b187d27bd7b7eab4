"""How a matrix is rounded: to nearest, with searched scales, or by GPTQ.

A matrix is [I, O]; `group` consecutive inputs of an output share a scale. H [I, I] is the mean of x x^T over the
inputs x of its products, so a rounding error D costs tr(D^T H D): the mean squared error of the products, summed over
outputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax

from inferlib.calibration.compiled import compiled
from inferlib.calibration.coordinate_descent import descend
from inferlib.ops.quantized import Scheme, exponent_code, largest_value, quantize, round_scales, round_values

Rounding = Literal["nearest", "clip", "gptq"]
# Scales that are tried, as shares of the one by which the largest magnitude becomes the type's largest value.
_SHARES = tuple(np.linspace(1.0, 0.65, 11).tolist())
DAMPING = 0.01  # of the mean of H's diagonal, which is added to it
_BLOCK = 64  # inputs whose errors are passed on to later blocks at once


class Rounded(NamedTuple):
    """A rounded matrix: values [I, O] and scales [I / group, O], float32 numbers that the scheme's types have exactly.
    losses [O]: tr(D^T H D), for each output; nearest [O]: of rounding to nearest."""

    values: jax.Array
    scales: jax.Array
    losses: jax.Array
    nearest: jax.Array


def round_matrix(w: jax.Array, h: jax.Array, scheme: Scheme, group: int, rounding: Rounding) -> Rounded:
    """Round w [I, O] by its H [I, I], or to nearest if H says nothing. No output is rounded worse than to nearest."""
    if rounding != "gptq" or not float(jnp.max(jnp.diag(h))) > 0:
        return _round(w, h, scheme, group, "nearest" if rounding == "nearest" else "clip")
    order = jnp.argsort(-jnp.diag(h), stable=True)
    factor = inverse_factor(h[order][:, order])
    if factor is None:
        return _round(w, h, scheme, group, "clip")
    return _round_by_gptq(w, h, order, factor, scheme, group)


@compiled(static_argnames=("scheme", "group", "rounding"))
def _round(w: jax.Array, h: jax.Array, scheme: Scheme, group: int, rounding: Rounding) -> Rounded:
    nearest = to_nearest(w, scheme, group)
    if rounding == "nearest":
        loss = losses(w, *nearest, h)
        return Rounded(*nearest, loss, loss)
    scales = search_scales(w, jnp.diag(h), scheme, group)
    return _better(w, h, (round_to(w, scales, scheme), scales), nearest)


@compiled(static_argnames=("scheme", "group"))
def _round_by_gptq(
    w: jax.Array, h: jax.Array, order: jax.Array, factor: jax.Array, scheme: Scheme, group: int
) -> Rounded:
    scales = search_scales(w, jnp.diag(h), scheme, group)
    each = jnp.repeat(scales, group, axis=0)[order]
    values = gptq(w[order], each, factor, scheme)
    values = jnp.zeros_like(values).at[order].set(values)
    if scheme.group is not None:
        damped = h + DAMPING * jnp.mean(jnp.diag(h)) * jnp.eye(h.shape[0], dtype=h.dtype)
        values, scales = descend(w, values, scales, damped, scheme)
    return _better(w, h, (values, scales), to_nearest(w, scheme, group))


def _better(
    w: jax.Array, h: jax.Array, one: tuple[jax.Array, jax.Array], nearest: tuple[jax.Array, jax.Array]
) -> Rounded:
    """For each output the rounding that loses less."""
    ours, theirs = losses(w, *one, h), losses(w, *nearest, h)
    values, scales = (jnp.where(ours <= theirs, a, b) for a, b in zip(one, nearest, strict=True))
    return Rounded(values, scales, jnp.minimum(ours, theirs), theirs)


def losses(w: jax.Array, values: jax.Array, scales: jax.Array, h: jax.Array) -> jax.Array:
    """[O] tr(D^T H D) of each output's error D."""
    error = values * jnp.repeat(scales, w.shape[0] // scales.shape[0], axis=0) - w
    return jnp.sum(error * jnp.matmul(h, error, precision=lax.Precision.HIGHEST), axis=0)


def to_nearest(w: jax.Array, scheme: Scheme, group: int) -> tuple[jax.Array, jax.Array]:
    """Values and scales as `ops.quantized.quantize` makes them."""
    inputs, outputs = w.shape
    rounded = quantize(w.reshape(inputs // group, group, outputs), (1,), Scheme(scheme.values, None, scheme.scales))
    return rounded.values.astype(jnp.float32).reshape(w.shape), rounded.scales.astype(jnp.float32)


def round_to(w: jax.Array, scales: jax.Array, scheme: Scheme) -> jax.Array:
    """The values [I, O] of w by scales [I / group, O]."""
    return round_values(w / jnp.repeat(scales, w.shape[0] // scales.shape[0], axis=0), np.dtype(scheme.values))


def search_scales(w: jax.Array, importance: jax.Array, scheme: Scheme, group: int) -> jax.Array:
    """Scales [I / group, O] that minimise the squared error, each input's weighted by its importance [I].

    Scales are clipped to a share of what the largest magnitude asks for, or, if they are powers of two, may be twice as
    large as the OCP specification's. Where importance is zero, all inputs count alike.
    """
    inputs, outputs = w.shape
    w = w.reshape(inputs // group, group, outputs)
    importance = importance.reshape(inputs // group, group, 1)
    importance = jnp.where(jnp.max(importance, axis=1, keepdims=True) > 0, importance, 1.0)
    candidates = _candidates(jnp.max(jnp.abs(w), axis=1), scheme)

    def step(best: tuple[jax.Array, jax.Array], scales: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        rounded = round_values(w / scales[:, None], np.dtype(scheme.values)) * scales[:, None]
        error = jnp.sum(importance * jnp.square(rounded - w), axis=1)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scales, best[1])), None

    start = jnp.full(candidates.shape[1:], jnp.inf), candidates[0]
    return lax.scan(step, start, candidates)[0][1]


def _candidates(largest: jax.Array, scheme: Scheme) -> jax.Array:
    """Scales to try [N, G, O] for the largest magnitudes [G, O]."""
    if scheme.scales == "float8_e8m0fnu":
        code = exponent_code(largest, np.dtype(scheme.values)).astype(jnp.int32)
        codes = jnp.clip(code + jnp.arange(2)[:, None, None], 1, 253)  # of normal numbers with normal inverses
        return lax.bitcast_convert_type(codes << 23, jnp.float32)
    scales = largest / largest_value(np.dtype(scheme.values))
    scales = jnp.where(scales == 0, 1.0, scales) * jnp.asarray(_SHARES)[:, None, None]
    return round_scales(scales, scheme.scales)


def inverse_factor(h: jax.Array) -> jax.Array | None:
    """The upper triangular U with U^T U = (H + damping)^-1, float32; None if H is not positive definite even so.

    With the damped H = V V^T and V upper triangular, U is the inverse of V. In float64 on CPUs.
    """
    on_cpu = {device.platform for device in h.devices()} == {"cpu"}
    if not on_cpu:
        return _inverse_factor_on_device(h)
    reversed_h = np.asarray(h, np.float64)[::-1, ::-1].copy()
    diagonal = np.einsum("ii->i", reversed_h)
    diagonal += DAMPING * diagonal.mean()
    try:
        lower = scipy.linalg.cholesky(reversed_h, lower=True, overwrite_a=True)
    except (np.linalg.LinAlgError, ValueError):
        return None
    (trtri,) = scipy.linalg.get_lapack_funcs(("trtri",), (lower,))
    inverse, _ = trtri(lower, lower=1)
    return jnp.asarray(inverse[::-1, ::-1], jnp.float32)


def _inverse_factor_on_device(h: jax.Array) -> jax.Array | None:
    damped = h + DAMPING * jnp.mean(jnp.diag(h)) * jnp.eye(h.shape[0], dtype=h.dtype)
    lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    identity = jnp.eye(h.shape[0], dtype=h.dtype)
    factor = jax.scipy.linalg.solve_triangular(lower[::-1, ::-1], identity, lower=False)
    return factor if bool(jnp.all(jnp.isfinite(factor))) else None


def gptq(w: jax.Array, scales: jax.Array, factor: jax.Array, scheme: Scheme) -> jax.Array:
    """Round w [I, O] one input after the other, each time changing the inputs behind it so that they make up for the
    error (Frantar et al. 2022, "GPTQ"). Returns the values [I, O], float32.

    scales [I, O]: of each input; they stay as they are, so any order of inputs keeps its groups. factor: see
    `inverse_factor`, of H in the same order.
    """
    inputs, outputs = w.shape
    more = -inputs % _BLOCK
    w, scales = jnp.pad(w, ((0, more), (0, 0))), jnp.pad(scales, ((0, more), (0, 0)), constant_values=1.0)
    factor = jnp.pad(factor, ((0, more), (0, more))) + jnp.diag((jnp.arange(inputs + more) >= inputs).astype(w.dtype))
    dtype, places = np.dtype(scheme.values), jnp.arange(_BLOCK)

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        w, values = carry
        start = number * _BLOCK
        rows, row_scales, strip = (lax.dynamic_slice_in_dim(x, start, _BLOCK) for x in (w, scales, factor))
        corner = lax.dynamic_slice_in_dim(strip, start, _BLOCK, axis=1)

        def one(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows, rounded, errors = carry
            value = round_values(rows[i] / row_scales[i], dtype)
            error = (rows[i] - value * row_scales[i]) / corner[i, i]
            rows = rows - jnp.where(places > i, corner[i], 0)[:, None] * error
            return rows, rounded.at[i].set(value), errors.at[i].set(error)

        empty = jnp.zeros((_BLOCK, outputs), w.dtype)
        _, rounded, errors = lax.fori_loop(0, _BLOCK, one, (rows, empty, empty))
        # What this changes of rows up to the block's end is not read again.
        w = w - jnp.matmul(strip.T, errors, precision=lax.Precision.HIGHEST)
        return w, lax.dynamic_update_slice_in_dim(values, rounded, start, axis=0)

    return lax.fori_loop(0, (inputs + more) // _BLOCK, block, (w, jnp.zeros_like(w)))[1][:inputs]
