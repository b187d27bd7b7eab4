"""What only the decode-attention kernel for GPUs does, in interpret mode (see also test_decode_attention.py)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.pallas_kernels import decode_attention_gpu
from inferlib.pallas_kernels.decode_attention_gpu import decode_attention
from tests.helpers.attention_calls import on_decode_kernel
from tests.helpers.decode_attention_cases import Case

RUN = on_decode_kernel(decode_attention, interpret=True)


@pytest.mark.parametrize("group", [1, 3, 16, 20])
def test_query_heads_per_kv_head(group):
    Case((5, 300), slots=300, heads=3, group=group).check(RUN)


def test_float16():
    Case((0, 1, 50, 300), slots=300, dtype=jnp.float16, sinks=True, options={"softcap": 20.0}).check(RUN)


def test_float32_queries_on_a_bfloat16_cache():
    case = Case((1, 50, 300), slots=300, dtype=jnp.bfloat16)
    inputs = case.inputs(2)
    inputs["q"] = inputs["q"].astype(jnp.float32) * 1.001
    out, _ = RUN(**inputs, **case.static())
    np.testing.assert_allclose(out, case.oracle(inputs)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("limit", [None, 16])
def test_sinks_count_once(limit):
    _, lse = Case((0, 1, 16), slots=300, sinks=True).check(partial(RUN, limit=limit))
    assert np.all(np.asarray(lse[0]) == -np.inf)


def test_many_shares_and_one_share_agree():
    case = Case((16, 3), slots=300)
    for one, many in zip(case.check(partial(RUN, limit=16)), case.check(RUN), strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 250])
def test_long_rows_get_more_shares(monkeypatch, window):
    monkeypatch.setattr(decode_attention_gpu, "PROGRAMS", 24)
    Case((300, 20, 280), slots=300, options={"window": window}).check(RUN)


def test_bad_shapes_and_options_are_refused():
    inputs = Case((1, 2)).inputs(7)
    with pytest.raises(ValueError, match="window"):
        RUN(**inputs, scale=1.0, ring=True)
    with pytest.raises(ValueError, match="must both be"):
        RUN(**inputs | {"k": inputs["k"][:1], "v": inputs["v"][:1]}, scale=1.0)


@pytest.mark.parametrize("size", [64, 80])
def test_lowers_to_triton(size):
    inputs = Case((1, 2), size=size, slots=500, dtype=jnp.bfloat16, sinks=True).inputs(8)
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    run = jax.jit(partial(on_decode_kernel(decode_attention), scale=1.0, softcap=5.0, window=300, ring=True))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(**inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
