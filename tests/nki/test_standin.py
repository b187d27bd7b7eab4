"""Instructions of the stand-in against values worked out by hand, the ones easiest to get wrong first."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from inferlib.nki_kernels import simulator
from inferlib.nki_kernels.simulator import isa


def store(made):
    out = nl.ndarray(made.shape, dtype=made.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=made)
    return out


def load(x):
    made = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=made, src=x)
    return made


def check_indexing(x):
    t = load(x)
    assert t[0].shape == (1, 3, 4)
    assert t[0, 1, 2].shape == (1, 1)
    assert t[:, 1].shape == (8, 4)
    assert t[:, 1, 2].shape == (8, 1)
    assert t[..., 2].shape == (8, 3)
    assert t[2:4, :, ::2].get_pattern() == [[12, 2], [4, 3], [2, 2]]
    assert x[0].shape == (3, 4)
    assert x[0, 1, 2].shape == (1,)
    return store(t)


def test_integer_indices_keep_two_dimensions_on_chip_and_drop_them_in_hbm():
    x = np.arange(96, dtype=np.float32).reshape(8, 3, 4)
    np.testing.assert_array_equal(nki.jit(check_indexing)(x), x)


def write_through_views(x):
    t = load(x)
    nisa.memset(dst=t.reshape((8, 2, 6))[:, 1, 4:6], value=7.0)
    nisa.memset(dst=t.permute((0, 2, 1))[0:4, 0, :], value=9.0)
    words = t.view(nl.int32)
    nisa.tensor_scalar(dst=words[4:8, 0:1], data=words[4:8, 0:1], op0=nl.bitwise_and, operand0=0)
    return store(t)


def test_views_alias():
    with pytest.raises(simulator.RuleError, match=r"\[partition-start\]"):
        nki.jit(write_through_views)(np.ones((8, 3, 4), np.float32))
    want = np.ones((64, 12), np.float32)
    want[:, 10:] = 7

    def aliased(x):
        t = load(x)
        nisa.memset(dst=t.reshape((64, 2, 6))[:, 1, 4:6], value=7.0)
        nisa.memset(dst=t.reshape((64, 3, 4)).permute((0, 2, 1))[32:64, 0, :], value=9.0)
        return store(t)

    want[32:, [0, 4, 8]] = 9
    np.testing.assert_array_equal(nki.jit(aliased)(np.ones((64, 12), np.float32)), want)


def round_values(x):
    t = load(x)
    half = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    whole = nl.ndarray(x.shape, dtype=nl.int8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=half, src=t)
    nisa.tensor_copy(dst=whole, src=t[:, :])
    return store(half), store(whole)


def test_writes_round_to_even_and_saturate():
    x = np.array([[0.5, 1.5, 2.5, -3.5, 200.0, -200.0, 1.00390625, -3.4028235e38]], np.float32)
    half, whole = nki.jit(round_values)(x)
    np.testing.assert_array_equal(whole, [[0, 2, 2, -4, 127, -128, 1, -128]])
    assert half.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(half[0, 6:].astype(np.float32), [1.0, -np.inf])


def multiply(a, b):
    product = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
    stationary, moving = load(a), load(b)
    nisa.nc_matmul(dst=product[:, 0:2], stationary=stationary, moving=moving[:, 0:2])
    # Both halves: what was written accumulates, what was not is overwritten.
    nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
    nisa.nc_matmul(dst=product[:, 3:4], stationary=stationary, moving=moving[:, 3:4], accumulate=False)
    nisa.nc_matmul(dst=product[:, 3:4], stationary=stationary, moving=moving[:, 3:4], accumulate=True)
    out = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=product)
    return store(out)


def test_products_accumulate_by_location(rng):
    a, b = rng.integers(-4, 5, (7, 3)).astype(np.float32), rng.integers(-4, 5, (7, 4)).astype(np.float32)
    np.testing.assert_array_equal(nki.jit(multiply)(a, b), (a.T @ b) * [2, 2, 1, 2])


def activate(x):
    t = load(x)
    bias = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=bias, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    nisa.activation(dst=t, op=nl.copy, data=t, scale=2.0, bias=bias, reduce_op=nl.add,
                    reduce_cmd=nisa.reduce_cmd.reset_reduce)  # fmt: skip
    nisa.activation(dst=t, op=nl.square, data=t, reduce_op=nl.add, reduce_res=total,
                    reduce_cmd=nisa.reduce_cmd.reduce)  # fmt: skip
    return store(t), store(total)


def test_activation_scales_shifts_and_sums_over_two_instructions():
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    values, total = nki.jit(activate)(x)
    first = 2 * x + np.arange(4)[:, None]
    np.testing.assert_array_equal(values, first**2)
    np.testing.assert_array_equal(total[:, 0], (first + first**2).sum(1))


def select(x):
    t = load(x)
    low = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
    high = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=low, pattern=[[0, 1]], offset=10, channel_multiplier=1)
    nisa.memset(dst=high, value=13.0)
    state = nl.ndarray((4, 5), dtype=nl.float32, buffer=nl.sbuf)
    most = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.range_select(dst=state, on_true_tile=t, comp_op0=nl.greater_equal, comp_op1=nl.less, bound0=low, bound1=high,
                      range_start=10, reduce_res=most)  # fmt: skip
    triangle = nl.ndarray((4, 5), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(dst=triangle, pattern=[[-1, 5]], channel_multiplier=1, on_true_tile=t, on_false_value=-1.0,
                       cmp_op=nl.greater_equal)  # fmt: skip
    return store(state), store(most), store(triangle)


def test_range_and_affine_select():
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    state, most, triangle = nki.jit(select)(x)
    column, row = np.arange(5)[None], np.arange(4)[:, None]
    least = np.finfo(np.float32).min
    np.testing.assert_array_equal(state, np.where((column >= row) & (column < 3), x, least))
    np.testing.assert_array_equal(most[:, 0], [2, 7, 12, least])
    np.testing.assert_array_equal(triangle, np.where(row >= column, x, -1))


def combine(x, y):
    a, b = load(x), load(y)
    out = nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=out, data=a, op0=nl.subtract, operand0=1.0, reverse0=True, op1=nl.multiply, operand1=b[:, 0:1]
    )
    nisa.scalar_tensor_tensor(dst=out, data=out, op0=nl.add, operand0=2.0, op1=nl.subtract, operand1=b, reverse1=True)
    least = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=least, op=nl.minimum, data=out, axis=1, negate=True)
    large = nl.ndarray((4, 3), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=large, value=2**24 + 1)
    nisa.tensor_tensor(dst=large, data1=large, data2=large, op=nl.add)
    return store(out), store(least), store(large)


def test_operators_reverse_and_32_bit_integers_are_exact(rng):
    x, y = rng.normal(size=(2, 4, 3)).astype(np.float32)
    out, least, large = nki.jit(combine)(x, y)
    want = y - ((1 - x) * y[:, :1] + 2)
    np.testing.assert_allclose(out, want, rtol=1e-6)
    np.testing.assert_allclose(least[:, 0], -want.min(1), rtol=1e-6)
    assert (large == 2**25 + 2).all()


def gather(x, rows, start):
    index, first = load(rows), load(start)
    made = nl.ndarray((3, 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(dst=made, value=-1.0)
    nisa.dma_copy(dst=made, src=x.ap(pattern=[[4, 3], [1, 4]], vector_offset=index, indirect_dim=0),
                  oob_mode=nisa.oob_mode.skip)  # fmt: skip
    part = nl.ndarray((2, 2), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=part, src=x.ap(pattern=[[4, 2], [1, 2]], offset=1, scalar_offset=first, indirect_dim=0))
    twice = nl.ndarray((2, 4), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=twice, src=x.ap(pattern=[[0, 2], [1, 4]], offset=4))
    return store(made), store(part), store(twice)


def test_gathers_by_vector_and_scalar_and_skips_what_is_out_of_bounds():
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    with simulator.session("trn2") as seen:
        made, part, twice = nki.jit(gather)(x, np.array([[4], [7], [1]], np.int32), np.array([[3]], np.int32))
    np.testing.assert_array_equal(made, [x[4], [-1] * 4, x[1]])
    np.testing.assert_array_equal(part, x[3:5, 1:3])
    np.testing.assert_array_equal(twice, [x[1], x[1]])
    # Two rows of three, two halves, a row twice, and the indices.
    assert seen.cores[0].hbm_read == 2 * 16 + 2 * 8 + 2 * 16 + 3 * 4 + 4


def quantise(x):
    data = nl.ndarray((32, x.shape[1] // 4), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
    scale = nl.ndarray((32, x.shape[1] // 4), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.quantize_mx(dst=data, src=load(x), dst_scale=scale)
    used = nl.ndarray((4, x.shape[1] // 4), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=used, src=scale[0:4])
    product = nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul_mx(dst=product, stationary=data, moving=data, stationary_scale=scale, moving_scale=scale)
    out = nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=product)
    return store(used), store(data.view(nl.uint8)), store(out)


def test_quantize_mx_groups_8_partitions_of_4_and_packs_element_0_low():
    x = np.zeros((32, 8), ml_dtypes.bfloat16)
    x[8, 0], x[8, 1], x[15, 2], x[8, 4] = 1.75, -1.0, 0.5, 3.0
    used, data, out = nki.jit(quantise)(x)
    # 2**(floor(log2(amax)) - 7): twice the scale of the OCP sample; a zero group gives byte 0.
    np.testing.assert_array_equal(used, [[0, 0], [127 - 7, 127 + 1 - 7], [0, 0], [0, 0]])
    decoded = data[:, :4].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decoded[8], [1.75 * 128, -128, 0, 0])
    assert decoded[15, 2] == 64
    np.testing.assert_array_equal(out, [[1.75**2 + 1 + 0.25, 1.75 * 3], [1.75 * 3, 9]])


def mx_product(data, scale, moving, moving_scale):
    a = nl.ndarray((128, 2), dtype=nl.uint16, buffer=nl.sbuf)
    nisa.dma_copy(dst=a, src=data)
    b = nl.ndarray((128, 3), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.dma_copy(dst=b, src=moving)
    scales = nl.ndarray((128, 2), dtype=nl.uint8, buffer=nl.sbuf)
    others = nl.ndarray((128, 3), dtype=nl.uint8, buffer=nl.sbuf)
    for quadrant in range(4):
        at = 32 * quadrant
        nisa.dma_copy(dst=scales[at : at + 4], src=scale[4 * quadrant : 4 * quadrant + 4])
        nisa.dma_copy(dst=others[at : at + 4], src=moving_scale[4 * quadrant : 4 * quadrant + 4])
    product = nl.ndarray((2, 3), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul_mx(dst=product, stationary=a.view(nl.float4_e2m1fn_x4), moving=b.view(nl.float8_e4m3fn_x4),
                      stationary_scale=scales, moving_scale=others)  # fmt: skip
    out = nl.ndarray((2, 3), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=product)
    return store(out)


def test_mx_product_of_fp4_and_fp8_against_dequantised_values(rng):
    fp4, fp8 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn
    a, b = rng.normal(size=(512, 2)).astype(fp4), rng.normal(size=(512, 3)).astype(fp8)
    sa, sb = rng.integers(120, 134, (16, 2)).astype(np.uint8), rng.integers(120, 134, (16, 3)).astype(np.uint8)

    def value(x, s):
        return x.astype(np.float64) * np.exp2(np.repeat(s, 32, axis=0).astype(np.float64) - 127)

    codes = a.view(np.uint8).reshape(128, 4, 2).astype(np.uint16)
    packed = codes[:, 0] | codes[:, 1] << 4 | codes[:, 2] << 8 | codes[:, 3] << 12
    words = np.ascontiguousarray(b.reshape(128, 4, 3).transpose(0, 2, 1)).view("<u4")[..., 0]
    got = nki.jit(mx_product)(packed, sa, words, sb)
    np.testing.assert_allclose(got, value(a, sa).T @ value(b, sb), rtol=1e-5, atol=1e-4)


def exchange(x):
    core = nl.program_id(0)
    out = nl.ndarray((2, 2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    scratch = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    mine, other = load(x[core]), nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.sendrecv(src=mine, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.dma_copy(dst=out[core, 0:1], src=other)
    nisa.dma_copy(dst=scratch[core : core + 1], src=mine)
    nisa.core_barrier(data=scratch, cores=(0, 1))
    again = load(scratch[1 - core : 2 - core])
    nisa.dma_copy(dst=out[core, 1:2], src=again)
    return out


def test_cores_exchange_tiles_and_meet_at_barriers():
    x = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    with simulator.session("trn2") as seen:
        got = nki.jit(exchange)[2](x)
    np.testing.assert_array_equal(got, [[x[1, 0]] * 2, [x[0, 0]] * 2])
    assert len(seen.cores) == 2
    assert all(core.core_to_core == 16 for core in seen.cores)


def test_memory_is_freed_with_its_last_view():
    def many(x):
        for _ in range(50):
            t = load(x)
        return store(t)

    with simulator.session("trn2") as seen:
        nki.jit(many)(np.ones((128, 10000), np.float32))
    # The tile being loaded and the one of the turn before: double buffering.
    assert seen.cores[0].sbuf_peak == 2 * 40000


def test_counters_of_a_product(rng):
    a, b = rng.normal(size=(64, 32)).astype(np.float32), rng.normal(size=(64, 128)).astype(np.float32)

    def product_of(a, b):
        product = nl.ndarray((32, 128), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=load(a), moving=load(b), accumulate=False)
        out = nl.ndarray((32, 128), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=out, src=product)
        return store(out)

    with simulator.session("trn2") as seen:
        np.testing.assert_allclose(nki.jit(product_of)(a, b), a.T @ b, rtol=1e-4, atol=1e-4)
    (core,) = seen.cores
    assert (core.hbm_read, core.hbm_written) == (a.nbytes + b.nbytes, 32 * 128 * 4)
    assert core.instructions == {"dma": 3, "tensor": 1, "vector": 1}
    assert core.matmul_useful / core.matmul_slots == 64 * 32 / 128**2
    # 128 columns at a quarter of the rate, at 2.4 GHz.
    assert core.busy_us["tensor"] == pytest.approx(4 * 128 / 2400)


def turn_and_choose(x, mask):
    t, chosen_by = load(x), load(mask)
    turned = nl.ndarray((6, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=t, engine=nisa.engine.tensor)
    small = nl.ndarray((6, 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_transpose(dst=small, data=t, engine=nisa.engine.vector)
    chosen = nl.ndarray((6, 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.select_reduce(dst=chosen, predicate=chosen_by, on_true=turned, on_false=-2.0)
    inverse = nl.ndarray((6, 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=turned)
    return store(small), store(chosen), store(inverse)


def test_transposes_are_bit_exact_and_select_does_not_compute():
    x = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    x[0, 0], x[1, 1] = np.nan, np.inf
    mask = (np.arange(24).reshape(6, 4) % 3 > 0).astype(np.uint8)
    small, chosen, inverse = nki.jit(turn_and_choose)(x, mask)
    np.testing.assert_array_equal(small, x.T)
    np.testing.assert_array_equal(chosen, np.where(mask, x.T, -2))
    np.testing.assert_array_equal(inverse, 1 / x.T)


def count_up(x):
    whole = nl.ndarray((3, 2, 4), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=whole, pattern=[[100, 2], [-1, 4]], offset=7, channel_multiplier=10)
    bits = nl.ndarray((3, 8), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=bits, data=whole.reshape((3, 8)), op0=nl.bitwise_and, operand0=6, op1=nl.left_shift, operand1=1
    )
    return store(whole), store(bits)


def test_iota_nests_its_pattern_and_bits_are_not_cast():
    whole, bits = nki.jit(count_up)(np.ones((1, 1), np.float32))
    want = 7 + 10 * np.arange(3)[:, None, None] + 100 * np.arange(2)[:, None] - np.arange(4)
    np.testing.assert_array_equal(whole, want)
    np.testing.assert_array_equal(bits, (want.reshape(3, 8) & 6) << 1)


def find_greatest(x):
    t = load(x)
    best = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.sbuf)
    places = nl.ndarray((2, 8), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=best, src=t)
    nisa.memset(dst=best[:, 7:8], value=99.0)
    nisa.nc_find_index8(dst=places, data=t, vals=best)
    return store(best), store(places)


def test_the_greatest_eight_and_where_they_stand():
    x = np.array([[3, 1, 3, 0, 2, 8, 9, 7, -1, 5], [0] * 10], np.float32)
    best, places = nki.jit(find_greatest)(x)
    np.testing.assert_array_equal(best[0], [9, 8, 7, 5, 3, 3, 2, 99])
    # Equal values in turn; what is not there is all ones.
    np.testing.assert_array_equal(places, [[6, 5, 7, 9, 0, 2, 4, 2**32 - 1], [*range(7), 2**32 - 1]])


def test_every_instruction_is_tried_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in isa.INSTRUCTIONS if f"nisa.{name}(" not in source] == []
