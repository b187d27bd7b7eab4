"""EAGLE-3 heads against the published arithmetic, written down in torch, on a tiny Llama in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.eagle3 import Eagle3Files, new_head, save_head
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.config import ConfigError, ModelConfig
from inferlib.models.eagle3 import abstract_head, default_feature_layers
from inferlib.models.families import config_from_hf, family_of
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism, ShardingError
from inferlib.sharding.shards import Shards, make_shards
from tests.helpers.eagle3 import make_head
from tests.helpers.oracle import make_checkpoint
from tests.helpers.published_eagle3 import PublishedHead

LENGTH, LAYERS, DRAFT_VOCAB = 24, 8, 40
TOKENS = np.random.default_rng(0).integers(0, 131, LENGTH).astype(np.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture
def head(target, tmp_path) -> Path:
    return make_head(tmp_path / "head", target, DRAFT_VOCAB)


def target_config(path: Path) -> ModelConfig:
    return config_from_hf(json.loads((path / "config.json").read_text()))


def features_of(path: Path, layers: tuple[int, ...], *, scan: bool) -> tuple[Any, np.ndarray]:
    """Hidden states [T, N, D] after layers of the target, and the last ones [T, D]."""
    hf = json.loads((path / "config.json").read_text())
    model = abstract_model(config_from_hf(hf), "float32", scan=scan)
    weights = load_weights(SafetensorsSource(path), family_of(hf), model)
    plan = plan_cache(model, rows=1, max_len=LENGTH, chunk=LENGTH, dtype="float32")

    def run(weights, cache):
        zero = jnp.zeros(1, jnp.int32)
        batch = StepBatch.of_chunks(jnp.asarray(TOKENS[None]), zero, zero)
        ctx = StepContext(batch, model.config, plan.max_len, feature_layers=layers)
        ran = model.merge(weights)(ctx, plan.view(cache))
        return ran.features, ran.hidden

    features, hidden = jax.jit(run)(weights, plan.allocate())
    return None if features is None else np.array(features), np.asarray(hidden)


def reference_states(path: Path) -> list[np.ndarray]:
    """The residual [T, D] before each layer, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(input_ids=torch.as_tensor(TOKENS)[None], output_hidden_states=True).hidden_states
    return [x[0].numpy() for x in states]


# ---- features


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_features_are_the_residual_after_so_many_layers(target, scan):
    layers = (0, 5, 2, 7, 5)
    features, hidden = features_of(target, (*layers, LAYERS), scan=scan)
    expected = reference_states(target)
    for i, layer in enumerate(layers):
        np.testing.assert_allclose(features[:, i], expected[layer], rtol=0, atol=1e-5 * expected[layer].std())
    np.testing.assert_array_equal(features[:, -1], hidden)


@pytest.mark.slow
def test_features_of_a_pattern_of_layers_that_repeats(tmp_path):
    """A scan whose pattern has two layers, behind one that is not scanned."""
    kinds = ["full_attention", *["sliding_attention", "full_attention"] * 3]
    path = make_checkpoint(
        tmp_path, "gemma2", num_hidden_layers=7, layer_types=["sliding_attention", *kinds[:-1]], sliding_window=8
    )
    features, _ = features_of(path, tuple(range(7)), scan=True)
    expected = np.stack(reference_states(path)[:7], axis=1)
    np.testing.assert_allclose(features, expected, rtol=0, atol=2e-5 * expected.std())


def test_a_step_that_asks_for_no_features_has_none(target):
    features, _ = features_of(target, (), scan=True)
    assert features is None


def test_features_behind_the_last_layer_are_refused(target):
    with pytest.raises(ConfigError, match="after 9 layers are asked for of a model of 8"):
        features_of(target, (2, 9), scan=False)


def test_features_are_taken_after_the_published_layers():
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(30) == (2, 15, 27)
    assert default_feature_layers(4) == (1, 2, 3)


# ---- the head


DRAFTS = 3


def published(head: Path, target: Path, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Hidden states [T - 1 + k - 1, D] of a text and of drafts behind it, their logits, and the k drafts."""
    oracle, positions = PublishedHead(head, target), torch.arange(LENGTH - 1)
    wide = torch.as_tensor(features).flatten(1)[:-1]
    hidden = oracle.step(torch.as_tensor(TOKENS[1:]).long(), wide, positions)
    states, drafts = [hidden], []
    for i in range(DRAFTS):
        _, chosen = oracle.choose(states[-1][-1:])
        drafts.append(int(chosen))
        if i < DRAFTS - 1:
            states.append(oracle.step(chosen, states[-1][-1:], positions[-1:] + 1 + i))
    every = torch.cat(states)
    return every.numpy(), oracle.choose(every)[0].numpy(), drafts


def ours(path: Path, target: Path, features: np.ndarray, shards: Shards = Shards()):  # noqa: B008
    """The same by the head: a chunk, and then one token a step. On a mesh, one device's part of each step."""
    files = Eagle3Files.open(path, target_config(target))
    head = abstract_head(files.config, "float32", shards=shards)
    weights = files.load(head, shards=shards)
    plan = plan_cache(head.model, rows=1, max_len=LENGTH + DRAFTS, chunk=LENGTH, dtype="float32")
    table = jnp.asarray(load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    table = jnp.pad(table, ((0, -len(table) % shards.size(axes.VOCAB)), (0, 0)))

    def advance(weights, cache, batch, hidden, table, *, fused):
        module = head.merge(weights)
        ctx = StepContext(batch, files.config.model, plan.max_len, shards=shards)
        x = hidden if fused else module.fuse(hidden)
        x, cache = module(module.embedding(batch.tokens, table, shards), x, ctx, plan.view(cache)[0])
        return x, plan.flatten((cache,)), module.logits(x, shards)

    def stepping(fused: bool) -> Callable:
        run = partial(advance, fused=fused)
        if shards.rules is not None:
            spec, arrays = shards.rules.spec, tuple(shards.rules.spec(array.axes) for array in plan.arrays)
            of_weights = tuple(spec(array.axes) for array in head.model.specs)
            taken = of_weights, arrays, spec(()), spec(()), spec((axes.VOCAB, axes.EMBED))
            out = spec(()), arrays, spec((None, axes.VOCAB))
            run = jax.shard_map(run, mesh=shards.mesh, in_specs=taken, out_specs=out, check_vma=False)
        return jax.jit(run)

    programs, ids_of = [stepping(fused) for fused in (False, True)], jax.jit(lambda w, x: head.merge(w).target_ids(x))

    def step(cache, batch, hidden, *, fused):
        hidden, cache, logits = programs[fused](weights, cache, batch, jnp.asarray(hidden), table)
        logits = np.asarray(logits)[:, : files.config.model.vocab]
        chosen = ids_of(weights, logits[-1:].argmax(-1))
        return np.asarray(hidden), cache, logits, int(chosen[0])

    zero, cache = jnp.zeros(1, jnp.int32), plan.allocate(shards)
    batch = StepBatch.of_chunks(jnp.asarray(TOKENS[None, 1:]), zero, zero)
    x, cache, logits, draft = step(cache, batch, features[:-1], fused=False)
    states, scores, drafts = [x], [logits], [draft]
    for i in range(DRAFTS - 1):
        batch = StepBatch.of_rows(jnp.asarray([drafts[-1]]), jnp.asarray([LENGTH + i]))
        x, cache, logits, draft = step(cache, batch, states[-1][-1:], fused=True)
        states.append(x)
        scores.append(logits)
        drafts.append(draft)
    return np.concatenate(states), np.concatenate(scores), drafts


def must_be_equal(results: tuple, expected: tuple) -> None:
    for x, y in zip(results[:2], expected[:2], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * y.std())
    assert results[2] == expected[2]


@pytest.fixture(scope="module")
def features(target) -> np.ndarray:
    return features_of(target, (2, 4, 5), scan=True)[0]


@pytest.mark.parametrize("options", [{}, {"embeds": True, "draft_vocab": 131, "attention_bias": True}])
def test_a_head_equals_the_published_arithmetic(target, features, tmp_path, options):
    path = make_head(tmp_path / "head", target, **{"draft_vocab": DRAFT_VOCAB, **options})
    assert Eagle3Files.open(path, target_config(target)).config.feature_layers == (2, 4, 5)
    must_be_equal(ours(path, target, features), published(path, target, features))


@pytest.mark.slow
def test_a_head_on_a_mesh_equals_the_published_arithmetic(target, features, tmp_path):
    """Four devices: heads are copied, and the 41 tokens that can be drafted are padded."""
    path, shards = make_head(tmp_path / "head", target, 41, embeds=True), make_shards(Parallelism(tensor=4))
    must_be_equal(ours(path, target, features, shards), published(path, target, features))


def test_a_head_is_written_as_it_was_read(target, head, tmp_path):
    config = target_config(target)
    files = Eagle3Files.open(head, config)
    abstract = abstract_head(files.config, "float32")
    hf = json.loads((head / "config.json").read_text())
    save_head(tmp_path / "again", hf, abstract, files.load(abstract))
    old, new = (load_file(path / "model.safetensors") for path in (head, tmp_path / "again"))
    assert old.keys() == new.keys()
    for name, x in old.items():
        assert x.dtype == new[name].dtype, name
        np.testing.assert_array_equal(x, new[name])
    assert Eagle3Files.open(tmp_path / "again", config).config == files.config


def test_a_bfloat16_head_is_read_and_written(target, head, tmp_path):
    config = target_config(target)
    files = Eagle3Files.open(head, config)
    abstract = abstract_head(files.config, "bfloat16")
    weights = files.load(abstract)
    save_head(tmp_path / "half", json.loads((head / "config.json").read_text()), abstract, weights)
    again = Eagle3Files.open(tmp_path / "half", config).load(abstract)
    for old, new in zip(weights, again, strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))


def test_a_head_without_layers_of_features_takes_the_published_ones(target, head):
    rewrite(head, eagle_config=None)
    config = replace(target_config(target), layers=target_config(target).layers * 4)
    assert Eagle3Files.open(head, config).config.feature_layers == (2, 16, 29)


def test_names_of_others_are_read_too(target, head):
    file = head / "model.safetensors"
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in load_file(file).items()}
    config = target_config(target)
    before = Eagle3Files.open(head, config)
    weights = before.load(abstract_head(before.config, "float32"))
    save_file(renamed, file)
    files = Eagle3Files.open(head, config)
    for old, new in zip(weights, files.load(abstract_head(files.config, "float32")), strict=True):
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))


# ---- heads of other models, and damaged ones


def rewrite(head: Path, **options) -> None:
    file = head / "config.json"
    hf = {**json.loads(file.read_text()), **options}
    file.write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))


def read(head: Path, target: ModelConfig) -> None:
    files = Eagle3Files.open(head, target)
    files.load(abstract_head(files.config, "float32"))


def without(head: Path, name: str) -> None:
    tensors = load_file(head / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != name}, head / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda head: rewrite(head, vocab_size=151), "another model, with a vocabulary of 151; this one has 131"),
        (
            lambda head: rewrite(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 30]}),
            "takes the output of layer 30; this one has 8",
        ),
        (
            lambda head: rewrite(head, eagle_config={"eagle_aux_hidden_state_layer_ids": "low"}),
            "list of numbers of layers",
        ),
        (lambda head: rewrite(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}), "fc takes 288 numbers"),
        (lambda head: rewrite(head, norm_before_residual=True), "norm_before_residual .* is not supported"),
        (lambda head: rewrite(head, draft_vocab_size=50), "lm_head.weight is .* instead of"),
        (lambda head: rewrite(head, num_hidden_layers=2), "an EAGLE-3 head has one layer"),
        (lambda head: without(head, "fc.weight"), "has no fc.weight"),
        (lambda head: without(head, "d2t"), "has no d2t"),
        (lambda head: without(head, "midlayer.hidden_norm.weight"), "hidden_norm.weight .* is missing"),
        (lambda head: (head / "model.safetensors").unlink(), "holds no .*safetensors file"),
        (lambda head: (head / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_what_is_no_head_of_the_model_is_refused(target, head, change, message):
    change(head)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read(head, target_config(target))


def test_a_head_of_a_wider_model_is_refused(target, tmp_path):
    wider = replace(target_config(target), dim=128)
    with pytest.raises(ConfigError, match="width 96 cannot take the embeddings of a model of width 128"):
        Eagle3Files.open(make_head(tmp_path / "shared", target, DRAFT_VOCAB), wider)
    with pytest.raises(CheckpointError, match="fc takes 288 numbers, and 3 hidden states of this one are 3 x 128"):
        Eagle3Files.open(make_head(tmp_path / "own", target, DRAFT_VOCAB, embeds=True), wider)


def test_a_draft_outside_the_vocabulary_is_refused(target, head):
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + 120
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"names token .* in d2t, of a model of 131"):
        read(head, target_config(target))


def test_a_mesh_that_splits_the_width_is_refused(target, head):
    shards = make_shards(Parallelism(tensor=2, sequence=2, rules="tp2d"))
    with pytest.raises(ShardingError, match="split the model's width"):
        abstract_head(Eagle3Files.open(head, target_config(target)).config, "float32", shards=shards)


def test_a_new_head_follows_its_target(target):
    hf = new_head(target_config(target), 64)
    assert hf["draft_vocab_size"] == 64
    assert hf["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
