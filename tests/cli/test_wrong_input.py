"""Wrong types and values for every public function and option: each ends in an error of ours, before device work.

An error is ours if a `raise` of the library made it, in one line; what Python or JAX say by themselves is not. Pairs of
wrong values are drawn by a fixed seed. About half a minute.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import inferlib
from inferlib import LLM, Buckets, EngineOptions, Parallelism, SamplingParams
from inferlib.config import EngineSettings
from tests.helpers.cli_model import make_model
from tests.helpers.wrong_calls import Reached, problems, report


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    buckets = Buckets(prefill=(8,), batch=(1, 2), cache=(64,))
    return LLM(path, max_batch=2, max_len=64, buckets=buckets, progress=False)


@pytest.fixture(autouse=True)
def stop_at_the_device(monkeypatch, tmp_path):
    """And in a folder of its own, since some of the wrong names are names of folders to make."""
    monkeypatch.chdir(tmp_path)

    def reached(*args: Any, **options: Any) -> Any:
        raise Reached

    for name in ("engine.engine.Engine.add", "model_files.ModelFiles.load", "engine.engine.Engine.warmup"):
        monkeypatch.setattr(f"inferlib.{name}", reached)
    monkeypatch.setattr("inferlib.conversion.save_weights", reached)
    monkeypatch.setattr("gc.collect", lambda: 0)  # after each conversion that was stopped; it looks at the whole suite


def test_params():
    names = list(inspect.signature(SamplingParams).parameters)
    report(problems(SamplingParams, {}, names))


def test_sizes():
    wrong = problems(Buckets, {"prefill": (8,), "batch": (2,), "cache": (64,), "tile": None})
    wrong += problems(Parallelism, {}, list(inspect.signature(Parallelism).parameters))
    report(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("most", [20, pytest.param(None, marks=pytest.mark.release)])
def test_model(path, most):
    """In so many of the wrong ways for each option."""
    options = [
        *get_type_hints(EngineSettings),
        "dtype",
        "quantization",
        "parallel",
        "artifacts",
        "seed",
        "progress",
        "revision",
        "generation_config",
    ]
    good = {"model": path, "max_len": 64, "max_batch": 2, "progress": False}
    wrong = problems(LLM, good, ["model", "config", *options], most)
    options = [*get_type_hints(EngineSettings)]
    wrong += problems(lambda **options: LLM(path, EngineOptions(**options)), {"max_len": 64}, options, most)
    report(wrong)


def test_generation(llm):
    messages = [{"role": "user", "content": "hi"}]
    before = llm.stats.dispatches, llm.compilations

    def stream(**arguments: Any) -> None:
        next(iter(llm.stream(**arguments)))

    wrong = problems(llm.generate, {"prompts": "a", "sampling_params": None})
    options = ("chat_template", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
    wrong += problems(llm.chat, {"messages": messages, "sampling_params": None}, ["messages", "sampling_params"])
    wrong += problems(llm.chat_prompt, {"messages": messages}, ["messages", *options])
    wrong += problems(stream, {"prompt": "a", "sampling_params": None})
    wrong += problems(llm.prepare, {"prompt": "a", "params": SamplingParams(), "fit": False})
    wrong += problems(lambda **options: list(llm.run(**options)), {"requests": []})
    wrong += problems(llm.score, {"token_lists": [[1, 2]]})
    wrong += problems(llm.logits, {"token_ids": [1, 2]})
    wrong += problems(llm.warmup, {"modes": ("greedy",)})
    report(wrong)
    assert before == (llm.stats.dispatches, llm.compilations)


def test_calibration(path, tmp_path, monkeypatch):
    def reached(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr("inferlib.calibration.job.Job.run", reached)
    data = inferlib.TextSample(["a text to calibrate on. " * 20], tokens=64, window=64)
    good = {"model": path, "out": tmp_path / "out", "data": data, "method": "gptq", "scheme": "int4"}
    good |= {"dtype": "float32", "progress": False}
    report(problems(inferlib.calibrate, good, [*good, "revision"]))
    report(problems(inferlib.TextSample, {"texts": ["a"], "tokens": 64, "window": 64}))


def test_evaluation(path, monkeypatch):
    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr("inferlib.evaluation.evaluate._load", reached)
    data = inferlib.TextSample(["a text to measure on. " * 20], tokens=64, window=64)
    good = {"model": path, "data": data, "against": None, "quantization": None, "kv_cache_dtype": None}
    good |= {"dtype": "float32", "progress": False}
    report(problems(inferlib.evaluate, good, [*good, "revision"]))


@pytest.mark.slow
def test_conversion(path, tmp_path):
    good = {"model": path, "out": tmp_path / "out", "dtype": "float32", "progress": False}
    report(problems(inferlib.convert, good, [*good, "quantization", "parallel", "revision"]))
