"""Experts from a checkpoint to devices: one by one and fused, whole and in parts. A few seconds."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from inferlib.checkpoint.assemble import LoadItem
from inferlib.checkpoint.experts import expert_pieces, load_experts
from inferlib.checkpoint.load import placement
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, ClampedSwiglu, LayerSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import FusedExperts
from inferlib.programs import start_functions as functions
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.helpers.oracle import make_checkpoint

EXPERTS, DIM, HIDDEN, LAYERS = 5, 8, 6, 2
SPEC = MoeSpec(RouterSpec(EXPERTS, 2), HIDDEN, ClampedSwiglu(1.7, 7.0), bias=True)
CONFIG = ModelConfig(
    "test", vocab=16, dim=DIM, layers=(LayerSpec(AttentionSpec(2, 2, 4, 0.5, None), SPEC),) * LAYERS, context=64
)
PARTS = {"gate_up": (2, DIM, HIDDEN), "gate_up_bias": (2, HIDDEN), "down": (HIDDEN, DIM), "down_bias": (DIM,)}
ONE_BY_ONE = {
    f"mlp.experts.{part}{bias}": f"{{e}}.{part}{bias}" for part in ("gate", "up", "down") for bias in ("", "_bias")
}
FUSED = {f"mlp.experts.{part}": part for part in PARTS}
FORMS = {
    "one by one": (ONE_BY_ONE, FusedExperts()),
    "fused": (FUSED, FusedExperts()),
    "transposed": (FUSED, FusedExperts(transposed=True)),
    "transposed and interleaved": (FUSED, FusedExperts(transposed=True, interleaved=True)),
}


class Tensors(dict):
    """A source in memory, which counts the reads of each part of it."""

    def __init__(self):
        super().__init__()
        self.reads = Counter()

    def nbytes(self, name: str) -> int:
        return self[name].nbytes

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        self.reads[name, rows and (rows.start, rows.stop)] += 1
        return self[name] if rows is None else self[name][rows]


def stored(form: str, weights: dict[str, np.ndarray]) -> Tensors:
    """The weights [L, E, ...] as a checkpoint of this form holds them; the layer goes before each name."""
    _, fused = FORMS[form]
    tensors = Tensors()
    for kind, value in weights.items():
        rows = value if kind.endswith("bias") else np.swapaxes(value, -2, -1)  # [..., out, in]
        for layer in range(LAYERS):
            x = rows[layer]
            if form == "one by one":
                halves = {"gate": 0, "up": 1} if kind.startswith("gate_up") else {"down": ...}
                for name, half in halves.items():
                    for e in range(EXPERTS):
                        tensors[f"{layer}.{e}.{name}{'_bias' * kind.endswith('bias')}"] = x[e][half]
                continue
            if kind.startswith("gate_up"):
                x = np.swapaxes(x, 1, 2) if fused.interleaved else x
                x = x.reshape(EXPERTS, 2 * HIDDEN, *x.shape[3:])
            tensors[f"{layer}.{kind}"] = np.swapaxes(x, 1, 2) if fused.transposed and x.ndim == 3 else x
    return tensors


@pytest.mark.parametrize(
    ("form", "parallel", "scan"),
    [
        ("one by one", "", False),
        ("one by one", "tp=4,dp=2", False),
        ("one by one", "ep=2,tp=2", True),
        ("fused", "", True),
        ("fused", "ep=4,rules=tp", False),
        ("transposed", "ep=2,tp=2", True),
        ("transposed and interleaved", "", True),
        ("transposed and interleaved", "tp=4,dp=2", False),
    ],
)
@pytest.mark.fast_cases(2)
def test_experts_are_laid_out(form, parallel, scan):
    """Padded with zeros where they or their width do not divide; every device's part read once."""
    rng = np.random.default_rng(0)
    weights = {kind: rng.normal(size=(LAYERS, EXPERTS, *shape)).astype(np.float32) for kind, shape in PARTS.items()}
    source, (names, fused) = stored(form, weights), FORMS[form]
    shards = make_shards(Parallelism.parse(parallel))
    model, advanced = abstract_model(CONFIG, "float32", scan=scan, shards=shards), []
    for spec in model.weights:
        if not spec.part.startswith("mlp.experts."):
            continue
        layers = model.layers_of(spec.block)
        per_layer = [{part: f"{i}.{name}" for part, name in names.items()} for i in layers]
        pieces = tuple(expert_pieces(of, SPEC, spec.part, DIM, fused) for of in per_layer)
        assert {piece.tensor: piece.shape for layer in pieces for piece in layer}.items() <= {
            name: x.shape for name, x in source.items()
        }.items()
        item = LoadItem(spec, CONFIG.layers[0], pieces, fused)
        place = placement(shards, spec.axes, spec.shape)
        if place is None and scan:  # in another order of memory, as a TPU's compiler may ask for
            order = tuple(reversed(range(len(spec.shape))))
            place = Format(Layout(order), SingleDeviceSharding(jax.devices()[0]))
        (got,) = load_experts(source, item, [place], advanced.append)
        assert got.shape == spec.shape
        assert not isinstance(place, Format) or got.format.layout.major_to_minor == order
        want = weights[spec.part.removeprefix("mlp.experts.")][list(layers)]
        want = want if scan else want[0]
        room = [(0, n - m) for n, m in zip(spec.shape, want.shape, strict=True)]
        np.testing.assert_array_equal(np.asarray(got), np.pad(want, room))
    assert set(source.reads.values()) == {1}
    assert sum(advanced) == sum(x.nbytes for x in source.values())


@pytest.mark.slow
def test_experts_load_without_compiling(tmp_path, monkeypatch):
    """With functions that were compiled earlier; those that are recorded make nothing."""
    path = make_checkpoint(tmp_path, "qwen2_moe", num_hidden_layers=2)
    files, shards = ModelFiles.open(path), make_shards(Parallelism.parse("ep=2,tp=2"))
    model = abstract_model(files.config, "float32", scan=True, shards=shards)
    expected = files.load(model, shards=shards)
    with functions.recorded() as compiled:
        assert not any(isinstance(weight, jax.Array) for weight in files.load(model, shards=shards))
    monkeypatch.setattr(functions, "_jitted", None)
    with functions.adopted(compiled):
        for got, want in zip(files.load(model, shards=shards), expected, strict=True):
            np.testing.assert_array_equal(got, want)
