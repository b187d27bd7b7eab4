"""Exported models in transformers on a CPU, in the package compressed-tensors, and read back."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from inferlib import LLM, TextSample, calibrate, export
from inferlib.checkpoint import compressed_tensors
from inferlib.checkpoint.source import CheckpointError
from inferlib.conversion import convert
from inferlib.models.quantization import Quantization
from inferlib.option_checks import ConfigurationError
from tests.helpers.cli_model import Commands, error_of, make_model
from tests.helpers.oracle import make_checkpoint

TEXTS = [" ".join(f"{n * n % 97} sheep and {n} goats" for n in range(start, start + 40)) for start in range(6)]
DATA = TextSample(TEXTS, tokens=256, window=64)
PROMPT = [7, 200, 31, 4, 100, 101, 102, 9]
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=1, vocab_size=264)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def checkpoint(model: Path, path: Path, family: str = "llama", **options) -> Path:
    """A checkpoint with the tokenizer of another."""
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    path = make_checkpoint(path, family, **{**SIZES, **heads, **options})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, path / name)
    return path


def exported(path: Path, out: Path, scheme: str, method: str, dtype: str = "float32") -> Path:
    """Calibrated or, without a method, converted before."""
    calibrated = out.with_name("calibrated")
    if method:
        calibrate(path, calibrated, data=DATA, method=method, scheme=scheme, dtype=dtype)
    else:
        convert(path, calibrated, quantization=scheme, dtype=dtype, progress=False)
    nbytes = export(calibrated, out, progress=False)
    files = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert nbytes <= files < 1.5 * nbytes
    return out


def logits_of(path: Path, **options) -> np.ndarray:
    return LLM(path, dtype="float32", max_batch=1, max_len=64, progress=False, **options).logits(PROMPT)


def by_transformers(path: Path) -> np.ndarray:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(torch.tensor([PROMPT])).logits[0].float().numpy()


CASES = [
    ("int4", "awq+nearest", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("int8", "nearest", "phi3", {"pad_token_id": 0, "num_hidden_layers": 2}),
    ("int4", "nearest", "qwen3_moe", {"moe_intermediate_size": 32}),
    pytest.param("fp8", "nearest", "llama", {"tie_word_embeddings": True}, marks=pytest.mark.release),
    pytest.param("int4_g32", "hadamard:merged+gptq", "qwen3", {"tie_word_embeddings": True}, marks=pytest.mark.release),
    pytest.param("int8", "nearest", "mixtral", {}, marks=pytest.mark.release),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "method", "family", "options"), CASES)
def test_transformers_and_this_library_read_the_same_model(model, tmp_path, scheme, method, family, options):
    path = checkpoint(model, tmp_path / "model", family, **options)
    out = exported(path, tmp_path / "out", scheme, method)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    ours, theirs, original = logits_of(out), by_transformers(out), by_transformers(path)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * original.std())
    assert (
        1e-4 < np.sqrt(np.mean((ours - original) ** 2)) / original.std() < 0.8
    )  # random weights do not bear four bits
    if family == "phi3":
        assert_the_model_of_the_other_format(out, ours)


def assert_the_model_of_the_other_format(out: Path, logits: np.ndarray) -> None:
    """The same values and scales, with the head written whole."""
    tensors = {name: array for file in out.glob("*.safetensors") for name, array in load_file(file).items()}
    assert {name.rpartition(".")[2] for name in tensors} == {"weight", "weight_packed", "weight_scale", "weight_shape"}
    assert tensors["lm_head.weight"].shape == (264, 64)
    np.testing.assert_allclose(logits, logits_of(out.with_name("calibrated")), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_inputs_that_are_rounded_are_rounded_there_too(model, tmp_path):
    """Here only in steps of many rows, so the logits are near each other."""
    path = checkpoint(model, tmp_path / "model")
    out = exported(path, tmp_path / "out", "int8_a8", "smoothquant+nearest")
    options = json.loads((out / "config.json").read_text())["quantization_config"]
    assert options["format"] == "int-quantized"
    assert options["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    ours, theirs = logits_of(out), by_transformers(out)
    assert 1e-4 < np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std() < 0.05


def test_values_are_packed_as_the_package_packs_them(model, tmp_path):
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = np.random.default_rng(0).integers(-7, 8, (6, 64)).astype("int8")
    for bits, dtype in ((4, "int4"), (8, "int8")):
        expected = package.pack_to_int32(torch.tensor(values), bits).numpy()
        np.testing.assert_array_equal(compressed_tensors._packed(values.astype(dtype)), expected)


REFUSED: dict[str, dict[str, Any]] = {
    "int4, int8, int8_a8, fp8 and fp8_a8": asdict(Quantization.named("mxfp4")),
    "without lowrank": {"rank": 4},
    "hadamard:merged or spinquant:merged instead of hadamard": {"rotation": 64},
}


@pytest.mark.slow
def test_what_has_no_form_is_refused_before_anything_is_written(model, tmp_path):
    """Nor is a weight read before: the manifest says what they are. Experts are those of a family."""
    llama, experts = (tmp_path / "quantized" / family for family in ("llama", "gpt_oss"))
    llama.parent.mkdir()
    for path in (llama, experts):
        original = checkpoint(model, tmp_path / path.name, path.name)
        convert(original, path, quantization="int8", dtype="float32", progress=False)
    manifest = json.loads((llama / "inferlib.json").read_text())
    for words, changes in REFUSED.items():
        changed = manifest | {"quantization": manifest["quantization"] | changes}
        (llama / "inferlib.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigurationError, match=words):
            export(llama, tmp_path / "out", progress=False)
    with pytest.raises(ConfigurationError, match="has all experts of a layer"):
        export(experts, tmp_path / "out", progress=False)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_only_quantised_directories_of_this_library_are_exported(model, tmp_path):
    converted = tmp_path / "converted"
    convert(model, converted, progress=False)
    for path in (model, converted):
        with pytest.raises(CheckpointError, match="is no directory that inferlib quantize"):
            export(path, tmp_path / "out")
    nameless = tmp_path / "nameless"
    convert(model, nameless, quantization="int8", progress=False)
    for file in (nameless / "config.json", nameless / "inferlib.json"):
        file.write_text(file.read_text().replace('"model_type"', '"kind"'))
    with pytest.raises(CheckpointError, match="has no model_type"):
        export(nameless, tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists"):
        exported(checkpoint(model, tmp_path / "model"), converted, "int8", "nearest")


@pytest.mark.slow
def test_the_command_writes_it_whole_or_not_at_all(model, tmp_path, monkeypatch):
    """Also of what `convert` quantised, and over what a killed export left."""
    path, out = checkpoint(model, tmp_path / "model"), tmp_path / "out"
    convert(path, tmp_path / "converted", quantization="int8", dtype="float32", progress=False)
    commands, words = Commands(path), ["export", tmp_path / "converted", out]
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("No space left on device")

        patch.setattr(compressed_tensors, "write_safetensors", full)
        assert "No space left" in error_of(commands(*words))
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model-outside.safetensors").write_text("half")
    result = commands(*words)
    assert result.exit_code == 0, result.output
    expected = logits_of(tmp_path / "converted")
    np.testing.assert_allclose(logits_of(out), expected, rtol=0, atol=1e-4 * expected.std())
