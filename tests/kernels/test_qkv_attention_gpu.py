"""Decode attention on NVIDIA GPUs from products with queries, keys and values on: interpreted elsewhere. About 10 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import KvCache
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import AttentionSpec, NormSpec, OutputGate, QueryTemperature, RopeSpec
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.rope import apply_rope
from inferlib.ops.backend import Backend
from inferlib.ops.by_platform import traced_for
from inferlib.ops.matmul import matmul
from inferlib.ops.quantized import SCHEMES
from inferlib.ops.residual_norm import DeferredNorm
from inferlib.pallas_kernels import decode_attention_gpu, qkv_attention_gpu
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.attention_calls import decode_attention, qkv_attention
from tests.helpers.decode_attention_cases import TOLERANCE, Case
from tests.helpers.kernels import kernels_in
from tests.helpers.packed_experts import quantized

SMALL = partial(Case, writes=True)  # what no query sees is NaN or infinite, with the new cells, and those of idle rows
EPS = 1e-3


def table_of(case: Case) -> dict:
    """Its page table, if it has one; of pages that hold no position, those that do not exist."""
    inputs = case.inputs(0)
    if not case.columns:
        return {}
    unused = jnp.arange(case.columns) * case.slots >= jnp.asarray(case.lengths)[:, None]
    return {"pages": jnp.where(unused & (not case.ring), 10**6, inputs["pages"])}


def draw(case: Case, rotary: int = 0, norms: bool = False, bias: bool = False) -> tuple[list, dict]:
    """Products [T, K, G + 2, h], cache and lengths, and the arrays that a layer has. rotary: numbers of a head that are
    rotated. What is projected of tokens that are not new is any finite number."""
    rng, inputs = np.random.default_rng(1), case.inputs(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), case.dtype)  # noqa: E731
    key, value = (jnp.nan_to_num(x[..., None, :], nan=9.0) for x in inputs["new"])
    qkv, arrays = jnp.concatenate([inputs["q"], key, value], axis=-2), {}
    qkv = qkv.reshape(-1, *qkv.shape[-3:])
    if bias:
        arrays["bias"] = normal(*qkv.shape[1:])
    if norms:
        arrays["norms"] = normal(case.size), normal(case.size)
    if rotary:
        angles = rng.uniform(0, 6, size=(qkv.shape[0], rotary // 2))
        arrays["rope"] = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    if case.sinks:
        arrays["sinks"] = inputs["sinks"].astype(case.dtype)
    return [qkv, inputs["k"], inputs["v"], inputs["lengths"]], arrays


def one_after_the_other(qkv, k, v, lengths, arrays, *, eps, offset, counts=None, **options):
    """As layers have it without the kernel."""
    qkv = qkv + arrays["bias"] if "bias" in arrays else qkv
    q, key, value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if "norms" in arrays:
        pairs = zip((q, key), arrays["norms"], strict=True)
        q, key = (rms_norm(x, weight, eps, unit_offset=bool(offset)) for x, weight in pairs)
    if "rope" in arrays:
        q, key = (apply_rope(x, *arrays["rope"]) for x in (q, key))
    of_rows = [
        x if x.shape[0] == lengths.shape[0] else x.reshape(*lengths.shape, -1, *x.shape[1:]) for x in (q, key, value)
    ]
    how = dict(new=of_rows[1:], written=counts, sinks=arrays.get("sinks"))
    out, _, *cache = decode_attention(of_rows[0], k, v, lengths, **how, **options)
    return out.reshape(q.shape), *cache


def counts_of(case: Case) -> dict:
    """How many tokens of each row are new, if not all are."""
    return {} if isinstance(case.writes, bool) else {"counts": jnp.asarray(case.writes, jnp.int32)}


def hold(case: Case, result: Sequence[jax.Array], want: Sequence[jax.Array], tolerance: float) -> None:
    """Outputs of new tokens, and all of the cache. Other outputs are finite."""
    tokens, rows = case.queries or 1, len(case.lengths)
    counts = np.broadcast_to(counts_of(case).get("counts", tokens), rows)
    new = (np.arange(tokens) >= tokens - counts[:, None]).ravel()
    assert np.isfinite(np.float32(result[0])).all()
    for n, (got, expected) in enumerate(zip(result, want, strict=True)):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        got, expected = (np.float32(x)[new if n == 0 else ...] for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def check(case: Case, offset: float = 0.0, **has) -> None:
    inputs, arrays = draw(case, **has)
    options = dict(eps=EPS, offset=offset) | case.static() | table_of(case) | counts_of(case)
    result, want = (jax.jit(partial(f, **options))(*inputs, arrays) for f in (qkv_attention, one_after_the_other))
    hold(case, result, want, TOLERANCE[jnp.dtype(case.dtype).name])


ALL = dict(norms=True, bias=True)
CASES = {
    "norms": (SMALL((512, 400), group=8, size=128, slots=512, options={"softcap": 5.0}), dict(norms=True)),
    "no powers of two, rotated in part, norms with an offset": (
        SMALL((300, 17, 0), heads=1, group=3, size=48, slots=300, sinks=True, options={"window": 50}),
        ALL | dict(rotary=32, offset=1.0),
    ),
    "a ring that wraps": (
        SMALL((200, 30, 1, 0), slots=96, ring=True, options={"window": 64}),
        dict(rotary=64, norms=True),
    ),
    "a ring of its window": (SMALL((97, 96, 95), slots=96, ring=True, sinks=True, options={"window": 96}), {}),
    "bfloat16": (SMALL((1, 31, 257), slots=300, dtype=jnp.bfloat16, sinks=True), ALL | dict(rotary=32)),
    "pages": (SMALL((0, 1, 16, 17, 65, 112), slots=16, columns=7, sinks=True), dict(rotary=64)),
    "pages of blocks, a window of itself, bfloat16": (
        SMALL((1, 128, 129), slots=128, columns=2, dtype=jnp.bfloat16, options={"window": 1}),
        ALL | dict(rotary=32),
    ),
    "several tokens": (SMALL((512, 5, 0), queries=4, size=128, slots=512, options={"softcap": 5.0}), dict(norms=True)),
    "several tokens, some of them new, across shares": (
        SMALL((300, 17, 257, 2), queries=5, group=3, size=48, slots=300, sinks=True, writes=(5, 1, 3, 1)),
        ALL | dict(rotary=32, offset=1.0),
    ),
    "several tokens in a ring, a window": (
        SMALL((200, 30, 4, 0), queries=3, slots=98, ring=True, sinks=True, writes=(3, 2, 1, 3), options={"window": 96}),
        dict(rotary=64),
    ),
    "several tokens, a window of less, pages": (
        SMALL((130, 16, 35), queries=8, slots=16, columns=9, writes=(8, 1, 4), options={"window": 2}),
        dict(rotary=64, bias=True),
    ),
    "several tokens, bfloat16, pages": (
        SMALL((257, 128), queries=2, slots=128, columns=3, dtype=jnp.bfloat16, writes=(1, 2)),
        dict(rotary=32, norms=True),
    ),
    "a ring of pages": (SMALL((0, 3, 80, 81, 500), slots=16, columns=5, ring=True, options={"window": 80}), {}),
}


# Rings and pages that other cases have with other options.
FURTHER = ("a ring that wraps", "a ring of its window", "bfloat16", "pages", "several tokens, bfloat16, pages")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.release] * (x in FURTHER)) for x in CASES])
def test_equals_what_layers_compute(name):
    case, has = CASES[name]
    check(case, **has)


@pytest.mark.slow
def test_nothing_is_written_to_pages_that_do_not_exist():
    (qkv, k, v, lengths), arrays = draw(SMALL((5, 30), slots=16, columns=2))
    pages = jnp.array([[0, 1], [2, k.shape[0]]], jnp.int32)
    _, *written = jax.jit(partial(qkv_attention, scale=1.0))(qkv, k, v, lengths, arrays, pages=pages)
    for new, old in zip(written, (k, v), strict=True):
        new, old = np.array(new), np.array(old)
        assert np.isfinite(new[0, :, 4]).all()
        new[0, :, 4] = old[0, :, 4] = 0
        np.testing.assert_array_equal(new, old)


@pytest.mark.slow
def test_long_rows_get_more_shares(monkeypatch):
    monkeypatch.setattr(decode_attention_gpu, "CONCURRENT", 0)
    monkeypatch.setattr(decode_attention_gpu, "BALANCED", decode_attention_gpu.Launch(24, stages=2))
    check(SMALL((300, 20, 280), slots=64, columns=5))


def shares_of(qkv: jax.Array, normed: bool) -> tuple[jax.Array, dict, dict]:
    """Three shares [3, B, K, G + 2, h] that add up to products; its options. If normed, the products lack the factor
    of a norm of 48 inputs, whose squares are returned too, and the last share is an addend."""
    rng, rows, result = np.random.default_rng(3), qkv.shape[0], np.float32(qkv)
    arrays, options = {}, dict(dtype=qkv.dtype)
    if normed:
        squares = rng.uniform(1, 100, size=(rows, 5)).astype(np.float32)
        result = result * np.sqrt(squares.sum(1) / 48 + 1e-2).reshape(-1, 1, 1, 1)
        arrays, options = dict(squares=jnp.asarray(squares)), options | dict(inputs=48, inputs_eps=1e-2)
    parts = rng.normal(size=(2, *result.shape)).astype(np.float32)
    last = result - parts.sum(0)
    if normed:
        return jnp.stack([*parts]), arrays | dict(addend=jnp.asarray(last)), options
    return jnp.stack([*parts, last]), arrays, options


NO_POWERS = "no powers of two, rotated in part, norms with an offset"


@pytest.mark.parametrize(
    ("name", "limits", "normed", "before"),
    [
        (NO_POWERS, {}, True, False),
        ("several tokens, some of them new, across shares", {}, True, True),
        pytest.param(
            "several tokens, some of them new, across shares",
            {"SHARES_OF_MANY": 99},
            *(True, False),
            marks=pytest.mark.release,
        ),
        pytest.param(NO_POWERS, {"CONCURRENT": 1}, False, False, marks=pytest.mark.release),
        (NO_POWERS, {"CONCURRENT": 1, "SHARES_OF_MANY": 2}, False, True),
        (NO_POWERS, {"MOST_SHARES": 1}, True, True),
    ],
)
@pytest.mark.fast_cases(2)
def test_shares_of_products_are_summed(name, limits, normed, before, monkeypatch):
    """In attention, or in a kernel before it where its programs or the shares are many."""
    for limit, value in limits.items():
        monkeypatch.setattr(decode_attention_gpu if limit == "CONCURRENT" else qkv_attention_gpu, limit, value)
    case, has = CASES[name]
    (qkv, *cache), arrays = draw(case, **{key: value for key, value in has.items() if key != "offset"})
    options = dict(eps=EPS, offset=has.get("offset", 0.0)) | case.static() | counts_of(case)
    shares, norm, made = shares_of(qkv, normed)
    want = jax.jit(partial(one_after_the_other, **options))(qkv, *cache, arrays)
    run = partial(qkv_attention, **options, **made)
    assert ("summed" in kernels_in(run, shares, *cache, arrays | norm)) == before
    result = jax.jit(run)(shares, *cache, arrays | norm)
    hold(case, result, want, 2e-5)


@pytest.mark.slow
def test_sums_are_rounded_as_products_are():
    """To bfloat16, before bias and norms."""
    case = SMALL((1, 31, 300), slots=300, dtype=jnp.bfloat16)
    (qkv, *cache), arrays = draw(case, rotary=32, **ALL)
    options = dict(eps=EPS, offset=0.0) | case.static()
    shares = jnp.stack([qkv.astype(jnp.float32) * size for size in (1.0, 2.0**-10)])
    result = jax.jit(partial(qkv_attention, **options, dtype=jnp.bfloat16))(shares, *cache, arrays)
    dense = jax.jit(partial(qkv_attention, **options))(qkv, *cache, arrays)
    for got, expected in zip(result, dense, strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(expected))


def test_few_rows_get_shares_half_as_long():
    for rows, splits in ((1, 32), (2, 16), (64, 1)):
        k = jax.ShapeDtypeStruct((rows, 8, 2048, 128), jnp.bfloat16)
        dealt, _ = decode_attention_gpu.dealt(KvCache(k, k), rows, 8, 128, window=None)
        assert (dealt["block"], dealt["splits"]) == (64, splits)


@pytest.mark.slow
def test_a_sink_of_nothing():
    """-inf, in a row of several shares."""
    case = SMALL((300, 1), slots=300, sinks=True)
    inputs, arrays = draw(case)
    arrays["sinks"] = arrays["sinks"].at[0, 1].set(-jnp.inf)
    options = dict(eps=EPS, offset=0.0) | case.static()
    result, want = (jax.jit(partial(f, **options))(*inputs, arrays) for f in (qkv_attention, one_after_the_other))
    np.testing.assert_allclose(result[0], want[0], rtol=2e-5, atol=2e-5)


def test_bad_shapes_and_options_are_refused():
    (qkv, k, v, lengths), arrays = draw(SMALL((1, 2)))
    with pytest.raises(ValueError, match="3 tokens are not as many for each of 2 rows"):
        qkv_attention(jnp.concatenate([qkv, qkv[:1]]), k, v, lengths, arrays, scale=1.0)
    with pytest.raises(ValueError, match="as QkvPartials"):
        qkv_attention(qkv[None], k, v, lengths, arrays, scale=1.0)
    with pytest.raises(ValueError, match="partial sums are"):
        qkv_attention(qkv, k, v, lengths, arrays, scale=1.0, dtype=jnp.float32)
    squares = {"squares": jnp.ones((2, 1))}
    with pytest.raises(ValueError, match="number of a row's inputs"):
        qkv_attention(qkv[None], k, v, lengths, squares, scale=1.0, dtype=jnp.float32)
    with pytest.raises(ValueError, match="window"):
        qkv_attention(qkv, k, v, lengths, arrays, scale=1.0, ring=True)
    with pytest.raises(ValueError, match="must both be"):
        qkv_attention(qkv, k[:1], v[:1], lengths, arrays, scale=1.0)


SPEC = AttentionSpec(4, 2, 8, 0.1, RopeSpec(8, 1e4))
KEYS, TOKEN = jnp.zeros((2, 2, 16, 8)), jnp.ones(1, jnp.int32)
ROWS = StepBatch.of_rows(TOKEN, TOKEN)


def taken(spec=SPEC, *cache, layer=None, batch=ROWS, chosen="pallas_gpu", parallel="tp=1") -> bool:
    shards = planned_shards(Parallelism.parse(parallel))
    ctx = StepContext(batch, None, 16, backend=Backend(qkv_attention=chosen), shards=shards)
    return Attention.fuses(
        SimpleNamespace(spec=spec, layout=SimpleNamespace(queries=2)),
        ctx,
        LayerCache(cache or (KEYS, KEYS), layer=layer),
    )


def test_layers_that_it_takes():
    gate = OutputGate("sigmoid", per_head=True)
    assert taken()
    assert taken(
        replace(
            SPEC, rope=None, window=4, softcap=5.0, qk_norm="head", qkv_bias=True, o_bias=True, sinks=True, gate=gate
        )
    )
    for changes in (
        dict(qk_norm="full"),
        dict(qk_norm="unit"),
        dict(qk_norm="head", qk_norm_after_rope=True),
        dict(temperature=QueryTemperature(0.1, 8)),
        dict(value_dim=4),
        dict(value_scale=2.0),
        dict(value_norm=True),
        dict(key_is_value=True),
        dict(chunk=4),
        dict(cache_of=0),
    ):
        assert not taken(replace(SPEC, **changes)), changes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "rows", "kernels", "normed"), [(None, 2, 0, True), ("mxfp4", 1, 1, True), ("int8", 5, 0, False)]
)
def test_layers_leave_sums_to_it(scheme, rows, kernels, normed):
    """Where their weight's products come in shares; else it gets the whole products, of the whole norm."""
    rng, shapes = np.random.default_rng(0), ((rows, 64), (64, 2, 4, 8), (5, 2, 16, 8), (5, 2, 16, 8))
    x, w, *cells = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    w = w if scheme is None else quantized(np.float32(w), (0,), SCHEMES[scheme])
    if normed:
        x = DeferredNorm(x, jnp.asarray(rng.uniform(1, 99, size=(rows, 3)), jnp.float32), EPS)
    cache, shards = LayerCache(tuple(cells)), planned_shards(Parallelism())
    batch, kernels_of = StepBatch.of_rows(jnp.ones(rows, jnp.int32), jnp.arange(1, rows + 1)), "pallas_gpu"
    ctx = StepContext(batch, None, 16, backend=Backend(qkv_attention=kernels_of, matmul=kernels_of), shards=shards)
    spec = replace(SPEC, rope=None)

    def step(x, w):
        layer = SimpleNamespace(spec=spec, qkv={...: w}, norm=NormSpec())
        out, cells = Attention.attend_fused(layer, Attention.project_partially(layer, x, ctx), cache, ctx)
        return out, *cells.arrays

    @jax.jit
    def apart(x, w):
        whole = matmul(x.array() if normed else x, w)
        return qkv_attention(whole, *cache.arrays, ctx.batch.decode_lengths, {}, scale=spec.scale, limit=16)

    want, result = apart(x, w), jax.jit(step)(x, w)
    assert ({"row_matmul", "summed"} & kernels_in(step, x, w) == {"row_matmul"}) == bool(kernels)
    for got, expected in zip(result, want, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=0.03, atol=0.03)


def test_steps_and_caches_that_it_takes():
    """Decode rows alone, whose keys and values lie apart in one layer's cache, as they are, whole on a device."""
    assert taken(parallel="tp=2")
    assert not taken(parallel="cp=2")
    assert not taken(chosen="xla")
    assert not taken(batch=StepBatch(TOKEN[None], *[TOKEN] * 3, TOKEN[None], TOKEN))
    assert taken(batch=StepBatch.of_rows(TOKEN.repeat(32)[None], TOKEN, TOKEN))
    assert not taken(batch=StepBatch.of_rows(TOKEN.repeat(33)[None], TOKEN, TOKEN))
    assert not taken(SPEC, KEYS[None], KEYS[None], layer=jnp.int32(0))
    for cache in ((KEYS,), (KEYS, KEYS[..., 0]), (KEYS, KEYS, KEYS[..., 0], KEYS[..., 0])):
        assert not taken(SPEC, *cache)


@pytest.mark.parametrize(
    ("sinks", "shares", "columns", "queries"), [(False, False, 4, None), (True, True, None, None), (True, True, 4, 4)]
)
def test_lowers_to_triton(sinks, shares, columns, queries):
    """Heads of gpt-oss with norms; the cache is written where it lies."""
    slots, new = 128 if columns else 500, (1, 4) if queries else True
    shape = dict(group=8, slots=slots, columns=columns, queries=queries, writes=new)
    case = Case((1, 9), **shape, dtype=jnp.bfloat16, sinks=sinks)
    (qkv, *cache), arrays = draw(case, rotary=64, **ALL)
    norm, made = {}, {}
    if shares:
        qkv, norm, made = shares_of(qkv, True)
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    made |= table_of(case) | counts_of(case)
    run = jax.jit(partial(qkv_attention, scale=1.0, window=300, ring=True, **made), donate_argnums=(1, 2))
    with traced_for("cuda"), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(qkv, *cache, arrays | norm).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
    assert text.count("output_operand_alias<") == 2
