"""Planted faults: each is refused, and the message names the rule that was broken.

Small kernels break one rule each; `MUTANTS`, `LATENT_MUTANTS` and `EXPERT_MUTANTS` are the source of flash_decode,
of mla_decode and of expert_mlp with one line changed.
"""

from __future__ import annotations

import importlib.util
import inspect

import jax.numpy as jnp
import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.nki_kernels import expert_mlp, flash_decode, mla_decode, simulator

FAULTS = {}


def fault(rule, target="trn3", lnc=1):
    def register(function):
        FAULTS[function.__name__] = (rule, target, lnc, function)
        return function

    return register


def tile(shape, dtype="float32", buffer=nl.sbuf, value=1.0):
    made = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    if value != None:  # noqa: E711
        nisa.memset(dst=made, value=value)
    return made


def store(made):
    out = nl.ndarray(made.shape, dtype=made.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=made)
    return out


@fault("partitions")
def partitions_129(x):
    return store(tile((129, 4)))


@fault("partitions")
def one_dimension_on_chip(x):
    return store(tile((128,)))


@fault("sbuf-capacity", target="trn2")
def sbuf_overflow(x):
    a = tile((128, 30000))
    b = tile((1, 30000))
    return store(a), store(b)


@fault("psum-capacity")
def psum_overflow(x):
    cached = []
    for _ in range(9):
        cached.append(nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.psum))
    return x


@fault("psum-bank")
def product_across_banks(x):
    product = nl.ndarray((128, 768), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product[:, 256:768], stationary=tile((128, 128)), moving=tile((128, 512)), accumulate=False)
    return x


@fault("dma-psum")
def dma_from_psum(x):
    return store(tile((128, 4), buffer=nl.psum))


@fault("buffer")
def gpsimd_on_psum(x):
    nisa.memset(dst=tile((128, 4), buffer=nl.psum, value=None), value=0.0, engine=nisa.engine.gpsimd)
    return x


@fault("buffer")
def product_into_sbuf(x):
    nisa.nc_matmul(dst=tile((4, 4)), stationary=tile((128, 4)), moving=tile((128, 4)), accumulate=False)
    return x


@fault("buffer")
def product_from_psum(x):
    product = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=tile((128, 4), buffer=nl.psum), moving=tile((128, 4)), accumulate=False)
    return x


@fault("unwritten")
def reading_unwritten_sbuf(x):
    return store(nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.sbuf))


@fault("unwritten")
def reading_one_unwritten_column(x):
    made = nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=made[:, 0:3], value=1.0)
    return store(made)


@fault("output")
def output_with_a_hole(x):
    out = nl.ndarray((2, 128, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0], src=tile((128, 4)))
    return out


@fault("output")
def output_in_private_hbm(x):
    out = nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=out, src=tile((128, 4)))
    return out


@fault("read-only")
def writing_an_input(x):
    nisa.dma_copy(dst=x, src=tile((128, 4)))
    return x


@fault("reduce-registers")
def missing_reset_reduce(x):
    total = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=tile((128, 4)), op=nl.exp, data=tile((128, 4)), reduce_op=nl.add, reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reduce,
    )  # fmt: skip
    return store(total)


@fault("mx-layout")
def scales_in_consecutive_rows(x):
    data = tile((128, 4), dtype=nl.float8_e4m3fn_x4, value=0)
    scale = tile((16, 4), dtype=nl.uint8, value=127)
    product = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul_mx(dst=product, stationary=data, moving=data, stationary_scale=scale, moving_scale=scale)
    return x


@fault("mx-layout")
def mx_of_48_partitions(x):
    data = tile((48, 4), dtype=nl.float8_e4m3fn_x4, value=0)
    scale = tile((48, 4), dtype=nl.uint8, value=127)
    product = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul_mx(dst=product, stationary=data, moving=data, stationary_scale=scale, moving_scale=scale)
    return x


@fault("mx-layout")
def mx_with_an_odd_stationary(x):
    data = tile((32, 3), dtype=nl.float8_e4m3fn_x4, value=0)
    scale = tile((4, 3), dtype=nl.uint8, value=127)
    product = nl.ndarray((3, 3), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul_mx(dst=product, stationary=data, moving=data, stationary_scale=scale, moving_scale=scale)
    return x


@fault("generation", target="trn2")
def mx_on_trn2(x):
    return store(tile((128, 4), dtype=nl.float8_e4m3fn_x4, value=0))


@fault("partition-start")
def misaligned_quadrant(x):
    made = tile((128, 4))
    nisa.activation(dst=made[16:48], op=nl.exp, data=made[16:48])
    return store(made)


@fault("partition-start")
def ninety_six_partitions_from_32(x):
    made = tile((128, 4))
    nisa.activation(dst=made[32:128], op=nl.exp, data=made[32:128])
    return store(made)


@fault("partition-step")
def every_other_partition(x):
    return store(tile((128, 4)).ap(pattern=[[8, 64], [1, 4]]))


@fault("access-pattern")
def pattern_that_leaves_its_partition(x):
    return store(tile((128, 4)).ap(pattern=[[4, 128], [1, 4]], offset=2))


@fault("access-pattern")
def slice_beyond_the_tensor(x):
    return store(tile((128, 4))[:, 2:6])


@fault("fp32-pair")
def mixed_dtypes_in_a_product(x):
    product = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=tile((128, 4), nl.bfloat16), moving=tile((128, 4)), accumulate=False)
    return x


@fault("matmul-limits")
def moving_size_over_512(x):
    product = nl.ndarray((4, 516), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=tile((128, 4)), moving=tile((128, 516)), accumulate=False)
    return x


@fault("dtype", target="trn2")
def product_in_bfloat16_on_trn2(x):
    product = nl.ndarray((4, 4), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=tile((128, 4)), moving=tile((128, 4)), accumulate=False)
    return x


@fault("accumulate")
def accumulation_without_a_start(x):
    product = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=tile((128, 4)), moving=tile((128, 4)), accumulate=True)
    return x


@fault("accumulate")
def accumulation_onto_memset(x):
    product = tile((4, 4), buffer=nl.psum, value=0.0)
    nisa.nc_matmul(dst=product, stationary=tile((128, 4)), moving=tile((128, 4)))
    return x


@fault("two-psum")
def two_inputs_in_psum(x):
    nisa.tensor_tensor(
        dst=tile((128, 4)), data1=tile((128, 4), buffer=nl.psum), data2=tile((128, 4), buffer=nl.psum), op=nl.add
    )
    return x


@fault("float32-operand")
def bfloat16_scale(x):
    nisa.activation(dst=tile((128, 4)), op=nl.exp, data=tile((128, 4)), scale=tile((128, 1), nl.bfloat16))
    return x


@fault("shape")
def broadcasting_tensor_tensor(x):
    nisa.tensor_tensor(dst=tile((128, 4)), data1=tile((128, 4)), data2=tile((128, 1)), op=nl.add)
    return x


@fault("reduce-axis")
def reducing_a_middle_axis(x):
    nisa.tensor_reduce(dst=tile((128, 3)), op=nl.add, data=tile((128, 2, 3)), axis=1)
    return x


@fault("activation-range")
def reciprocal_of_zero(x):
    nisa.activation(dst=tile((128, 4)), op=nl.reciprocal, data=tile((128, 4), value=0.0))
    return x


@fault("fill-value")
def range_select_with_another_fill(x):
    bound = tile((128, 1))
    nisa.range_select(
        dst=tile((128, 4)), on_true_tile=tile((128, 4)), comp_op0=nl.greater_equal, comp_op1=nl.less,
        bound0=bound, bound1=bound, on_false_value=-1e9,
    )  # fmt: skip
    return x


@fault("fp8-overflow")
def too_great_for_float8(x):
    return store(tile((128, 4), nl.float8_e4m3, value=300.0))


@fault("element-count")
def copy_of_another_size(x):
    nisa.dma_copy(dst=tile((128, 4)), src=tile((128, 2)))
    return x


@fault("out-of-bounds")
def gather_out_of_bounds(x):
    rows = tile((4, 1), nl.int32, value=128)
    nisa.dma_copy(dst=tile((4, 4)), src=x.ap(pattern=[[4, 4], [1, 4]], vector_offset=rows, indirect_dim=0))
    return x


@fault("out-of-bounds")
def last_row_and_beyond(x):
    row = tile((1, 1), nl.int32, value=127)
    nisa.dma_copy(dst=tile((2, 4)), src=x.ap(pattern=[[4, 2], [1, 4]], scalar_offset=row, indirect_dim=0))
    return x


@fault("dtype")
def float_memset_of_integers(x):
    return store(tile((128, 4), nl.int32, value=1.0))


@fault("view")
def partitions_permuted(x):
    return store(tile((4, 8)).permute((1, 0)))


@fault("engine")
def transpose_on_gpsimd(x):
    nisa.nc_transpose(dst=tile((4, 4)), data=tile((4, 4)), engine=nisa.engine.gpsimd)
    return x


@fault("subset")
def an_instruction_that_is_not_there(x):
    nisa.bn_stats(dst=x, data=x)
    return x


@fault("language")
def uses_is(x):
    if x is None:
        return 0
    return x


@fault("language")
def uses_a_comprehension(x):
    cached = [x for _ in range(2)]
    return cached[0]


@fault("language")
def unpacks_in_a_loop(x):
    for a, b in ((1, 2), (3, 4)):
        print(a, b)
    return x


@fault("language")
def uses_what_is_no_constant(x):
    if len(FAULTS) > 0:
        return x
    return 0


@fault("language")
def uses_a_deprecated_range(x):
    for _ in nl.affine_range(2):
        pass
    return x


@fault("core-race", lnc=2)
def reading_what_the_other_core_wrote(x):
    shared = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    nisa.dma_copy(dst=shared[core : core + 1], src=tile((1, 4)))
    both = nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.sbuf)
    # The exchange waits for the other core, but says nothing of HBM.
    nisa.sendrecv(src=tile((1, 4)), dst=both, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
    nisa.dma_copy(dst=both, src=shared[1 - core : 2 - core])
    return shared


@fault("core-race", lnc=2)
def both_cores_write_the_output(x):
    out = nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile((1, 4)))
    return out


@fault("core-pairing", lnc=2)
def one_core_alone_at_a_barrier(x):
    out = nl.ndarray((1, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.core_barrier(data=out, cores=(0, 1))
    return out


@fault("lnc")
def sendrecv_on_one_core(x):
    nisa.sendrecv(src=tile((1, 4)), dst=tile((1, 4)), send_to_rank=0, recv_from_rank=0, pipe_id=0)
    return x


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused_by_name(name):
    rule, target, lnc, function = FAULTS[name]
    with simulator.session(target), pytest.raises(simulator.RuleError, match=rf"\[{rule}\].*The rule: ") as caught:
        nki.jit(function)[lnc](np.ones((128, 4), np.float32))
    assert caught.value.rule == rule


def test_a_kernel_without_a_fault_runs():
    out = nki.jit(lambda x: x)
    assert out.lnc == 1
    with pytest.raises(simulator.RuleError, match=r"\[lnc\]"):
        out[3]


def test_lnc_that_the_host_does_not_have_is_refused(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with pytest.raises(simulator.RuleError, match=r"\[lnc\]"):
        nki.jit(partitions_129)(np.ones((128, 4), np.float32))


# (line of flash_decode or attention_tiles, what it becomes, the rule that then breaks)
MUTANTS = {
    "maxima transposed on the Vector engine": ("dst=moved, data=lanes, engine=nisa.engine.tensor",
                                               "dst=moved, data=lanes, engine=nisa.engine.vector", "shape"),
    "scores in SBUF": ("raw = nl.ndarray((128, n, queries), dtype=nl.float32, buffer=nl.psum)",
                       "raw = nl.ndarray((128, n, queries), dtype=nl.float32, buffer=nl.sbuf)", "buffer"),
    "scores in bfloat16": ("raw = nl.ndarray((128, n, queries), dtype=nl.float32",
                           "raw = nl.ndarray((128, n, queries), dtype=nl.bfloat16", "dtype"),
    "sums of values in bfloat16": ("product = nl.ndarray(sums.shape, dtype=nl.float32",
                                   "product = nl.ndarray(sums.shape, dtype=nl.bfloat16", "dtype"),
    "output copied by GpSimd": (" : (piece + 1) * part], src=moved)",
                                " : (piece + 1) * part], src=moved, engine=nisa.engine.gpsimd)", "buffer"),
    "accumulating from the first value": ("accumulate=i > 0 or not first", "accumulate=True", "accumulate"),
    "weights in float32": ("weights = nl.ndarray(scores.shape, dtype=work_dtype(cache)",
                           "weights = nl.ndarray(scores.shape, dtype=nl.float32", "fp32-pair"),
    "maxima over the wrong axis": ("data=scores.permute((0, 2, 1)), axis=2", "data=scores.permute((0, 2, 1)), axis=1",
                                   "reduce-axis"),
    "output straight from PSUM": ("dst=out[row, head], src=turned", "dst=out[row, head], src=moved", "dma-psum"),
    "lse of all heads at one place": ("dst=lse[row, head : head + 1]", "dst=lse[row, 0:1]", "output"),
    "sums of the state not cleared": ("    nisa.memset(dst=sums, value=0.0)\n", "", "unwritten"),
    "index by bytes": ("vector_offset=index[0:lanes, i : i + 1]", "vector_offset=index[0:lanes]", "shape"),
    "skipping forgotten": ("oob_mode=nisa.oob_mode.skip", "oob_mode=nisa.oob_mode.error", "out-of-bounds"),
    "state without the partition dimension": ("nl.ndarray((128, queries), dtype=nl.float32, buffer=nl.sbuf)\n    total",
                                              "nl.ndarray((queries,), dtype=nl.float32, buffer=nl.sbuf)\n    total",
                                              "partitions"),
}  # fmt: skip


# The same of mla_decode.
LATENT_MUTANTS = {
    "scores in SBUF": ("nl.ndarray((queries, (stop - first) * 128), dtype=nl.float32, buffer=nl.psum)",
                       "nl.ndarray((queries, (stop - first) * 128), dtype=nl.float32, buffer=nl.sbuf)", "buffer"),
    "all of a block's scores in one product": ("stop = min(tiles, first + 4)", "stop = min(tiles, first + 16)",
                                               "matmul-limits"),
    "bounds that are numbers": ("bound0=zero", "bound0=0.0", "argument"),
    "bounds of all tiles": ("bound1=ends[:, t : t + 1]", "bound1=ends", "shape"),
    "another fill": ("on_false_value=FP32_MIN", "on_false_value=FLOOR", "fill-value"),
    "maxima without a reset": ("reduce_cmd=nisa.reduce_cmd.reset_reduce,\n                reduce_res=tops",
                               "reduce_cmd=nisa.reduce_cmd.reduce,\n                reduce_res=tops",
                               "reduce-registers"),
    "sums without a reset": ("reduce_res=added,\n        reduce_cmd=nisa.reduce_cmd.reset_reduce",
                             "reduce_res=added,\n        reduce_cmd=nisa.reduce_cmd.reduce", "reduce-registers"),
    "weights of float32": ("weights = nl.ndarray(scores.shape, dtype=cells[2].dtype",
                           "weights = nl.ndarray(scores.shape, dtype=nl.float32", "fp32-pair"),
    "products of no tile first": ("accumulate=first + i > 0", "accumulate=True", "accumulate"),
    "results of one group alone": ("dst=out[row, first:stop]", "dst=out[row, 0 : stop - first]", "output"),
    "the first token's rows for all": ("src=stops[row, first:stop]", "src=stops[row]", "element-count"),
}  # fmt: skip


# The same of expert_mlp.
EXPERT_MUTANTS = {
    "skipping forgotten": ("oob_mode=nisa.oob_mode.skip", "oob_mode=nisa.oob_mode.error", "out-of-bounds"),
    "buffers not cleared": ("        nisa.memset(dst=tile.view(nl.int32), value=0, engine=nisa.engine.gpsimd)\n", "",
                            "unwritten"),
    "sums not cleared": ("    nisa.memset(dst=sums, value=0.0)\n", "", "unwritten"),
    "rows of one tile": ("pattern=[[rows.shape[1], lanes]", "pattern=[[width, lanes]", "access-pattern"),
    "rows found in float32": ("rows = nl.ndarray((lanes, n), dtype=nl.int32",
                              "rows = nl.ndarray((lanes, n), dtype=nl.float32", "dtype"),
    "rows of all places": ("vector_offset=index", "vector_offset=index.broadcast(1, 2)", "shape"),
    "counts in float32": ("counts = nl.ndarray((tokens, n), dtype=nl.uint8",
                          "counts = nl.ndarray((tokens, n), dtype=nl.float32", "dtype"),
    "accumulating from the first tile": ("accumulate=tile + i > 0", "accumulate=True", "accumulate"),
    "hidden in float32": ("hidden = nl.ndarray((tokens, features), dtype=turned.dtype",
                          "hidden = nl.ndarray((tokens, features), dtype=nl.float32", "fp32-pair"),
    "sums of the wrong columns": ("operand1=sums[:, start:stop]", "operand1=sums[:, 0:1]", "shape"),
}  # fmt: skip


def load_mutant(module, tmp_path, old, new):
    source = inspect.getsource(module)
    assert source.count(old) >= 1, f"{module.__name__} has no {old!r}"
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def launch(kernel):
    """Two KV heads, pages of 16 in two blocks, of which some are not live."""
    q = np.ones((1, 2, 4, 64), ml_dtypes.bfloat16)
    cache = np.ones((256, 2, 16, 64), ml_dtypes.bfloat16)
    spans = np.array([[[0, 0], [900, 900]]], np.float32)
    sinks, table = np.zeros((2, 4), np.float32), np.arange(256, dtype=np.int32)[None]
    return kernel(q, cache, cache, spans, sinks, table, slots=4096, scale=0.125, softcap=0.0, paged=True)


def test_the_kernel_that_is_mutated_runs():
    with simulator.session("trn2"):
        out, _ = launch(flash_decode.kernel)
    np.testing.assert_allclose(out.astype(np.float32), 900 / (900 + np.exp(-8)), atol=0.02)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_flash_decode_is_refused_by_name(name, tmp_path):
    old, new, rule = MUTANTS[name]
    mutant = load_mutant(flash_decode, tmp_path, old, new)
    with simulator.session("trn2"), pytest.raises(simulator.RuleError, match=rf"\[{rule}\]"):
        launch(mutant)


def launch_latents(kernel):
    """130 queries in two groups over 900 of 2,048 positions in pages of 128."""
    q, rotary = np.ones((1, 130, 64), ml_dtypes.bfloat16), np.ones((1, 130, 16), ml_dtypes.bfloat16)
    latents, keys = np.ones((16, 1, 128, 64), ml_dtypes.bfloat16), np.ones((16, 1, 128, 16), ml_dtypes.bfloat16)
    spans, stops = np.array([[[0], [900]]], np.float32), np.full((1, 130, 1), 899.5, np.float32)
    table = np.arange(16, dtype=np.int32)[None]
    return kernel(q, rotary, latents, keys, spans, stops, table, slots=2048, scale=0.1, paged=True)


def test_the_latent_kernel_that_is_mutated_runs():
    with simulator.session("trn2"):
        out, lse = launch_latents(mla_decode.kernel)
    np.testing.assert_allclose(out.astype(np.float32), 1, atol=0.02)
    np.testing.assert_allclose(lse, 8 + np.log(900), atol=1e-3)


@pytest.mark.parametrize("name", LATENT_MUTANTS)
def test_a_mutant_of_mla_decode_is_refused_by_name(name, tmp_path):
    old, new, rule = LATENT_MUTANTS[name]
    mutant = load_mutant(mla_decode, tmp_path, old, new)
    with simulator.session("trn2"), pytest.raises(simulator.RuleError, match=rf"\[{rule}\]"):
        launch_latents(mutant)


def launch_experts(kernel):
    """An empty place and two of three experts, for four tokens."""
    x, places = np.ones((4, 256), ml_dtypes.bfloat16), np.array([3, 0, 2], np.int32)
    gate_up, down = np.full((3, 2, 256, 32), 1 / 256, ml_dtypes.bfloat16), np.ones((3, 32, 256), ml_dtypes.bfloat16)
    columns = np.ones((3, 4, 3), np.float32)
    columns[1:, :, 0] = 0
    return kernel(x, gate_up, down, places, columns, act="silu")


def test_the_expert_kernel_that_is_mutated_runs():
    with simulator.session("trn2"):
        (y,) = launch_experts(expert_mlp.kernel)
    np.testing.assert_allclose(y.astype(np.float32), 2 * 32 / (1 + np.exp(-1)), rtol=0.01)


@pytest.mark.parametrize("name", EXPERT_MUTANTS)
def test_a_mutant_of_expert_mlp_is_refused_by_name(name, tmp_path):
    old, new, rule = EXPERT_MUTANTS[name]
    mutant = load_mutant(expert_mlp, tmp_path, old, new)
    with simulator.session("trn2"), pytest.raises(simulator.RuleError, match=rf"\[{rule}\]"):
        launch_experts(mutant)


def test_a_dtype_that_the_generation_lacks_is_refused_before_launch():
    cache = jnp.zeros((1, 1, 128, 64), jnp.float8_e4m3fn)
    q, lengths = jnp.zeros((1, 1, 1, 4, 64), jnp.bfloat16), jnp.array([3], jnp.int32)
    with simulator.session("trn2"), pytest.raises(simulator.RuleError, match=r"\[generation\].*float8_e4m3fn"):
        flash_decode.flash_decode(q, KvCache(cache), lengths, AttentionOptions(1.0))
