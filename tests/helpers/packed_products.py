"""Weights in every form that the TPU kernel of products takes, and products that its results are compared with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.models.abstract import WeightSpec
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import SCHEMES, Scheme
from inferlib.sharding import axes

FLOAT4 = "mxfp4 by float4"  # as v7x takes it
FORMS = {**SCHEMES, FLOAT4: SCHEMES["mxfp4"], "int8_block": Scheme("int8", group=128), "bfloat16": None}


def packed(name: str, w: np.ndarray, spoilt: tuple[int, ...] | None = None) -> tuple[PackedTensor, np.ndarray]:
    """A stack of weights [L, 2, K, N] in one of FORMS, and their values, float64. spoilt: a scale of [L, K / g, 2, N]
    that is made NaN."""
    scheme = FORMS[name]
    names = (axes.LAYERS, axes.EMBED, axes.GATE_UP, axes.MLP)
    whole = jnp.moveaxis(jnp.asarray(w), 1, 2)
    spec = WeightSpec("w", whole.shape, np.dtype("bfloat16"), names, "normal", None, "w", (1,), scheme)
    arrays = [np.array(array) for array in jax.jit(spec.stored)(whole)]
    if spoilt:
        arrays[1][spoilt] = np.nan
    arrays = [jnp.asarray(array) for array in arrays]
    values = jax.jit(lambda *arrays: scheme.tensor(*arrays).dequantized((1,), jnp.float32))
    cached = arrays[0] if scheme is None else values(*arrays).reshape(whole.shape)
    spec = dataclasses.replace(spec, packed=True, float4=name == FLOAT4)
    tensor = spec.packing.tensor(*jax.jit(spec.packed_arrays)(*arrays))
    return tensor, np.moveaxis(np.asarray(cached, np.float64), 2, 1)


def hold(y: np.ndarray, x: jax.Array, exact: np.ndarray, rounding: float = 2e-6) -> None:
    """y [P, T, N] to x [T, K] times exact [P, K, N], of which the last inputs may be padding, within a rounding of all
    that is summed."""
    rows = np.asarray(x, np.float64)
    expected = np.einsum("tk,pkn->ptn", rows, exact[:, : rows.shape[1]])
    total = np.einsum("tk,pkn->ptn", np.abs(rows), np.abs(exact[:, : rows.shape[1]]))
    assert np.max(np.abs(y - expected) / np.maximum(total, 1e-30)) < rounding
