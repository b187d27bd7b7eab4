"""What only the decode-attention kernel for GPUs does, in interpret mode (see also test_decode_attention.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import KvCache
from inferlib.ops.choice import Choice
from inferlib.ops.decode_attention import choose
from inferlib.pallas_kernels import decode_attention_gpu
from inferlib.pallas_kernels.decode_attention_gpu import BALANCED, EVEN, Launch, decode_attention, tiling
from tests.helpers.attention_calls import on_decode_kernel
from tests.helpers.decode_attention_cases import Case

RUN = on_decode_kernel(decode_attention, interpret=True)


def with_strange_ids(run):
    """Pages of a table that hold no position do not exist."""

    def of_call(pages, k, lengths, **rest):
        unused = jnp.arange(pages.shape[1]) * k.shape[-2] >= lengths[:, None]
        pages = jnp.where(unused, jnp.where(jnp.arange(pages.shape[1]) % 2, -7, 10**6), pages)
        return run(pages=pages, k=k, lengths=lengths, **rest)

    return of_call


# Pages of 64 float32 positions of size 64 are one block, of 128 two.
PAGES = {
    "pages of more than a block, sinks": Case((0, 128, 129, 500), slots=128, columns=4, sinks=True),
    "windows that begin within blocks of a layer of a stack": Case(
        (20, 97, 384, 300), slots=64, columns=6, layers=3, options={"window": 70}
    ),
    "odd groups of size 80, half precision": Case(
        (3, 33, 144), slots=48, columns=3, size=80, group=7, heads=3, dtype=jnp.bfloat16, options={"softcap": 20.0}
    ),
}
RINGS = {
    "ring of pages": Case((0, 17, 80, 81, 100, 500), slots=16, columns=5, ring=True, options={"window": 60}),
    "ring of pages, a window of all": Case((3, 256, 1003), slots=64, columns=4, ring=True, options={"window": 256}),
}
QUERIES = {
    "several queries in a ring": Case((3, 129, 500), queries=3, slots=128, ring=True, options={"window": 100}),
    "several queries, pages": Case((2, 3, 47, 48, 49), queries=3, slots=16, columns=4, group=3),
}


def balance(monkeypatch, programs: int) -> None:
    """Divide all rows among so many programs, a longer row among more."""
    monkeypatch.setattr(decode_attention_gpu, "CONCURRENT", 0)
    monkeypatch.setattr(decode_attention_gpu, "BALANCED", Launch(programs, stages=2))


# What other cases have with other pages.
FURTHER = ("odd groups of size 80, half precision", "ring of pages, a window of all", "several queries in a ring")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.release] * (x in FURTHER)) for x in PAGES | RINGS | QUERIES]
)
@pytest.mark.fast_cases(4)
def test_pages_and_several_queries(name, monkeypatch):
    """In many shares or in few."""
    if "pages" in name:
        balance(monkeypatch, programs=8)
    (PAGES | RINGS | QUERIES)[name].check(with_strange_ids(RUN) if name in PAGES else RUN)


def test_the_operation_takes_pages_of_whole_blocks():
    case = Case((5, 20), slots=24, columns=2, heads=1)
    cache = KvCache(case.inputs(0)["k"], case.inputs(0)["v"], pages=case.inputs(0)["pages"])
    assert choose(cache, None, "pallas_gpu") == Choice("xla", "pages of 24 positions are not a multiple of 16")
    with pytest.raises(ValueError, match="pages of 24 positions"):
        case.check(RUN)
    assert choose(replace(cache, k=cache.k[..., :16, :]), None, "pallas_gpu") == Choice("pallas_gpu")


def test_one_query_head_of_a_kv_head():
    Case((5, 300), slots=300, heads=3, group=1).check(RUN)


def test_float16_of_many_query_heads():
    shape = dict(slots=300, heads=3, group=20, dtype=jnp.float16)
    Case((0, 1, 50, 300), **shape, sinks=True, options={"softcap": 20.0}).check(RUN)


def test_float32_queries_on_a_bfloat16_cache():
    case = Case((1, 50, 300), slots=300, dtype=jnp.bfloat16)
    inputs = case.inputs(2)
    inputs["q"] = inputs["q"].astype(jnp.float32) * 1.001
    out, _ = RUN(**inputs, **case.static())
    np.testing.assert_allclose(out, case.oracle(inputs)[0], rtol=2e-5, atol=2e-5)


# In many shares they are with pages, too.
@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.release), 16])
def test_sinks_count_once(limit):
    """In many shares and in one."""
    _, lse = Case((0, 1, 16), slots=300, sinks=True).check(partial(RUN, limit=limit))
    assert np.all(np.asarray(lse[0]) == -np.inf)


def test_long_rows_get_more_shares(monkeypatch):
    balance(monkeypatch, programs=24)
    Case((300, 20, 280), slots=300, options={"window": 250}).check(RUN)


def test_shares_are_even_where_none_is_long():
    for rows, longest, launch, splits in ((8, 2304, EVEN, 4), (32, 640, EVEN, 1), (8, 32768, BALANCED, 16)):
        assert tiling(rows * 8, 256, longest) == (64, splits, launch)
    assert tiling(64 * 8, 256, 640) == (64, 1, BALANCED)
    assert tiling(8, 2048, 640)[2] == BALANCED  # blocks too large for a third stage


def test_bad_shapes_and_options_are_refused():
    inputs = Case((1, 2)).inputs(7)
    with pytest.raises(ValueError, match="window"):
        RUN(**inputs, scale=1.0, ring=True)
    with pytest.raises(ValueError, match="must both be"):
        RUN(**inputs | {"k": inputs["k"][:1], "v": inputs["v"][:1]}, scale=1.0)


@pytest.mark.parametrize(("size", "columns", "queries"), [(64, None, None), (80, 4, None), (64, 4, 3)])
def test_lowers_to_triton(size, columns, queries):
    shape = dict(size=size, slots=128 if columns else 500, columns=columns, queries=queries)
    inputs = Case((1, 2), dtype=jnp.bfloat16, sinks=True, **shape).inputs(8)
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    run = jax.jit(partial(on_decode_kernel(decode_attention), scale=1.0, softcap=5.0, window=300, ring=True))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(**inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
