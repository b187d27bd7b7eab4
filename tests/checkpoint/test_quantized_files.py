"""Quantised weights in files: those that `convert` writes, and checkpoints as they are shipped. About 50 s."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from inferlib import LLM, Buckets, convert
from inferlib.checkpoint.shipped import QuantizedSource, form_of
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.ops.quantized import Scheme, nbytes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards
from tests.helpers.cli_model import Commands, error_of
from tests.helpers.llms import random_prompts
from tests.helpers.oracle import make_checkpoint
from tests.helpers.oracle_cases import SMOLLM2_HEADS
from tests.helpers.shipped_checkpoints import LINEAR, SHIPPED, awq, compressed, gptq, ship


def load(
    path: Path, quantization: str | None = None, parallel: str = "", scan: bool = False, **options
) -> tuple[AbstractModel, tuple[jax.Array, ...]]:
    files, shards = ModelFiles.open(path), make_shards(Parallelism.parse(parallel))
    stored_as = files.quantization(quantization)
    options = {"dtype": "float32", "quantization": stored_as, "scan": scan, "shards": shards} | options
    model = abstract_model(files.config, **options)
    return model, files.load(model, shards=shards)


def whole(model: AbstractModel, arrays: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    """Each weight as float32; what scale zeros have is no matter."""
    rest, result = iter(arrays), {}
    for weight in model.weights:
        cached = tuple(islice(rest, len(weight.arrays)))
        if weight.scheme is not None:
            cached = [_dequantized(cached, weight.scheme, weight.contracting)]
        result[weight.name] = np.asarray(cached[0]).reshape(weight.shape)
    return result


@partial(jax.jit, static_argnums=(1, 2))
def _dequantized(arrays: tuple[jax.Array, ...], scheme: Scheme, contracting: tuple[int, ...]) -> jax.Array:
    return scheme.tensor(*arrays).dequantized(contracting, "float32")


# ---- converted


@pytest.mark.release
@pytest.mark.parametrize(("name", "parallel"), [("mxfp4", "tp=5"), ("int8", "tp=4")])
def test_converted_weights_are_those_made_at_load(name, parallel, tmp_path):
    """On a mesh that copies heads and pads the vocabulary, of stacked layers; also made from floats. `test_convert` has
    each scheme on one device."""
    original = make_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=2, **SMOLLM2_HEADS)
    floats, out = tmp_path / "floats", tmp_path / name
    convert(original, floats, dtype="float32", progress=False)
    stored = convert(original, out, dtype="float32", quantization=name, progress=False)
    assert ModelFiles.open(out).nbytes == stored < ModelFiles.open(floats).nbytes
    want = whole(*load(original, name, parallel, scan=True))
    for path in (out, floats):
        for part, weight in whole(*load(path, name, parallel, scan=True)).items():
            np.testing.assert_array_equal(weight, want[part], err_msg=f"{path.name} {part}")
    files = ModelFiles.open(out)
    assert files.quantization(None) == files.quantization(name) == Quantization.named(name)
    with pytest.raises(CheckpointError, match=f"{name} weights, which cannot become fp8"):
        files.quantization("fp8")


# ---- as they are shipped


SLOW = ("fp8 by tensor", "transformers fp8 by tensor, experts", "int8 by tensor with zero points", "gptq experts")
STACKED = ("int4 by group",)  # on one device as well, where layers are stacked or not


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in SHIPPED])
def test_shipped_weights_are_kept(case, tmp_path, caplog):
    path, dense = ship(case, tmp_path)
    scheme = form_of(SHIPPED[case][1]).scheme
    meshes = SHIPPED[case][-1]
    for parallel in meshes if case in STACKED else meshes[-1:]:
        for scan in (False, True) if not parallel else (False,):
            _, floats = load(dense, parallel=parallel, scan=scan)
            model, arrays = load(path, parallel=parallel, scan=scan)
            assert [(x.shape, x.dtype) for x in arrays] == [(spec.shape, spec.dtype) for spec in model.specs]
            for weight, (name, got), want in zip(model.weights, whole(model, arrays).items(), floats, strict=True):
                quantized = weight.contracting and name != "head" and (case != "gpt-oss" or ".experts." in name)
                assert weight.scheme == (scheme if quantized else None), name
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=0, err_msg=f"{parallel} {name}")
    bits = {name: jax.dtypes.itemsize_bits(getattr(scheme, name)) for name in ("values", "scales")}
    shared = bits["scales"] + bits["values"] * scheme.zeros
    for weight in (weight for weight in model.weights if weight.scheme is not None):
        taken = math.prod(weight.shape) * bits["values"] + math.prod(weight.arrays[1].shape) * shared
        assert sum(x.nbytes for x in weight.arrays) * 8 == taken
    stored = ModelFiles.open(path)
    assert stored.nbytes < 0.7 * ModelFiles.open(dense).nbytes
    with pytest.raises(CheckpointError, match="quantise the original"):
        stored.quantization("mxfp8")
    of_cache = "kv_cache_scheme" in SHIPPED[case][1]
    assert ("6 scales and zero points of queries, keys and values are not used" in caplog.text) == of_cache


def test_info_counts_weights_as_they_are_kept(tmp_path):
    path, dense = ship("int8 by channel", tmp_path)
    tensors, inferlib = load_file(dense / "model.safetensors"), Commands(path)

    def taken(which) -> int:
        """In bfloat16, with float32 scales."""
        return sum(w.size + 4 * len(w) if which(name) else 2 * w.size for name, w in tensors.items())

    facts = json.loads(inferlib("info", path, "--json", "--parallel", "tp=1", "--max-len", "64").stdout)
    assert facts["quantization"] == "int8 by channel"
    assert facts["weight_bytes"]["bfloat16"] == taken(LINEAR)
    assert sum(weight["nbytes"] for weight in facts["parallel"]["weights"]) == taken(LINEAR)
    made = json.loads(inferlib("info", dense, "--json", "--quantization", "int8").stdout)
    assert made["weight_bytes"]["bfloat16"] == taken(lambda name: LINEAR(name) or name == "lm_head.weight")
    assert "int8 by channel weights" in inferlib("info", path).stdout
    assert "cannot become mxfp8: quantise the original" in error_of(inferlib("info", path, "--quantization", "mxfp8"))
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(hf | {"quantization_config": "awq"}))
    assert "quantization_config in config.json is damaged: it must be" in error_of(inferlib("info", path))


def test_a_config_that_contradicts_its_tensors_is_named(tmp_path):
    path, dense = ship("AutoFP8", tmp_path)
    for folder, config in ((path, {}), (dense, SHIPPED["AutoFP8"][1])):
        hf = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"no quantization_config.*proj\.weight float8_e4m3fn, .*fetch"):
        load(path)
    with pytest.raises(CheckpointError, match=r"no weight is quantised so \(no \*\.weight of float8_e4m3fn\): take"):
        ModelFiles.open(dense)
    with pytest.raises(CheckpointError, match=r"says mxfp4, and no weight is quantised so \(no \*_blocks\): take"):
        QuantizedSource(Tensors({"a.weight": np.zeros((2, 2), np.float32)}), form_of({"quant_method": "mxfp4"}))


@pytest.mark.slow
def test_experts_are_packed_for_kernels_as_they_are_loaded(tmp_path):
    """From a checkpoint as it is shipped on one device, and from a converted one on two."""
    path, converted, backend = (
        ship("gpt-oss", tmp_path)[0],
        tmp_path / "converted",
        Backend(grouped_matmul="pallas_tpu"),
    )
    convert(path, converted, dtype="float32", progress=False)
    model, arrays = load(path)
    rest, dense = iter(arrays), {}
    for weight in model.weights:
        dense[weight.name] = tuple(islice(rest, len(weight.arrays)))
    expected: dict[str, tuple[jax.Array, ...]] = {}
    for source, parallel in ((path, ""), (converted, "ep=2")):
        model, arrays = load(source, parallel=parallel, dtype="bfloat16", backend=backend)
        assert [(x.shape, x.dtype) for x in arrays] == [(spec.shape, spec.dtype) for spec in model.specs]
        rest = iter(arrays)
        for weight in model.weights:
            cached = tuple(islice(rest, len(weight.arrays)))
            assert weight.packed == (weight.scheme is not None)
            if weight.packed:
                of_one = weight if not parallel else replace(weight, shape=(7, *weight.shape[1:]))
                if weight.name not in expected:
                    expected[weight.name] = jax.jit(of_one.packing.pack)(*dense[weight.name])
                for got, want in zip(cached, expected[weight.name], strict=True):
                    np.testing.assert_array_equal(got[: len(want)], want, err_msg=f"{source.name} {weight.name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["awq experts", pytest.param("int8 by channel with zero points", marks=pytest.mark.release)]
)
def test_logits_are_those_of_the_weights_they_stand_for(case, tmp_path):
    path, dense = ship(case, tmp_path)
    (prompt,) = random_prompts([12])
    sizes = dict(dtype="float32", max_batch=1, max_len=32, buckets=Buckets((16,), (1,), (32,)), progress=False)
    llm = LLM(path, **sizes)
    np.testing.assert_allclose(llm.logits(prompt), LLM(dense, **sizes).logits(prompt), rtol=0, atol=1e-4)
    assert sum(nbytes(w.shape, w.dtype) for w in llm.engine.weights) == llm.engine.model.nbytes


@pytest.mark.parametrize("case", ["gpt-oss", "awq experts"])
def test_shipped_checkpoints_are_converted_as_they_are(case, tmp_path):
    path, _ = ship(case, tmp_path)
    convert(path, tmp_path / "converted", dtype="float32", progress=False)
    want, got = whole(*load(path)), whole(*load(tmp_path / "converted", parallel="ep=2,tp=2"))
    for name, weight in want.items():
        if ".experts." in name:
            np.testing.assert_array_equal(got[name][: len(weight)], weight, err_msg=name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitnet"}, "quant_method 'bitnet' is not supported; supported: mxfp4, fp8, awq, gptq"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"fp8 with weight_block_size \[64, 64\]"),
        ("awq", "damaged: it must be an object, not 'awq'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": None}},
            "g must be an object, not None",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": ["g"]}, "config_groups must be an object"),
        (compressed("int", 4, "group", "pack-quantized"), "compressed-tensors with group_size None"),
        (compressed("int", 3, "group", "pack-quantized", group_size=32), "type int with 3 bits"),
        (compressed("float", 8, "channel", "float-quantized", symmetric=False), "'float-quantized' with zero points"),
        (compressed("int", 4, "group", "pack-quantized", group_size=32, actorder="group"), "actorder 'group'"),
        (compressed("int", 8, "block", "int-quantized"), "strategy 'block'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "awq with version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "awq with zero_point False"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": None}, "gptq with group_size None"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ],
)
def test_unknown_schemes_are_named(config, message):
    with pytest.raises(CheckpointError, match=message):
        form_of(config)


class Tensors(dict):
    """A source of arrays."""

    def names(self):
        return self.keys()

    def dtype(self, name):
        return self[name].dtype

    def shape(self, name):
        return self[name].shape

    def read(self, name, rows=None):
        return self[name][rows or slice(None)]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def test_missing_and_wrong_scales_are_named():
    cached = {"b.weight": np.zeros((2, 2), np.float32)}
    lone = Tensors(cached | {"a.weight": np.zeros((2, 2), np.int8)})
    with pytest.raises(CheckpointError, match=r"lacks the scales of quantised weights: a\.weight_scale; fetch"):
        QuantizedSource(lone, form_of(compressed("int", 8, "channel", "int-quantized")))
    parts, _ = gptq(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32), 4, 32)
    parts = {"a" + ending: x for ending, x in parts.items()}
    source = QuantizedSource(Tensors(cached, **parts), form_of(GPTQ))
    assert [source.spare(name) for name in ("a.bias", "b.bias", "a.g_idx")] == [True, False, False]
    for missing, kind in ((".scales", "scales"), (".qzeros", "zero points")):
        rest = {name: x for name, x in parts.items() if not name.endswith(missing)}
        with pytest.raises(CheckpointError, match=f"lacks the {kind} of quantised weights: a{missing}; fetch"):
            QuantizedSource(Tensors(rest), form_of(GPTQ))
    with pytest.raises(
        CheckpointError, match=r"a\.scales has shape \(2, 8\), and groups of 128 .* correct its group_s"
    ):
        QuantizedSource(Tensors(parts), form_of(GPTQ | {"group_size": 128}))
    with pytest.raises(
        CheckpointError, match=r"a\.scales has shape \(2, 8\), and each whole row of a weight of 8 x 64"
    ):
        QuantizedSource(Tensors(parts), form_of(GPTQ | {"group_size": -1}))
    symmetric = QuantizedSource(Tensors(parts), form_of(GPTQ | {"sym": True}))
    with pytest.raises(CheckpointError, match=r"a\.qzeros has zero points .* set sym to false"):
        symmetric.read("a.weight")
    scattered = parts | {"a.g_idx": np.random.default_rng(1).permutation(parts["a.g_idx"])}
    with pytest.raises(CheckpointError, match=r"a\.g_idx scatters groups .*act-order.* with desc_act false"):
        QuantizedSource(Tensors(scattered), form_of(GPTQ))


@pytest.mark.parametrize(
    ("config", "encode"),
    [
        (GPTQ, lambda w: gptq(w, 4, 32)),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, lambda w: awq(w, 32)),
    ],
)
def test_rows_of_packed_weights_are_those_of_the_whole(config, encode):
    """Also those that begin within an item."""
    parts, back = encode(np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32))
    source = QuantizedSource(Tensors({"a" + ending: x for ending, x in parts.items()}), form_of(config))
    np.testing.assert_array_equal(source.read("a.weight"), back)
    for rows in (slice(8, 24), slice(5, 19), slice(40, 48)):
        for part in (source.values, source.scales, source.zeros):
            np.testing.assert_array_equal(part("a.weight", rows), part("a.weight")[rows])
