"""Products with weights that have a branch of low rank, against float64, alone and after a rotation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.models.abstract import WeightSpec
from inferlib.ops.hadamard import rotation_matrix
from inferlib.ops.low_rank import LowRankWeight
from inferlib.ops.matmul import Product, _by_rows, choose, matmul, matmul_partials
from inferlib.ops.quantized import SCHEMES
from inferlib.ops.residual_norm import DeferredNorm
from inferlib.sharding import axes
from tests.helpers.kernels import lowered_for_cuda

ROWS, INPUTS, OUTPUTS, RANK = 3, 128, 128, 4
NAMES = (axes.EMBED, axes.GATE_UP, axes.MLP)


def weight(scheme: str, rotation: int, *, packed: bool):
    """A weight [I, 2, O] with a branch as products take it, and what it multiplies by as one matrix, float64."""
    draw = np.random.default_rng(0).standard_normal
    a, b = (jnp.asarray(draw(shape), jnp.bfloat16) for shape in ((INPUTS, RANK), (RANK, 2, OUTPUTS)))
    spec = WeightSpec("w", (INPUTS, 2, OUTPUTS), np.dtype("bfloat16"), NAMES, "normal", None, "w", (0,))
    spec = replace(spec, scheme=replace(SCHEMES[scheme], rotation=rotation), rank=RANK)
    assert [array.part for array in spec.arrays] == ["w", "w.scales", "w.factor_a", "w.factor_b"]
    assert [array.shape for array in spec.arrays[2:]] == [(INPUTS, RANK), (RANK, 2, OUTPUTS)]
    *stored, zeros_a, zeros_b = jax.jit(spec.stored)(jnp.asarray(draw(spec.shape), jnp.float32))
    assert zeros_a.shape == a.shape
    assert not zeros_a.any()
    assert not zeros_b.any()
    base = spec.scheme.tensor(*stored)
    whole = np.asarray(jax.jit(lambda w: w.dequantized((0,), jnp.float32))(base), np.float64).reshape(spec.shape)
    whole = whole + np.einsum("ir,rpo->ipo", np.asarray(a, np.float64), np.asarray(b, np.float64))
    if rotation:
        turn = np.kron(np.eye(INPUTS // rotation), rotation_matrix(rotation))
        whole = np.einsum("ij,jpo->ipo", turn, whole)
    if packed:
        spec = replace(spec, packed=True)
        *arrays, a, b = jax.jit(spec.packed_arrays)(*stored, a, b)
        base = spec.packing.tensor(*arrays)
        assert jax.tree.structure(spec.value) == jax.tree.structure(LowRankWeight(base, a, b))
    return LowRankWeight(base, a, b), whole


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("scheme", "rotation"), [("int4", 0), ("int4", 64), ("int8", 0)])
def test_the_branch_is_added_before_the_activation(scheme, rotation, packed):
    w, exact = weight(scheme, rotation, packed=packed)
    x = np.random.default_rng(1).standard_normal((ROWS, INPUTS))
    x = jnp.asarray(x, jnp.bfloat16 if packed else jnp.float32)
    expected = np.einsum("ti,ipo->tpo", np.asarray(x, np.float64), exact)
    within = partial(np.testing.assert_allclose, rtol=0, atol=(2**-5 if packed else 1e-5) * expected.std())
    within(jax.jit(partial(matmul, out_dtype=jnp.float32))(x, w), expected)
    if not packed:
        y = jax.jit(partial(matmul, activation=lambda gate, up: jnp.maximum(gate, 0) * up))(x, w)
        np.testing.assert_allclose(y, np.maximum(expected[:, 0], 0) * expected[:, 1], rtol=0, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("rotation", "deferred"), [(0, True), (64, False)])
def test_the_gpu_kernel_of_rows_adds_the_branch(rotation, deferred):
    """To split-K partial sums too, and before a norm's factor."""
    w, exact = weight("int4", rotation, packed=False)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, INPUTS)), jnp.bfloat16)
    norm = DeferredNorm(x, jnp.asarray(np.square(np.float32(x))), 1e-5)
    inputs = np.float64(jax.jit(DeferredNorm.array)(norm) if deferred else x)
    expected = np.einsum("ti,ipo->tpo", inputs, exact)
    within = partial(np.testing.assert_allclose, rtol=0, atol=2**-5 * expected.std())

    def by_rows(x, w):
        x, base = w.parted(x)
        return _by_rows(x, replace(w, base=base), Product(1, None, jnp.float32, None), interpret=True)

    within(jax.jit(by_rows)(norm if deferred else x, w), expected)
    sums = jax.jit(lambda x, w: matmul_partials(x.array() if deferred else x, w))(norm if deferred else x, w)
    within(np.sum(sums.splits, axis=0) + (0 if sums.addend is None else sums.addend), expected)
    assert choose(w, ROWS, x.dtype, backend="pallas_gpu", partials=True).name == "row_matmul"
    assert lowered_for_cuda(matmul, x, w).count("triton") > lowered_for_cuda(matmul, x, w.base).count("triton")


def test_stacked_weights_are_read_by_layer():
    w, exact = weight("int4", 0, packed=True)
    stack = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), w)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((ROWS, INPUTS)), jnp.bfloat16)
    y = jax.jit(lambda x, w, layer: matmul(x, w.of_layer(layer), out_dtype=jnp.float32))(x, stack, 1)
    expected = np.einsum("ti,ipo->tpo", np.asarray(x, np.float64), exact)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2**-5 * expected.std())
