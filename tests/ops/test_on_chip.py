"""Weights of a loop that stay in on-chip memory: which do, and that nothing else changes. About 2 s."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.ops.backend import Backend
from inferlib.ops.matmul import matmul
from inferlib.ops.on_chip import choose, loop_weights
from inferlib.ops.packed import PackedTensor

KERNELS = Backend(matmul="pallas_tpu", loop_weights="pallas_tpu", generation="v5e")


def weight(inputs: int, columns: int) -> PackedTensor:
    """An int8 weight, as shapes."""
    values = jax.ShapeDtypeStruct((1, inputs, columns), jnp.int8)
    return PackedTensor(values, jax.ShapeDtypeStruct((1, 1, columns), jnp.float32))


@pytest.mark.parametrize(
    ("generation", "count", "reason"),
    [
        ("v5e", 107, None),
        ("v5e", 108, "take 113.7 MB, 0.4 MB more than fit in on-chip memory of v5e"),
        ("v6e", 92, "take 96.8 MB, 0.4 MB more than fit in on-chip memory of v6e"),
        ("v4", 1, "take 1.1 MB, 1.1 MB more than fit in on-chip memory of v4"),
    ],
)
def test_as_many_stay_as_there_is_room_for(generation, count, reason):
    choice = choose([weight(1024, 1024)] * count, replace(KERNELS, generation=generation))
    assert choice.name == ("xla" if reason else "pallas_tpu")
    assert (reason or "") in choice.reason


def test_kernels_must_read_all_of_them():
    dense = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    assert "does not read all weights of the loop" in choose([weight(1024, 1024), dense], KERNELS).reason
    assert choose([weight(1024, 200)], KERNELS).name == "pallas_tpu"
    assert choose([], KERNELS) == choose([dense], Backend()) == choose([dense], replace(KERNELS, matmul="xla"))


def test_products_of_a_loop_are_the_same():
    """What is not packed stays as it is, and so do all weights if there are many rows."""
    rng = np.random.default_rng(0)
    values, scales = rng.integers(-127, 128, (1, 128, 128), np.int8), rng.random((1, 1, 128), np.float32)
    weights = {"w": PackedTensor(jnp.asarray(values), jnp.asarray(scales)), "norm": jnp.ones(128)}
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)

    def loop(x: jax.Array, weights: dict, backend: Backend) -> jax.Array:
        there = loop_weights(weights, x.shape[0], backend)
        assert there["w"].on_chip == (backend.loop_weights != "xla")
        assert there["norm"] is weights["norm"]
        return jax.lax.fori_loop(0, 3, lambda _, x: matmul(x, there["w"]) / 2**12, x)

    backends = KERNELS, replace(KERNELS, loop_weights="xla")
    once, each = (jax.jit(loop, static_argnums=2)(x, weights, backend) for backend in backends)
    np.testing.assert_array_equal(once, each)
    assert np.abs(np.asarray(once, np.float32)).max() > 0
    assert loop_weights(weights, 65, KERNELS) is weights
