"""Feed-forwards that follow one another, fused into one."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferlib import Buckets, TextSample, export, fuse_feed_forwards
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf
from inferlib.models.ffn_fusion import fused_weights
from tests.helpers.llms import build_llm, random_prompts, reference
from tests.helpers.oracle import make_checkpoint
from tests.helpers.tokenizer import write_tokenizer

TYPES = ("mamba", "mlp", "mlp", "mlp", "attention", "mlp")
RUN = (1, 2, 3)  # the checkpoint's layers that become one
DATA = TextSample(["one two three four five six seven eight nine ten"] * 40, tokens=64, window=16)
BUCKETS = Buckets(prefill=(16,), batch=(1,), cache=(64,))


@pytest.fixture
def model(tmp_path):
    folder = make_checkpoint(tmp_path, "nemotron_h", layers_block_type=list(TYPES))
    write_tokenizer(folder)
    return folder


def silence(folder, layers) -> None:
    """Make these feed-forwards add nothing."""
    tensors = load_file(folder / "model.safetensors")
    for layer in layers:
        names = [name for name in tensors if f"layers.{layer}.mixer.down_proj" in name]
        assert names
        tensors |= {name: np.zeros_like(tensors[name]) for name in names}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("speaks", [RUN[0], pytest.param(RUN[-1], marks=pytest.mark.release)])
def test_one_that_speaks_is_computed_exactly(speaks, model, tmp_path):
    """Where all others of a run add nothing, it does not matter whether they are side by side."""
    silence(model, set(RUN) - {speaks})
    out = tmp_path / "fused"
    report = fuse_feed_forwards(model, out, data=DATA, dtype="float32", progress=False)
    assert (report.before, report.after) == (4, 2)
    assert abs(report.divergence.value) < 1e-6
    assert report.agreement.value == 1
    (tokens,) = random_prompts([40])
    np.testing.assert_allclose(build_llm(out, BUCKETS).logits(tokens), reference(model, tokens), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_error_is_told(model, tmp_path):
    report = fuse_feed_forwards(model, tmp_path / "fused", data=DATA, dtype="float32", progress=False)
    assert report.divergence.value > 0.01
    assert report.agreement.value < 1
    assert report.tokens == 64
    assert f"{report.divergence.value:.4f}" in str(report)
    json.dumps(report.to_json())
    # The same from the models as they run.
    (tokens,) = random_prompts([40])
    llm = build_llm(tmp_path / "fused", BUCKETS)
    assert np.abs(llm.logits(tokens) - reference(model, tokens)).max() > 0.1


@pytest.mark.release
def test_a_fused_model_is_quantised_like_any_other(model, tmp_path):
    silence(model, RUN[1:])
    fuse_feed_forwards(model, tmp_path / "fused", data=DATA, quantization="int8", dtype="float32", progress=False)
    (tokens,) = random_prompts([40])
    got = build_llm(tmp_path / "fused", BUCKETS).logits(tokens)
    np.testing.assert_allclose(got, reference(model, tokens), rtol=0, atol=0.3)  # rounded, of a deviation above 1


@pytest.mark.parametrize("offset", [False, True])
def test_a_fused_feed_forward_is_the_sum(offset, model):
    """Of norms with and without an offset, by numpy."""
    rng = np.random.default_rng(0)
    config = config_from_hf(json.loads((model / "config.json").read_text()))
    object.__setattr__(config.norm, "unit_offset", offset)
    x = rng.normal(size=(5, 8))
    x /= np.sqrt((x**2).mean(-1, keepdims=True))
    sizes = {"pre_mlp_norm": (8,), "mlp.gate_up": (8, 1, 6), "mlp.down": (6, 8)}
    sizes |= {"mlp.gate_up_bias": (1, 6), "mlp.down_bias": (8,)}
    layers = [{part: jnp.asarray(rng.normal(size=size), jnp.float32) for part, size in sizes.items()} for _ in range(3)]

    def branch(layer) -> np.ndarray:
        one = {part: np.asarray(value, np.float64) for part, value in layer.items()}
        y = (x * (one["pre_mlp_norm"] + offset)) @ one["mlp.gate_up"][:, 0] + one["mlp.gate_up_bias"][0]
        return np.maximum(y, 0) ** 2 @ one["mlp.down"] + one["mlp.down_bias"]

    got = branch(fused_weights(config, layers))
    np.testing.assert_allclose(got, sum(map(branch, layers)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_cannot_be_fused(model, tmp_path, checkpoint):
    with pytest.raises(ConfigError, match="no dense feed-forwards that follow one another"):
        fuse_feed_forwards(checkpoint("llama"), tmp_path / "out", data=DATA, progress=False)
    with pytest.raises(ConfigError, match="needs RMS norms"):
        fuse_feed_forwards(checkpoint("gpt2"), tmp_path / "out", data=DATA, progress=False)
    fuse_feed_forwards(model, tmp_path / "fused", data=DATA, quantization="int8", progress=False)
    with pytest.raises(CheckpointError, match="quantised already: fuse the original"):
        fuse_feed_forwards(tmp_path / "fused", tmp_path / "out", data=DATA, progress=False)
    with pytest.raises(CheckpointError, match="fused feed-forwards, so its layers are not those"):
        export(tmp_path / "fused", tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match="adapters and other libraries know: take the original"):
        build_llm(tmp_path / "fused", BUCKETS, max_adapters=2)
    assert not (tmp_path / "out").exists()
