"""Products of few rows with weights on NVIDIA GPUs: interpreted elsewhere. About 30 s."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.models.layers.mlp import ACTIVATIONS, gated
from inferlib.ops.matmul import Product, _by_rows, _by_tiles, _dequantized, choose, matmul
from inferlib.ops.quantized import SCHEMES, Scheme
from inferlib.pallas_kernels import copies_gpu, grouped_matmul_gpu, mma_gpu, row_matmul_gpu
from inferlib.pallas_kernels.copies_gpu import Ring
from inferlib.pallas_kernels.row_matmul_gpu import Blocks, Epilogue, blocks, row_matmul, unsupported
from tests.helpers.kernels import kernels_in, lowered_for_cuda
from tests.helpers.packed_experts import dequantized, quantized, with_nan

on_cpu = jax.default_backend() == "cpu"


def draw(scheme: str | None, shape):
    """Arrays of a weight [N, I, O] for the kernel, and what it stands for in float64."""
    if scheme is None:
        values = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)
        return values, None, np.asarray(values, np.float64)
    w = quantized(jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32), (1,), SCHEMES[scheme])
    exact = np.asarray(dequantized(w, (1,)), np.float64).reshape(shape)
    return w.values.reshape(shape), w.scales, exact


def product(*arrays, **options) -> np.ndarray:
    """What the kernel makes of them, in one program."""
    return np.asarray(jax.jit(partial(row_matmul, interpret=on_cpu, **options))(*arrays))


def check(got, expected) -> None:
    error = np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 1e-3, error


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    # `test_kernels_make_what_xla_makes` has the others.
    [pytest.param(x, marks=[] if x in (None, "mxfp4") else [pytest.mark.release]) for x in (None, *SCHEMES)],
)
def test_rows_by_the_matrices_they_choose(scheme):
    """Inputs of very different sizes, outputs that do not fill their blocks; a group that nobody chose is not read."""
    rng, ids, rows = np.random.default_rng(0), np.array([2, 0, -1, 2]), np.array([0, 0, 1, 1])
    values, scales, exact = draw(scheme, (6, 256, 88))
    x = jnp.asarray(rng.normal(size=(2, 256)) * np.exp(3 * rng.normal(size=(2, 256))), jnp.bfloat16)
    run = partial(row_matmul, parts=2, chosen=Blocks(1 if scheme else 2, splits=2), interpret=on_cpu)
    spoiled = (with_nan(values, np.s_[2:4]), None) if scales is None else (values, with_nan(scales, np.s_[2:4]))
    got = jax.jit(run)(x, *spoiled, ids)
    chosen_rows = np.array([0, 1, 3])
    expected = np.einsum("mi,mpio->mpo", np.asarray(x, np.float64)[rows], exact.reshape(3, 2, 256, 88)[ids])
    assert got.shape == (4, 2, 88)
    check(got[chosen_rows], expected[chosen_rows])


@pytest.mark.skipif(on_cpu, reason="copies that run ahead have no meaning but on a GPU")
@pytest.mark.parametrize("chosen", [Blocks(*of, copied=True) for of in ((1, 1), (2, 1), (2, 3), (4, 2), (4, 8))])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("inputs", [896, 960])
def test_copies_that_run_ahead(scheme, chosen, inputs):
    """Of a row and of rows that choose; programs of several steps, of one, and of none, and steps that are not full;
    another matrix holds the largest values and NaN."""
    if scheme is None and chosen.words < 2:
        chosen = replace(chosen, words=2)
    rng, ids = np.random.default_rng(0), np.array([2, 0, -1, 2])
    values, scales, exact = draw(scheme, (3, inputs, 512))
    x = jnp.asarray(rng.normal(size=(4, inputs)), jnp.bfloat16)
    others = np.array(values)  # not every backend writes to parts of 4-bit arrays
    others[1] = np.nan if scales is None else 7
    spoiled = jnp.asarray(others), None if scales is None else with_nan(scales, np.s_[1])
    run = partial(row_matmul, chosen=chosen)
    got = jax.jit(run)(x, *spoiled, ids)
    expected = np.einsum("mi,mio->mo", np.asarray(x, np.float64), exact[ids])
    check(got[np.array([0, 1, 3]), 0], expected[[0, 1, 3]])
    for rows in (1, 3, 8, 16):  # that share the weights
        x = jnp.asarray(rng.normal(size=(rows, inputs)) * 10.0 ** np.linspace(-10, 10, rows)[:, None], jnp.bfloat16)
        got = jax.jit(run)(x, values[2:], None if scales is None else scales[2:])[:, 0]
        for each, row in zip(got, np.asarray(x, np.float64), strict=True):
            check(each, row @ exact[2])


@pytest.mark.skipif(on_cpu, reason="copies that run ahead have no meaning but on a GPU")
@pytest.mark.parametrize("scheme", ["mxfp4", "int8"])
def test_copies_of_a_large_matrix(scheme):
    """As many programs as a GPU holds, again and again."""
    values, scales, exact = draw(scheme, (1, 4096, 28672))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4096)), jnp.bfloat16)
    run = jax.jit(row_matmul)
    first = run(x, values, scales)
    check(first[:, 0], np.asarray(x, np.float64) @ exact[0])
    for _ in range(50):
        np.testing.assert_array_equal(run(x, values, scales), first)


@pytest.mark.parametrize("words", [1, 2, 4])
def test_copies_lie_where_they_are_read(words, monkeypatch):
    """Each lane's rows and words, by the addresses that statements get; where there is no GPU these are not run."""
    seen, stride = [], 32 * words * 3
    monkeypatch.setattr(
        copies_gpu, "asm", lambda text, _, args, *dtype: seen.append((text, args)) or jnp.zeros(32, int)
    )
    ring, where = Ring(words), 4096
    ring.copy(where, 1, None, jnp.full(32, 70), stride, 1, 0)
    [(text, (_, source, target, *_))] = seen
    memory = {}
    for n, (to, ahead) in enumerate(re.findall(r"\[\$3\+(\d+)\], \[a\+(\d+)\], 16", text)):
        for lane in range(32):
            place, at = int(target[lane]) + int(to), 16 * int(source[lane]) + int(ahead)
            assert place not in memory, n
            memory |= {place + 4 * word: at + 4 * word for word in range(4)}
    assert set(memory) == set(range(where + ring.size, where + 2 * ring.size, 4))
    seen.clear()
    ring.read(where, 1, 0)
    reads = [(int(re.search(r"\+(\d+)\]", text)[1]), args[0]) for text, args in seen if "ld.shared" in text]
    width = min(words, 2)  # of a reading
    assert len(reads) == 8 * words // width
    for lane in range(32):
        copied = [memory[int(at[lane]) + place + 4 * word] for place, at in reads for word in range(width)]
        rows = 8 * (lane & 3) + np.arange(8)
        assert copied == [
            16 * 70 + row * stride + 4 * (words * (lane >> 2) + word) for row in rows for word in range(words)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "size"), [pytest.param("mxfp4", 1e30, marks=pytest.mark.release), ("int8", 1e-30), ("fp8", 1e30)]
)
def test_inputs_of_any_size(scheme, size):
    """Beyond the range of float16: all as large as the largest, so that nothing may overflow either."""
    values, scales, exact = draw(scheme, (1, 128, 32))
    x = jnp.asarray(np.where(exact[0, :, 0] < 0, -size, size)[None], jnp.bfloat16)
    got = product(x, values, scales, np.zeros(1, np.int32))
    check(got[0], np.asarray(x, np.float64) @ exact[0])


def test_what_is_not_finite_stays_so():
    values, scales, _ = draw("mxfp4", (1, 128, 32))
    run = jax.jit(partial(row_matmul, interpret=on_cpu))
    for bad in (np.nan, np.inf):
        x = np.where(np.arange(128) == 70, bad, 1)[None].astype(jnp.bfloat16)
        assert not np.isfinite(run(x, values, scales, np.zeros(1, np.int32))).any()
    x, spoiled = np.ones((1, 128), jnp.bfloat16), with_nan(scales, np.s_[0, 1, 5])
    got = np.asarray(run(x, values, spoiled, np.zeros(1, np.int32)))[0, 0]
    assert np.isnan(got[5])
    assert np.isfinite(np.delete(got, 5)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "chosen"),
    [
        pytest.param("mxfp4", Blocks(4, 3), marks=pytest.mark.release),
        ("fp8_block", Blocks(4, 3)),
        pytest.param("fp8_block", Blocks(1, 2), marks=pytest.mark.release),
    ],
)
def test_blocks_change_nothing(scheme, chosen):
    """10 groups: the last step has two, its other lanes none, and some programs have no step."""
    inputs = 1280 if scheme == "fp8_block" else 320
    values, scales, exact = draw(scheme, (1, inputs, 160))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, inputs)), jnp.bfloat16)
    got = product(x, values, scales, np.zeros(1, np.int32), chosen=chosen)
    check(got[0], np.asarray(x, np.float64) @ exact[0])


@pytest.mark.parametrize(
    ("scheme", "rows"),
    [
        *((None, 4), ("int8", 8)),
        # `test_kernels_make_what_xla_makes` has nine rows, by weights in groups.
        *(pytest.param(*case, marks=pytest.mark.release) for case in (("fp8_block", 3), ("mxfp4", 9), ("mxfp4", 14))),
    ],
)
def test_several_rows_share_the_weights(scheme, rows):
    """Each as exact as alone, whatever the size of the others."""
    values, scales, exact = draw(scheme, (2, 256 + 128, 72))
    x = np.random.default_rng(0).normal(size=(rows, 384)) * 10.0 ** np.linspace(-20, 20, rows)[:, None]
    x = x.astype(jnp.bfloat16)
    got = product(x, values, scales, parts=2, chosen=Blocks(2 if scheme is None else 1, 2))
    assert got.shape == (rows, 2, 72)
    for row in range(rows):
        check(got[row], np.einsum("i,pio->po", np.asarray(x[row], np.float64), exact))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "rows", "parts"),
    [
        ("int8", 1, 1),
        pytest.param("mxfp4", 5, 2, marks=pytest.mark.release),
    ],
)
def test_an_activation_of_two_results(scheme, rows, parts):
    """Of two parts, or side by side in one."""
    values, scales, exact = draw(scheme, (parts, 384, 144 // parts))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 384)) / 20, jnp.bfloat16)
    chosen = Blocks(2 if scheme is None else 1, splits=3)
    epilogue = Epilogue(lambda gate, up: jax.nn.silu(gate) * up, dtype="bfloat16")
    got = product(x, values, scales, parts=parts, epilogue=epilogue, chosen=chosen)
    gate, up = np.split(np.einsum("mi,pio->mpo", np.asarray(x, np.float64), exact).reshape(rows, 144), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    assert (got.shape, got.dtype) == ((rows, 72), "bfloat16")
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) < 8e-3 * np.linalg.norm(expected)


@pytest.mark.skipif(on_cpu, reason="of instructions, which CPUs do not have")
@pytest.mark.parametrize("kind", mma_gpu.KINDS)
def test_instructions_are_those_that_are_emulated(kind):
    rng, count = np.random.default_rng(0), 2 if kind == "bfloat16" else 1
    words = [
        jnp.asarray((rng.integers(0, 2**32, 32, np.uint32) & 0xBFF7BFF7).view(np.int32)) for _ in range(8 * count + 8)
    ]
    c = [jnp.asarray(rng.normal(size=32), jnp.float32) for _ in range(4)]

    def split(some):
        return [some[i : i + count] for i in range(0, 8 * count, count)], 0, some[8 * count : 8 * count + 8]

    def kernel(*refs):
        read = [ref[...] for ref in refs[: len(words) + 4]]
        for ref, y in zip(refs[len(words) + 4 :], mma_gpu.mma(kind, *split(read), read[-4:]), strict=True):
            ref[...] = y

    shape = jax.ShapeDtypeStruct((32,), jnp.float32)
    params = plgpu.CompilerParams(num_warps=1)
    got = pl.pallas_call(kernel, out_shape=[shape] * 4, compiler_params=params)(*words, *c)
    for a, b in zip(got, mma_gpu.mma_by_lanes(kind, *split(words), c), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize(
    ("scheme", "rows", "kernel"),
    [
        ("mxfp4", 1, "row_matmul"),
        ("mxfp4", 16, "row_matmul"),
        ("mxfp4", 17, "grouped_matmul"),
        ("mxfp4", 128, "grouped_matmul"),
        ("mxfp4", 129, None),
        ("int8", 4, "row_matmul"),
        ("int8", 5, None),
    ],
)
def test_products_of_few_rows_take_a_kernel_on_gpus(scheme, rows, kernel):
    """Of a weight of several dimensions, in groups of the last that is summed over; with an activation."""
    w = quantized(jnp.ones((4, 64, 2, 16)), (0, 1), SCHEMES[scheme])
    run, x = partial(matmul, contract=2, activation=jnp.add), jnp.ones((rows, 4, 64), jnp.bfloat16)
    assert kernels_in(run, x, w) & {"row_matmul", "grouped_matmul"} == ({kernel} if kernel else set())
    np.testing.assert_array_equal(jax.jit(run)(x, w), np.full((rows, 16), 512))


GATE_UP, O, OF_THREE = ((160,), (2, 24), True), ((4, 96), (64,), False), ((2, 3, 64), (5, 8), False)


# Rows and the dtype of results. row_matmul takes one row and several; of 17 there is a second tile, of 65 a fifth.
ONE_AND_17_ROWS, TWO_TO_65_ROWS = ((1, "float32"), (17, "float32")), ((2, "bfloat16"), (9, "float32"), (65, "bfloat16"))


# Every scheme's values, every case and every number of rows occur; they do not depend on one another.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "case", "sizes"),
    [
        ("int8", GATE_UP, ONE_AND_17_ROWS + TWO_TO_65_ROWS),
        ("fp8_block", O, ONE_AND_17_ROWS),
        ("mxfp8", OF_THREE, TWO_TO_65_ROWS[::2]),
        ("mxfp4", OF_THREE, ONE_AND_17_ROWS),
        (Scheme("int4", 32), O, TWO_TO_65_ROWS[1:2]),
    ],
    ids=str,
)
def test_kernels_make_what_xla_makes(scheme, case, sizes):
    """On a CPU, where `matmul` is XLA's, kernels are interpreted. case: contracted and other dimensions, and whether an
    activation takes two of the latter."""
    (inner, outer, activated), rng = case, np.random.default_rng(0)
    contract = len(inner)
    weight = jnp.asarray(rng.normal(size=(*inner, *outer)), jnp.float32)
    w = quantized(weight, tuple(range(contract)), SCHEMES.get(scheme, scheme))
    activation = (lambda gate, up: jax.nn.silu(gate) * up) if activated else None
    taken = 0
    for rows, dtype in sizes:
        x = jnp.asarray(rng.normal(size=(rows, *inner)), jnp.bfloat16)
        choice = choose(w, rows, x.dtype, contract=contract, backend="pallas_gpu")
        if choice.name == "xla":
            assert rows > 4
            assert not w.grouped
            continue
        expected = jax.jit(_dequantized, static_argnums=(2, 3))(x.astype(jnp.float32), w, contract, jnp.float32)
        expected = np.asarray(activation(expected[:, 0], expected[:, 1]) if activated else expected, np.float64)
        kernel = {"row_matmul": _by_rows, "grouped_matmul": _by_tiles}[choice.name]
        product = Product(contract, activation, jnp.dtype(dtype), "pallas_gpu")
        got = jax.jit(partial(kernel, product=product, interpret=on_cpu))(x, w)
        assert (got.shape, got.dtype, bool(np.isfinite(got).all())) == (expected.shape, dtype, True)
        error = np.linalg.norm(np.asarray(got, np.float64) - expected)
        assert error < (1e-3 if dtype == "float32" and not activated else 1e-2) * np.linalg.norm(expected)
        taken += 1
    assert taken == (len(sizes) if w.grouped else 2)


# 17 rows take another kernel than one, and 16 the same; both call activations alike.
@pytest.mark.parametrize(("name", "rows"), [*((name, 1) for name in ACTIVATIONS), ("silu", 16), ("silu", 17)])
def test_every_activation_lowers_for_gpus(name, rows):
    w = quantized(jnp.ones((64, 2, 32)), (0,), SCHEMES["mxfp4"])
    x = jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16)
    assert "triton" in lowered_for_cuda(partial(matmul, activation=partial(gated, name)), x, w)


def test_products_of_other_dtypes_take_no_kernel():
    w = quantized(jnp.ones((64, 32)), (0,), SCHEMES["mxfp4"])
    for rows in (1, 17):
        assert not kernels_in(matmul, jnp.ones((rows, 64)), w)
    for taken_too, outputs, dtype in ((True, 32, "bfloat16"), (False, 2**18, "bfloat16"), (False, 32, "float32")):
        x, dense = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 64), (64, outputs)))
        assert ("row_matmul" in kernels_in(matmul, x, dense)) == taken_too


def test_what_it_cannot_run_is_refused_with_the_reason(monkeypatch):
    def values(*shape, dtype="float4_e2m1fn"):
        return jax.ShapeDtypeStruct(shape, dtype)

    assert unsupported("bfloat16", values(64, 2880, 2880), 32) is None
    assert "products of float32" in unsupported("float32", values(1, 256, 256), 32)
    assert "with float16" in unsupported("bfloat16", values(1, 256, 256, dtype="float16"), None)
    assert "250 inputs" in unsupported("bfloat16", values(1, 250, 256), None)
    assert "groups of 16" in unsupported("bfloat16", values(1, 256, 256), 16)
    assert "250 outputs" in unsupported("bfloat16", values(1, 256, 250), 32)
    assert "90 outputs" in unsupported("bfloat16", values(1, 256, 90, dtype="bfloat16"), None)
    assert unsupported("bfloat16", values(1, 2**17, 2**15, dtype="int8"), None) is None
    assert "more words" in unsupported("bfloat16", values(1, 2**17, 2**15, dtype="bfloat16"), None)
    monkeypatch.setattr(row_matmul_gpu, "converts_e4m3", lambda: False)
    monkeypatch.setattr(grouped_matmul_gpu, "converts_e4m3", lambda: False)
    for name, old in (("float4_e2m1fn", False), ("float8_e4m3fn", True), ("int8", False), ("bfloat16", False)):
        assert ("below 8.9" in (unsupported("bfloat16", values(1, 256, 256, dtype=name), None) or "")) == old
    assert "below 8.9" in grouped_matmul_gpu.unsupported(values(1, 256, 256, dtype="float8_e4m3fn"), None, False)
    assert grouped_matmul_gpu.unsupported(values(1, 256, 256), 32, False) is None
    with pytest.raises(ValueError, match="does not run products of float32"):
        row_matmul(jnp.ones((1, 64)), jnp.ones((1, 64, 32), jnp.int8), jnp.ones((1, 32)), jnp.zeros(1, jnp.int32))

    with pytest.raises(ValueError, match="up to 16 rows without ids"):
        row_matmul(jnp.ones((17, 64), jnp.bfloat16), jnp.ones((1, 64, 32), jnp.int8), jnp.ones((1, 32)))
    with pytest.raises(ValueError, match="3 ids are not the same number for each of 2 rows"):
        row_matmul(
            jnp.ones((2, 64), jnp.bfloat16), jnp.ones((1, 64, 32), jnp.int8), jnp.ones((1, 32)), jnp.zeros(3, int)
        )
    args = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((1, 64, 36), jnp.int8), jnp.ones((1, 36))
    with pytest.raises(ValueError, match="9 words of int8 are no multiple"):
        row_matmul(*args, chosen=Blocks(words=2), interpret=True)
    with pytest.raises(ValueError, match="1, 2 or 4 words"):
        Blocks(words=3)
    args = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((1, 64, 32), jnp.int8), jnp.ones((1, 32))
    with pytest.raises(ValueError, match="8 words of int8 do not fill the programs of"):
        row_matmul(*args, chosen=Blocks(words=2, copied=True), interpret=True)
    with pytest.raises(ValueError, match="1, 2 or 4 words of a lane"):
        Ring(words=3)


def test_blocks_of_usual_shapes():
    """The experts of gpt-oss-20b that one token chooses, llama3-8b's matrices, and an odd number of words."""
    assert blocks(8, 2880, 2880, "float4_e2m1fn") == Blocks(words=2, splits=12)
    assert blocks(1, 4096, 28672, "int8") == Blocks(words=4, splits=4, copied=True)
    assert blocks(1, 4096, 28672, "int8", rows=4) == Blocks(words=4, splits=4, copied=True)
    assert blocks(1, 4096, 28672, "float4_e2m1fn") == Blocks(words=2, splits=4, copied=True)
    assert blocks(1, 4096, 6144, "float4_e2m1fn") == Blocks(words=2, splits=11, copied=True)
    assert blocks(1, 4096, 4096, "float4_e2m1fn") == Blocks(words=2, splits=16, copied=True)
    assert blocks(1, 14336, 4096, "float4_e2m1fn") == Blocks(words=2, splits=28, copied=True)
    assert blocks(1, 4096, 128256, "float4_e2m1fn") == Blocks(words=2, copied=True)
    assert blocks(1, 4096, 4096, "float4_e2m1fn", rows=12) == Blocks(words=2, splits=32, copied=True)
    assert blocks(1, 14336, 4096, "float4_e2m1fn", rows=12) == Blocks(words=2, splits=38, copied=True)
    assert blocks(1, 14336, 4096, "float4_e2m1fn", rows=13) == Blocks(words=2, splits=28, copied=True)
    assert blocks(1, 4096, 4096, "bfloat16") == Blocks(words=4, splits=16, copied=True)
    assert blocks(1, 64, 24, "float4_e2m1fn") == Blocks(words=1, splits=1)
