"""Questions of small tasks, how their answers are judged, and `inferlib eval --tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from inferlib import LLM
from inferlib.evaluation import score_tasks
from inferlib.evaluation.score_tasks import evaluate_tasks
from inferlib.evaluation.tasks import TASKS, Question, questions
from inferlib.model_files import ModelFiles
from inferlib.option_checks import ConfigurationError
from inferlib.tokenizer import Tokenizer
from tests.helpers.cli_model import Commands, error_of, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", layers=1)


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    tokenizer = ModelFiles.open(model).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_the_same_each_time_and_their_prompts_tell_the_answer(name, tokenizer):
    asked = questions(name, tokenizer, count=6, context=256)
    assert asked == questions(name, tokenizer, count=6, context=256)
    assert asked[:4] == questions(name, tokenizer, count=4, context=256)
    assert len({q.prompt for q in asked}) > 1
    for q in asked:
        if q.choices:
            assert q.answer in q.choices
            assert len(set(q.choices)) == len(q.choices)
        if name in ("labels", "retrieval", "needle", "needles", "turns"):
            assert q.answer in q.prompt
            assert 200 < len(tokenizer.encode(q.prompt)) < 512


def test_an_answer_is_a_whole_word_at_the_beginning():
    def generate(prompts, params, progress):
        assert params.temperature == 0
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in prompts]

    asked = [Question(f" {text}", "12") for text in ("12", "12.", "123", "a 12", "")]
    llm: Any = SimpleNamespace(generate=generate)
    assert score_tasks._generated(llm, asked) == [True, True, False, False, False]


@pytest.mark.slow
def test_the_likeliest_choice_is_that_of_the_logits(model, tokenizer):
    llm = LLM(model, dtype="float32", max_batch=4, max_len=128, progress=False)
    asked, expected = questions("capitals", tokenizer, count=3, context=128), []
    for q in asked:
        sums = []
        for choice in q.choices:
            tokens, behind = tokenizer.encode(q.prompt + choice), len(tokenizer.encode(q.prompt))
            logp = log_softmax(llm.logits(tokens).astype(np.float64), axis=1)
            sums.append(sum(logp[i - 1, tokens[i]] for i in range(behind, len(tokens))))
        expected.append(q.choices[int(np.argmax(sums))] == q.answer)
    assert score_tasks._chosen(llm, asked) == expected


@pytest.mark.slow
def test_the_command_asks_both_models(model):
    commands = Commands(model)
    words = ["eval", model, "--tasks", "capitals,copying", "--questions", "2", "--context", "128", "--dtype", "float32"]
    result = commands(*words, "--against", model, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert [score["task"] for score in facts["scores"]] == ["capitals", "copying"]
    assert all(score["right"] == score["against"] for score in facts["scores"])
    assert "give --data" in error_of(commands("eval", model))
    assert "no task 'cooking'; there are copying" in error_of(commands("eval", model, "--tasks", "cooking"))
    too_long = ("eval", model, "--tasks", "needle", "--questions", "2", "--context", "4000")
    assert "take a context below 4000" in error_of(commands(*too_long))
    assert "leave it or --data out" in error_of(
        commands(*words, "--data", model / "config.json", "--attention-pages", "quest:2")
    )


def test_numbers_below_their_least_are_errors(model):
    with pytest.raises(ConfigurationError, match="count must be"):
        evaluate_tasks(model, ("copying",), count=1)
    with pytest.raises(ConfigurationError, match="context must be"):
        evaluate_tasks(model, ("copying",), context=5)


@pytest.mark.release
def test_a_small_model_finds_what_a_context_says():
    (score,) = evaluate_tasks("smollm2", ("needles",), count=3, context=160, progress=False, scan=True).scores
    assert score.right.value > 0.6
