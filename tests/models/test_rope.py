"""Rotary embeddings against transformers' implementation."""

from __future__ import annotations

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_partly

from inferlib import configs
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import RopeScaling, RopeSpec
from inferlib.models.families import config_from_hf
from inferlib.models.families.common import rope_spec
from inferlib.models.layers.rope import apply_rope, inverse_frequencies, rope_angles

ROPE_KINDS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-betas": {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 20, "beta_slow": 2},
    "yarn-untruncated": {"factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn-attention-factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
    },
    "longrope": {
        "short_factor": [1.0 + i / 50 for i in range(64)],
        "long_factor": [1.0 + i for i in range(64)],
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("max_len", [100, 4096, 5000, 20000])
@pytest.mark.parametrize("name", ROPE_KINDS)
def test_frequencies_equal_transformers(name, max_len):
    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": 5e5, **ROPE_KINDS[name]}
    hf = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 16384,
        "rope_parameters": parameters,
    }
    config = AutoConfig.for_model("llama", **copy.deepcopy(hf))
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=max_len)
    frequencies, ours = inverse_frequencies(rope_spec(hf), max_len)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=3e-7)
    assert ours == pytest.approx(factor, rel=1e-12)


def test_alpha_stretches_the_base_at_any_length():
    spec = RopeSpec(16, 1e4, RopeScaling("dynamic", original_context=64, alpha=1000.0))
    expected = inverse_frequencies(RopeSpec(16, 1e4 * 1000.0 ** (16 / 14)), 10)[0]
    for max_len in (10, 10000):
        np.testing.assert_array_equal(inverse_frequencies(spec, max_len)[0], expected)


def _rotated(rotate, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """transformers' rotation of x [T, H, h] with cos and sin [T, dim / 2]."""
    cos, sin = (torch.from_numpy(np.concatenate([a, a], axis=-1))[None] for a in (cos, sin))
    q = torch.from_numpy(x)[None].transpose(1, 2)
    return rotate(q, q, cos, sin)[0].transpose(1, 2)[0].numpy()


@pytest.mark.parametrize(("dim", "rotate"), [(16, rotate_halves), (12, rotate_partly)])
def test_rotation_equals_transformers(dim, rotate):
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((9, 3, 16), np.float32)
    spec = RopeSpec(dim, 1e4, RopeScaling("yarn", 4.0, 64))
    positions = rng.integers(0, 200, 9).astype(np.int32)
    cos, sin = rope_angles(spec, 256, jnp.asarray(positions))
    frequencies, factor = inverse_frequencies(spec, 256)
    angles = positions[:, None] * frequencies.astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=2e-5)
    expected = _rotated(rotate, x, np.array(cos), np.array(sin))
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), cos, sin), expected, atol=1e-6)


def test_interleaved_pairs_are_a_permutation_of_halves():
    """Queries and keys permuted alike have the dot products of the interleaved rotation."""
    rng, spec = np.random.default_rng(0), RopeSpec(12, 1e4)
    x = rng.standard_normal((9, 3, 16), np.float32)
    cos, sin = rope_angles(spec, 16, jnp.arange(9))
    order = np.concatenate([np.arange(0, 12, 2), np.arange(1, 12, 2), np.arange(12, 16)])
    ours = np.array(apply_rope(jnp.asarray(x[..., order]), cos, sin))
    expected = _rotated(rotate_interleaved, x, np.array(cos), np.array(sin))
    np.testing.assert_allclose(ours, expected[..., order], atol=1e-6)


def test_rotation_takes_any_inner_dimensions_and_keeps_the_type():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 2, 3, 8)), jnp.bfloat16)
    cos, sin = rope_angles(RopeSpec(8, 1e4), 16, jnp.arange(5))
    y = apply_rope(x, cos, sin)
    assert y.dtype == jnp.bfloat16
    whole = apply_rope(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(y, whole.astype(jnp.bfloat16))
    np.testing.assert_array_equal(y[:, 1, 2], apply_rope(x[:, 1, 2], cos, sin))


def test_a_step_has_its_kinds_in_the_order_of_layers():
    """A set's order differs between processes, and with it the text of a program, by which caches know it."""
    config = config_from_hf(configs.load("gemma3-1b"))
    zero = jnp.zeros(1, jnp.int32)
    step = StepContext(StepBatch.of_rows(zero, zero + 1), config, max_len=64)
    assert list(step.rope) == list(dict.fromkeys(layer.attention.rope for layer in config.layers))
    assert len(step.rope) == 2
