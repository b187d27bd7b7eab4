"""`examples/train`: what is trained is what `LLM` runs, and a run that was interrupted goes on to the same losses."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from examples.train import evaluate
from examples.train import model as presets
from examples.train.model import config_of, first_weights, logits_of
from examples.train.train import Run, Settings, draw_steps, open_run
from inferlib import Buckets, SamplingParams
from inferlib.checkpoint.save import save_model
from inferlib.distillation.record import read_log
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from tests.helpers.llms import build_llm
from tests.models.test_parity import one_pass

VOCAB, WIDTH, LENGTH = 40, 32, 24
SMALL = Settings("b", steps=4, batch=8, length=LENGTH, width=WIDTH, vocab=270, dtype="float32")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile() -> Iterator[None]:
    """Presets of a layer where they have two, lanes of three layers, gradients through two steps, and two devices that
    share a batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.LOOPS, "a", (1, 1, 1, 1))
        patch.setitem(presets.LOOPS, "b", (1, 1, 1, 8))
        patch.setattr(presets, "LANE_LAYERS", 3)
        patch.setattr(presets, "THROUGH", 2)
        patch.setattr(Run, "mesh", property(lambda run: Mesh(np.array(jax.devices()[:2]), ("data",))))
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    file, draw = tmp_path_factory.mktemp("texts") / "texts.jsonl", random.Random(0)
    words = ["alpha", "beta", "gamma", "delta"]
    splits = ["train"] * 40 + ["held_out"] * 6
    lines = [{"text": " ".join(draw.choices(words, k=100)), "split": split} for split in splits]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def losses(run: Run) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in read_log(run.out / "training" / "log.jsonl")]


def opened(texts: Path, out: Path, settings: Settings = SMALL, like: Run | None = None) -> Run:
    """like: one with the same settings, whose programs the run takes."""
    run = open_run(texts, out, settings, save_every=2, log_every=1)
    if like is not None:
        vars(run).update(step=like.step, measured=like.measured)
    return run


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory) -> Run:
    """A run that was not interrupted."""
    run = opened(texts, tmp_path_factory.mktemp("runs") / "whole")
    run.complete()
    return run


def drawn(preset: str, **options) -> tuple[dict, AbstractModel, tuple[jax.Array, ...]]:
    """A config.json, the model, and weights of which none is zero or one."""
    hf = config_of(preset, VOCAB, width=WIDTH, length=LENGTH, **options)
    model, draw = abstract_model(config_from_hf(hf), "float32"), np.random.default_rng(1)
    weights = (np.asarray(x) + draw.normal(0, 0.1, x.shape).astype(np.float32) for x in first_weights(model, 0))
    return hf, model, tuple(map(jnp.asarray, weights))


@pytest.mark.slow
def test_numbers_of_steps_keep_their_mean_and_spread():
    """Poisson's variance is its mean. A lognormal factor f adds mean^2 var f, and exp(0.5^2) - 1 is var f."""
    for spread, variance in ((0.0, 8.0), (0.5, 7 + 7**2 * (math.exp(0.25) - 1))):
        counts = [draw_steps(8, spread, np.random.default_rng((0, number))) for number in range(20_000)]
        assert min(counts) >= 1
        np.testing.assert_allclose([np.mean(counts), np.var(counts)], [8, variance], rtol=0.05)


# ---- the pass


PASS = jax.jit(logits_of, static_argnums=0)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("b", {}),
        ("b", {"state_norm": True}),
        pytest.param("b", {"injection": "linear"}, marks=pytest.mark.release),
        pytest.param("c", {}, marks=pytest.mark.release),
        ("d-delayed", {}),
    ],
)
@pytest.mark.slow
def test_the_written_model_gives_the_logits_that_were_trained(preset, options, tmp_path):
    hf, model, weights = drawn(preset, **options)
    save_model(tmp_path, hf, model, weights)
    logits = PASS(model, weights, TOKENS, 8)[1]
    assert np.std(logits) > 0.1
    np.testing.assert_allclose(one_pass(tmp_path, TOKENS[1], stacked=True), logits, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_decoding_is_the_pass_of_training(tmp_path):
    hf, model, weights = drawn("b")
    save_model(tmp_path, hf, model, weights)
    half, buckets = LENGTH // 2, Buckets(prefill=(LENGTH,), batch=(2,), cache=(2 * LENGTH,))
    llm = build_llm(tmp_path, buckets, max_batch=2, max_len=2 * LENGTH, decode_steps=1)
    begin = TOKENS[:, :half].tolist()
    outputs = llm.generate(begin, SamplingParams(temperature=0, max_tokens=half, ignore_eos=True))
    rows = np.array([row + output.outputs[0].token_ids for row, output in zip(begin, outputs, strict=True)])
    logits = np.asarray(PASS(model, weights, rows, 8))
    np.testing.assert_allclose(llm.logits(rows[1].tolist()), logits[1], rtol=0, atol=2e-5)
    before = logits[:, half - 1 : -1]
    chosen = np.take_along_axis(before, rows[:, half:, None], axis=-1)[..., 0]
    assert (before.max(-1) - chosen).max() < 1e-4


@pytest.mark.slow
def test_gradients_go_through_the_last_steps_alone():
    """A slope by differences of the core's weights goes through all of them."""
    _, model, weights = drawn("b")
    draw = np.random.default_rng(2)
    core = [w.block is not None and model.passes(w) > 1 for w in model.weights]
    direction = [draw.normal(0, 1, x.shape).astype(np.float32) * w for x, w in zip(weights, core, strict=True)]

    @jax.jit
    def slopes(steps):
        mean = lambda w: jnp.square(logits_of(model, w, jnp.asarray(TOKENS), steps)).mean()  # noqa: E731
        by_gradient = sum(jnp.vdot(g, d) for g, d in zip(jax.grad(mean)(weights), direction, strict=True))
        near = [mean([w + size * d for w, d in zip(weights, direction, strict=True)]) for size in (1e-3, -1e-3)]
        return by_gradient, (near[0] - near[1]) / 2e-3

    by_gradient, by_differences = map(float, slopes(presets.THROUGH))
    assert by_gradient == pytest.approx(by_differences, rel=0.005)
    by_gradient, by_differences = map(float, slopes(12))
    assert by_gradient != pytest.approx(by_differences, rel=0.01)


# ---- the run


@pytest.mark.slow
def test_a_run_that_was_interrupted_comes_to_the_same_losses(texts, whole, tmp_path, monkeypatch):
    run, batch = opened(texts, tmp_path / "run", like=whole), Run.batch

    def interrupted(self: Run, number: int):
        if number == 3:
            raise KeyboardInterrupt
        return batch(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.complete()
    assert len(losses(run)) == 3
    result = opened(texts, run.out, like=whole).complete()
    assert losses(run) == losses(whole)
    assert result["step"] == 4
    files = [(r.out / "model.safetensors").read_bytes() for r in (run, whole)]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_trained_model_is_measured(whole, monkeypatch):
    monkeypatch.setattr(evaluate, "THRESHOLDS", {"kl": (100.0,)})
    monkeypatch.setattr(evaluate, "DEPTHS", (4, 8))
    rows = [row[:LENGTH].tolist() for row in whole.data.held_out[:8]]
    lines = evaluate.lines_of(list(evaluate.measure(whole.out, rows, "float32")))
    assert [line["steps of a token"] for line in lines] == [f"{depth}.00" for depth in (*evaluate.DEPTHS, 1)]
    weights = ModelFiles.open(whole.out).load(whole.model)
    expected = jax.jit(whole.loss)(weights, np.asarray(rows), 8)
    assert float(lines[1]["held-out nats"]) == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run(texts, tmp_path, monkeypatch):
    run, batch = opened(texts, tmp_path / "run", replace(SMALL, preset="a")), Run.batch
    monkeypatch.setattr(Run, "batch", lambda self, number: (*batch(self, number)[:2], np.float32(math.inf)))
    result = run.complete()
    assert result["diverged"]
    assert result["step"] == 2
    assert not (run.out / "model.safetensors").exists()


# ---- wrong input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "give --steps or --minutes"),
        ({"batch": 9}, "a batch of 9 does not divide over 8 devices"),
        ({"preset": "a", "injection": "add"}, "preset a repeats no layers"),
        ({"fading": 1.0}, "between 0 and 1, got 1.0"),
        ({"preset": "c", "fading": 0.7}, "only preset b"),
        ({"preset": "a", "state_norm": True}, "so it has no state"),
        ({"core_steps": 1}, "2 at least"),
        ({"preset": "c", "core_steps": 4}, "for preset b alone"),
        ({"spread": -0.5}, "spread by 0 to 2, got -0.5"),
        ({"preset": "c", "spread": 0.5}, "preset c repeats no layers, so it takes no --spread"),
        ({"learning_rate": math.nan}, "between 0 and 1, got nan"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(SMALL, **options)


@pytest.mark.slow
def test_a_directory_of_another_run_is_refused(texts, whole, tmp_path):
    with pytest.raises(ConfigurationError, match="has a run with other settings"):
        opened(texts, whole.out, replace(SMALL, seed=1))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="has no run to go on with"):
        opened(texts, tmp_path)
