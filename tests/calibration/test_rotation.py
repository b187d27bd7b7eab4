"""Rotated and smoothed models compute what the original does, before anything is rounded."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.calibration.layer_weights import layer_parts
from inferlib.calibration.rotation import rotate_back, rotate_inputs, rotate_layer, rotation
from inferlib.calibration.smoothing import smooth
from inferlib.ops.hadamard import rotation_matrix
from inferlib.ops.observed import InputSums
from inferlib.ops.quantized import SCHEMES
from inferlib.option_checks import ConfigurationError
from tests.helpers.calibration import job_of, logits_of
from tests.helpers.llms import reference
from tests.helpers.oracle import make_checkpoint

WINDOWS = np.random.default_rng(0).integers(4, 120, (4, 24)).astype(np.int32)
TOLERANCE = 2e-4  # of the logits' standard deviation
_TWO = {"num_hidden_layers": 2}


@pytest.mark.parametrize("size", [1, 2, 12, 24, 64, 144, 576, 1536])
def test_rotations_are_hadamard_matrices(size):
    turn = rotation(size)
    np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(np.abs(turn), size**-0.5, rtol=1e-12)


@pytest.mark.parametrize("size", [7, 22])
def test_sizes_without_a_hadamard_matrix_have_another_rotation(size):
    turn = rotation(size)
    np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-12)
    assert np.abs(turn).max() < 1


def equals_reference(path, logits: np.ndarray) -> None:
    for window, ours in zip(WINDOWS, logits, strict=True):
        expected = reference(path, window.tolist())
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * expected.std())


FAMILIES = {
    "tied": ("llama", _TWO | {"tie_word_embeddings": True}),
    "biases": ("llama", _TWO | {"attention_bias": True, "mlp_bias": True}),
    "qwen2_moe": ("qwen2_moe", _TWO),
    "deepseek_v3": ("deepseek_v3", _TWO),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "mlp"]}),
    "qwen3_next": ("qwen3_next", _TWO | {"layer_types": ["linear_attention", "full_attention"]}),
}
SMOOTHED = {
    **FAMILIES,
    "gemma2": ("gemma2", _TWO),
    "gemma3n": ("gemma3n_text", {}),
    "cohere2": ("cohere2", _TWO),
    "gpt2": ("gpt2", {}),
    "gpt_oss": ("gpt_oss", _TWO),
}


def marked(*names: str, mark=pytest.mark.slow) -> list:
    return [pytest.param(*name.split(), marks=mark) for name in names]


@pytest.mark.parametrize(
    "name", ["tied", *marked("deepseek_v3", "nemotron_h", "qwen3_next"), *marked("qwen2_moe", mark=pytest.mark.release)]
)
@pytest.mark.fast_cases(1)
def test_a_rotated_model_equals_the_original(name, tmp_path):
    family, options = FAMILIES[name]
    path = make_checkpoint(tmp_path, family, **options)
    job = job_of(path, "hadamard+gptq", "int4")
    assert not job.target.config.tied
    rotations = job.rotations
    assert rotations is not None

    def rotated(layer, _):
        weights = rotate_layer(layer_parts(job.target, layer), job.load(layer), rotations)
        first = next(part for part in ("pre_attn_norm", "pre_mlp_norm") if part in weights)
        assert np.ptp(weights[first]) == 0  # folded into what reads it
        return weights

    equals_reference(path, logits_of(job, WINDOWS, rotated))


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "gemma3n", "gpt2"])
def test_a_residual_that_cannot_be_rotated_is_an_error(name, tmp_path):
    family, options = SMOOTHED[name]
    path = make_checkpoint(tmp_path, family, **options)
    with pytest.raises(ConfigurationError, match="hadamard"):
        job_of(path, "hadamard+gptq", "int4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("biases", "awq"),
        ("gemma2", "smoothquant"),
        *marked("deepseek_v3 awq", "nemotron_h awq"),
        *marked("gemma3n awq", "gpt2 awq", "qwen3_next smoothquant", mark=pytest.mark.release),
        *marked("cohere2 smoothquant", "qwen2_moe smoothquant", "gpt_oss smoothquant", mark=pytest.mark.release),
    ],
)
def test_a_smoothed_model_equals_the_original(name, kind, tmp_path):
    """As do models of the other families, whose layers have fewer places that take factors, or none."""
    family, options = SMOOTHED[name]
    path = make_checkpoint(tmp_path, family, **options)
    job, changed = job_of(path, "nearest", "int8"), []

    def smoothed(layer, walk):
        weights, parts = job.load(layer), layer_parts(job.target, layer)
        recorded = walk.record(layer, weights, job.quantized(layer))
        sums = {name: sums for names, sums in recorded.items() for name in names}
        assert set(sums) == set(job.quantized(layer))  # every product is recorded
        new, _ = smooth(parts, weights, sums, kind, SCHEMES["int4"], np.dtype("float32"))
        changed.extend(name for name in new if not np.array_equal(new[name], weights[name]))
        return new

    equals_reference(path, logits_of(job, WINDOWS, smoothed))
    if name in FAMILIES:
        assert {"pre_attn_norm", "mlp.down"} <= set(changed) or name != "biases"
        assert "pre_attn_norm" in changed


def test_rotated_inputs_are_those_of_a_float64_oracle():
    """What a rounding error costs stays the same in the rotated inputs, and the weight turns back."""
    draw, size = np.random.default_rng(0).standard_normal, 12
    w, x = draw((1, 36, 5)), draw((50, 36))
    sums = InputSums(*(jnp.asarray(a, jnp.float32) for a in ((x.T @ x)[None], w[..., 0], w[..., 0], [50.0])))
    turned, new = rotate_inputs(jnp.asarray(w, jnp.float32), sums, size)
    turn = np.kron(np.eye(3), rotation_matrix(size))
    np.testing.assert_allclose(turned[0], turn.T @ w[0], atol=1e-5)
    np.testing.assert_allclose(new.products[0], (x @ turn).T @ (x @ turn), atol=1e-4)
    np.testing.assert_allclose(rotate_back(turned, 1, size), w, atol=1e-5)


def test_the_inputs_of_dense_feed_forwards_are_rotated_in_runs_that_divide_all(tmp_path):
    rotations = {}
    for name, family, options in [
        ("dense", "llama", _TWO | {"intermediate_size": 384}),
        ("small", "llama", _TWO | {"intermediate_size": 80}),
        ("odd", "llama", _TWO | {"intermediate_size": 81}),
        ("experts", "mixtral", _TWO),
    ]:
        job = job_of(make_checkpoint(tmp_path / name, family, **options), "hadamard+gptq", "int8")
        rotations[name] = job.quantization.rotation
        schemes = {weight.part: weight.scheme for weight in job.target.weights if weight.scheme}
        assert {part for part, scheme in schemes.items() if scheme.rotation} <= {"mlp.down"}
    assert rotations == {"dense": 128, "small": 16, "odd": 0, "experts": 0}
    assert job_of(tmp_path / "dense", "hadamard:merged+gptq", "int8").quantization.rotation == 0
