"""From a checkpoint to weights: types, shards, wrong tensors, stacked layers, and the memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferlib import LLM
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import ConfigError
from inferlib.models.families import config_from_hf, family_of
from inferlib.programs.counter import compilations
from tests.helpers.oracle import make_checkpoint

FILE = "model.safetensors"


def load(folder: Path, dtype: str = "float32", *, scan: bool = False) -> tuple[AbstractModel, list[np.ndarray]]:
    hf = json.loads((folder / "config.json").read_text())
    model = abstract_model(config_from_hf(hf), dtype, scan=scan)
    weights = load_weights(SafetensorsSource(folder), family_of(hf), model)
    assert [(w.shape, w.dtype) for w in weights] == [(spec.shape, spec.dtype) for spec in model.specs]
    return model, [np.asarray(w) for w in weights]


@pytest.fixture(scope="module")
def original(checkpoint) -> Path:
    """Two layers, an output projection of its own, float32."""
    return checkpoint("llama")


@pytest.fixture
def rewrite(original, tmp_path):
    """`rewrite(change)`: a copy of the original whose tensors `change` altered."""

    def write(change) -> Path:
        tensors = load_file(original / FILE)
        change(tensors)
        save_file(tensors, tmp_path / FILE)
        (tmp_path / "config.json").write_text((original / "config.json").read_text())
        return tmp_path

    return write


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_types_of_sources(kind, original, rewrite):
    """A 16-bit checkpoint loads as itself and as float32 without any rounding; float32 rounds once."""

    def convert(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(kind)

    folder = rewrite(convert)
    _, exact = load(original)
    _, narrow = load(folder, kind)
    _, wide = load(folder, "float32")
    _, rounded = load(original, kind)
    for a, b, c, d in zip(exact, narrow, wide, rounded, strict=True):
        np.testing.assert_array_equal(a.astype(kind), b)
        np.testing.assert_array_equal(b.astype(np.float32), c)
        np.testing.assert_array_equal(b, d)


def test_types_may_differ_from_tensor_to_tensor(original, rewrite):
    def convert(tensors):
        tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].astype(
            ml_dtypes.bfloat16
        )

    _, exact = load(original)
    _, mixed = load(rewrite(convert))
    assert sum(not np.array_equal(a, b) for a, b in zip(exact, mixed, strict=True)) == 1
    for a, b in zip(exact, mixed, strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-8)


def test_an_index_of_several_files(original, tmp_path):
    tensors = load_file(original / FILE)
    names, index = sorted(tensors), {}
    for i in range(3):
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, tmp_path / f"part-{i}.safetensors")
        index |= dict.fromkeys(part, f"part-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text((original / "config.json").read_text())
    for a, b in zip(load(original)[1], load(tmp_path)[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_every_row_of_every_tensor_is_read_once(family, tmp_path, monkeypatch):
    """Also of fused tensors, which are read in pieces."""
    folder, rows, read = make_checkpoint(tmp_path, family, num_hidden_layers=2), Counter(), SafetensorsSource.read

    def counting(self, name, part=None):
        rows.update((name, row) for row in range(self.shape(name)[0])[part or slice(None)])
        return read(self, name, part)

    monkeypatch.setattr(SafetensorsSource, "read", counting)
    load(folder)
    source = SafetensorsSource(folder)
    assert rows == Counter((name, row) for name in source.names() for row in range(source.shape(name)[0]))


def test_what_is_laid_out_alike_is_compiled_once(tmp_path):
    """Also by layers and models that differ in what no weight shows: windows, rotary bases, feed-forwards."""
    kinds = ["sliding_attention", "full_attention"]
    load(make_checkpoint(tmp_path / "one", "ministral", num_hidden_layers=2, layer_types=kinds))
    rope = {"rope_type": "default", "rope_theta": 3e4}
    changes = {"sliding_window": 5, "rope_parameters": rope, "hidden_act": "gelu", "num_hidden_layers": 2}
    other = make_checkpoint(tmp_path / "other", "ministral", layer_types=kinds[::-1], **changes)
    before = compilations()
    load(other)
    assert compilations() == before


# ---- tensors that do not fit


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name, *shape):
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


K_PROJ, GATE = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(K_PROJ), f"missing: {K_PROJ} (48, 96)"),
        (drop("lm_head.weight"), "missing: lm_head.weight (131, 96)"),
        (drop("model.norm.weight", GATE), f"missing: {GATE} (80, 96), model.norm.weight (96,)"),
        (put(K_PROJ, 48, 95), f"wrong shape: {K_PROJ}: (48, 95) instead of (48, 96)"),
        (put("model.embed_tokens.weight", 96), "wrong shape: model.embed_tokens.weight: (96,) instead of (131, 96)"),
        (put("model.layers.2.self_attn.k_proj.weight", 48, 96), "unexpected: model.layers.2.self_attn.k_proj.weight"),
        (put("model.layers.0.self_attn.k_proj.bias", 48), "unexpected: model.layers.0.self_attn.k_proj.bias (48,)"),
    ],
)
def test_wrong_tensors_are_named_before_anything_is_read(change, message, rewrite, monkeypatch):
    folder = rewrite(change)
    monkeypatch.setattr(SafetensorsSource, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError) as caught:
        LLM(folder, max_len=64, progress=False)
    assert "does not hold a llama model of its config.json" in str(caught.value)
    assert message in str(caught.value)


def test_all_kinds_of_wrong_tensors_are_named_at_once(rewrite):
    """At most five of each kind; the rest is counted."""

    def change(tensors):
        for name in [name for name in tensors if "layers.1" in name]:
            tensors["other" + name] = tensors.pop(name)
        put(GATE, 1, 2)(tensors)

    with pytest.raises(CheckpointError) as caught:
        load(rewrite(change))
    text = str(caught.value)
    assert text.count("and 4 more") == 2
    assert "missing: model.layers.1" in text
    assert f"wrong shape: {GATE}" in text
    assert "unexpected: othermodel.layers.1" in text


def test_a_checkpoint_of_a_model_without_its_head(tmp_path):
    """The original GPT-2: names lack what those of a model with a head begin with."""
    path = make_checkpoint(tmp_path / "whole", "gpt2", num_hidden_layers=1)
    tensors = load_file(path / FILE)
    assert all(name.startswith("transformer.") for name in tensors)
    bare = tmp_path / "bare"
    bare.mkdir()
    save_file({name.removeprefix("transformer."): x for name, x in tensors.items()}, bare / FILE)
    (bare / "config.json").write_text((path / "config.json").read_text())
    for a, b in zip(load(path)[1], load(bare)[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_leftovers_of_old_checkpoints_are_ignored(original, rewrite):
    folder = rewrite(put("model.layers.0.self_attn.rotary_emb.inv_freq", 12))
    for a, b in zip(load(original)[1], load(folder)[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("present", [False, True])
def test_tied_output_projection(present, tmp_path):
    """The embedding serves both ends; a copy of it in the file is passed over."""
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=2, tie_word_embeddings=True)
    tensors = load_file(folder / FILE)
    assert "lm_head.weight" not in tensors
    if present:
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / FILE)
    model, weights = load(folder)
    assert "head" not in {spec.name for spec in model.specs}
    embed = next(w for w, spec in zip(weights, model.specs, strict=True) if spec.name == "embed")
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"])


def test_a_text_model_within_others(tmp_path):
    """A checkpoint that also sees and hears, and holds keys and values of layers that attend to another's."""
    sizes = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1}
    sizes |= {"intermediate_size": 80, "activation_sparsity_pattern": [0.7] * 2}
    dense = make_checkpoint(tmp_path / "plain", "gemma3n_text", **sizes)
    tensors, whole = load_file(dense / FILE), tmp_path / "whole"
    within = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    within |= {"model.vision_tower.stem.weight": np.ones(3), "model.embed_audio.norm.weight": np.ones(3)}
    within |= {"model.language_model.layers.1.self_attn.v_proj.weight": np.ones((48, 96))}
    whole.mkdir()
    save_file(within, whole / FILE)
    text = json.loads((dense / "config.json").read_text())
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (whole / "config.json").write_text(json.dumps(config))
    assert config_from_hf(config).eos_token_ids == (1, 106)
    for a, b in zip(load(dense)[1], load(whole)[1], strict=True):
        np.testing.assert_array_equal(a, b)
    save_file({**within, "model.language_model.layers.0.self_attn.x.weight": np.ones(3)}, whole / FILE)
    with pytest.raises(CheckpointError, match=r"unexpected: model.language_model.layers.0.self_attn.x.weight"):
        load(whole)


def test_experts_in_one_tensor_or_apart(tmp_path, caplog):
    """Both are published, beside tensors of images, which are left out and said to be."""
    options = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    apart, whole = make_checkpoint(tmp_path / "apart", "qwen3_5_moe", **options), tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text((apart / "config.json").read_text())
    tensors, name = load_file(apart / FILE), "model.language_model.layers.0.mlp.experts.{}_proj"
    gates, ups, downs = (
        np.stack([tensors.pop(name.format(f"{e}.{part}") + ".weight") for e in range(7)])
        for part in ("gate", "up", "down")
    )
    tensors[name.format("gate_up")] = np.concatenate([gates, ups], axis=1)
    save_file({**tensors, name.format("down"): downs}, whole / FILE)
    for a, b in zip(load(apart)[1], load(whole)[1], strict=True):
        np.testing.assert_array_equal(a, b)
    ModelFiles.open(whole)
    assert "the text model is run; " in caplog.text


def test_a_text_model_of_another_kind_is_named():
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "qwen2"}}
    with pytest.raises(ConfigError, match=r"is 'qwen2', which is not supported; known: mistral, ministral3, mistral4"):
        family_of(config)


# ---- stacked layers


def test_stacked_layers_hold_the_same_weights(checkpoint):
    """Each layer's weight is the same whether it stands alone or in a stack."""
    folder = checkpoint("ministral")

    def by_layer(scan):
        result = {}
        for spec, weight in zip(
            *[x if isinstance(x, list) else x.weights for x in load(folder, scan=scan)], strict=True
        ):
            if spec.block is None:
                result[spec.name] = weight
                continue
            layers = list(models[scan].layers_of(spec.block))
            for layer, part in zip(layers, weight if len(layers) > 1 else [weight], strict=True):
                result[layer, spec.part] = part
        return result

    models = {scan: load(folder, scan=scan)[0] for scan in (False, True)}
    stacked, unrolled = by_layer(True), by_layer(False)
    assert len(models[True].weights) < len(models[False].weights)
    assert stacked.keys() == unrolled.keys()
    for key, weight in unrolled.items():
        np.testing.assert_array_equal(stacked[key], weight)


# ---- memory

LAYERS, WIDTH, HIDDEN, VOCAB = 6, 1024, 6144, 20480
MEASURE = """
import json, sys
from pathlib import Path
import jax.numpy as jnp
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf, family_of

def memory(kind):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(kind))
    return 1024 * int(line.split()[1])

folder = Path(sys.argv[1])
hf = json.loads((folder / "config.json").read_text())
model = abstract_model(config_from_hf(hf), "bfloat16", scan=sys.argv[2] == "stacked")
jnp.zeros(8).block_until_ready()
before = memory("VmRSS")
weights = load_weights(SafetensorsSource(folder), family_of(hf), model)
peak = memory("VmHWM")
embed = next(w for w, spec in zip(weights, model.specs) if spec.name == "embed")
print(json.dumps([peak - before, model.nbytes, float(embed[3, 5])]))
"""


def write_large_checkpoint(folder: Path) -> None:
    """About 360 MB of random numbers in bfloat16, the largest tensor 42 MB."""
    shapes = {f"{name}.weight": (VOCAB, WIDTH) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (WIDTH,)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (WIDTH, WIDTH) for x in "qkvo"}
        shapes |= {f"{layer}mlp.{x}_proj.weight": (HIDDEN, WIDTH) for x in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (WIDTH, HIDDEN)}
        shapes |= {f"{layer}{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    noise = rng.normal(size=VOCAB * WIDTH).astype(np.float32).astype(ml_dtypes.bfloat16)
    save_file({name: noise[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()}, folder / FILE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_large_experts(folder: Path) -> None:
    """About 200 MB in bfloat16, nearly all of it 16 experts; the largest tensor is 4 MB."""
    layers, experts, shapes = 2, 8, {f"{name}.weight": (1024, 1024) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (1024,)
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (1024 if x in "qo" else 128, 1024) for x in "qkv"}
        shapes[f"{layer}self_attn.o_proj.weight"] = (1024, 1024)
        shapes |= {f"{layer}{x}_layernorm.weight": (1024,) for x in ("input", "post_attention")}
        shapes[f"{layer}block_sparse_moe.gate.weight"] = (experts, 1024)
        for e in range(experts):
            expert = f"{layer}block_sparse_moe.experts.{e}."
            shapes |= {f"{expert}w{n}.weight": (1024, 2048) if n == 2 else (2048, 1024) for n in (1, 2, 3)}
    noise = np.random.default_rng(0).normal(size=1 << 21).astype(np.float32).astype(ml_dtypes.bfloat16)
    save_file({name: noise[: np.prod(shape)].reshape(shape) for name, shape in shapes.items()}, folder / FILE)
    config = {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_local_experts": experts,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measured(folder: Path, how: str) -> tuple[int, int, float]:
    """Bytes by which the process grew at most, those of the weights, and a number of the embedding."""
    command = [sys.executable, "-c", MEASURE, str(folder), how]
    # How much freed memory malloc keeps for later depends on the order of threads: 120 to 180 MB. Let it return all.
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "MALLOC_TRIM_THRESHOLD_": "100000"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_loading_takes_the_memory_of_a_few_tensors(tmp_path):
    """On a CPU the weights themselves are host memory. Beyond them, the peak is a few of the largest tensors."""
    write_large_checkpoint(tmp_path)
    grown, weights, value = measured(tmp_path, "unrolled")
    tensors = load_file(tmp_path / FILE)
    largest, total = max(t.nbytes for t in tensors.values()), sum(t.nbytes for t in tensors.values())
    assert weights == total > 350e6
    assert value == float(tensors["model.embed_tokens.weight"][3, 5])
    assert grown > 0.9 * weights, "the measurement misses the weights"
    print(f"peak beyond the weights: {(grown - weights) / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
    assert grown - weights < total / 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_loading_stacked_experts_takes_little_beyond_them(tmp_path):
    """They go one by one to their place in the stack; put together at its end they would exist twice."""
    write_large_experts(tmp_path)
    grown, weights, value = measured(tmp_path, "stacked")
    tensors = load_file(tmp_path / FILE)
    assert weights == sum(t.nbytes for t in tensors.values()) > 200e6
    assert value == float(tensors["model.embed_tokens.weight"][3, 5])
    assert grown > 0.9 * weights, "the measurement misses the weights"
    print(f"peak beyond the weights: {(grown - weights) / 1e6:.0f} MB")
    assert grown - weights < weights / 3
