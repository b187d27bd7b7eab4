"""`inferlib finetune` on tiny models: what is trained and written, resumed runs, several devices, wrong input."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import LLM, SamplingParams, TextSample, calibrate, evaluate
from inferlib.checkpoint.laid_out import stored_model
from inferlib.checkpoint.source import CheckpointError
from inferlib.distillation.record import Record, read_log
from inferlib.distillation.settings import FinetuneSettings
from inferlib.finetuning.finetune import Run, finetune, open_run
from inferlib.finetuning.weights import QuantizedWeights, begin
from inferlib.finetuning.whole_rows import has_gradients, hidden_states, take_row_attention
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.ops.grouped_matmul import grouped_matmul
from inferlib.option_checks import ConfigurationError
from tests.helpers.cli_model import make_model
from tests.helpers.oracle import make_checkpoint

SMALL = dict(steps=4, batch=8, length=32, lr=1e-3, warmup=1, save_every=2, log_every=1, devices=1)


def settings(**options) -> FinetuneSettings:
    return FinetuneSettings(**{**SMALL, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def words() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(["alpha", "beta", "gamma", "delta"], k=40)) for _ in range(30)]


@pytest.fixture(scope="module")
def texts(words, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    splits = ["train"] * 26 + ["held_out"] * 4
    lines = [{"text": text, "split": split} for text, split in zip(words, splits, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def quantized(model, words, tmp_path_factory) -> Path:
    """The model in MXFP4, rounded to nearest."""
    out = tmp_path_factory.mktemp("quantized") / "mxfp4"
    calibrate(model, out, data=TextSample(words, 256, 64), method="nearest", scheme="mxfp4", dtype="float32")
    return out


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """A model with experts."""
    return make_model(tmp_path_factory.mktemp("experts") / "model", layers=1, family="qwen3_moe")


@pytest.fixture(scope="module")
def quantized_experts(experts, words) -> Path:
    """The model with experts in MXFP4, with inputs in MXFP8."""
    out = experts.with_name("mxfp4_a8")
    calibrate(experts, out, data=TextSample(words, 256, 64), method="nearest", scheme="mxfp4_a8", dtype="float32")
    return out


@pytest.fixture(scope="module")
def integer_experts(experts, words) -> Path:
    """The model with experts in int8, with inputs in int8."""
    out = experts.with_name("int8_a8")
    calibrate(experts, out, data=TextSample(words, 256, 64), method="nearest", scheme="int8_a8", dtype="float32")
    return out


@pytest.fixture(scope="module")
def whole(model, quantized, texts, tmp_path_factory) -> Run:
    """A run that was not interrupted."""
    run = open_run(quantized, texts, tmp_path_factory.mktemp("whole"), settings(), teacher=model)
    run.complete()
    return run


def losses(out: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(out / "training" / "log.jsonl")]


def arrays_of(directory: Path) -> list[np.ndarray]:
    files = ModelFiles.open(directory)
    stored = stored_model(files.config, "float32", files.quantization(None))
    return [np.asarray(array) for array in files.load(stored)]


# ---- what is trained and written


@pytest.mark.slow
def test_the_result_has_the_format_and_loses_as_little_as_the_run_says(model, quantized, words, texts, whole):
    """The run's step has compiled once. Other options need another directory."""
    out = whole.out
    result = json.loads((out / "training" / "result.json").read_text())
    assert result["after"] < 0.85 * result["before"]
    before, after = arrays_of(quantized), arrays_of(out)
    assert [(x.shape, x.dtype) for x in before] == [(x.shape, x.dtype) for x in after]
    sample = TextSample(words[26:], 512, 32)
    measured = evaluate(out, sample, against=model, dtype="float32").divergence
    assert measured is not None
    assert measured.value == pytest.approx(result["after"], rel=0.1)  # other windows of the same texts
    assert (out / "training" / "loss.png").stat().st_size > 0
    assert len(losses(out)) == SMALL["steps"]
    assert LLM(out, max_len=32).generate("alpha")[0].outputs[0].token_ids
    assert whole.step._cache_size() == 1
    with pytest.raises(ConfigurationError, match=r"has a run with lr 0\.001, not 0\.01"):
        finetune(quantized, texts, out, settings(lr=0.01), teacher=model)


@pytest.mark.release
def test_an_interrupted_run_resumes_to_the_same_bits(model, quantized, texts, whole, tmp_path, monkeypatch):
    """The loop is the one that `inferlib distill` has, whose runs resume in `test_distill.py`."""
    out, add = tmp_path / "out", Record.add

    def stop(self, step, *args, **metrics):
        if step == 3:
            raise KeyboardInterrupt
        add(self, step, *args, **metrics)

    monkeypatch.setattr(Record, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        finetune(quantized, texts, out, settings(), teacher=model)
    assert len(losses(out)) == 2
    monkeypatch.setattr(Record, "add", add)
    finetune(quantized, texts, out, settings(), teacher=model)
    assert losses(out) == losses(whole.out)
    for one, other in zip(arrays_of(out), arrays_of(whole.out), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.release
def test_without_a_teacher_the_texts_teach(quantized, texts, tmp_path):
    result = finetune(quantized, texts, tmp_path / "out", settings(steps=12, lr=1e-2))
    assert result.after < 0.8 * result.before
    assert "cross entropy" in (tmp_path / "out" / "training" / "result.json").read_text()


@pytest.mark.slow
def test_the_teacher_writes_samples_once(model, quantized, texts, tmp_path, monkeypatch):
    """Of the length of rows, each from a token of its own; a run that goes on has them."""
    out, options = tmp_path / "out", settings(samples=5)
    run = open_run(quantized, texts, out, options, teacher=model)
    samples = run.rows.training[-5:]
    assert samples.shape == (5, 32)
    assert len(set(samples[:, 0].tolist())) > 1
    llm = LLM(model, dtype="float32", max_len=32, generation_config="none")
    params = SamplingParams(temperature=1.0, max_tokens=31, ignore_eos=True, seed=3)
    again = llm.generate([samples[3, :1].tolist()], params)[0].outputs[0].token_ids
    assert samples[3, 1:].tolist() == list(again)
    monkeypatch.setattr("inferlib.finetuning.finetune.sample_rows", None)
    resumed = open_run(quantized, texts, out, options, teacher=model)
    np.testing.assert_array_equal(resumed.rows.training, run.rows.training)


@pytest.mark.release
def test_two_devices_learn_as_one(model, quantized, texts, whole, tmp_path):
    finetune(quantized, texts, tmp_path / "out", settings(devices=2), teacher=model)
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(whole.out), rtol=1e-3)


@pytest.mark.slow
def test_untrained_weights_are_stored_as_they_were(integer_experts):
    assert_stored_and_multiplied_alike(integer_experts)


@pytest.mark.release
@pytest.mark.parametrize(
    ("of", "scheme", "method"), [("model", "int4_g32", "nearest"), ("experts", "int4", "hadamard+gptq+lowrank:4")]
)
def test_further_weights_are_stored_as_they_were(request, words, tmp_path, of, scheme, method):
    """Rotations and branches are stored too."""
    model = request.getfixturevalue(of)
    calibrate(model, tmp_path / "q", data=TextSample(words, 256, 64), method=method, scheme=scheme, dtype="float32")
    assert_stored_and_multiplied_alike(tmp_path / "q")


def assert_stored_and_multiplied_alike(path: Path) -> None:
    """Weights that nothing trained are the files', and multiply as the engine's do."""
    files = ModelFiles.open(path)
    stored = stored_model(files.config, "float32", files.quantization(None))
    arrays = files.load(stored)
    weights = QuantizedWeights(stored, abstract_model(files.config, "float32"))

    @jax.jit  # one program instead of one for each operation
    def stored_again(trained, scales):
        triples = zip(stored.weights, trained, scales, strict=True)
        return [x for of_weight in triples for x in weights.rounded(*of_weight)]

    trained, scales = jax.jit(lambda arrays: begin(stored, arrays))(arrays)
    rounded = stored_again(trained, scales)
    for spec, one, other in zip(stored.specs, arrays, rounded, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=spec.name)
    tokens = jnp.arange(256).reshape(8, 32)  # so many that inputs are rounded by token
    expected = jax.jit(lambda arrays: hidden_states(stored, arrays, tokens)[1])(arrays)
    multiplied = jax.jit(lambda *of: hidden_states(weights.dense, weights.multiplied(*of), tokens)[1])
    hidden = multiplied(trained, scales)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=2e-4 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_attention_of_whole_rows_is_that_over_a_cache(model):
    files = ModelFiles.open(model)
    abstract = abstract_model(files.config, "float32")
    arrays, tokens = files.load(abstract), jnp.arange(64).reshape(2, 32)
    expected = jax.jit(lambda arrays: hidden_states(abstract, arrays, tokens)[1])(arrays)
    decoders = []

    @jax.jit
    def by_rows(arrays):
        decoder, hidden = hidden_states(abstract, arrays, tokens)
        decoders.append(decoder)
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inferlib.finetuning.whole_rows.row_kernel", lambda dtype: "cudnn")
        patch.setattr(
            "inferlib.finetuning.whole_rows.take_row_attention",
            lambda decoder, rows, kernel: take_row_attention(decoder, rows, "xla"),
        )
        hidden = by_rows(arrays)
    assert all("attend" in vars(block.attn) for block in decoders[0].blocks)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-4)


# ---- experts


@pytest.mark.release
def test_experts_and_their_router_learn(quantized_experts, texts, tmp_path):
    result = finetune(quantized_experts, texts, tmp_path / "out", settings(steps=12, lr=1e-2))
    assert result.after < 0.8 * result.before
    files = ModelFiles.open(quantized_experts)
    names = [spec.name for spec in stored_model(files.config, "float32", files.quantization(None)).specs]
    pairs = zip(names, arrays_of(quantized_experts), arrays_of(tmp_path / "out"), strict=True)
    moved = {name for name, one, other in pairs if (one.astype(float) != other.astype(float)).any()}
    for part in ("router.weight", "experts.gate_up", "experts.down"):
        assert f"blocks.0.mlp.{part}" in moved
    assert LLM(tmp_path / "out", max_len=32).generate("alpha")[0].outputs[0].token_ids


def test_memory_keeps_nothing_of_each_choice_of_a_token(experts):
    """What the gradients' pass takes from the pass before it."""
    config = ModelFiles.open(experts).config
    model = abstract_model(config, "float32")
    weights = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in model.specs]
    tokens = jax.ShapeDtypeStruct((2, 50), jnp.int32)
    back = jax.eval_shape(
        lambda weights, t: jax.vjp(lambda w: hidden_states(model, w, t)[1], weights)[1], weights, tokens
    )
    saved = {leaf.shape[0] for leaf in jax.tree.leaves(back) if leaf.ndim > 1}
    assert 100 in saved
    assert 100 * config.mixtures[0].router.chosen not in saved


# ---- recurrent layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "granitemoehybrid",
        pytest.param("kimi_linear", marks=pytest.mark.release),
    ],
)
def test_recurrent_layers_have_gradients(family, tmp_path):
    """In rows of several chunks, beside experts."""
    model = abstract_model(ModelFiles.open(make_checkpoint(tmp_path, family)).config, "float32")
    weights = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in model.specs]
    tokens = jax.ShapeDtypeStruct((1, 200), jnp.int32)
    assert has_gradients(lambda weights, tokens: hidden_states(model, weights, tokens)[1].sum(), weights, tokens)


# ---- wrong input


def test_what_cannot_be_trained_is_refused(model, quantized, texts, tmp_path):
    with pytest.raises(CheckpointError, match="quantise the model first"):
        finetune(model, texts, tmp_path / "out", settings())
    with pytest.raises(ConfigurationError, match="exceeds the model's context"):
        finetune(quantized, texts, tmp_path / "out", settings(length=512))
    short = tmp_path / "few.jsonl"
    short.write_text('{"text": "' + "a" * 600 + '", "split": "train"}\n{"text": "a", "split": "held_out"}\n')
    with pytest.raises(ConfigurationError, match="less than 256 tokens to measure with"):
        finetune(quantized, short, tmp_path / "out", settings(length=256))
    with pytest.raises(ConfigurationError, match="dtype must be"):
        finetune(quantized, texts, tmp_path / "out", settings(), dtype="float16")
    with pytest.raises(ConfigurationError, match="samples are written by the teacher"):
        finetune(quantized, texts, tmp_path / "out", settings(samples=2))
    with pytest.raises(ConfigurationError, match="does not divide over 3 devices"):
        finetune(quantized, texts, tmp_path / "out", settings(devices=3))
    assert not (tmp_path / "out").exists()


def test_a_teacher_of_other_tokens_is_refused(quantized, texts, tmp_path):
    teacher = make_checkpoint(tmp_path / "teacher", "llama", vocab_size=300)
    with pytest.raises(ConfigurationError, match=r"has 300 tokens, and .* has 260"):
        finetune(quantized, texts, tmp_path / "out", settings(), teacher=teacher)


@pytest.mark.slow
def test_layers_without_gradients_are_refused_by_the_name_of_the_family(integer_experts, texts, tmp_path, monkeypatch):
    """Experts that multiply as they do where nothing is trained."""
    without = lambda x, w, sizes, rows, most: grouped_matmul(x, w, sizes, rows=rows, most=most)  # noqa: E731
    monkeypatch.setattr("inferlib.ops.grouped_gradients._product", without)
    with pytest.raises(ConfigurationError, match="qwen3_moe has layers without gradients"):
        finetune(integer_experts, texts, tmp_path / "out", settings())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"lr": 0.0}, {"length": 8}, {"batch": 1.5}, {"devices": 0}, {"samples": -1}]
)
def test_settings_that_make_no_sense(options):
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} must be"):
        FinetuneSettings(**options)
