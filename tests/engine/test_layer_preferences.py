"""Rows whose layers keep as much as preferences say that were measured on a text."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib import LLM, Buckets, convert
from inferlib.calibration.layer_preferences import measure_layer_preferences
from inferlib.checkpoint.layer_arrays import PREFERENCES
from inferlib.checkpoint.source import CheckpointError
from inferlib.cli import app
from inferlib.deploy.compile import compile
from inferlib.deploy.explain import explain
from inferlib.model_files import ModelFiles
from inferlib.models.config import ConfigError
from inferlib.option_checks import ConfigurationError
from inferlib.texts import TextSample
from tests.engine.test_bounded_cache import FOUR_ROWS, GREEDY, PROMPTS, assert_as_alone
from tests.helpers.llms import build_llm
from tests.helpers.poison import tokens_of

WIDTH, NEWEST, TAUS = 80, 32, (0.8, 1.5)
PREFERRED = (1.0, 5.0, 2.0, 1.0, 3.0)  # of five layers, in levels of one, three and one
POLICY = "cake:40:4"
TEXT = TextSample(["".join(map(chr, np.random.default_rng(0).integers(97, 123, 2000)))], tokens=320, window=WIDTH)


@pytest.fixture(scope="module")
def path(checkpoint, tmp_path_factory):
    """A model with preferences that differ much."""
    folder = tmp_path_factory.mktemp("preferences") / "llama"
    shutil.copytree(checkpoint("llama", num_hidden_layers=len(PREFERRED)), folder)
    PREFERENCES.write(folder, {layer: np.array([x, x]) for layer, x in enumerate(PREFERRED)})
    return folder


def test_preferences_are_those_of_the_paper(checkpoint, tmp_path):
    """By the attention that transformers computes: the entropy of what the newest queries give to older positions, and
    the variance over these queries of what each position gets, summed over heads."""
    import torch
    from transformers import AutoModelForCausalLM

    path = shutil.copytree(checkpoint("llama"), tmp_path / "llama")
    file = measure_layer_preferences(path, data=TEXT, tau1=TAUS[0], tau2=TAUS[1], progress=False)
    assert file == PREFERENCES.path_of(path)
    files, measured = ModelFiles.open(path), PREFERENCES.read(path)
    assert files.tokenizer is not None
    windows = TEXT.windows(files.tokenizer, files.config.context)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        attentions = model(torch.tensor(windows), output_attentions=True).attentions
    expected = np.zeros((len(attentions), len(windows)))
    for layer, of_layer in enumerate(attentions):
        for number, weights in enumerate(of_layer.double().numpy()[:, :, -NEWEST:, :-NEWEST]):
            entropy = -sum(float((w * np.log(w)).sum()) for head in weights for w in head)
            variance = sum(float(((head - head.mean(axis=0)) ** 2).sum()) / (NEWEST - 1) for head in weights)
            expected[layer, number] = entropy ** (1 / TAUS[0]) * variance ** (1 / TAUS[1])
        np.testing.assert_allclose(measured[PREFERENCES.name_of(layer)], expected[layer], rtol=1e-3)
    shares = np.mean([window / window.sum() for window in expected.T], axis=0)
    np.testing.assert_allclose(files.config.layer_preferences, shares, rtol=1e-3)


@pytest.mark.slow
def test_rows_are_what_they_are_alone(path):
    llm = build_llm(path, FOUR_ROWS, cache_policy=POLICY, page_size=8, decode_steps=1, scan=True)
    assert [layer.attention.cache_level for layer in llm.engine.model.config.layers] == [1, 2, 1, 0, 1]
    assert llm.config.compacted.budgets == (24, 32, 80)
    assert_as_alone(llm)


def test_what_is_refused(checkpoint, path, tmp_path):
    def build(path, **options):
        return LLM(path, cache_policy="cake:64", max_batch=4, max_len=128, progress=False, **options)

    with pytest.raises(ConfigError, match=r"inferlib layer-preferences MODEL --data TEXT\.jsonl.* 'pyramidkv:64'"):
        build(checkpoint("llama"))
    with pytest.raises(ConfigurationError, match="layer 0 of this one has latents"):  # no preferences would help
        build(checkpoint("minicpm3"))
    with pytest.raises(ConfigurationError, match="layer 0 of this one has latents"):
        compile(checkpoint("minicpm3"), "cpu", buckets=FOUR_ROWS, cache_policy="cake:64")
    with pytest.raises(ConfigurationError, match="does not work with speculation yet"):
        build(path, speculation="ngram:3")
    for options, message in (
        ({"tau1": 0.1}, r"tau1 must be a number between 0\.2 and 100, got 0\.1"),
        ({"data": TextSample(["a"], tokens=64, window=63)}, "windows of 64 tokens or more, got 63"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            measure_layer_preferences(path, **{"data": TEXT, **options})
    with pytest.raises(ConfigurationError, match="layer 0 of this one has latents"):
        measure_layer_preferences(checkpoint("minicpm3"), data=TEXT, progress=False)
    for name, content, message in (
        ("damaged", None, "is damaged: remove it"),
        ("other", {"0": np.ones(2)}, "are not of the layers of this model"),
        ("uneven", {"0": np.ones(2), "1": np.ones(3)}, "is damaged: remove it"),
        ("below 0", {str(layer): -np.ones(2) for layer in range(len(PREFERRED))}, "is damaged: remove it"),
        ("infinite", {str(layer): np.full(2, np.inf) for layer in range(len(PREFERRED))}, "is damaged: remove it"),
        ("tables", {str(layer): np.ones((2, 3)) for layer in range(len(PREFERRED))}, "is damaged: remove it"),
        ("one array", np.ones(2), "is damaged: remove it"),
    ):
        folder = tmp_path / name
        shutil.copytree(path, folder)
        file = PREFERENCES.path_of(folder)
        if content is None:
            file.write_bytes(b"PK")
        elif isinstance(content, np.ndarray):
            with file.open("wb") as opened:
                np.save(opened, content)
        else:
            np.savez(file, **content)
        with pytest.raises((CheckpointError, ConfigError), match=message):
            ModelFiles.open(folder)


def test_commands_know_them(path):
    """And programs of other policies are the same without."""
    shown = explain(path, max_len=256, cache_policy="cake:96").facts()
    assert len(set(shown["layer_budgets"].values())) > 1
    made = CliRunner().invoke(app, ["info", str(path), "--max-len", "256", "--cache-policy", "cake:96"])
    assert made.exit_code == 0, made.output
    assert "in layer" in made.output
    missing = CliRunner().invoke(app, ["info", "--config", "llama3-8b", "--cache-policy", "cake:512"])
    assert "inferlib layer-preferences" in " ".join(missing.output.split())


def test_converted_models_have_them(path, tmp_path):
    """As they are when it is converted, or measured of the original later."""
    convert(path, tmp_path / "int8", quantization="int8", progress=False)
    files = ModelFiles.open(tmp_path / "int8")
    assert files.config.layer_preferences == ModelFiles.open(path).config.layer_preferences
    PREFERENCES.path_of(files.path).unlink()
    assert not ModelFiles.open(files.path).config.layer_preferences


@pytest.mark.release
def test_artifacts_have_them(path, tmp_path):
    buckets = Buckets((16,), (2,), (96,), tile=8)
    made = compile(path, "cpu", buckets=buckets, modes=("greedy",), cache_policy="cake:64:4", out=tmp_path / "out")
    assert made.ok, made
    there = LLM(path, artifacts=tmp_path / "out", progress=False)
    here = build_llm(path, buckets, cache_policy="cake:64:4")
    assert there.config.compacted.budgets == here.config.compacted.budgets
    assert tokens_of(there, PROMPTS[-2:], GREEDY) == tokens_of(here, PROMPTS[-2:], GREEDY)
