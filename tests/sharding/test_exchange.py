"""Tokens that are exchanged with experts on other devices: the same as on one, whatever the routing. About 30 s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from inferlib import LLM
from inferlib.buckets import Buckets
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.layers import exchange, moe
from inferlib.models.layers.exchange import Exchange, exchange_of, pairs_room, returns_parts
from inferlib.models.layers.moe import Moe
from inferlib.models.layout import Layout
from inferlib.ops import segment_sum
from inferlib.ops.backend import Backend
from inferlib.programs.keys import ProgramKey
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, make_shards
from tests.helpers.hlo import assert_collectives_equal
from tests.sharding.conftest import CHUNK, MAX_LEN, assert_same_logits_and_tokens

DIM, TOKENS = 12, 48
SPECS = {
    "shared, scaled sigmoid": MoeSpec(RouterSpec(8, 2, "sigmoid", correction=True), 10, shared=MlpSpec(6)),
    "experts that return their input": MoeSpec(RouterSpec(8, 2, correction=True, scale=1.5), 10, identity=2),
    "seven, scaled inputs": MoeSpec(RouterSpec(7, 1, correction=True), 10, scale_input=True, bias=True),
}


@pytest.fixture(autouse=True)
def tiny_tokens_are_worth_it(monkeypatch):
    """Shapes that are used here only: programs are kept."""
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(exchange, "_WAIT_BYTES", 0)
    monkeypatch.setattr(exchange, "_LEAST_ROOM", 0)
    for module in (exchange, moe, segment_sum):
        monkeypatch.setattr(module, "TILE", 2)


def build(spec: MoeSpec, shards: Shards):
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=4, scale=0.5, rope=None)
    config = ModelConfig("test", vocab=8, dim=DIM, layers=(LayerSpec(attention, spec),), context=64)
    return nnx.split(nnx.eval_shape(lambda: Moe(spec, Layout(config, shards), jnp.float32)))


def layer_on(spec: MoeSpec, parallel: str = "", backend: Backend = Backend()):  # noqa: B008
    """(weights by name, x [T, D], lengths [T]) -> [T, D]"""
    shards = make_shards(Parallelism.parse(parallel))
    graph, state = build(spec, shards)
    flat = nnx.to_flat_state(state)

    def layer(weights, x, lengths):
        moe = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), weights))
        rows = StepBatch.of_rows(jnp.zeros(lengths.shape, jnp.int32), lengths)
        ctx = StepContext(rows, None, 64, backend=backend, shards=shards)
        return moe.finish(shards.sum(moe(x, ctx)[0], axes.MLP))

    if shards.mesh is not None:
        spec_of = shards.rules.spec
        ins = ([spec_of(p.axes) for _, p in flat], spec_of((axes.ROWS, None)), spec_of((axes.ROWS,)))
        layer = jax.shard_map(layer, mesh=shards.mesh, in_specs=ins, out_specs=ins[1], check_vma=False)
    layer = jax.jit(layer)

    def call(weights: dict[str, np.ndarray], x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        padded = [
            np.pad(w := weights[".".join(path)], [(0, n - m) for m, n in zip(w.shape, p.shape, strict=True)])
            for path, p in flat
        ]
        return np.asarray(layer(padded, x, lengths))

    return call


def ragged_all_to_all(shards: Shards, x, out, starts, sizes, at, received, name):
    """What `jax.lax.ragged_all_to_all` is documented to do, which CPUs cannot."""
    everyone, me = lax.all_gather((x, starts, sizes, at), shards.mesh_axes(name)), shards.index(name)
    for i in range(shards.size(name)):
        rows, start, size, first = (a[i] for a in everyone)
        number = jnp.arange(out.shape[0]) - first[me]
        here = (number >= 0) & (number < jnp.minimum(size[me], received[i]))
        out = jnp.where(here.reshape(-1, *[1] * (x.ndim - 1)), rows[jnp.where(here, start[me] + number, 0)], out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel", "form"),
    [
        ("shared, scaled sigmoid", "ep=4,tp=2", "ragged"),
        ("experts that return their input", "ep=8", "padded"),
        ("experts that return their input", "ep=8", "gathered"),
        pytest.param("seven, scaled inputs", "dp=2,ep=4", "padded", marks=pytest.mark.release),
        ("seven, scaled inputs", "dp=2,ep=4", "ragged"),
        ("shared, scaled sigmoid", "dp=2,ep=4", "gathered"),
        ("shared, scaled sigmoid", "ep=8", "gathered on a torus"),
    ],
)
def test_a_layer_whatever_the_routing(name, parallel, form, monkeypatch):
    """Balanced; all tokens to the same experts, for which a round has no room; one token alone. Rows that are inactive
    hold NaN, and so do arrays before they are written."""
    monkeypatch.setattr(Shards, "ragged_all_to_all", ragged_all_to_all)
    spec, rng = SPECS[name], np.random.default_rng(0)
    parallelism = Parallelism.parse(parallel)
    tokens = TOKENS // (parallelism.expert * parallelism.data)
    monkeypatch.setattr(exchange, "_WAIT_BYTES", 1 << 30 if "gathered" in form else 0)
    generation = "v6e" if "torus" in form else None
    backend = Backend(exchange="ragged" if form == "ragged" else "padded", generation=generation)
    how, received = exchange_of(spec, tokens, 4 * DIM, parallelism.expert, backend), tokens * parallelism.expert
    if "gathered" in form:
        assert how is None
        assert returns_parts(tokens, DIM, backend) == ("torus" in form)
    else:
        assert how.room < (received if how.ragged else tokens)
        received = how.room * (1 if how.ragged else parallelism.expert)
    chosen = spec.router.chosen
    assert "gathered" not in form or pairs_room(chosen, tokens, received, backend) < received * chosen
    weights = {
        ".".join(path): rng.normal(size=p.shape).astype(np.float32) * 0.5
        for path, p in nnx.to_flat_state(build(spec, Shards())[1])
    }
    x = rng.normal(size=(TOKENS, DIM)).astype(np.float32)
    most = ~np.isin(np.arange(TOKENS), [3, 7, 40])
    alone, split = layer_on(spec), layer_on(spec, parallel, backend)
    for favour, active in ((0.0, most), (1e3, most), (0.0, np.arange(TOKENS) == 9)):
        x[~active], lengths = np.nan, active.astype(np.int32)
        weights["router.correction"] = favour * (np.arange(spec.router.experts) < spec.router.chosen).astype(np.float32)
        want, got = (layer(weights, x, lengths)[active] for layer in (alone, split))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.slow
def test_the_same_logits_and_greedy_tokens(engine_of, expected):
    """Every program that ran has the collectives that were promised, all-to-all among them."""
    engine = engine_of("exchanged", "ep=4,tp=2,rules=tp_sp")
    assert_same_logits_and_tokens(engine, "exchanged", expected)
    for key in engine.programs._compiled:
        kinds = {kind for kind, axis, _ in assert_collectives_equal(engine.programs, key) if axis == "expert"}
        assert ("all-to-all" in kinds) == (key.chunks > 0), str(key)  # one row of a replica is gathered


@pytest.mark.slow
def test_collectives_beside_a_sequence_axis_are_those_promised(programs_of):
    programs = programs_of("exchanged", "ep=4,cp=2,rules=tp2d")
    assert_collectives_equal(programs, ProgramKey("greedy", 1, MAX_LEN, chunks=1, chunk=CHUNK))


@pytest.mark.release
def test_quantised_experts(shape_of):
    options = dict(quantization="int8", max_batch=4, buckets=Buckets((CHUNK,), (4,), (MAX_LEN,)), max_len=MAX_LEN)
    tokens = np.random.default_rng(5).integers(3, 131, 16).tolist()
    alone, split = (
        LLM(shape_of("exchanged"), parallel=parallel, progress=False, **options).logits(tokens)
        for parallel in (None, "ep=4,tp=2")
    )
    np.testing.assert_allclose(split, alone, rtol=0, atol=2e-5 * np.abs(alone).max())


def test_parts_that_return_are_summed_as_by_a_reduce_scatter():
    """In the order of devices, in float32, bit by bit."""
    shards, torus = make_shards(Parallelism(expert=8)), Backend(generation="v6e")
    parts = np.random.default_rng(0).normal(size=(8, 8 * 3, DIM)).astype(np.float32)
    everyone = shards.rules.spec((axes.ROWS, None))

    def sums(parts: np.ndarray, backend: Backend) -> np.ndarray:
        run = lambda x: exchange._returned(x, shards, backend)  # noqa: E731
        run = jax.shard_map(run, mesh=shards.mesh, in_specs=everyone, out_specs=everyone, check_vma=False)
        return np.asarray(jax.jit(run)(parts.reshape(-1, DIM)))

    np.testing.assert_allclose(sums(parts, torus), sums(parts, Backend()), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(sums(parts, torus), sum(parts))
    halves = parts.astype(jnp.bfloat16)
    np.testing.assert_array_equal(sums(halves, torus), sum(halves.astype(np.float32)).astype(jnp.bfloat16))


def test_how_sums_return():
    """On a torus by parts, where a reduce-scatter would be an all-reduce."""
    torus = Backend(generation="v6e")
    assert returns_parts(4, 4096, torus)
    assert returns_parts(8, 2880, torus)
    assert not returns_parts(8, 4096, torus)
    assert not returns_parts(16, 2880, torus)
    assert not returns_parts(4, 4096, Backend())


def test_what_is_chosen(monkeypatch):
    """By bytes and the number of collectives: few tokens, or few devices for a token's choices, are gathered."""
    monkeypatch.undo()
    spec = MoeSpec(RouterSpec(256, 8), 2048)  # DeepSeek-V3's
    ragged = dict(row_bytes=2 * 7168, backend=Backend(exchange="ragged"))
    assert exchange_of(spec, 1, devices=1, **ragged) is None
    assert exchange_of(spec, 1, devices=4, **ragged) is None
    assert exchange_of(spec, 256, devices=4, **ragged) is None  # a token goes to 3.6 of 4 devices
    assert exchange_of(spec, 4, devices=32, **ragged) is None  # all-to-all would take longer to start
    # A token goes to 7.2 of 32 devices, and so few tokens take no rounds.
    assert exchange_of(spec, 32, devices=32, **ragged) == Exchange(rows=233, room=1024, ragged=True, many=False)
    assert exchange_of(spec, 512, devices=32, **ragged) == Exchange(rows=3721, room=5632, ragged=True)
    padded = exchange_of(spec, 64, devices=32, row_bytes=2 * 7168, backend=Backend())
    assert padded == Exchange(rows=32 * 22, room=22, ragged=False)
    kernel = Backend(exchange="ragged", grouped_matmul="pallas_gpu")  # would wait for the host in each round
    assert exchange_of(spec, 512, devices=32, row_bytes=2 * 7168, backend=kernel).room == 512 * 32
    torus = dict(row_bytes=2 * 7168, backend=Backend(exchange="ragged", generation="v6e"))
    assert exchange_of(spec, 512, devices=8, **torus) is None  # half as far would be less
    assert exchange_of(spec, 512, devices=8, **ragged) is not None
    assert exchange_of(MoeSpec(RouterSpec(256, 1), 2048), 512, devices=8, **torus) is not None
    everywhere = MoeSpec(RouterSpec(8, 8), 2048)
    assert exchange_of(everywhere, 64, devices=8, **ragged) is None


def test_devices_that_a_token_goes_to():
    rng = np.random.default_rng(4)
    for experts, chosen, devices in ((8, 2, 4), (7, 3, 4), (16, 1, 2)):
        local = -(-experts // devices)
        drawn = [any(e < local for e in rng.permutation(experts)[:chosen]) for _ in range(4000)]
        share = MoeSpec(RouterSpec(experts, chosen), 8).device_share(devices)
        assert share == pytest.approx(np.mean(drawn), abs=0.03)
