"""What only the prefill-attention kernel for GPUs does, in interpret mode (see also test_prefill_attention.py)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.ops.choice import Choice
from inferlib.ops.prefill_attention import BlockList, choose
from inferlib.pallas_kernels import prefill_attention_hopper_gpu
from inferlib.pallas_kernels.prefill_attention_gpu import Blocks, splits_of
from inferlib.pallas_kernels.prefill_attention_gpu import prefill_attention as kernel
from tests.helpers.attention_calls import on_prefill_kernel, prefill_attention
from tests.helpers.prefill_attention_cases import Case

# In one program each.
RUN = jax.jit(on_prefill_kernel(partial(kernel, sizes=Blocks(32, 16), interpret=True)), static_argnames="scale")
BY_XLA = jax.jit(prefill_attention, static_argnames="scale")


def of(case: Case, **changes) -> tuple[jax.ShapeDtypeStruct, KvCache]:
    """The shapes of a case's queries and cache."""
    arrays = [case.inputs(0)[name] for name in "qkv"]
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    return q, KvCache(**{"k": k, "v": v} | changes)


@pytest.mark.slow
def test_each_query_has_a_window():
    """Chunked attention: queries see what is in their own run of 24 positions."""
    inputs = Case((0, 5, 40), width=48, slots=128, size=64, group=3).inputs(1)
    k, v = (np.nan_to_num(inputs[name], nan=0.5, posinf=0.5) for name in "kv")
    inputs |= {"k": k, "v": v, "window": inputs["positions"] % 24 + 1, "scale": 0.1}
    for got, want in zip(RUN(**inputs), BY_XLA(**inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_values_of_another_size():
    inputs = Case((0, 30), slots=80, size=48).inputs(2)
    v = np.asarray(inputs["v"])
    wide = {**inputs, "v": np.concatenate([v, -v[..., :24]], axis=-1), "scale": 0.1}
    (out, lse), (narrow, same) = RUN(**wide), RUN(**inputs, scale=0.1)
    narrow = np.asarray(narrow)
    np.testing.assert_allclose(out, np.concatenate([narrow, -narrow[..., :24]], axis=-1), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(lse, same)


@pytest.mark.slow
def test_tiles_of_a_prompt_equal_one_chunk():
    """In any order, among tiles of other rows."""
    whole = jax.tree.map(np.asarray, Case((0, 20), width=64, slots=96).inputs(3))
    tile = lambda x: x.reshape(8, 16, *x.shape[2:])[::-1]  # noqa: E731
    tiles = whole | {name: tile(whole[name]) for name in ("q", "positions")}
    tiles["rows"] = np.repeat(whole["rows"], 4)[::-1]
    for got, want in zip(RUN(**tiles, scale=0.1), RUN(**whole, scale=0.1), strict=True):
        np.testing.assert_allclose(got, tile(np.asarray(want)), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_operation_runs_it(monkeypatch):
    monkeypatch.setattr(prefill_attention_hopper_gpu, "is_hopper", lambda: False)
    case = Case((0, 30, -1), slots=80, heads=1, dtype=jnp.bfloat16)
    case.check(partial(prefill_attention, backend="pallas_gpu"))
    for lacking, changes in {
        "scales": {"k_scales": jnp.ones((5, 1, 80)), "v_scales": jnp.ones((5, 1, 80))},
        "list of blocks here, but on Hopper GPUs": {"listed": BlockList(jnp.zeros((3, 1, 1, 1), jnp.int32), 128, 128)},
    }.items():
        with pytest.raises(ValueError, match=f"takes no {lacking}.*use xla"):
            prefill_attention(**case.inputs(0), scale=1.0, backend="pallas_gpu", **changes)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case((1,), dtype=jnp.float32), "float32, where the kernel takes bfloat16 and float16"),
        (Case((1,), dtype=jnp.bfloat16, size=320), "heads of size 320, beyond 256"),
        (Case((1,), dtype=jnp.bfloat16, slots=24, columns=2), "pages of 24 positions are not a multiple of 16"),
    ],
)
def test_what_it_cannot_run_is_xlas(case, reason):
    pages = case.columns and jax.ShapeDtypeStruct((1, case.columns), jnp.int32)
    q, cache = of(case, pages=pages)
    assert choose(cache, None, "pallas_gpu", q) == Choice("xla", reason)
    assert choose(cache, None, "pallas_gpu").name == "pallas_gpu"  # sizes are not asked
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(partial(kernel, options=AttentionOptions(1.0)), q, cache, *of_tokens(case))


def of_tokens(case: Case) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    rows, positions = (case.inputs(0)[name] for name in ("rows", "positions"))
    return jax.ShapeDtypeStruct(rows.shape, rows.dtype), jax.ShapeDtypeStruct(positions.shape, positions.dtype)


def test_scales_are_xlas_and_windows_of_queries_are_not():
    q, cache = of(Case((1,), dtype=jnp.bfloat16))
    window = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    assert choose(cache, window, "pallas_gpu", q) == Choice("pallas_gpu")
    scales = jax.ShapeDtypeStruct(cache.k.shape[:-1], jnp.float32)
    scaled = KvCache(cache.k, cache.v, scales, scales)
    assert choose(scaled, None, "pallas_gpu", q) == Choice("xla", "a cache of int8 or fp8")


@pytest.mark.parametrize(("size", "columns"), [(80, 4), (256, None), pytest.param(64, None, marks=pytest.mark.release)])
def test_lowers_to_triton(size, columns):
    case = Case((1, 2), size=size, columns=columns, slots=64, dtype=jnp.bfloat16, sinks=True)
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    run = jax.jit(partial(on_prefill_kernel(kernel), scale=1.0, softcap=5.0, window=30, ring=True))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(**case.inputs(4)).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((0, 30, 140, -1), width=16, slots=160), marks=pytest.mark.release),
        pytest.param(
            Case((5, 100), width=16, slots=32, columns=5, sinks=True, options={"softcap": 4.0}),
            marks=pytest.mark.release,
        ),
        Case((0, 90, 200, -1), width=16, slots=64, sinks=True, ring=True, options={"window": 40}),
    ],
    ids=["rows", "pages", "ring"],
)
def test_programs_that_share_a_tile(case):
    """Also where a share has no block."""
    case.check(on_prefill_kernel(partial(kernel, sizes=Blocks(32, 16), splits=4, interpret=True)))


def test_few_tiles_are_shared():
    assert [splits_of(programs, 66) for programs in (8, 32, 64, 128, 129, 1024)] == [8, 8, 4, 2, 1, 1]
    assert [splits_of(8, blocks) for blocks in (1, 7, 8, 16)] == [1, 1, 2, 4]
