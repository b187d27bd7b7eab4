"""Every implementation of products with weights, of one and of groups of rows, over drawn values, layers and groups.

Shapes are odd, and fixed, so that all examples of a test run in one program. About 15 s.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.ops.grouped_matmul import grouped_matmul
from inferlib.ops.matmul import matmul
from inferlib.ops.quantized import SCHEMES
from inferlib.pallas_kernels import grouped_matmul_tpu
from inferlib.pallas_kernels.mx_matmul_tpu import mx_matmul
from inferlib.pallas_kernels.packed_weights_tpu import Weight
from tests.helpers.grouped_matmul_cases import SMALL, Case
from tests.helpers.packed_experts import dequantized, quantized
from tests.helpers.packed_products import FLOAT4, hold, packed

SEEDS = st.integers(0, 2**32 - 1)
# Rows, inputs, columns. Groups of 32 inputs fill no tile, nor do 33 inputs.
PRODUCTS = {
    "mxfp4": (1, 96, 65),
    FLOAT4: (5, 288, 136),
    "mxfp8": (19, 160, 130),
    "int4": (33, 384, 7),
    "int8": (3, 33, 45),
    "bfloat16": (7, 33, 201),
}


def weights(seed: int, spread: int, *shape: int) -> np.ndarray:
    """Numbers whose sizes differ between inputs and columns by up to two to the spread, and a column of zeros."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
    w[..., rng.integers(shape[-1])] = 0
    return np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32)


@cache
def kernel():
    return jax.jit(partial(mx_matmul, out_dtype=jnp.float32, interpret=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
@given(seed=SEEDS, spread=st.integers(0, 9), layer=st.integers(0, 2))
@settings(max_examples=5)
def test_products_of_odd_shapes_on_tpu(name, seed, spread, layer):
    """Of a stack, the layer asked for."""
    rows, inputs, columns = PRODUCTS[name]
    tensor, exact = packed(name, weights(seed, spread, 3, 2, inputs, columns))
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((rows, inputs)), jnp.bfloat16)
    hold(np.asarray(kernel()(x, tensor.stack, layer=jnp.int32(layer)), np.float64), x, exact[layer])


xla = jax.jit(partial(matmul, out_dtype=jnp.float32))


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name in SCHEMES])
@given(seed=SEEDS, spread=st.integers(0, 9))
@settings(max_examples=5)
@pytest.mark.fast_cases(2)
def test_products_of_odd_shapes_by_xla(name, seed, spread):
    rows, inputs, columns = PRODUCTS[name]
    cached = quantized(jnp.asarray(weights(seed, spread, inputs, 2, columns)), (0,), SCHEMES[name])
    exact = np.asarray(dequantized(cached, (0,)), np.float64).reshape(inputs, 2, columns)
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((rows, inputs)), jnp.float32)
    hold(np.moveaxis(np.asarray(xla(x, cached), np.float64), 1, 0), x, np.moveaxis(exact, 1, 0))


# ---- groups of rows

ROWS = 97
GROUPS = {
    "float32": Case((), ROWS, inner=27, outer=45),
    "mxfp4": Case((), ROWS, parts=1, inner=160, outer=46, dtype="bfloat16", scheme="mxfp4"),
}
# Where groups end: some have no rows, or end where the tiles of a kernel do.
ENDS = st.lists(st.one_of(st.integers(0, ROWS), st.sampled_from([16, 32, 64, 96, 97])), min_size=5, max_size=5)


def by(backend: str):
    def run(x, w, sizes, layer):
        return jnp.moveaxis(grouped_matmul(x, w, sizes, most=ROWS, layer=layer, backend=backend), 1, 0)

    return run


def on_tpu(x, w, sizes, layer):
    outer = (w.values if isinstance(w, Weight) else w).shape[-1]
    blocks = dataclasses.replace(SMALL, columns=outer)
    return grouped_matmul_tpu.grouped_matmul(x, w, sizes, layer=layer, blocks=blocks, interpret=True)


GROUPED = {"xla": by("xla"), "gpu": by("pallas_gpu"), "tpu": on_tpu}


@cache
def compiled(backend: str):
    return jax.jit(GROUPED[backend])


@pytest.mark.parametrize("backend", GROUPED)
@pytest.mark.parametrize("name", GROUPS)
@given(ends=ENDS, seed=SEEDS)
@settings(max_examples=5)
@pytest.mark.fast_cases(1)
def test_products_of_any_groups(name, backend, ends, seed):
    sizes = tuple(np.diff(sorted(ends), prepend=0).tolist())
    dataclasses.replace(GROUPS[name], sizes=sizes).check(compiled(backend), seed, pack=backend == "tpu")
