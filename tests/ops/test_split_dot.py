"""Products of few rows that stay split-K partial sums."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops import split_dot
from inferlib.ops.by_platform import traced_for
from inferlib.ops.matmul import choose, matmul, matmul_partials
from inferlib.ops.split_dot import partial_products, splits, unsupported


@pytest.mark.parametrize(
    ("inputs", "outputs", "count"),
    [
        (4096, 6144, 4),
        (14336, 4096, 8),  # as many as fill the GPU
        (4096, 28672, 1),  # tiles of the whole product fill it
        (2048, 2048, 4),  # no split has fewer than 512 inputs
        (1536, 2048, 2),  # inputs divide by it
        (500, 64, 1),
    ],
)
def test_as_many_parts_as_fill_the_gpu(inputs, outputs, count):
    assert splits(inputs, outputs) == count


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_their_sum_is_the_product(rows):
    rng = np.random.default_rng(rows)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((rows, 2048), (2048, 96)))
    sums = jax.jit(partial_products)(x, w)
    assert sums.dtype == jnp.float32
    assert sums.shape[0] == (8 if rows == 1 else 4)  # one row counts as two of half its size
    exact = np.float64(x) @ np.float64(w)
    np.testing.assert_allclose(np.sum(np.float64(sums), axis=0), exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_weights_of_several_dimensions():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 2, 512), (2, 512, 4, 8)))
    sums = jax.jit(lambda x, w: matmul_partials(x, w, contract=2).total(jnp.float32))(x, w)
    np.testing.assert_allclose(sums, np.einsum("tij,ijko->tko", np.float64(x), np.float64(w)), rtol=0, atol=1e-2)


def test_what_stays_whole():
    w = jnp.ones((64, 32), jnp.bfloat16)
    for backend, partials, name in ((None, True, "split_dot"), (None, False, "xla"), ("xla", True, "xla")):
        assert choose(w, 4, w.dtype, backend=backend, partials=partials).name == name
    assert choose(w, 17, w.dtype, backend=None, partials=True).reason == "17 rows"
    assert unsupported(4, jnp.float32, w.astype(jnp.float32)) == "products of float32 with float32"
    assert unsupported(4, jnp.float16, w.astype(jnp.float16)) == "products of float16 with float16"
    assert unsupported(4, w.dtype, w.astype(jnp.float32)) == "products of bfloat16 with float32"


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "expected"),
    [
        (64, 4096, 4096, False),
        (65, 4096, 4096, True),
        (128, 14336, 4096, True),
        (129, 4096, 4096, False),
        (128, 4096, 6144, False),
        (128, 2048, 2048, False),
        (128, 4097, 4096, False),
    ],
)
def test_two_halves_where_tiles_leave_processors_idle(rows, inputs, outputs, expected):
    assert split_dot.halved(rows, inputs, outputs) is expected


def test_on_gpus_two_halves_are_the_product():
    """And elsewhere it stays whole."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((80, 2, 2048), (2, 2048, 8)))
    for platform, count in (("cuda", 2), ("cpu", 1)):
        with traced_for(platform):
            traced = jax.make_jaxpr(partial(matmul, contract=2))(x, w)
        [dot] = (e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general")
        assert len(dot.params["dimension_numbers"][1][0]) == count - 1
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, struct.shape).astype(np.float32) for struct in (x, w))
    with traced_for("cuda"):
        y = jax.jit(partial(matmul, contract=2))(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    expected = jnp.asarray(np.einsum("tij,ijo->to", x, w), jnp.bfloat16)
    np.testing.assert_array_equal(y.astype(jnp.float32), expected.astype(jnp.float32))
