"""Memory that does not suffice: one line that says what takes how much and what would fit, on every path."""

from __future__ import annotations

import re

import jax
import pytest

from inferlib import LLM, Buckets, SamplingParams
from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.programs import memory
from inferlib.programs.memory import Demand, OutOfMemoryError, explained, is_out_of_memory
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.helpers.cli_model import Commands, error_of, make_model
from tests.helpers.llms import build_llm

BUCKETS = Buckets(prefill=(8,), batch=(2,), cache=(64,))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
ERRORS = [
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 35184372088832 bytes."),
    jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    MemoryError(),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


def exhausted(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


def check(error: OutOfMemoryError, doing: str) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    size = r"[\d.]+ [GM]iB"
    assert re.match(
        f"out of memory while {doing}: the host has {size}, and this takes {size} of weights, {size} of cache "
        rf"\(2 rows of 64 positions\)(, | and ){size} of sampling state",
        message,
    ), message


@pytest.mark.parametrize("error", ERRORS, ids=str)
@pytest.mark.parametrize(
    ("owner", "name", "doing"),
    [
        ("inferlib.model_files.ModelFiles", "load", "loading the weights"),
        (CachePlan, "allocate", "making room for the cache"),
        (ProgramSet, "allocate_state", "making room for the cache"),
    ],
)
def test_a_start_without_memory(owner, name, doing, error, path, monkeypatch):
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", exhausted(error))
    else:
        monkeypatch.setattr(owner, name, exhausted(error))
    with pytest.raises(OutOfMemoryError) as raised:
        build_llm(path, BUCKETS)
    check(raised.value, doing)
    assert raised.value.__cause__ is error


@pytest.mark.slow
def test_compiling_and_running_without_memory(path, monkeypatch):
    """The request fails, and the next one runs."""
    error = ERRORS[0]
    llm = build_llm(path, BUCKETS)
    with monkeypatch.context() as patch:
        patch.setattr(ProgramSet, "lower", exhausted(error))
        with pytest.raises(OutOfMemoryError) as raised:
            llm.generate([5], GREEDY)
        check(raised.value, r"compiling 'prefill .*'")
        with pytest.raises(OutOfMemoryError, match="while compiling"):
            llm.warmup(["greedy"])
    (expected,) = llm.generate([5], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.programs, "ready", lambda key: exhausted(error))
        with pytest.raises(OutOfMemoryError, match=r"GiB, and this takes .* of temporaries") as raised:
            llm.generate([5], GREEDY)
        check(raised.value, "running")
    (output,) = llm.generate([5], GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_other_errors_stay_what_they_are(path, monkeypatch):
    llm = build_llm(path, BUCKETS)
    for error in (jax.errors.JaxRuntimeError("INTERNAL: no such device"), RuntimeError("out of memory"), KeyError(3)):
        assert not is_out_of_memory(error)
        monkeypatch.setattr(llm.engine.programs, "ready", lambda key, error=error: exhausted(error))
        with pytest.raises(type(error)) as raised:
            llm.generate([5], GREEDY)
        assert raised.value is error
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory space vmem is full"))


def test_random_weights_without_memory(path, monkeypatch):
    programs = build_llm(path, BUCKETS).engine.programs
    monkeypatch.setattr(AbstractModel, "random_weights", exhausted(MemoryError()))
    with pytest.raises(OutOfMemoryError) as raised, explained("making the weights", programs.demand):
        programs.model.random_weights()
    check(raised.value, "making the weights")


def demand_of(llm: LLM, temporaries: int = 0, **changes) -> Demand:
    sizes = {"max_batch": 8, "max_len": 128, **changes}
    config = EngineConfig.make("cpu", sizes["max_batch"], sizes["max_len"], model=llm.model_config)
    programs = ProgramSet.make(llm.engine.model, config)
    return Demand.of(programs.model, programs.plan, config, temporaries)


def total(demand: Demand) -> int:
    return demand.weights + demand.cache + demand.state + demand.temporaries


def test_what_is_said_to_fit_fits(path):
    llm = build_llm(path, BUCKETS)
    whole = demand_of(llm, temporaries=4096)
    counted = sum(spec.nbytes for spec in llm.engine.model.specs)
    assert whole.weights == counted
    most, row = total(whole) - whole.cache - whole.state, (whole.cache + whole.state) // 8
    for rows in (1, 3, 7):
        capacity = int((most + (rows + 0.5) * row) / 0.9)
        message = whole.message("running", capacity, host=False)
        assert f"a device has {capacity / 2**20:.2f} MiB, and this takes" in message
        assert message.endswith(f"max_batch={rows} would fit")
        assert total(demand_of(llm, 4096, max_batch=rows)) <= 0.9 * capacity + 1
    # Less than a row: fewer positions.
    capacity = int((most + 0.75 * row) / 0.9)
    said = re.search(r"max_batch=1 with max_len=(\d+) would fit$", whole.message("running", capacity, host=False))
    assert said
    assert 64 < int(said[1]) < 128
    assert "should fit: something else takes memory" in whole.message("running", 2 * total(whole), host=True)
    assert whole.message("running", 0, host=False).endswith("quantise, or split the model over devices")
    assert ": this takes " in whole.message("running", 0, host=False)


def test_weights_that_are_too_large(path):
    whole = demand_of(build_llm(path, BUCKETS))
    message = whole.message("loading the weights", int(whole.weights / 1.5 / 0.9), host=False)
    assert re.search(r"too large: quantization='int8' \(0\.\d+ MiB of weights\) or parallel='tp=4' would fit$", message)
    message = whole.message("loading the weights", whole.weights // 100, host=False)
    assert re.search(r"too large: parallel='tp=\d+' would fit$", message)


def test_sizes_are_those_of_a_device(path):
    llm = build_llm(path, BUCKETS)
    shards = planned_shards(Parallelism.parse("tp=2"))
    config = EngineConfig.make("cpu", 8, 128, shards=shards, model=llm.model_config)
    model = abstract_model(llm.model_config, "float32", shards=shards)
    split, whole = Demand.of(model, ProgramSet.make(model, config).plan, config, 0), demand_of(llm)
    assert split.cache == whole.cache / 2
    assert whole.weights / 2 <= split.weights < 0.6 * whole.weights
    assert "of sampling state on each of 2 devices" in split.message("running", 0, host=False)


@pytest.mark.slow
def test_a_command_ends_with_one_line(path, monkeypatch, tmp_path):
    inferlib = Commands(path)
    monkeypatch.setattr(memory, "host_bytes", lambda: 1 << 30)
    assert inferlib.generate("a").exit_code == 0
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    for how in (["a"], ["--input", source, "--output", target], ["--stream", "a"]):
        with monkeypatch.context() as patch:
            patch.setattr(ProgramSet, "ready", lambda self, key: exhausted(ERRORS[0]))
            message = error_of(inferlib.generate(*how))
        assert message.startswith("out of memory while running: the host has 1.00 GiB")
        assert ("the finished lines are kept" in message) == ("--input" in how)
    monkeypatch.setattr("inferlib.model_files.ModelFiles.open", exhausted(MemoryError()))
    assert error_of(inferlib.generate("a", "--seed", "1")) == "out of memory: the host has no more"
