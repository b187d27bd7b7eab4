"""Experts of few tokens, every implementation against float64 numpy. About 10 s."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from inferlib.ops.choice import Choice
from inferlib.ops.expert_mlp import ExpertWeights, choose, expert_mlp
from inferlib.ops.packed import PackedTensor
from inferlib.ops.quantized import SCHEMES, QuantizedTensor
from inferlib.pallas_kernels import expert_mlp_tpu
from inferlib.pallas_kernels.expert_mlp_tpu import Blocks, unsupported
from inferlib.pallas_kernels.generations_tpu import planning_for
from inferlib.pallas_kernels.packed_weights_tpu import Weight
from tests.helpers.kernels import copies_of, on_backends
from tests.helpers.packed_experts import dequantized, packed, quantized


def activation(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


@dataclass(frozen=True)
class Case:
    """choices: of each token its experts; of a token without, x is NaN. Weights of experts that nobody chooses, and of
    other layers, are NaN."""

    choices: tuple[tuple[int, ...], ...]
    experts: int = 4
    dim: int = 24
    hidden: int = 40
    scheme: str | None = None
    float4: bool = False  # of gate and up; down's share of a device may be too small for it
    bias: bool = False
    scale_input: bool = False
    stacked: bool = True

    def check(self, run, *, pack: bool = True) -> None:
        """Hold run(x, weights, factors, ...) to the oracle. pack: weights in groups, as the kernel takes them."""
        rng, tokens = np.random.default_rng(len(self.choices)), len(self.choices)
        dtype, tolerance = (jnp.float32, 1e-5) if self.scheme is None else (jnp.bfloat16, 0.06)
        x = np.asarray(jnp.asarray(rng.normal(size=(tokens, self.dim)), dtype), float)
        factors, weights = np.zeros((tokens, self.experts)), {}
        for token, chosen in enumerate(self.choices):
            factors[token, list(chosen)] = rng.uniform(0.1, 1, len(chosen))
        shapes = {"gate_up": (2, self.dim, self.hidden), "down": (self.hidden, self.dim), "bias": (2, self.hidden)}
        for name, shape in shapes.items():
            w = np.full((2, self.experts, *shape), np.nan)
            w[1, factors.any(0)] = rng.normal(size=(np.count_nonzero(factors.any(0)), *shape)) / 5
            weights[name] = jnp.asarray(w, jnp.float32) if self.stacked else jnp.asarray(w[1], jnp.float32)
        exact = {name: np.asarray(w, float) for name, w in weights.items()}
        if self.scheme:
            for name in ("gate_up", "down"):
                summed, float4 = (len(shapes[name]) + self.stacked - 1,), self.float4 and name == "gate_up"
                cached = quantized(weights[name], summed, SCHEMES[self.scheme])
                exact[name] = np.asarray(dequantized(cached, summed), float).reshape(exact[name].shape)
                weights[name] = packed(cached, self.scheme, float4=float4) if cached.grouped and pack else cached
        expected = np.zeros((tokens, self.dim))
        for token, expert in np.argwhere(factors):
            w_in, w_out, bias = (exact[n][1, expert] if self.stacked else exact[n][expert] for n in shapes)
            factor = factors[token, expert]
            both = np.einsum("d,pdf->pf", x[token] * (factor if self.scale_input else 1), w_in) + bias * self.bias
            y = both[0] / (1 + np.exp(-both[0])) * both[1] @ w_out
            expected[token] += y if self.scale_input else factor * y
        x[~factors.any(1)] = np.nan
        bias, layer = weights["bias"] if self.bias else None, jnp.int32(1) if self.stacked else None
        experts = ExpertWeights(weights["gate_up"], weights["down"], bias, layer, "silu")
        run = partial(run, activation=activation, scale_input=self.scale_input)
        got = jax.jit(run)(jnp.asarray(x, dtype), experts, jnp.asarray(factors, jnp.float32))
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, float), expected, rtol=tolerance / 3, atol=tolerance)


CASES = {
    "some": Case(((0, 2), (2,), (), (3, 0))),
    "none": Case(((), ())),
    "one, by the last": Case(((),) * 16 + ((3,),)),
    "all": Case(((0, 1), (2, 3), (1, 2)), stacked=False),
    "bias, scaled inputs": Case(((1, 3), (0,), ()), bias=True, scale_input=True),
    "scaled inputs": Case(((1, 3), (0,)), scale_input=True),
    "int8": Case(((1, 3), (), (0, 3)), scheme="int8", bias=True),
    "mxfp4": Case(((1, 3), (), (0, 3)), dim=160, hidden=96, scheme="mxfp4", bias=True),
    "mxfp8": Case(((0, 1), (2, 3), (1, 2)), dim=32, hidden=64, scheme="mxfp8", stacked=False),
}
# In pieces of their width.
WIDE = {
    "pieces": Case(((0, 2), (2,), ()), hidden=384),
    "pieces, int8": Case(((0, 2), (2,), ()), hidden=256, scheme="int8", bias=True),
    "pieces, mxfp4": Case(((0, 2), (2,), ()), dim=32, hidden=384, scheme="mxfp4", bias=True),
    "float4": Case(((1, 3), ()), dim=288, hidden=128, scheme="mxfp4", float4=True),
    "pieces, fp8_block": Case(((0, 2), (2,), ()), dim=128, hidden=1024, scheme="fp8_block", scale_input=True),
}


RACES = ("some", "none", "pieces", "pieces, mxfp4")


# With a bias there are scaled inputs too, and all experts of mxfp8.
FURTHER = [("mxfp4", "tpu"), ("mxfp8", "xla"), ("all", "tpu"), ("scaled inputs", "xla"), ("scaled inputs", "tpu")]


@on_backends(CASES, ("xla", "tpu"), RACES, further=FURTHER)
@pytest.mark.fast_cases(3)
def test_equals_the_oracle(name, backend):
    run = partial(expert_mlp, backend={"xla": "xla", "tpu": "pallas_tpu"}[backend])
    CASES[name].check(run, pack=backend == "tpu")


@pytest.mark.parametrize("name", ["some", "none", "all", "scaled inputs"])
def test_the_trainium_kernel_on_its_stand_in(name):
    CASES[name].check(partial(expert_mlp, backend="nki"))


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        *(("pieces", 3), ("float4", 2)),
        pytest.param("pieces, int8", 2, marks=pytest.mark.release),
        pytest.param("pieces, fp8_block", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.fast_cases(1)
def test_in_pieces(name, buffers):
    """Those that are searched for races have two buffers there."""
    WIDE[name].check(partial(directly, blocks=Blocks(128, buffers), interpret=True))


@pytest.mark.parametrize(
    "name",
    [
        *("some", "none", "one, by the last"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bias, scaled inputs", "mxfp4", "pieces")),
        pytest.param("pieces, int8", marks=pytest.mark.release),
    ],
)
@pytest.mark.fast_cases(2)
def test_two_cores_share_the_experts(name, capsys):
    """Three experts, none, and one, which leaves the second core nothing; an odd and an even number of pieces."""
    params = pltpu.InterpretParams(num_cores_or_threads=2, detect_races=True)
    blocks = Blocks(128 if name in WIDE else CASES[name].hidden)
    with planning_for("v5p"):
        (CASES | WIDE)[name].check(partial(directly, blocks=blocks, interpret=params))
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


def test_a_device_with_two_cores_adds_their_sums():
    def partial_sums(generation: str) -> tuple:
        with planning_for(generation):
            run = partial(directly, activation=activation, interpret=True)
            jaxpr = jax.make_jaxpr(run)(x, weights, jnp.ones((2, 4), jnp.float32))
        (call,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "pallas_call")
        return call.outvars[0].aval.dtype, call.outvars[0].aval.shape, call.params["grid_mapping"].grid

    x, layer = jnp.ones((2, 128), jnp.bfloat16), jnp.int32(0)
    gate_up, down = jnp.ones((1, 4, 2, 128, 128), jnp.bfloat16), jnp.ones((1, 4, 128, 128), jnp.bfloat16)
    weights = ExpertWeights(gate_up, down, None, layer, "silu")
    assert partial_sums("v5e") == (jnp.bfloat16, (16, 128), (1,))
    assert partial_sums("v5p") == (jnp.float32, (32, 128), (2,))


@pytest.mark.slow
@copies_of(RACES, early=("pieces, mxfp4",), further=[("pieces, mxfp4", "on_wait")])
def test_it_has_no_races(name, mode, capsys):
    """Copies happen when they are started, or not before they are waited for."""
    params, case = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode), (CASES | WIDE)[name]
    case.check(partial(directly, blocks=Blocks(128 if name in WIDE else 40), interpret=params))
    assert "RACE" not in capsys.readouterr().out  # newer jax raises


def directly(x, weights: ExpertWeights, factors, *, activation, **options) -> jax.Array:
    """The kernel, without its contract."""
    gate_up, down, layer, small = weights.gate_up, weights.down, weights.layer, {}
    if weights.gate_up_bias is not None:
        small["gate_up_bias"] = weights.gate_up_bias
    if isinstance(gate_up, QuantizedTensor):
        small |= {"gate_up_scales": gate_up.scales, "down_scales": down.scales}
        gate_up, down = gate_up.values, down.values
    gate_up, down = (w.of_experts(stacked=True) if isinstance(w, PackedTensor) else w for w in (gate_up, down))
    down = down if isinstance(down, Weight) else down[:, :, None]
    experts = expert_mlp_tpu.Experts(gate_up, down, **small, layer=layer)
    return expert_mlp_tpu.expert_mlp(x, experts, factors, activation, **options)


def test_what_the_kernel_cannot_run_is_refused_with_the_reason():
    def shapes(tokens=32, dim=2048, hidden=768, x="bfloat16", w="bfloat16"):
        gate_up, down = (1, 8, 2, dim, hidden), (1, 8, 1, hidden, dim)
        return jax.ShapeDtypeStruct((tokens, dim), x), *(jax.ShapeDtypeStruct(shape, w) for shape in (gate_up, down))

    assert unsupported(*shapes()) is None
    assert unsupported(*shapes(dim=7168, hidden=2048, w="int8")) is None
    assert unsupported(*shapes(dim=4096, hidden=14336)) is None
    assert "experts of 2048 x 768 need" in unsupported(*shapes(tokens=4096))
    assert "not float32 and int8" in unsupported(*shapes(x="float32", w="int8"))
    assert "experts of 8192 x 8100 need" in unsupported(*shapes(dim=8192, hidden=8100))
    assert "768 columns do not divide into blocks of 512" in unsupported(*shapes(), blocks=Blocks(512))
    with pytest.raises(ValueError, match="two buffers"):
        Blocks(128, 1)


def test_the_choice_says_why_it_is_xlas():
    def lacks(tokens=None, scheme=None, halves=2, **options):
        gate_up, down = jnp.ones((2, halves, 128, 128), jnp.bfloat16), jnp.ones((2, 128, 128), jnp.bfloat16)
        if scheme is not None:
            gate_up, down = quantized(gate_up, (2,), SCHEMES[scheme]), quantized(down, (1,), SCHEMES[scheme])
        return choose(tokens, ExpertWeights(gate_up, down), jnp.bfloat16, "pallas_tpu", **options).reason

    assert not lacks()
    assert not lacks(128, "int8")
    assert "129 tokens" in lacks(129)
    assert "packed" in lacks(scheme="mxfp4")
    assert "with gates" in lacks(halves=1)
    assert "split the model's width" in lacks(split_inputs=True)
    assert choose(None, None, jnp.bfloat16, "xla") == Choice("xla")


def test_what_trainium_cannot_run_is_refused_with_the_reason():
    def lacks(tokens=None, scheme=None, bias=None, activation="silu", **options):
        gate_up, down = jnp.ones((2, 2, 64, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
        if scheme is not None:
            gate_up, down = quantized(gate_up, (2,), SCHEMES[scheme]), quantized(down, (1,), SCHEMES[scheme])
        weights = ExpertWeights(gate_up, down, bias, activation=activation)
        return choose(tokens, weights, jnp.bfloat16, "nki", **options).reason

    assert not lacks()
    assert not lacks(128)
    assert "129 tokens" in lacks(129)
    assert "no quantised weights" in lacks(scheme="int8")
    assert "no biases" in lacks(bias=jnp.ones((2, 2, 64)))
    assert "no activation relu2" in lacks(activation="relu2")
    assert "split the model's width" in lacks(split_inputs=True)
    with pytest.raises(ValueError, match="no activation None"):
        Case(((0,),)).check(
            lambda x, w, f, **rest: expert_mlp(x, replace(w, activation=None), f, backend="nki", **rest)
        )
