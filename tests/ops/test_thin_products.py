"""Products with two thin matrices, of adapters and of branches of low rank, by XLA and by the kernels for GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.thin_products import ROWS, beside, by_tiles, thin_products
from tests.helpers.kernels import lowered_for_cuda


@pytest.mark.parametrize(
    ("rows", "inputs", "parts", "width", "outputs", "masked"),
    [(1, (256,), 1, 16, (300,), False), (3, (4, 64), 1, 4, (2, 96), True), (20, (640,), 2, 130, (160,), True)],
)
def test_kernels_equal_xla(rows, inputs, parts, width, outputs, masked):
    draw = np.random.default_rng(0)
    shapes = (rows, *inputs), (*inputs, parts, width), (parts, width, *outputs)
    x, a, b = (jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    keep = jnp.asarray(draw.random((rows, width)) < 0.5) if masked else None
    want = np.float32(jax.jit(partial(thin_products, backend="xla"))(x, a, b, keep))
    got = np.float32(jax.jit(partial(by_tiles, interpret=True))(x, a, b, keep))
    assert want.shape == got.shape == (rows, parts, *outputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-6 * want.std())


def test_gpus_run_those_of_decode_batches_by_kernels():
    x, a, b = (jnp.ones(shape, jnp.bfloat16) for shape in ((2, 64), (64, 1, 16), (1, 16, 64)))
    lowered = {backend: lowered_for_cuda(partial(thin_products, backend=backend), x, a, b) for backend in ("xla", None)}
    assert "triton" in lowered[None]
    assert "triton" not in lowered["xla"]
    assert beside(ROWS, jnp.bfloat16, "pallas_gpu")
    assert not beside(ROWS + 1, jnp.bfloat16, None)
    assert not beside(1, jnp.float32, None)
    assert not beside(1, jnp.bfloat16, "pallas_tpu")
