"""`inferlib distill eagle3` on a tiny model: what is learned, resumed runs, several devices, wrong input."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib.checkpoint.eagle3 import Eagle3Files
from inferlib.cli import app
from inferlib.distillation import continuations
from inferlib.distillation.continuations import prompts_of_chats
from inferlib.distillation.data import Data, prepare
from inferlib.distillation.eagle3 import Run, distill_eagle3, open_run
from inferlib.distillation.record import Record, read_log
from inferlib.distillation.settings import DistillSettings
from inferlib.distillation.texts import frequent_tokens, read_texts, rows_of
from inferlib.model_files import ModelFiles
from inferlib.models.eagle3 import abstract_head
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.tokenizer import Tokenizer
from tests.helpers.cli_model import make_model

SMALL = dict(steps=20, batch=8, length=24, unroll=2, draft_vocab=64, warmup=1, save_every=10, log_every=1, devices=1)
SMALL |= dict(lr=3e-3, continuations=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    file, draw = tmp_path_factory.mktemp("texts") / "texts.jsonl", random.Random(0)
    words = ["alpha", "beta", "gamma", "delta"]
    lines = [{"text": " ".join(draw.choices(words, k=60)), "split": "train"} for _ in range(40)]
    lines += [{"text": " ".join(draw.choices(words, k=60)), "split": "held_out"} for _ in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def with_chats(texts, tmp_path_factory) -> Path:
    """The texts, and requests that the model answers."""
    file = tmp_path_factory.mktemp("chats") / "texts.jsonl"
    chats = [{"messages": [{"role": "user", "content": f"alpha {n}"}]} for n in range(12)]
    file.write_text(texts.read_text() + "".join(json.dumps(chat) + "\n" for chat in chats))
    return file


def losses(out: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(out / "training" / "log.jsonl")]


def opened(model: Path, texts: Path, out: Path, like: Run | None = None, **options) -> Run:
    """like: one with the same settings, whose program of a step the run takes."""
    run = open_run(str(model), texts, out, DistillSettings(**{**SMALL, **options}))
    if like is not None:
        vars(run).update(step=like.step)
    return run


@pytest.fixture(scope="module")
def whole(model, texts, tmp_path_factory) -> Run:
    """A run that was not interrupted."""
    run = opened(model, texts, tmp_path_factory.mktemp("whole"))
    run.complete()
    return run


@pytest.mark.slow
def test_a_run_leaves_a_head_as_published(model, whole):
    """Whose step has compiled once."""
    config = config_from_hf(json.loads((model / "config.json").read_text()))
    files = Eagle3Files.open(whole.out, config)
    assert files.config.model.vocab == 64
    weights = files.load(abstract_head(files.config, "float32"))
    assert all(np.isfinite(w).all() for w in weights)
    data = Data.load(whole.folder / "data.npz")
    head = abstract_head(files.config, "float32").merge(weights)
    np.testing.assert_array_equal(head.target_ids(np.arange(64)), data.ids)
    assert (whole.folder / "loss.png").stat().st_size > 0
    result = json.loads((whole.folder / "result.json").read_text())
    assert 1 <= result["tokens_a_verification"] <= 5
    assert len(losses(whole.out)) == SMALL["steps"]
    assert whole.step._cache_size() == 1


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_loss(model, texts, whole, tmp_path, monkeypatch):
    out, add = tmp_path / "head", Record.add

    def stop(self, step, *args, **metrics):
        if step == 13:
            raise KeyboardInterrupt
        add(self, step, *args, **metrics)

    monkeypatch.setattr(Record, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        opened(model, texts, out, like=whole).complete()
    assert len(losses(out)) == 12
    monkeypatch.setattr(Record, "add", add)
    result = opened(model, texts, out, like=whole).complete()
    assert losses(out) == losses(whole.out)
    expected = json.loads((whole.folder / "result.json").read_text())
    assert result.tokens == expected["tokens_a_verification"]
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (whole.out / name).read_bytes()


def test_what_the_model_answers_to_chats_is_learned_from(model, with_chats, monkeypatch):
    """Each prompt as the template has it, and its answer behind it. What it writes is what `LLM` does."""

    def answered(_, prompts, params, **how):
        room = [sampling.max_tokens for sampling in params]
        assert room == [how["length"] - len(prompt) for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7, 8, 9])]) for _ in prompts]

    monkeypatch.setattr(continuations, "generate_once", answered)
    files, settings = ModelFiles.open(model), DistillSettings(**SMALL | dict(continuations=0, length=64))
    data = prepare(files, with_chats, settings, dtype="float32", progress=False)
    render, encode = files.tokenizer.chat_template.render, files.tokenizer.encode
    chats = [render([{"role": "user", "content": f"alpha {n}"}]) for n in range(2)]
    expected = [token for chat in chats for token in (*encode(chat, add_special_tokens=False), 7, 8, 9)]
    np.testing.assert_array_equal(data.continued.reshape(-1)[: len(expected)], expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": "hello"}, "line 1 must be"),
        ({"messages": [], "text": "a"}, "without a text"),
        ({"messages": [], "split": "held_out"}, "texts alone measure"),
    ],
)
def test_wrong_chats_are_refused(line, message, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(ConfigurationError, match=message):
        read_texts(file)


def test_chats_that_cannot_be_answered(model, caplog):
    """Those without room are left out, which is said; what cannot be rendered is refused."""
    tokenizer = Tokenizer.from_directory(model)
    short, long = ([{"role": "user", "content": "alpha " * count}] for count in (1, 40))
    (prompt,) = prompts_of_chats([long, short], tokenizer, 64)
    assert prompt == list(tokenizer.encode(tokenizer.chat_template.render(short), add_special_tokens=False))
    assert "1 of 2 chats are left out" in caplog.text
    with pytest.raises(ConfigurationError, match="chat 2 of the data: "):
        prompts_of_chats([short, [{"role": "user"}]], tokenizer, 64)
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="no chat template"):
        prompts_of_chats([short], tokenizer, 64)


@pytest.mark.release
def test_two_devices_learn_as_one(model, texts, whole, tmp_path):
    opened(model, texts, tmp_path / "head", steps=4, devices=2).complete()
    opened(model, texts, tmp_path / "one", steps=4).complete()
    np.testing.assert_allclose(losses(tmp_path / "head"), losses(tmp_path / "one"), rtol=2e-5)


@pytest.mark.slow
def test_a_head_learns_what_its_target_goes_on_with(whole):
    """In 20 steps, for a random model; one of 64 drafts would stand by chance."""
    entries = read_log(whole.folder / "log.jsonl")
    loss, standing = ([entry[name] for entry in entries] for name in ("loss", "standing"))
    assert np.mean(loss[-5:]) < 0.8 * np.mean(loss[:5])  # of so many steps, which vary
    assert np.mean(standing[-5:]) > np.mean(standing[:5]) + 0.1
    assert json.loads((whole.folder / "result.json").read_text())["acceptance"] > 3 / 64


@pytest.mark.slow
def test_a_head_begins_with_features_of_size_one(whole):
    """Whatever sizes the target's hidden states have, here much more than 1."""
    weights = whole.all_weights(whole.first_state()["weights"])
    features, _ = whole.target.states(whole.target_weights, jax.numpy.asarray(whole.data.rows[:2]))
    fused = whole.passes.begin(weights, features).hidden
    assert np.sqrt(np.mean(np.square(features))) > 3
    assert 0.1 < np.sqrt(np.mean(np.square(fused))) < 1


# ---- texts


def test_each_fiftieth_text_is_held_out_unless_the_file_says(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(1, 101)))
    assert read_texts(file).testing == ("50", "100")
    assert len(read_texts(file).training) == 98


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}\n{"text"', "has a line that is no JSON"),
        ('{"text": 3}\n', "line 1 must be"),
        ("[1]\n", "line 1 must be"),
        ('{"text": "a", "split": "test"}\n', "line 1 must be"),
        ('{"text": "a"}\n', "no text for evaluation"),
        ('{"text": "a", "split": "held_out"}\n', "no text for training"),
        ("", "no text for training"),
    ],
)
def test_a_file_of_other_lines_is_refused(tmp_path, lines, message):
    (tmp_path / "texts.jsonl").write_text(lines)
    with pytest.raises(ConfigurationError, match=message):
        read_texts(tmp_path / "texts.jsonl")


def test_rows_and_frequent_tokens():
    np.testing.assert_array_equal(rows_of(np.arange(7), 3), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(frequent_tokens(np.array([5, 5, 2, 7, 2, 5]), 9, 3), [2, 5, 7])
    np.testing.assert_array_equal(frequent_tokens(np.array([5]), 9, 3), [0, 1, 5])


def test_batches_take_every_row_once_before_any_twice():
    nothing = np.zeros((0, 1), np.int32)
    data = Data(np.arange(10, dtype=np.int32)[:, None], nothing, nothing, nothing, nothing, 0)
    taken = np.concatenate([data.batch(step, 4, seed=1) for step in range(5)]).reshape(-1)
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert list(taken[:10]) != list(taken[10:])
    mixed = Data(data.rows, data.rows + 100, nothing, nothing, nothing, 0)
    assert (mixed.batch(3, 4, seed=1) >= 100).sum() == 2


# ---- wrong input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"steps": 0}, "steps must be a whole number from 1"),
        ({"draft_vocab": 2}, "draft_vocab must be a whole number from 16"),
        ({"unroll": 24, "length": 24}, "too short for 24 drafts"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DistillSettings(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 6, "devices": 4}, "6 rows does not divide over 4 devices"),
        ({"devices": 9}, "9 devices are asked for, and there are 8"),
        ({"length": 512}, "exceeds the model's context, 256"),
        ({"draft_vocab": 300}, "draft_vocab is 300, and the model has 260"),
        ({"continuations": 10_000}, "--continuations wants more"),
        ({"lr": 1e-3}, "has a run with lr 0.003, not 0.001"),
    ],
)
def test_a_run_that_cannot_be_is_refused(model, texts, whole, tmp_path, options, message):
    out = whole.out if "lr" in options else tmp_path / "head"
    with pytest.raises(ConfigurationError, match=message):
        distill_eagle3(str(model), texts, out, DistillSettings(**{**SMALL, **options}))
    assert out == whole.out or not out.exists()


def test_a_directory_of_something_else_is_refused(model, texts, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="not empty and has no run"):
        distill_eagle3(str(model), texts, tmp_path, DistillSettings(**SMALL))


@pytest.mark.slow
def test_the_command_says_what_a_verification_gives(model, texts, whole):
    """Of a finished run, which is measured again and does not go on."""
    before = losses(whole.out)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words = ["distill", "eagle3", "--model", str(model), "--data", str(texts), "--out", str(whole.out), *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "tokens a verification with chains of 4 drafts" in result.stderr
    assert losses(whole.out) == before


def test_the_command_trains_no_other_head(model, texts, tmp_path):
    words = ["distill", "medusa", "--model", str(model), "--data", str(texts), "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "distill trains eagle3, got 'medusa'" in result.stderr
