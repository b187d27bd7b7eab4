"""Weights in every form that the TPU kernel of products takes, and products that its results are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.models.abstract import WeightSpec
from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.quantized import SCHEMES, Scheme
from inferlib.sharding import axes

FLOAT4 = "mxfp4 by float4"  # as v7x takes it
FORMS = {**SCHEMES, FLOAT4: SCHEMES["mxfp4"], "int8_block": Scheme("int8", group=128), "bfloat16": None}


def packed(name: str, w: np.ndarray, spoilt: tuple[int, ...] | None = None) -> tuple[PackedTensor, np.ndarray]:
    """A stack of weights [L, 2, K, N] in one of FORMS, and their values, float64. spoilt: a scale of [L, K / g, 2, N]
    that is made NaN."""
    whole = np.moveaxis(w, 1, 2)
    packing, stored, values, pack = _programs(name, whole.shape)
    arrays = [np.array(array) for array in stored(whole)]
    if spoilt:
        arrays[1][spoilt] = np.nan
    cached = arrays[0] if FORMS[name] is None else np.asarray(values(*arrays)).reshape(whole.shape)
    return packing.tensor(*pack(*arrays)), np.moveaxis(cached.astype(np.float64), 2, 1)


@cache
def _programs(name: str, shape: tuple[int, ...]) -> tuple[Packing, Callable, Callable, Callable]:
    """How a stack [L, K, 2, N] in one of FORMS is packed; the programs that quantise it, that read it, and that pack
    it."""
    scheme, names = FORMS[name], (axes.LAYERS, axes.EMBED, axes.GATE_UP, axes.MLP)
    spec = WeightSpec("w", shape, np.dtype("bfloat16"), names, "normal", None, "w", (1,), scheme)
    values = jax.jit(lambda *arrays: scheme.tensor(*arrays).dequantized((1,), jnp.float32))
    packed = dataclasses.replace(spec, packed=True, float4=name == FLOAT4)
    return packed.packing, jax.jit(spec.stored), values, jax.jit(packed.packed_arrays)


def hold(y: np.ndarray, x: jax.Array, exact: np.ndarray, rounding: float = 2e-6) -> None:
    """y [P, T, N] to x [T, K] times exact [P, K, N], of which the last inputs may be padding, within a rounding of all
    that is summed."""
    rows = np.asarray(x, np.float64)
    expected = np.einsum("tk,pkn->ptn", rows, exact[:, : rows.shape[1]])
    total = np.einsum("tk,pkn->ptn", np.abs(rows), np.abs(exact[:, : rows.shape[1]]))
    assert np.max(np.abs(y - expected) / np.maximum(total, 1e-30)) < rounding
