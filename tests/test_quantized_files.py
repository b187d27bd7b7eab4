"""Quantised weights in files: those that `convert` writes, and checkpoints as they are shipped. About 20 s."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

from inferlib import convert
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.quantization import Quantization
from inferlib.ops.quantized import QuantizedTensor
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.oracle import SMOLLM2_HEADS, make_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compilations")


def load(
    path: Path, quantization: str | None = None, parallel: str = "", scan: bool = False
) -> tuple[AbstractModel, tuple[jax.Array, ...]]:
    files, shards = ModelFiles.open(path), make_shards(Parallelism.parse(parallel))
    kept = files.quantization(quantization)
    model = abstract_model(files.config, "float32", quantization=kept, scan=scan, shards=shards)
    return model, files.load(model, shards=shards)


def whole(model: AbstractModel, arrays: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    """Each weight as float32; what scale zeros have is no matter."""
    rest, found = iter(arrays), {}
    for weight in model.weights:
        held = tuple(islice(rest, len(weight.arrays)))
        if weight.scheme is not None:
            held = [QuantizedTensor(*held, weight.scheme.group is not None).dequantized(weight.contracting, "float32")]
        found[weight.name] = np.asarray(held[0]).reshape(weight.shape)
    return found


# ---- converted


def test_converted_weights_are_those_made_at_load(tmp_path):
    """On one device and on meshes that copy heads, pad the vocabulary, or stack layers; also made from floats."""
    original = make_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=2, **SMOLLM2_HEADS)
    floats = tmp_path / "floats"
    convert(original, floats, dtype="float32", progress=False)
    for name in ("int8", "mxfp4"):
        out = tmp_path / name
        stored = convert(original, out, dtype="float32", quantization=name, progress=False)
        assert ModelFiles.open(out).nbytes == stored < ModelFiles.open(floats).nbytes
        for parallel, scan in (("", False), ("tp=4" if name == "int8" else "tp=5", True)):
            want = whole(*load(original, name, parallel, scan))
            for path in (out, floats):
                got = whole(*load(path, name, parallel, scan))
                for part, weight in got.items():
                    np.testing.assert_array_equal(weight, want[part], err_msg=f"{path.name} {part}")
        files = ModelFiles.open(out)
        assert files.quantization(None) == files.quantization(name) == Quantization.named(name)
        with pytest.raises(
            CheckpointError, match=f"has {name} weights, which cannot become fp8: quantise the original"
        ):
            files.quantization("fp8")
