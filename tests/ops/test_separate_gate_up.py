"""Gate and up as two weights give what one weight of both gives."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from inferlib import configs
from inferlib.models.abstract import WeightSpec, abstract_model
from inferlib.models.adapters import AdapterSlots
from inferlib.models.families import config_from_hf
from inferlib.models.layers.mlp import gating
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.ops.matmul import matmul
from inferlib.ops.quantized import SCHEMES
from inferlib.ops.separate_gate_up import SeparateGateUp
from inferlib.sharding import axes

NAMES = (axes.EMBED, axes.GATE_UP, axes.MLP)
SEPARATE = Backend(gate_up="separate")


def weight(spec: WeightSpec, whole: jax.Array):
    """The weight of these values as layers see it."""
    return jax.tree.unflatten(jax.tree.structure(spec.value), spec.stored(whole))


@pytest.mark.parametrize("activation", [None, gating("silu")])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("scheme", [None, "int8", "fp8"])
def test_products_are_those_of_one_weight(scheme, rows, activation):
    """Bit for bit, also through a program."""
    stored = SCHEMES[scheme] if scheme else None
    one = WeightSpec("w", (64, 2, 48), np.dtype("float32"), NAMES, "normal", None, "w", (0,), stored)
    x, whole = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 64), one.shape]))
    joint, two = weight(one, whole), weight(replace(one, separate=True), whole)
    assert isinstance(two, SeparateGateUp)
    assert two.shape == joint.shape
    multiply = jax.jit(lambda x, w: matmul(x, w, activation=activation))
    np.testing.assert_array_equal(multiply(x, two), multiply(x, joint))


def test_arrays_are_named_and_have_the_axes_of_one_half():
    spec = WeightSpec("mlp.w", (64, 2, 48), np.dtype("bfloat16"), NAMES, "normal", 0, "w", (0,), SCHEMES["int8"])
    arrays = replace(spec, separate=True).arrays
    assert [array.name for array in arrays] == ["mlp.w.gate", "mlp.w.gate.scales", "mlp.w.up", "mlp.w.up.scales"]
    assert {array.axes for array in arrays} == {(axes.EMBED, axes.MLP), (axes.MLP,)}
    assert sum(array.nbytes for array in arrays) == sum(array.nbytes for array in spec.arrays)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smollm2-135m", {"backend": Backend()}),
        ("smollm2-135m", {"adapters": AdapterSlots(2, 4)}),
        ("smollm2-135m", {"quantization": replace(Quantization.named("int8"), rank=4)}),
        ("qwen3-30b-a3b", {}),
        ("nemotron-h-8b", {}),
    ],
)
def test_others_stay_one_weight(name, options):
    """Those of adapters and of branches, of experts, and of layers without a gate."""
    options = {"backend": SEPARATE, **options}
    model = abstract_model(config_from_hf(configs.load(name)), "bfloat16", scan=True, **options)
    assert any(axes.GATE_UP in weight.axes for weight in model.weights)
    assert not any(weight.separate for weight in model.weights)
