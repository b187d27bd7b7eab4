"""Adapters merged into checkpoints as they are converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferlib import convert
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.helpers.adapters import write_adapter

LAYER = "model.layers.{}.self_attn.{}_proj"
VOCAB = 131


@pytest.fixture(scope="module")
def llama(checkpoint) -> Path:
    return checkpoint("llama", num_hidden_layers=2)


def shape_of(model: Path, name: str) -> tuple[int, ...]:
    return load_file(model / "model.safetensors")[name].shape


def projections(model: Path) -> dict[str, tuple[int, int, int]]:
    """Of rank 4, but for one of rank 2; also the feed-forward, the embedding and the head."""
    rows = {}
    for layer, name, rank in ((0, "q", 4), (1, "q", 2), (0, "v", 4), (1, "o", 4)):
        module = LAYER.format(layer, name)
        rows[module] = (rank, *shape_of(model, module + ".weight")[::-1])
    for module in ("model.layers.1.mlp.down_proj", "lm_head"):
        rows[module] = (4, *shape_of(model, module + ".weight")[::-1])
    return rows | {"model.embed_tokens": (4, *shape_of(model, "model.embed_tokens.weight"))}


def merged_by_hand(model: Path, out: Path, changes: dict[str, np.ndarray]) -> Path:
    """A copy of a checkpoint with these added to its tensors."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = (tensors[name].astype(np.float64) + change).astype(np.float32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def assert_close(got: Path, expected: Path, parallel: str = "") -> None:
    shards, loaded = make_shards(Parallelism.parse(parallel)), []
    for path in (got, expected):
        files = ModelFiles.open(path)
        model = abstract_model(files.config, "float32", shards=shards)
        loaded.append(files.load(model, shards=shards))
    for spec, a, b in zip(model.specs, *loaded, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6, err_msg=spec.name)


@pytest.mark.parametrize(("rslora", "parallel"), [(False, "tp=1"), (True, "tp=2")])
def test_a_merged_adapter_equals_a_merge_by_hand(llama, tmp_path, rslora, parallel):
    """Patterns of ranks and of alpha, by the end of a name and by an expression, of which the first counts."""
    patterns = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {r".*\.o_proj": 3, "v_proj": 16, "o_proj": 5},
    }
    modules = projections(llama)
    tensors = write_adapter(tmp_path / "adapter", modules, use_rslora=rslora, **patterns)
    changes = {}
    for module, (rank, *_) in modules.items():
        alpha = {"o_proj": 3, "v_proj": 16}.get(module.rpartition(".")[2], 8)
        a, b = (x.astype(np.float64) for name, x in tensors.items() if f".{module}.lora" in name)
        change = (b @ a) * alpha / (np.sqrt(rank) if rslora else rank)
        changes[module + ".weight"] = change.T if "embed" in module else change
    expected = merged_by_hand(llama, tmp_path / "expected", changes)
    out = tmp_path / "merged"
    convert(llama, out, dtype="float32", parallel=parallel, merge_adapter=tmp_path / "adapter", progress=False)
    assert_close(out, expected, parallel)
    assert sorted(path.name for path in llama.iterdir()) == sorted(path.name for path in expected.iterdir())


@pytest.mark.slow
def test_fused_projections_and_weights_that_are_transposed(checkpoint, tmp_path):
    """GPT-2's queries, keys and values are one module, whose weight is [in, out]."""
    gpt2 = checkpoint("gpt2", num_hidden_layers=2)
    name = next(n for n in load_file(gpt2 / "model.safetensors") if n.endswith("h.1.attn.c_attn.weight"))
    module = name.removesuffix(".weight")
    tensors = write_adapter(tmp_path / "adapter", {module: (4, *shape_of(gpt2, name))}, fan_in_fan_out=True)
    a, b = (x.astype(np.float64) for x in tensors.values())
    expected = merged_by_hand(gpt2, tmp_path / "expected", {name: 2 * (b @ a).T})
    convert(gpt2, tmp_path / "merged", dtype="float32", merge_adapter=tmp_path / "adapter", progress=False)
    assert_close(tmp_path / "merged", expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3', and LORA alone is read: merge it with PEFT"),
        ({"use_dora": True}, "has DoRA, which is not supported: merge it with PEFT"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save, whole modules beside the adapter"),
        ({"bias": "all"}, "has bias 'all', and only 'none' is supported"),
        ({"target_parameters": ["experts"]}, "has target_parameters"),
        ({"r": 0}, "r must be above 0, it is 0"),
        ({"r": 3}, "the rank 3, and its tensors have shapes"),
        ({"rank_pattern": [1]}, "rank_pattern must map names of modules"),
    ],
)
def test_adapters_of_other_kinds_are_refused(llama, tmp_path, config, message):
    module = LAYER.format(0, "q")
    write_adapter(tmp_path / "adapter", {module: (4, *shape_of(llama, module + ".weight")[::-1])}, **config)
    with pytest.raises(CheckpointError, match=message):
        convert(llama, tmp_path / "out", merge_adapter=tmp_path / "adapter", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"model.layers.0.self_attn.other": (4, 8, 8)}, "changes model.layers.0.self_attn.other, and the model has no"),
        ({"model.layers.0.self_attn.q_proj": (4, 8, 8)}, r"changes .* as \(8, 8\), and the model's weight is"),
        ({}, "changes nothing"),
    ],
)
def test_an_adapter_of_another_model_is_refused(llama, tmp_path, modules, message):
    write_adapter(tmp_path / "adapter", modules)
    with pytest.raises(CheckpointError, match=message):
        ModelFiles.open(llama).merged(tmp_path / "adapter")


def test_what_is_no_adapter_is_refused(llama, checkpoint, tmp_path):
    """A folder without a configuration, other tensors, a tied head, a model that is converted already."""
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json: an adapter is a directory that PEFT wrote"):
        ModelFiles.open(llama).merged(tmp_path)
    module = LAYER.format(0, "q")
    sizes = (4, *shape_of(llama, module + ".weight")[::-1])
    for extra in ("lora_magnitude_vector", "base_layer.weight"):
        tensors = write_adapter(tmp_path / "adapter", {module: sizes})
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file(tensors | {f"base_model.model.{module}.{extra}": np.ones(3, np.float32)}, file)
        with pytest.raises(CheckpointError, match=r"holds (DoRA|more than the two factors of LoRA) \(base_model"):
            ModelFiles.open(llama).merged(tmp_path / "adapter")
    tied = checkpoint("llama", num_hidden_layers=1, tie_word_embeddings=True)
    write_adapter(tmp_path / "embedding", {"model.embed_tokens": (4, *shape_of(tied, "model.embed_tokens.weight"))})
    with pytest.raises(CheckpointError, match="the embedding and the output projection at once: train the adapter"):
        ModelFiles.open(tied).merged(tmp_path / "embedding")
    convert(llama, tmp_path / "done", dtype="float32", progress=False)
    write_adapter(tmp_path / "adapter", {module: sizes})
    with pytest.raises(CheckpointError, match="is converted: merge the adapter into the original"):
        ModelFiles.open(tmp_path / "done").merged(tmp_path / "adapter")


def test_experts_one_by_one(checkpoint, tmp_path):
    """An expert's projection in a mixture, where the checkpoint has each expert by itself."""
    mixture = checkpoint("qwen3_moe", num_hidden_layers=1)
    module = "model.layers.0.mlp.experts.1.down_proj"
    tensors = write_adapter(tmp_path / "adapter", {module: (4, *shape_of(mixture, module + ".weight")[::-1])})
    a, b = (x.astype(np.float64) for x in tensors.values())
    expected = merged_by_hand(mixture, tmp_path / "expected", {module + ".weight": 2 * (b @ a)})
    convert(mixture, tmp_path / "merged", dtype="float32", merge_adapter=tmp_path / "adapter", progress=False)
    assert_close(tmp_path / "merged", expected)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["num_hidden_layers"] == 1
