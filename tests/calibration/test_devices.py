"""Several devices that share the windows of a text record and make what one does."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inferlib import calibrate
from inferlib.calibration.forward import LayerwiseForward, devices_for
from inferlib.checkpoint.laid_out import read_layer
from inferlib.texts import TextSample
from tests.helpers.calibration import job_of
from tests.helpers.llms import TINY
from tests.helpers.oracle import make_checkpoint

WINDOWS = np.random.default_rng(0).integers(4, 120, (8, 24)).astype(np.int32)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen2_moe", {"num_hidden_layers": 1}, marks=pytest.mark.release),
        # Inputs of layers, and caches that others read.
        pytest.param("gemma3n_text", TINY["gemma3n_text"], marks=pytest.mark.release),
    ],
)
@pytest.mark.slow
def test_sums_and_residuals_are_those_of_one_device(family, options, tmp_path):
    job = job_of(make_checkpoint(tmp_path, family, **options), "gptq", "int8")
    walks = [LayerwiseForward(job.original, WINDOWS, devices) for devices in (1, 8)]
    outside = job.outside_weights()
    for walk in walks:
        walk.begin(outside)
    for layer in range(len(job.target.config.layers)):
        weights, parts = job.load(layer), job.quantized(layer)
        one, several = (walk.record(layer, weights, parts) for walk in walks)
        assert one.keys() == several.keys()
        for names, sums in one.items():
            for ours, theirs in zip(several[names], sums, strict=True):
                assert len(ours.devices()) == 1
                expected = np.asarray(theirs)
                np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
        for walk in walks:
            walk.advance(layer, weights)
    logits = [walk.logits(outside) for walk in walks]
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4 * logits[0].std())


@pytest.mark.slow
def test_eight_devices_write_what_one_does(checkpoint, tmp_path, monkeypatch):
    """But for numbers next to a border of rounding, which a last bit of a sum may move."""
    path = checkpoint("llama", num_hidden_layers=1)
    data = TextSample(["The quick brown fox jumps over the lazy dog. " * 40], tokens=256, window=32)
    options = {"data": data, "method": "clip", "scheme": "int4", "dtype": "float32"}
    one = calibrate(path, tmp_path / "one", **options)
    monkeypatch.setattr("inferlib.calibration.calibrate.devices_for", lambda windows: windows)
    several = calibrate(path, tmp_path / "several", **options)
    for ours, expected in zip(several.matrices, one.matrices, strict=True):
        assert (ours.layer, ours.part) == (expected.layer, expected.part)
        assert ours.loss == pytest.approx(expected.loss, rel=0.02)
    weights = job_of(path, "clip", "int4").target.weights
    for block in (0, None):
        arrays = [read_layer(report.out, [w for w in weights if w.block == block]) for report in (one, several)]
        for part, expected in arrays[0].items():
            ours, expected = (np.asarray(x).astype(np.float32) for x in (arrays[1][part], expected))
            assert np.mean(np.abs(ours - expected) > 1e-5 * np.abs(expected)) < 0.01, part


def test_devices_share_windows_equally(monkeypatch):
    """Eight devices, which are no CPUs."""
    assert [devices_for(n) for n in (8, 3)] == [1, 1]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [devices_for(n) for n in (32, 12, 3, 11)] == [8, 6, 3, 1]
