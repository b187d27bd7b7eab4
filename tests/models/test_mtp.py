"""The layer that predicts a further token, against transformers' layer behind the published projection, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.mtp import MtpFiles
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf, family_of
from inferlib.models.mtp import abstract_mtp
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import make_shards
from tests.helpers.mtp import MTP_LAYERS, PublishedMtp, make_target
from tests.helpers.oracle import make_checkpoint

LENGTH, FURTHER = 20, 3
TOKENS = np.random.default_rng(0).integers(0, 131, LENGTH + FURTHER).astype(np.int32)


@torch.no_grad()
def reference(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [LENGTH - 1 + FURTHER, D] of a layer, over a text and then fed with its own; and normed."""
    layer, tokens = PublishedMtp(path), torch.as_tensor(TOKENS).long()
    out = layer.step(tokens[1:LENGTH], layer.features(tokens[:LENGTH])[:-1])
    for further in range(FURTHER):
        out = layer.step(tokens[LENGTH + further, None], layer.passed_on(out[-1:]))
    return out.numpy(), layer.norm(out, "shared_head.norm").numpy()


def open_files(path: Path) -> MtpFiles:
    hf = json.loads((path / "config.json").read_text())
    return MtpFiles.open(SafetensorsSource(path), family_of(hf), config_from_hf(hf))


def ours(path: Path) -> tuple[np.ndarray, np.ndarray]:
    files, zero = open_files(path), jnp.zeros(1, jnp.int32)
    model, tokens = abstract_model(files.target, "float32", scan=True), jnp.asarray(TOKENS)
    weights = load_weights(files.source, files.family, model)
    plan = plan_cache(model, rows=1, max_len=LENGTH, chunk=LENGTH, dtype="float32")

    @jax.jit
    def run(weights, cache):
        decoder = model.merge(weights)
        ctx = StepContext(StepBatch.of_chunks(tokens[None, :LENGTH], zero, zero), files.target, plan.max_len)
        return decoder.final_norm(decoder(ctx, plan.view(cache)).hidden, ctx.shards)[:-1]

    hidden, table = run(weights, plan.allocate()), model.merge(weights).embed[...]

    mtp = abstract_mtp(files.target, "float32", normed=files.names.normed)
    of_layer = files.load(mtp)
    plan = plan_cache(mtp.model, rows=1, max_len=LENGTH + FURTHER, chunk=LENGTH, dtype="float32")

    @jax.jit
    def advance(weights, cache, batch, hidden):
        layer = mtp.merge(weights)
        ctx = StepContext(batch, mtp.model.config, plan.max_len)
        x, cache = layer(table[batch.tokens], hidden, ctx, plan.view(cache)[0])
        return x, plan.flatten((cache,)), layer.normed(x, ctx.shards), layer.passed_on(x[-1:], ctx.shards)

    batch = StepBatch.of_chunks(tokens[None, 1:LENGTH], zero, zero)
    cache, states, normed = plan.allocate(), [], []
    for further in range(FURTHER + 1):
        x, cache, y, hidden = advance(of_layer, cache, batch, hidden)
        states.append(x)
        normed.append(y)
        at = LENGTH + further
        batch = StepBatch.of_rows(tokens[at : at + 1], zero + at) if further < FURTHER else batch
    return np.concatenate(states), np.concatenate(normed)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", pytest.param("glm4_moe", marks=pytest.mark.release)])
def test_a_layer_equals_transformers(family, tmp_path):
    path = make_target(tmp_path, family)
    for result, expected in zip(ours(path), reference(path), strict=True):
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5 * expected.std())


# ---- what has no such layers


def test_a_checkpoint_without_the_layer_is_refused(tmp_path):
    path = make_target(tmp_path, "deepseek_v3")
    file = path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if not k.startswith(f"model.layers.{MTP_LAYERS}.")}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"no layer model.layers.{MTP_LAYERS}. for predicting further tokens"):
        open_files(path)


def test_a_layer_without_a_tensor_is_refused(tmp_path):
    path = make_target(tmp_path, "deepseek_v3")
    file = path / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.endswith("hnorm.weight")}, file)
    files = open_files(path)
    with pytest.raises(CheckpointError, match=r"hnorm.weight \(96,\) is missing"):
        files.load(abstract_mtp(files.target, "float32"))


def test_families_without_the_layer_are_refused(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="llama has no layer for predicting further tokens"):
        open_files(path)


def test_a_mesh_that_splits_tokens_is_refused(tmp_path):
    files = open_files(make_target(tmp_path, "deepseek_v3"))
    with pytest.raises(ShardingError, match="an MTP layer cannot"):
        abstract_mtp(files.target, "float32", shards=make_shards(Parallelism(tensor=2, rules="tp_sp")))
