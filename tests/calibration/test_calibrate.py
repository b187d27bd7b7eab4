"""`calibrate` and `inferlib quantize`: what they write, how they go on, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferlib import LLM, TextSample, calibrate, explain, export
from inferlib.calibration.forward import LayerwiseForward
from inferlib.calibration.job import Job
from inferlib.calibration.report import CalibrationReport
from inferlib.calibration.store import RECORD
from inferlib.checkpoint.source import CheckpointError
from inferlib.model_files import ModelFiles
from inferlib.ops.backend import Backend
from inferlib.option_checks import ConfigurationError
from inferlib.sharding.mesh import ShardingError
from tests.helpers.cli_model import Commands, error_of, make_model
from tests.helpers.oracle import make_checkpoint

TEXTS = [" ".join(f"{n * n % 97} sheep and {n} goats" for n in range(start, start + 40)) for start in range(6)]
DATA = TextSample(TEXTS, tokens=512, window=128)
WIDE = {"intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 260}
PROMPT = [7, 200, 31, 4, 100, 101, 102, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def load(path: Path) -> LLM:
    return LLM(path, dtype="float32", max_batch=1, max_len=64, progress=False)


def with_tokenizer(model: Path, shape: Path) -> Path:
    """A checkpoint with the tokenizer of another."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, shape / name)
    return shape


def arrays_of(path: Path) -> list[np.ndarray]:
    return [np.asarray(array).astype(np.float32) for array in load(path).engine.weights]


OPTIONS: dict[str, Any] = dict(data=DATA, method="awq+gptq", scheme="int4", dtype="float32")


@pytest.fixture(scope="module")
def calibrated(model, tmp_path_factory) -> CalibrationReport:
    """Of `OPTIONS`; leave what it wrote as it is."""
    return calibrate(model, tmp_path_factory.mktemp("calibrated") / "out", **OPTIONS)


@pytest.mark.slow
def test_a_calibrated_model_loads_and_loses_less_than_nearest(model, calibrated):
    tokenizer = ModelFiles.open(model).tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXTS[0])[:64]
    original, report = load(model).logits(tokens), calibrated
    nearest = LLM(model, quantization="int4", dtype="float32", max_batch=1, max_len=64, progress=False)
    ours, theirs = load(report.out).logits(tokens), nearest.logits(tokens)
    assert np.mean((ours - original) ** 2) < np.mean((theirs - original) ** 2)
    assert len(report.matrices) == 2 * 4 + 1  # the head as well
    assert report.bits < 6
    assert report.tokens == 512
    assert "gate_up" in str(report)
    assert json.loads(json.dumps(report.to_json()))["matrices"][0]["layer"] == 0
    assert all(matrix.loss <= matrix.nearest for matrix in report.matrices)


@pytest.mark.slow
def test_nearest_writes_what_convert_and_llm_make(model, tmp_path):
    calibrate(model, tmp_path / "out", data=DATA, method="nearest", scheme="mxfp4", dtype="float32")
    llm = LLM(model, dtype="float32", quantization="mxfp4", max_batch=1, max_len=64, progress=False)
    for ours, theirs in zip(arrays_of(tmp_path / "out"), llm.engine.weights, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs).astype(np.float32))


@pytest.mark.slow
def test_programs_compute_what_the_calibration_did(model, tmp_path, monkeypatch):
    """Also with a head that was parted from its embedding by a rotation, with inputs that programs rotate, and a branch
    of low rank; on a mesh, whose CPUs take no types of four bits, with stacked layers. A mesh that would cut a rotation
    is refused."""
    options = {**WIDE, "tie_word_embeddings": True}
    shape = with_tokenizer(model, make_checkpoint(tmp_path / "tied", "llama", **options))
    made, begin = [], LayerwiseForward.begin

    def seen(walk, outside, *rest):
        made.append((walk, outside))
        return begin(walk, outside, *rest)

    monkeypatch.setattr(LayerwiseForward, "begin", seen)
    out, sizes = tmp_path / "out", dict(dtype="float32", max_batch=1, max_len=64, progress=False)
    calibrate(shape, out, data=DATA, method="hadamard+gptq+lowrank:4:attn.o,mlp", scheme="int8", dtype="float32")
    llm, ((walk, outside),) = load(out), made
    assert not llm.engine.model.config.tied
    assert [w.scheme.rotation for w in llm.engine.model.weights if w.part == "mlp.down" and w.scheme] == [128, 128]
    assert {w.part for w in llm.engine.model.weights if w.scheme} == {"attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"}
    assert {w.part for w in llm.engine.model.weights if w.rank} == {"attn.o", "mlp.gate_up", "mlp.down"}
    expected, tokens = walk.logits(outside)[0, :64], walk.windows[0, :64].tolist()
    for of in (llm, LLM(out, parallel="tp=2", scan=True, **sizes)):
        np.testing.assert_allclose(of.logits(tokens), expected, rtol=0, atol=1e-3 * expected.std())
    with pytest.raises(ShardingError, match=r"each 128 of the 256 inputs of mlp\.down are rotated together"):
        LLM(out, parallel="tp=4", **sizes)
    explanation = explain(out)
    assert explanation.facts()["rotation"] == 128
    assert "128 at a time" in str(explanation)
    assert "rank 4 in bfloat16 beside attn.o, mlp" in " ".join(str(explanation).split())


@pytest.mark.release
def test_other_schemes_lose_no_more_than_nearest(model, tmp_path):
    scheme, method = "fp8_block", "hadamard+awq+gptq"
    tokenizer = ModelFiles.open(model).tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXTS[0])[:64]
    calibrate(model, tmp_path / "out", data=DATA, method=method, scheme=scheme, dtype="float32")
    nearest = LLM(model, quantization=scheme, dtype="float32", max_batch=1, max_len=64, progress=False)
    original, theirs = load(model).logits(tokens), nearest.logits(tokens)
    ours = load(tmp_path / "out").logits(tokens)
    assert np.mean((ours - original) ** 2) < np.mean((theirs - original) ** 2)


@pytest.mark.release
def test_weights_that_tpus_read_packed_compute_the_same(model, tmp_path):
    """But for bfloat16, by stacked layers and the interpreted kernel."""
    options = dict(hidden_size=384, head_dim=64, **WIDE)
    shape = with_tokenizer(model, make_checkpoint(tmp_path / "wide", "llama", **options))
    calibrate(shape, tmp_path / "out", data=DATA, method="hadamard+nearest+lowrank:8", scheme="mxfp8")
    sizes: dict[str, Any] = dict(dtype="bfloat16", max_batch=1, max_len=64, progress=False, platform="tpu")
    kernel, xla = (
        LLM(tmp_path / "out", backend=backend, free_layouts=False, **sizes)
        for backend in (Backend(matmul="pallas_tpu"), Backend())
    )
    assert any(weight.packed and weight.rank for weight in kernel.engine.model.weights)
    expected = xla.logits(PROMPT)
    np.testing.assert_allclose(kernel.logits(PROMPT), expected, rtol=0, atol=0.1 * expected.std())


@pytest.mark.slow
def test_experts_that_saw_no_token_are_counted(model, tmp_path):
    options = dict(num_local_experts=5, num_hidden_layers=1, vocab_size=260)
    shape = with_tokenizer(model, make_checkpoint(tmp_path / "moe", "mixtral", **options))
    two_tokens = TextSample([TEXTS[0]], tokens=2, window=2)
    report = calibrate(shape, tmp_path / "out", data=two_tokens, method="gptq", scheme="int4")
    assert sum(matrix.idle for matrix in report.matrices) >= 2  # gate_up and down of at least one expert
    assert "saw no token" in str(report)
    assert np.all(np.isfinite(load(tmp_path / "out").logits(PROMPT)))


@pytest.mark.slow
def test_adapters_fit_where_inputs_of_products_stayed(model, calibrated, tmp_path):
    export(calibrated.out, tmp_path / "exported")
    out, rotated = tmp_path / "out", tmp_path / "rotated"
    for path, method in ((out, "nearest"), (rotated, "hadamard:merged+nearest")):
        calibrate(model, path, data=DATA, method=method, scheme="int4", dtype="float32")
    for path, moves in ((calibrated.out, "awq"), (tmp_path / "exported", "awq"), (rotated, "hadamard")):
        with pytest.raises(CheckpointError, match=f"{moves}.* made of the inputs"):
            LLM(path, dtype="float32", max_batch=1, max_len=64, max_adapters=1, progress=False)
    ModelFiles.open(out).must_take_adapters()
    (out / RECORD).write_text('{"settings": []}')
    with pytest.raises(CheckpointError, match="is damaged"):
        ModelFiles.open(out).must_take_adapters()


# ---- interrupted runs


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_bits(model, calibrated, tmp_path, monkeypatch):
    layer, calls = Job.layer, []

    def stops(self, number, *rest):
        calls.append(number)
        if len(calls) == 2:
            raise Interrupted
        return layer(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "layer", stops)
        with pytest.raises(Interrupted):
            calibrate(model, tmp_path / "out", **OPTIONS)
        assert not (tmp_path / "out").exists()
        with pytest.raises(FileExistsError, match="another scheme"):
            calibrate(model, tmp_path / "out", **(OPTIONS | dict[str, Any](scheme="mxfp4")))
        report = calibrate(model, tmp_path / "out", **OPTIONS)
    assert calls == [0, 1, 1]
    assert len(report.matrices) == 9
    assert not (tmp_path / "out.partial").exists()
    for ours, theirs in zip(arrays_of(tmp_path / "out"), arrays_of(calibrated.out), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_what_a_kill_leaves_of_a_layer_is_written_anew(model, tmp_path, monkeypatch):
    partial = tmp_path / "out.partial"

    def stops(self, number, *_):
        (partial / "weights" / "layer0000.orbax-checkpoint-tmp").mkdir(parents=True)
        (partial / "weights" / "layer0000").mkdir()
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Job, "layer", stops)
        with pytest.raises(Interrupted):
            calibrate(model, tmp_path / "out", data=DATA, method="clip")
    calibrate(model, tmp_path / "out", data=DATA, method="clip")
    assert np.all(np.isfinite(load(tmp_path / "out").logits(PROMPT)))


def test_damaged_and_strange_directories_are_named(model, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError, match=r"mine\.txt"):
        calibrate(model, tmp_path / "out", data=DATA)
    (partial / "mine.txt").unlink()
    (partial / RECORD).write_text('{"layers": 3}')
    with pytest.raises(FileExistsError, match="damaged"):
        calibrate(model, tmp_path / "out", data=DATA)
    shutil.rmtree(partial)
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists"):
        calibrate(model, tmp_path / "out", data=DATA)


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_the_run_goes_on_later(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(OSError, match="GB free"):
            calibrate(model, tmp_path / "out", data=DATA, method="nearest")
    assert not (tmp_path / "out.partial").exists()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError("the weights could not be written: No space left on device")

        patch.setattr("inferlib.calibration.store.save_weights", full)
        with pytest.raises(OSError, match="No space left"):
            calibrate(model, tmp_path / "out", data=DATA, method="nearest")
    calibrate(model, tmp_path / "out", data=DATA, method="nearest")
    load(tmp_path / "out")


# ---- wrong input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "no method is called 'magic'"),
        ({"method": 3}, "no method is called 3"),
        ({"method": ""}, "no method"),
        ({"method": "gptq+gptq"}, "gptq twice"),
        ({"method": "gptq+clip"}, "takes one"),
        ({"method": "awq+smoothquant+gptq", "scheme": "int8_a8"}, "takes one"),
        ({"method": "hadamard"}, "say how to round"),
        ({"method": "gptq+lowrank"}, "has no rank: give one after a colon, such as lowrank:16"),
        ({"method": "gptq+lowrank:0"}, "has no rank"),
        ({"method": "gptq+lowrank:x"}, "has no rank"),
        ({"method": f"gptq+lowrank:{'9' * 5000}"}, "has no rank"),
        ({"method": "gptq+lowrank:4:"}, "names no parts: write lowrank:4, or lowrank:4:mlp"),
        (
            {"method": "gptq+lowrank:4:mlp,conv"},
            "lowrank:4:'conv' names no matrix that can have a branch; those that can",
        ),
        ({"method": "gptq+lowrank:4+lowrank:8"}, "lowrank twice"),
        ({"method": "gptq:3"}, "'gptq:3' is no part of a method: write gptq"),
        ({"method": "hadamard:whole+gptq"}, "write hadamard or hadamard:merged"),
        ({"method": "hadamard+spinquant+gptq"}, "takes one"),
        ({"method": "spinquant:0"}, "write spinquant, spinquant:100 or spinquant:merged"),
        ({"method": "gptq+lowrank:4000"}, "is no low rank of"),
        ({"method": "smoothquant"}, "take int8_a8 or fp8_a8"),
        ({"method": "awq", "scheme": "int8_a8"}, "smoothquant"),
        ({"scheme": "int3"}, "no quantization is called 'int3'"),
        ({"dtype": "int8"}, "dtype"),
        ({"data": []}, "have 0 tokens, and 64 windows of 256 take 16384"),
        ({"data": [3]}, "list of texts"),
        ({"data": TextSample(["too short"], tokens=300, window=128)}, "3 windows of 128 take 384"),
    ],
)
def test_wrong_options_name_the_fix_before_anything_is_written(model, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        calibrate(model, tmp_path / "out", **{"data": DATA, **options})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [{"tokens": 0}, {"window": 1}, {"tokens": 1.5}, {"tokens": 8, "window": 9}])
def test_wrong_sizes_of_the_text(values):
    with pytest.raises(ConfigurationError):
        TextSample(TEXTS, **values)


def test_quantised_models_and_models_without_a_tokenizer_are_refused(model, tmp_path):
    calibrate(model, tmp_path / "out", data=DATA, method="nearest")
    with pytest.raises(CheckpointError, match="quantised already"):
        calibrate(tmp_path / "out", tmp_path / "again", data=DATA)
    bare = make_checkpoint(tmp_path / "bare", "llama")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        calibrate(bare, tmp_path / "again", data=DATA)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"text": "a"}', "{}"], "line 2 is no text"),
        (["[["], "line 1 is no text"),
        (['{"text": 3}'], "line 1 is no text"),
    ],
)
def test_lines_that_are_no_text_are_named(tmp_path, lines, words):
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigurationError, match=words):
        TextSample(tmp_path / "data.jsonl").read()


def test_lines_are_texts_or_objects(tmp_path):
    (tmp_path / "data.jsonl").write_text('"a"\n\n{"text": "b", "id": 3}\n{"text": " "}\n')
    assert TextSample(tmp_path / "data.jsonl").read() == ["a", "b"]


def test_windows_are_spread_over_all_texts(model):
    tokenizer = ModelFiles.open(model).tokenizer
    assert tokenizer is not None
    windows = TextSample(TEXTS, tokens=64, window=16).windows(tokenizer, context=8)
    whole = [token for text in TEXTS for token in tokenizer.encode(text)]
    assert windows.shape == (8, 8)
    assert windows[0].tolist() == whole[:8]
    assert windows[-1].tolist() == whole[-8:]


@pytest.mark.slow
def test_the_command_writes_a_model_and_prints_the_losses(model, tmp_path):
    commands, data = Commands(model), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["quantize", model, tmp_path / "out", "--data", data, "--tokens", "256", "--window", "64"]
    short, picture = tmp_path / "few.jsonl", tmp_path / "errors.svg"
    short.write_text('{"text": "abc"}')
    assert "the texts have" in error_of(commands(*words, "--test-data", short))
    result = commands(*words, "--method", "gptq", "--scheme", "int4", "--test-data", data, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "gptq to int4" in result.stdout
    assert f"KL divergence from {model}" in " ".join(result.stdout.split())
    assert "gate_up" in picture.read_text()
    assert load(tmp_path / "out").engine.model.weights
    assert "exists" in error_of(commands(*words))
    assert "tokens, and" in error_of(commands(*words[:2], tmp_path / "other", *words[3:5], "--tokens", "1000000"))
