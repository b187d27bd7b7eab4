"""The TPU kernels of products with their collective, interpreted on fake devices, against float64 numpy. About 30 s."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from inferlib.ops import collective_matmul as contract
from inferlib.pallas_kernels import collective_matmul_tpu as kernels
from inferlib.pallas_kernels.collective_matmul_tpu import Blocks, blocks, unsupported

STAYS, STREAMED = Blocks(128, 512, 16), Blocks(128, 256, 48)
DEPTH = 128
# n devices, how copies take place, blocks, rows of a device (48: an uneven half each way), dtype
CASES = {
    "2, eager": (2, "eager", STAYS, 32, "bfloat16"),
    "4, on wait": (4, "on_wait", STREAMED, 48, "float32"),
    "8, eager": (8, "eager", STREAMED, 48, "bfloat16"),
}


def on_mesh(devices: int, f, ins, outs):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("8")])
def test_equal_the_oracle_without_races(name, capsys):
    check(name)
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


@pytest.mark.release  # rings of two and of four have all that this has but its length
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("8")])
def test_equal_the_oracle_without_races_on_eight_devices(name):
    """In a process of its own, as its devices wait for each other in more threads than JAX has by default."""
    root = str(Path(__file__).parents[2])
    env = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    run = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "equal\n"


def check(name: str) -> None:
    """One after the other: all-gather and two products side by side, then a product and the reduce-scatter. Other
    layers' weights are NaN, and so is on-chip memory that nothing was copied to."""
    devices, mode, sizes, rows, dtype = CASES[name]
    rng = np.random.default_rng(devices)
    ring = tuple(rng.permutation(devices).tolist())
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan")
    kind = dict(axis="x", ring=ring, layer=1, blocks=sizes, interpret=params)

    def run(x, up, down):
        y = kernels.all_gather_matmul(x, up, **kind)
        return y, kernels.matmul_reduce_scatter(y[0] + y[1], down, **kind)

    def drawn(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype), float)

    x, up, down = drawn(devices * rows, DEPTH), drawn(3, 2, DEPTH, devices * 256), drawn(3, devices * 256, 256)
    up[::2], down[::2] = np.nan, np.nan
    split = P(None, None, None, "x")
    f = on_mesh(devices, run, (P("x"), split, P(None, "x")), (P(None, None, "x"), P("x")))
    y, z = f(*(jnp.asarray(a, dtype) for a in (x, up, down)))
    assert (y.dtype, z.dtype) == (dtype, dtype)
    expected = np.einsum("tk,pkn->ptn", x, up[1])
    tolerance = 1e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(np.asarray(y, float), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.asarray(z, float), expected.sum(0) @ down[1], rtol=0, atol=tolerance)


@pytest.mark.slow
def test_sums_are_made_in_the_order_stated():
    """Powers of two and ones that vanish beside them tell in which order they were added."""
    devices, rows, ring = 4, 32, (2, 0, 3, 1)
    x, w = np.zeros((devices * rows, devices * 128)), np.zeros((1, devices * 128, 128))
    parts = np.array([1.0, 2.0**24, 1.0, -(2.0**24)])
    x[:, ::128], w[0, ::128] = 1, parts[:, None]
    run = partial(kernels.matmul_reduce_scatter, axis="x", ring=ring, interpret=pltpu.InterpretParams())
    got = on_mesh(devices, run, (P(None, "x"), P(None, "x")), P("x"))(jnp.float32(x), jnp.float32(w))
    for device in range(devices):
        place = ring.index(device)
        for half, step in ((0, 1), (1, -1)):
            total = np.float32(0)
            for k in range(1, devices + 1):
                total += np.float32(parts[ring[(place + step * k) % devices]])
            np.testing.assert_array_equal(np.asarray(got)[device * rows + half * 16 :][:16], total)


@pytest.mark.slow
def test_the_contract_takes_weights_as_layers_have_them():
    """Both backends: several dimensions of results, of what is summed over, and a layer of a stack."""
    rng = np.random.default_rng(3)
    x, up = rng.normal(size=(64, 128)), rng.normal(size=(2, 128, 2, 3, 256))
    down = rng.normal(size=(2, *up.shape[2:], 128))

    def run(x, up, down, layer, backend):
        kind = dict(axis="x", layer=layer, backend=backend, interpret=True)
        y = contract.all_gather_matmul(x, up, **kind)
        return y, contract.matmul_reduce_scatter(y, down, **kind)

    expected = np.tensordot(x, up[1], 1)
    split = P(None, None, *[None] * (up.ndim - 3), "x")
    last = P(None, *[None] * (down.ndim - 3), "x")
    for backend in ("xla", "pallas_tpu"):
        f = on_mesh(2, partial(run, backend=backend), (P("x"), split, last, P()), (P(*split[1:]), P("x")))
        y, z = f(*(jnp.asarray(a, jnp.float32) for a in (x, up, down)), jnp.int32(1))
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(z, np.tensordot(expected, down[1], expected.ndim - 1), rtol=1e-5, atol=2e-2)


def test_what_they_cannot_run_is_refused_with_the_reason():
    def reason(rows=256, inner=4096, outer=1792, x="bfloat16", w="bfloat16", sizes=None, scatters=False):
        x, w = jax.ShapeDtypeStruct((rows, inner), x), jax.ShapeDtypeStruct((1, 2, inner, outer), w)
        return unsupported(rows, x, w, scatters=scatters, blocks_=sizes)

    assert reason() is None
    assert "not float16 and float16" in reason(x="float16", w="float16")
    assert "not bfloat16 and int8" in reason(w="int8")
    assert "a device has 100 rows, not a multiple of 16" in reason(rows=100)
    assert "a device has 16 rows" in reason(rows=16)
    assert "weights of 4096 x 1000 do not divide" in reason(outer=1000)
    assert "weights of 100 x 1792 do not divide" in reason(inner=100)
    assert "columns of 512" in reason(sizes=Blocks(512, 1024, 16))
    assert "256 rows do not divide into products of 96" in reason(sizes=Blocks(128, 256, 96))
    assert "bytes on chip, and there are" in reason(rows=8192)
    assert "bytes on chip, and there are" in reason(rows=4096, scatters=True)
    for columns, cached, rows, message in (
        (100, 200, 16, "multiples"),
        (128, 256, 24, "multiples"),
        (256, 384, 16, "one"),
    ):
        with pytest.raises(ValueError, match=message):
            Blocks(columns, cached, rows)


def test_bad_calls_raise_before_anything_runs():
    def call(rows, devices=2, **options):
        run = partial(kernels.all_gather_matmul, axis="x", **options)
        return on_mesh(devices, run, (P("x"), P()), P())(jnp.zeros((devices * rows, 128)), jnp.zeros((1, 1, 128, 128)))

    with pytest.raises(ValueError, match="does not run this product with its collective: a device has 40 rows"):
        call(40)
    with pytest.raises(ValueError, match=r"a ring of 2 devices names each once, not \[0, 0\]"):
        call(32, ring=(0, 0))
    with pytest.raises(ValueError, match="it needs no collective"):
        call(32, devices=1)
    run = on_mesh(2, partial(kernels.matmul_reduce_scatter, axis="x"), (P(), P()), P("x"))
    with pytest.raises(ValueError, match="splits 61 rows over 2 devices: pad them"):
        run(jnp.zeros((61, 128)), jnp.zeros((1, 128, 128)))


def test_usual_blocks_keep_weights_on_chip_where_they_fit():
    assert blocks(256, 2, 4096, 1792, 2, scatters=False) == Blocks(256, 2 * 1792, 256)  # llama3-8b on 8
    assert blocks(260 + 12, 1, 1792, 4096, 2, scatters=True) == Blocks(512, 4096, 272)
    assert blocks(512, 2, 8192, 3584, 2, scatters=False) == Blocks(512, 1024, 512)  # llama3-70b on 8
    assert blocks(512, 1, 3584, 8192, 2, scatters=True) == Blocks(512, 2048, 512)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    check(sys.argv[1])
    print("equal")
