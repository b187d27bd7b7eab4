"""Learned rotations: what they compute, what their loss is of, how a run goes on, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from inferlib import LLM, TextSample, calibrate
from inferlib.calibration.job import Job
from inferlib.calibration.layer_weights import layer_parts, specs_of
from inferlib.calibration.rotation import Rotations, rotate_layer
from inferlib.calibration.spinquant import Learned, Learning
from inferlib.calibration.store import ROTATIONS
from inferlib.checkpoint.laid_out import read_layer
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.ops.grouped_matmul import grouped_matmul
from inferlib.option_checks import ConfigurationError
from tests.helpers.calibration import job_of, logits_of
from tests.helpers.cli_model import Commands, make_model
from tests.helpers.oracle import make_checkpoint, reference_logits

TEXTS = [" ".join(f"{n * n % 97} sheep and {n} goats" for n in range(start, start + 40)) for start in range(6)]
_TWO = {"num_hidden_layers": 2}
_OPTIONS: dict[str, Any] = dict(
    data=TextSample(TEXTS, tokens=128, window=32), method="spinquant:2+gptq", scheme="int4", dtype="float32"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model", layers=1)


def test_any_rotations_leave_the_logits_as_they_are(tmp_path):
    """Before anything is rounded, in float32, with a head that is parted from its embedding."""
    draw = np.random.default_rng(1).standard_normal
    path = make_checkpoint(tmp_path, "llama", **_TWO, tie_word_embeddings=True)
    job = job_of(path, "spinquant+gptq", "int4")
    turned = jax.tree.map(lambda x: np.linalg.qr(draw(x.shape))[0].astype(np.float32), job.rotations)
    job = replace(job, rotations=turned)
    assert list(turned.values) == [0, 1]

    def rotated(layer, _):
        return rotate_layer(layer_parts(job.target, layer), job.load(layer), turned)

    window = np.random.default_rng(0).integers(4, 120, (1, 24)).astype(np.int32)
    expected = reference_logits(path, window[0])
    np.testing.assert_allclose(logits_of(job, window, rotated)[0], expected, rtol=0, atol=2e-4 * expected.std())


def divergence(model, out, windows: np.ndarray) -> float:
    """The mean KL divergence of a calibrated model from the original."""
    options: dict[str, Any] = dict(dtype="float32", max_batch=1, max_len=32, progress=False)
    (p, q) = (
        np.stack([np.asarray(jax.nn.log_softmax(llm.logits(window.tolist()))) for window in windows])
        for llm in (LLM(model, **options), LLM(out, **options))
    )
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.release)])
def test_learning_lowers_the_divergence_of_the_model_that_is_written(family, tmp_path):
    """By the command, to nearest: what the report says is what the written model does."""
    model = make_model(tmp_path / "model", layers=1, family=family)
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["quantize", model, out, "--data", data, "--tokens", "128", "--window", "32", "--dtype", "float32"]
    result = Commands(model)(*words, "--method", "spinquant:8", "--scheme", "mxfp4", "--json")
    assert result.exit_code == 0, result.output
    before, after = json.loads(result.stdout)["calibration"]["learned"]
    assert after < 0.98 * before
    tokenizer = ModelFiles.open(model).tokenizer
    assert tokenizer is not None
    windows = TextSample(TEXTS, tokens=128, window=32).windows(tokenizer, 256)
    assert divergence(model, out, windows) == pytest.approx(after, rel=1e-3)
    learned = Learned.load(out / ROTATIONS)
    assert (learned.before, learned.after) == (before, after)
    for turn in jax.tree.leaves(learned.rotations):
        np.testing.assert_allclose(turn.T @ turn, np.eye(len(turn)), atol=1e-6)


# ---- interrupted runs


class Interrupted(Exception):
    pass


def arrays_of(path) -> list[np.ndarray]:
    """The arrays of a calibrated model of one layer."""
    target = job_of(path.parent / "source", "spinquant+gptq", "int4").target
    return [np.asarray(x) for layer in (None, 0) for x in read_layer(path, specs_of(target, layer)).values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "interruptions",
    # While it learns nothing is there yet, as when a run begins.
    [[(Job, "layer")], pytest.param([(Learned, "save"), (Job, "layer")], marks=pytest.mark.release)],
    ids=["later", "while it learns and later"],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(interruptions, model, tmp_path, monkeypatch):
    """Interrupted while it learns, it learns anew. Interrupted later, it takes what it has learned."""
    (tmp_path / "source").symlink_to(model)
    report = calibrate(model, tmp_path / "whole", **_OPTIONS)
    assert "learned rotations" in str(report)

    def stops(*_, **__):
        raise Interrupted

    for what in interruptions:
        with monkeypatch.context() as patch:
            patch.setattr(*what, stops)
            with pytest.raises(Interrupted):
                calibrate(model, tmp_path / "out", **_OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(Learning, "learn", stops)
        again = calibrate(model, tmp_path / "out", **_OPTIONS)
    assert (again.learned, again.matrices) == (report.learned, report.matrices)
    for ours, theirs in zip(arrays_of(tmp_path / "out"), arrays_of(tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_damaged_file_of_rotations_is_named(tmp_path):
    file = tmp_path / ROTATIONS
    Learned(Rotations(np.eye(2), {3: np.eye(1)}), 2.0, 1.0).save(file)
    assert list(tmp_path.iterdir()) == [file]
    assert list(Learned.load(file).rotations.values) == [3]
    for damaged in (b"", file.read_bytes()[:99], b"text"):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged: remove"):
            Learned.load(file)


# ---- refusals


@pytest.mark.slow
def test_layers_without_gradients_are_refused(tmp_path, monkeypatch):
    """Experts that multiply as they do where nothing is learned; else they are learned with."""
    job = job_of(make_checkpoint(tmp_path, "mixtral", num_hidden_layers=1), "spinquant+gptq", "int4")
    assert job.rotations is not None
    learning = Learning(job.original, job.target, job.rotations, 1)
    learning.check(32)
    without = lambda x, w, sizes, rows, most: grouped_matmul(x, w, sizes, rows=rows, most=most)  # noqa: E731
    monkeypatch.setattr("inferlib.ops.grouped_gradients._product", without)
    with pytest.raises(ConfigurationError, match=r"spinquant learns by gradients.*mixtral.*take hadamard"):
        learning.check(32)


def test_a_residual_that_cannot_be_rotated_is_refused_by_the_name_of_the_method(tmp_path):
    with pytest.raises(ConfigurationError, match="spinquant rotates a residual"):
        job_of(make_checkpoint(tmp_path, "gemma2", **_TWO), "spinquant", "int4")


def test_without_optax_the_error_says_how_to_get_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr("inferlib.calibration.calibrate.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'inferlib\[distill\]'"):
        calibrate(model, tmp_path / "out", **_OPTIONS)
    assert list(tmp_path.iterdir()) == []
