"""The mixture of experts and its grouped products against float64 numpy, expert by expert. About 15 s."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import (
    AttentionSpec,
    ClampedSwiglu,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
    RouterSpec,
)
from inferlib.models.layers import exchange, moe
from inferlib.models.layers.moe import Moe
from inferlib.models.layout import Layout
from inferlib.ops import group_order, segment_sum
from inferlib.ops.backend import Backend
from inferlib.ops.grouped_matmul import _by_tiles, grouped_matmul
from inferlib.pallas_kernels import group_order_tpu

DIM, HIDDEN, EXPERTS = 12, 10, 8
TOLERANCE = 2e-6  # absolute, on sums of order 1 in float32

# ---- grouped products


@pytest.mark.parametrize(
    ("sizes", "rows", "form", "stacked"),
    [
        ([3, 0, 1, 5], 9, "default", False),
        ([0, 0, 2, 0], 6, "default", True),  # rows in no group
        ([0, 0, 0, 0], 3, "default", True),
        ([1, 1, 1, 1], 4, "counted tiles", True),
        ([0, 0, 2, 0], 6, "counted tiles", True),
        ([300, 0, 127, 129], 600, "default", True),  # several products for a group
        ([300, 0, 127, 129], 600, "counted tiles", True),
        ([128, 256, 0, 0], 384, "default", False),
    ],
)
def test_grouped_matmul(sizes, rows, form, stacked, monkeypatch):
    """Rows beyond the groups hold NaN, and so do the weights of groups without rows and those of other layers. Stacked,
    the rows of x are in another order."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6)).astype(np.float32)
    w = rng.normal(size=(len(sizes), 2, 6, 5)).astype(np.float32)
    ends = np.cumsum(sizes)
    expected = np.zeros((ends[-1], 2, 5))
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        expected[end - size : end] = np.einsum("ri,jik->rjk", x[end - size : end].astype(np.float64), w[group])
    x[ends[-1] :] = np.nan
    w[np.array(sizes) == 0] = np.nan
    options = {}
    if stacked:
        w, options = np.stack([np.full_like(w, np.nan), w, np.full_like(w, np.nan)]), {"layer": jnp.int32(1)}
        options["rows"] = order = rng.permutation(rows).astype(np.int32)
        x = x[np.argsort(order)]
    most = max(*sizes, 1)
    counted = partial(_by_tiles, most=most, counted=True)  # as on a GPU
    with monkeypatch.context() as patch:
        if form == "counted tiles":
            patch.setattr(jax.lax, "platform_dependent", lambda *inputs, **_: counted(*inputs))
        got = jax.jit(lambda *inputs: grouped_matmul(*inputs, most=most, **options))(x, w, np.array(sizes, np.int32))
    assert got.shape == (rows, 2, 5)
    np.testing.assert_allclose(got[: ends[-1]], expected, rtol=0, atol=1e-5)


def test_grouped_matmul_refuses_what_does_not_fit():
    x, w = jnp.zeros((4, 6)), jnp.zeros((3, 6, 5))
    with pytest.raises(ValueError, match="do not go together"):
        grouped_matmul(x, w, jnp.zeros(2, jnp.int32), most=4)
    with pytest.raises(ValueError, match="do not go together"):
        grouped_matmul(x[:, :5], w, jnp.zeros(3, jnp.int32), most=4)


def test_only_chosen_experts_are_read():
    """No copy of all experts is made, of one layer or of a stack of them."""
    experts, inner, outer = 32, 64, 64
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    x = jax.ShapeDtypeStruct((8, inner), jnp.float32)
    for layers in ((), (3,)):
        w = jax.ShapeDtypeStruct((*layers, experts, inner, outer), jnp.float32)
        layer = jax.ShapeDtypeStruct((), jnp.int32) if layers else None
        product = jax.jit(lambda *a, layer: grouped_matmul(*a, most=4, layer=layer))
        memory = product.lower(x, w, sizes, layer=layer).compile().memory_analysis()
        assert memory.temp_size_in_bytes < experts * inner * outer * 4 / 4


# ---- the layer


def config_of(spec: MoeSpec) -> ModelConfig:
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=4, scale=0.5, rope=None)
    return ModelConfig("test", vocab=8, dim=DIM, layers=(LayerSpec(attention, spec),), context=64)


def build(spec: MoeSpec, seed: int = 0) -> tuple[Moe, dict[str, np.ndarray]]:
    """The layer with random weights, and these by name."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Moe(spec, Layout(config_of(spec)), jnp.float32)))
    rng, weights = np.random.default_rng(seed), {}
    for path, p in nnx.to_flat_state(state):
        weights[".".join(path)] = rng.normal(size=p.shape).astype(np.float32) * 0.5
    flat = [jnp.asarray(weights[".".join(path)]) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), flat)), weights


def context(lengths: list[int] | jax.Array, backend: Backend = Backend()) -> StepContext:  # noqa: B008
    rows = StepBatch.of_rows(jnp.zeros(len(lengths), jnp.int32), jnp.asarray(lengths, jnp.int32))
    return StepContext(rows, None, 64, backend=backend)


def run(
    layer: Moe,
    x: np.ndarray,
    lengths: list[int] | None = None,
    backend: Backend = Backend(),  # noqa: B008
) -> np.ndarray:
    graph, state = nnx.split(layer)

    @jax.jit
    def step(state, x, lengths):
        ctx, module = context(lengths, backend), nnx.merge(graph, state)
        return module.finish(module(x, ctx)[0])

    return np.asarray(step(state, x, np.array(lengths or [1] * len(x), np.int32)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def feed_forward(x, gate_up, down, activation, gate_up_bias=0.0, down_bias=0.0):
    """x [D], gate_up [2, D, F], down [F, D]."""
    gate, up = x @ gate_up + gate_up_bias
    if isinstance(activation, ClampedSwiglu):
        gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
        return (up + 1) * gate * sigmoid(activation.alpha * gate) @ down + down_bias
    return (gate * sigmoid(gate) * up) @ down + down_bias


def route(logits, spec: RouterSpec, correction) -> dict[int, float]:
    """One token's experts and weights."""
    scores = sigmoid(logits) if spec.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranks = scores + correction
    groups = ranks.reshape(spec.groups, -1)
    of_groups = np.sort(groups)[:, -{"max": 1, "top2": 2}[spec.group_score] :].sum(1) if spec.groups > 1 else [0]
    best = np.argsort(of_groups)[-spec.chosen_groups :]
    allowed = [e for e in range(spec.experts) if e // groups.shape[1] in best]
    chosen = sorted(allowed, key=lambda e: ranks[e])[-spec.chosen :]
    total = sum(scores[e] for e in chosen) if spec.renormalize else 1.0
    return {e: scores[e] / total * spec.scale for e in chosen}


def mixture(spec: MoeSpec, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The layer, token by token and expert by expert."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    out = np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        logits = token @ w["router.weight"] + w.get("router.bias", 0.0)
        for e, weight in route(logits, spec.router, w.get("router.correction", 0.0)).items():
            if e >= spec.experts:
                out[t] += weight * token
                continue
            parts = [w[f"experts.{name}"][e] for name in ("gate_up", "down")]
            parts += [spec.activation, *(w[f"experts.{n}_bias"][e] for n in ("gate_up", "down") if spec.bias)]
            scale = weight if spec.scale_input else 1.0
            out[t] += feed_forward(token * scale, *parts) * (1.0 if spec.scale_input else weight)
        if spec.shared is not None:
            biases = [w[f"shared.{n}_bias"] for n in ("gate_up", "down") if spec.shared.bias]
            gate_up = np.swapaxes(w["shared.gate_up"], 0, 1)
            shared = feed_forward(token, gate_up, w["shared.down"], spec.shared.activation, *biases)
            out[t] += shared * (sigmoid(token @ w["shared_gate"]) if spec.shared_gate else 1.0)
    return out


SPECS = {
    "softmax": MoeSpec(RouterSpec(EXPERTS, 2), HIDDEN),
    "one expert": MoeSpec(RouterSpec(EXPERTS, 1), HIDDEN),
    "every expert": MoeSpec(RouterSpec(EXPERTS, EXPERTS, renormalize=True), HIDDEN),
    "scaled": MoeSpec(RouterSpec(EXPERTS, 3, "sigmoid", renormalize=True, scale=2.5), HIDDEN),
    "groups by their best": MoeSpec(
        RouterSpec(EXPERTS, 3, groups=4, chosen_groups=2, group_score="max"), HIDDEN, shared=MlpSpec(6)
    ),
    "groups by their best two, corrected": MoeSpec(
        RouterSpec(EXPERTS, 3, "sigmoid", groups=4, chosen_groups=2, correction=True), HIDDEN
    ),
    "clamped, with biases": MoeSpec(
        RouterSpec(EXPERTS, 3, renormalize=True, bias=True), HIDDEN, ClampedSwiglu(1.702, 0.5), bias=True
    ),
    "scaled inputs, shared with biases": MoeSpec(
        RouterSpec(EXPERTS, 1, "sigmoid"), HIDDEN, shared=MlpSpec(6, bias=True), scale_input=True
    ),
    "gated shared": MoeSpec(RouterSpec(EXPERTS, 2), HIDDEN, shared=MlpSpec(6), shared_gate=True),
    "experts that return their input": MoeSpec(
        RouterSpec(EXPERTS, 3, correction=True, scale=1.5), HIDDEN, identity=3, shared=MlpSpec(6)
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.fast_cases(3)
def test_layer(name):
    layer, weights = build(SPECS[name])
    x = np.random.default_rng(1).normal(size=(9, DIM)).astype(np.float32)
    np.testing.assert_allclose(run(layer, x), mixture(SPECS[name], weights, x), rtol=0, atol=TOLERANCE * 5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Backend(), Backend(grouped_matmul="pallas_gpu")], ids=["xla", "gpu"])
def test_a_row_alone(backend):
    """Nothing of it is masked. On GPUs the experts of the first are not sorted, those of the others are."""
    x = np.random.default_rng(1).normal(size=(1, DIM)).astype(np.float32)
    for name in ("clamped, with biases", "experts that return their input"):
        layer, weights = build(SPECS[name])
        expected = mixture(SPECS[name], weights, x)
        np.testing.assert_allclose(run(layer, x, backend=backend), expected, rtol=0, atol=TOLERANCE * 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("clamped, with biases", "grouped_matmul"),
        pytest.param("experts that return their input", "grouped_matmul", marks=pytest.mark.release),
        ("clamped, with biases", "expert_mlp"),
        ("scaled inputs, shared with biases", "expert_mlp"),
    ],
)
def test_tpu_kernels(name, kernel):
    """Rows of one part of the batch are inactive, and NaN."""
    layer, weights = build(SPECS[name])
    x, lengths = np.random.default_rng(1).normal(size=(9, DIM)).astype(np.float32), [1] * 7 + [0] * 2
    expected = mixture(SPECS[name], weights, x)
    x[7:] = np.nan
    got = run(layer, x, lengths, Backend(**{kernel: "pallas_tpu"}))
    np.testing.assert_allclose(got[:7], expected[:7], rtol=0, atol=TOLERANCE * 5)


@pytest.mark.release
def test_rounds_whose_choices_a_tpu_kernel_sorts(monkeypatch):
    """Interpreted, where CPUs take XLA's form; choices of a quarter of the tokens fit into a round."""
    layer, _ = build(SPECS["softmax"])
    rng, tokens, chosen, orders = np.random.default_rng(0), 12, SPECS["softmax"].router.chosen, []
    x = jnp.asarray(rng.normal(size=(tokens, DIM)), jnp.float32)
    ids = jnp.asarray(np.argsort(rng.random((tokens, EXPERTS)))[:, :chosen], jnp.int32).at[5].set(-1)
    weights = jnp.asarray(rng.random((tokens, chosen)), jnp.float32)
    monkeypatch.setattr(exchange, "_LEAST_ROOM", 0)
    for module in (exchange, moe, segment_sum):
        monkeypatch.setattr(module, "TILE", 2)

    def by_kernel(*args, tpu, **others):
        orders.append(args[1])
        return tpu(*args)

    outs = []
    for kernel in (False, True):
        if kernel:
            interpreted = partial(group_order_tpu.group_order, interpret=True)
            monkeypatch.setattr(group_order_tpu, "group_order", interpreted)
            monkeypatch.setattr(group_order, "by_platform", by_kernel)
        ctx = context([1] * tokens, Backend(grouped_matmul="pallas_tpu"))
        graph, state = nnx.split(layer.experts)
        run = jax.jit(lambda state, *args, ctx=ctx: nnx.merge(graph, state)(*args, tokens // 4, ctx, None))  # noqa: B023
        outs.append(np.asarray(run(state, x, ids, weights)))
    assert orders
    assert all(numbers is not None for numbers in orders)
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(
    "name",
    ["groups by their best two, corrected", "clamped, with biases", "gated shared", "experts that return their input"],
)
def test_types_are_kept(name):
    """Weights and activations in bfloat16, scores and corrections in float32."""
    spec = SPECS[name]
    graph, state = nnx.split(nnx.eval_shape(lambda: Moe(spec, Layout(config_of(spec)), jnp.bfloat16)))
    wide = {path[-1] for path, p in nnx.to_flat_state(state) if p.dtype != jnp.bfloat16}
    assert wide == ({"correction"} if spec.router.correction else set())
    x = jax.ShapeDtypeStruct((3, DIM), jnp.bfloat16)
    out = jax.eval_shape(lambda state, x: (m := nnx.merge(graph, state)).finish(m(x, context([1] * 3))[0]), state, x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", ["clamped, with biases", "experts that return their input"])
def test_neighbours_change_no_row(name):
    """Whatever they are, NaN and inactive ones included, bit by bit."""
    layer, _ = build(SPECS[name])
    rng = np.random.default_rng(2)
    x = rng.normal(size=(6, DIM)).astype(np.float32)
    expected = run(layer, x)
    others = x.copy()
    others[1:3], others[4] = rng.normal(size=(2, DIM)) * 100, np.nan
    got = run(layer, others, [1, 1, 0, 5, 1, 9])
    np.testing.assert_array_equal(got[[0, 3, 5]], expected[[0, 3, 5]])
    assert not np.isfinite(got[4]).any()


@pytest.mark.slow
def test_inactive_rows_need_no_expert():
    """Those that only they would choose are not read: NaN in them shows nowhere."""
    spec = SPECS["one expert"]
    layer, weights = build(spec)
    x = np.random.default_rng(3).normal(size=(8, DIM)).astype(np.float32)
    chosen = np.argmax(x @ weights["router.weight"], axis=1)
    active = chosen != chosen[0]
    assert 0 < active.sum() < 8
    expected = run(layer, x)
    layer.experts.down[...] = layer.experts.down[...].at[chosen[0]].set(jnp.nan)
    got = run(layer, x, active.astype(int).tolist())
    np.testing.assert_array_equal(got[active], expected[active])
    np.testing.assert_array_equal(got[~active], 0)


def test_choices_of_a_device_are_as_many_as_expected():
    spec, rng = MoeSpec(RouterSpec(64, 8), 8), np.random.default_rng(6)
    for tokens, devices in ((1, 4), (20, 4), (20, 1)):
        drawn = [max(np.sum(rng.permutation(64)[:8] < 64 // devices) for _ in range(tokens)) for _ in range(300)]
        assert spec.most_choices(tokens, devices) == pytest.approx(np.mean(drawn), abs=0.2)


def test_sums_of_segments(monkeypatch):
    """Tiles that are not asked for stay as they are; rows of no segment hold NaN, and a sum starts from nothing."""
    monkeypatch.setattr(segment_sum, "TILE", 4)
    rng = np.random.default_rng(7)
    counts = np.array([2, 0, 1, 3, 0, 0, 0, 0, 1, 1, 4, 0], np.int32)
    starts, total = np.cumsum(counts) - counts, counts.sum()
    rows, factors, places = rng.normal(size=(20, 2, 3)), rng.normal(size=20), rng.permutation(20)
    rows[places[total:]] = np.nan
    want = np.full((12, 6), np.nan)
    for t in range(4, 12):
        at = starts[t] + np.arange(counts[t])
        want[t] = np.sum(rows[places[at]] * factors[at, None, None], axis=0).reshape(6)
    inputs = [np.full((12, 6), np.nan), rows, places, factors, starts, counts]
    inputs = [a.astype(np.float32 if a.dtype == float else np.int32) for a in inputs]

    def run(into, rows, *segments):
        return segment_sum.segment_sum(into, rows, segment_sum.Segments(*segments), 1, 3, tiles=2, longest=2)

    got = jax.jit(run)(*inputs)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_experts_that_are_read_are_as_many_as_expected():
    spec, rng = SPECS["softmax"], np.random.default_rng(4)
    for tokens in (0, 1, 3, 20):
        drawn = [len({e for _ in range(tokens) for e in rng.permutation(EXPERTS)[:2]}) for _ in range(2000)]
        assert spec.read_share(tokens) == pytest.approx(np.mean(drawn) / EXPERTS, abs=0.01)
