"""Every implementation of attention against its float64 oracle, over drawn lengths, values and cuts.

Where a cache is cut in two at any position, its parts merge to the whole. Shapes are fixed, so that all examples of a
test run in one program or two. About 25 s, and 15 s of slow ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import inferlib.nki_kernels  # noqa: F401 (the stand-in)
from inferlib.ops.attention import merge_attention
from inferlib.ops.cache_write import unfolded
from inferlib.pallas_kernels import (
    block_stream_tpu,
    decode_attention_gpu,
    decode_attention_tpu,
    mla_decode_attention_tpu,
    mla_prefill_attention_tpu,
    prefill_attention_gpu,
    prefill_attention_tpu,
)
from tests.helpers import (
    decode_attention_cases,
    mla_decode_attention_cases,
    mla_prefill_attention_cases,
    prefill_attention_cases,
)
from tests.helpers.attention_calls import (
    decode_attention,
    mla_decode_attention,
    mla_prefill_attention,
    on_decode_kernel,
    on_prefill_kernel,
    prefill_attention,
)
from tests.helpers.decode_attention_cases import behind, folded

SEEDS = st.integers(0, 2**32 - 1)
LOUDNESS = st.sampled_from([0.0, 1.0, 3.0])


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """So that rows have several blocks, and their ends several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention_tpu, "BLOCK_BYTES", 1 << 15)
        patch.setattr(decode_attention_tpu, "PART", 32)
        patch.setattr(block_stream_tpu, "UNROLL", 2)
        patch.setattr(block_stream_tpu, "MOST_COMPARED", 2)
        prefill = prefill_attention_tpu.Blocks(16, 128, rows=128, edge=128)
        patch.setattr(prefill_attention_tpu, "blocks", lambda *_: prefill)
        latents = mla_decode_attention_tpu.Blocks(positions=256, part=256, edge=256)
        patch.setattr(mla_decode_attention_tpu, "blocks", lambda *_: latents)
        patch.setattr(mla_prefill_attention_tpu, "blocks", lambda *_: mla_prefill_attention_tpu.Blocks(16, 1, 256))
        yield


def near(capacity: int, *edges: int) -> st.SearchStrategy[int]:
    """0 to the capacity, often next to an edge."""
    chosen = {0, 1, capacity - 1, capacity, *(edge + n for edge in edges for n in (-1, 0, 1))}
    return st.one_of(st.sampled_from(sorted(chosen)), st.integers(0, capacity))


def rows_of(count: int, numbers: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[numbers] * count)


@cache
def compiled(run: Callable, **static: Any) -> Callable:
    return jax.jit(lambda inputs: run(**inputs, **static))


def backends(names: Iterable[str], further: str = "") -> list[Any]:
    """The stand-in of Trainium computes element by element; kernels for TPUs take long to compile. further: release,
    as another test has the kernel of this one."""
    slow = {"nki": pytest.mark.slow, "tpu": pytest.mark.slow, further: pytest.mark.release}
    return [pytest.param(name, marks=[slow[name]] if name in slow else []) for name in names]


merge = jax.jit(lambda parts: merge_attention(*(jnp.stack(x) for x in zip(*parts, strict=True))))


def table_of(inputs: dict[str, Any], rows: int) -> np.ndarray:
    return np.asarray(inputs.get("pages", np.arange(rows)[:, None]))


# ---- decode

PAGED = decode_attention_cases.Case((), heads=1, group=3, slots=16, columns=5)
UNPAGED = dataclasses.replace(PAGED, slots=80, columns=None)
DECODE = {
    "xla": (decode_attention, PAGED),
    "tpu": (partial(decode_attention, backend="pallas_tpu"), PAGED),
    "nki": (partial(decode_attention, backend="nki"), PAGED),
    "gpu": (on_decode_kernel(decode_attention_gpu.decode_attention, interpret=True), UNPAGED),
}
LENGTHS = rows_of(4, near(80, 16, 20, 32))


@pytest.mark.parametrize("backend", backends(DECODE, "nki"))
@given(lengths=LENGTHS, cuts=rows_of(4, near(80, 16)), seed=SEEDS, loudness=LOUDNESS)
@settings(max_examples=5)
def test_decode_of_any_lengths_cut_anywhere(backend, lengths, cuts, seed, loudness):
    run, case = DECODE[backend]
    case = dataclasses.replace(case, lengths=lengths, loudness=loudness)
    inputs, run = case.inputs(seed), compiled(run, **case.static())
    case.hold(inputs, *run(inputs))
    table, cuts = table_of(inputs, 4), np.array(cuts)
    rest = {name: behind(inputs[name], table, cuts) for name in ("k", "v")}
    rest["lengths"] = jnp.maximum(inputs["lengths"] - cuts, 0)
    first = {"lengths": jnp.minimum(inputs["lengths"], cuts)}
    case.hold(inputs, *merge([run(inputs | part) for part in (first, rest)]))


@pytest.mark.parametrize("window", [20, pytest.param(1, marks=pytest.mark.release)])
@pytest.mark.parametrize("backend", backends(DECODE, "tpu"))
@given(lengths=LENGTHS, seed=SEEDS)
@settings(max_examples=5)
def test_decode_of_any_lengths_within_a_window(backend, window, lengths, seed):
    """Of three queries, where the kernel takes several, with sinks."""
    run, case = DECODE[backend]
    queries = None if backend == "gpu" else 3
    case = dataclasses.replace(case, lengths=lengths, queries=queries, sinks=True, options={"window": window})
    inputs = case.inputs(seed)
    case.hold(inputs, *compiled(run, **case.static())(inputs))


# ---- prefill

CHUNKS = prefill_attention_cases.Case((), width=16, heads=1, group=2, slots=32, columns=6)
PREFILL = {
    "xla": (prefill_attention, CHUNKS),
    "tpu": (partial(prefill_attention, backend="pallas_tpu"), CHUNKS),
    "gpu": (
        on_prefill_kernel(
            partial(prefill_attention_gpu.prefill_attention, sizes=prefill_attention_gpu.Blocks(16, 16), interpret=True)
        ),
        CHUNKS,
    ),
    "nki": (partial(prefill_attention, backend="nki"), dataclasses.replace(CHUNKS, slots=192, columns=None)),
}
STARTS = st.one_of(st.just(-1), near(192 - CHUNKS.width, 16, 32, 128))


def parts_of_chunks(inputs: dict[str, Any], cuts: Sequence[int], cells: dict[str, jax.Array], fold: int = 1):
    """What there is before the cuts, one of each chunk, and what there is from them on: the arguments that differ."""
    positions, cuts = inputs["positions"], np.array(cuts)
    there = np.asarray(inputs["rows"]) < len(cuts)
    table = table_of(inputs, len(cuts))[np.asarray(inputs["rows"])[there]]
    yield {"positions": jnp.minimum(positions, cuts[:, None] - 1)}
    rest = {name: behind(x, table, cuts[there]) for name, x in cells.items()}
    yield rest | {"positions": jnp.maximum(positions - cuts[:, None], -1)}


@pytest.mark.parametrize("backend", backends(PREFILL, "nki"))
@given(starts=rows_of(3, STARTS), cuts=rows_of(3, near(192, 32, 128)), seed=SEEDS, loudness=LOUDNESS)
@settings(max_examples=5)
def test_prefill_from_any_starts_cut_anywhere(backend, starts, cuts, seed, loudness):
    run, case = PREFILL[backend]
    case = dataclasses.replace(case, starts=starts, loudness=loudness)
    inputs, run = case.inputs(seed), compiled(run, **case.static())
    case.hold(inputs, *run(inputs))
    parts = parts_of_chunks(inputs, cuts, {name: inputs[name] for name in ("k", "v")})
    case.hold(inputs, *merge([run(inputs | part) for part in parts]))


@pytest.mark.parametrize("window", [1, pytest.param(50, marks=pytest.mark.release)])
@pytest.mark.parametrize("backend", backends(PREFILL, "tpu"))
@given(starts=rows_of(3, st.one_of(STARTS, st.integers(177, 192))), seed=SEEDS)
@settings(max_examples=5)
def test_prefill_from_any_starts_within_a_window(backend, window, starts, seed):
    """Those that go beyond the cache, too."""
    run, case = PREFILL[backend]
    case = dataclasses.replace(case, starts=starts, sinks=True, options={"window": window})
    inputs = case.inputs(seed)
    case.hold(inputs, *compiled(run, **case.static())(inputs))


# ---- latents

ROWS = mla_decode_attention_cases.Case((), heads=3, slots=256, columns=2)
SMALL = mla_decode_attention_cases.Case((), heads=3, rank=32, rotary=16, fold=1, slots=64)
SCALE = mla_decode_attention_cases.SCALE


def one_query(q, rotary, **rest):
    out, lse = mla_decode_attention(q[:, 0], rotary[:, 0], **rest, backend="pallas_gpu")
    return out[:, None], lse[:, None]


MLA_DECODE = {
    "xla": (mla_decode_attention, ROWS),
    "tpu": (partial(mla_decode_attention, backend="pallas_tpu"), ROWS),
    "gpu": (one_query, SMALL),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends(MLA_DECODE))
@given(data=st.data(), seed=SEEDS, loudness=LOUDNESS)
@settings(max_examples=5)
def test_decode_over_latents_of_any_lengths_cut_anywhere(backend, data, seed, loudness):
    run, case = MLA_DECODE[backend]
    run = compiled(run, scale=SCALE)
    numbers = rows_of(3, near(case.slots * (case.columns or 1), 16, 32) if backend == "gpu" else near(512, 256))
    lengths, cuts = data.draw(numbers), np.array(data.draw(numbers))
    case = dataclasses.replace(case, lengths=lengths, loudness=loudness)
    inputs = case.inputs(seed)
    case.hold(inputs, *run(inputs))
    table, keys = table_of(inputs, 3), unfolded(inputs["keys"], case.fold)
    first = {"lengths": jnp.minimum(inputs["lengths"], cuts)}
    rest = {"latents": behind(inputs["latents"], table, cuts), "keys": folded(behind(keys, table, cuts), case.fold)}
    rest["lengths"] = jnp.maximum(inputs["lengths"] - cuts, 0)
    case.hold(inputs, *merge([run(inputs | part) for part in (first, rest)]))


MLA_CHUNKS = mla_prefill_attention_cases.Case((), width=16, heads=2, slots=256, columns=2)
MLA_PREFILL = {"xla": mla_prefill_attention, "tpu": partial(mla_prefill_attention, backend="pallas_tpu")}


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends(MLA_PREFILL))
@given(starts=rows_of(3, st.one_of(st.just(-1), near(496, 240, 256))), cuts=rows_of(3, near(512, 256)), seed=SEEDS)
@settings(max_examples=5)
def test_prefill_over_latents_from_any_starts_cut_anywhere(backend, starts, cuts, seed):
    run, case = compiled(MLA_PREFILL[backend], scale=SCALE), dataclasses.replace(MLA_CHUNKS, starts=starts)
    inputs = case.inputs(seed)
    case.hold(inputs, *run(inputs))
    keys = unfolded(inputs["keys"], case.fold)
    first, rest = parts_of_chunks(inputs, cuts, {"latents": inputs["latents"], "keys": keys})
    rest["keys"] = folded(rest["keys"], case.fold)
    case.hold(inputs, *merge([run(inputs | part) for part in (first, rest)]))
