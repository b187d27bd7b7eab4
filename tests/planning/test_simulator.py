"""The simulated engine against a real one and against measurements. About 10 s."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from inferlib.buckets import Buckets
from inferlib.cli import app
from inferlib.config import EngineConfig
from inferlib.configs import load, measurements
from inferlib.engine import profit
from inferlib.engine.engine import Engine
from inferlib.engine.scheduler import Scheduler
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.planning.costs import Deployed, step_time
from inferlib.planning.planner import PlanError, rank
from inferlib.planning.simulator import Device, Simulation, choose, engine_config, mean_workload, simulate
from inferlib.planning.trace import Offer, Served, Service, TraceError, at_rate, percentiles, read_trace, usual_trace
from inferlib.sampling.params import SamplingParams
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import parse_target
from tests.helpers.cli_model import error_of

MEASURED = measurements("h200-engine")


def deployed(name: str, target: str, parallel: str = "tp=1") -> Deployed:
    return Deployed(config_from_hf(load(name)), parse_target(target), Parallelism.parse(parallel))


# ---- against measurements


@pytest.mark.slow
@pytest.mark.parametrize("run", MEASURED["runs"], ids=lambda run: f"{run['model']}-{run['max_batch']}")
def test_runs_measured_on_an_h200(run, monkeypatch):
    """Within 10 %. They took as many prompt tokens a step as there were, whatever the step's room, and perhaps did not
    move rows."""
    monkeypatch.setattr(profit, "_LARGE_WEIGHTS", 10**9)
    if not run["moves"]:
        monkeypatch.setattr(Scheduler, "_compact", lambda self: None)
    it = deployed(run["model"], MEASURED["target"])
    buckets = Buckets(tuple(run["prefill"]), tuple(run["batch"]), (run["max_len"],), run["tile"])
    config = engine_config(it, run["max_batch"], run["max_len"], buckets)
    service = simulate(it, config, usual_trace()).service
    assert (service.input_tokens, service.output_tokens) == (116_664, 100_242)
    assert service.throughput == pytest.approx(run["output_tokens_per_second"], rel=0.1)
    long = simulate(it, config, [Offer(2000, 1)] * 32).service
    assert long.input_tokens / long.seconds == pytest.approx(run["prompt_tokens_per_second"], rel=0.1)
    assert 1e3 * simulate(it, config, [Offer(2000, 1)]).service.seconds == pytest.approx(run["first_token_ms"], rel=0.1)


# ---- against the engine


def tiny() -> ModelConfig:
    layer = LayerSpec(AttentionSpec(heads=1, kv_heads=1, head_dim=8, scale=1.0, rope=None), MlpSpec(hidden=8))
    return ModelConfig("none", vocab=64, dim=8, layers=(layer,), context=64)


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "pages", "alike"), [(None, None, False), (4, None, True), (4, 10, False)])
def test_it_sends_what_the_engine_sends(tile, pages, alike, monkeypatch):
    """The same programs for the same rows, in the same order, and as many tokens come back from each; also with a pool
    that is too small for four rows, and with prompts that begin alike."""
    sent: list[tuple] = []
    original = Engine._send

    def recorded(engine, dispatch):
        chunks = [(chunk.start, chunk.length, chunk.last) for chunk in dispatch.chunks]
        sent.append((dispatch.key, chunks, [len(s.prompt) for s in dispatch.rows], len(engine.scheduler.waiting)))
        original(engine, dispatch)

    monkeypatch.setattr(Engine, "_send", recorded)
    lengths = [(1 + 5 * i % 17, 1 + 7 * i % 19) for i in range(14)]
    offers = [Offer(*pair, prompt=(0,) * pair[0] if alike else None) for pair in lengths]
    buckets = Buckets(prefill=(8,), batch=(2, 4), cache=(36,), tile=tile)
    it = Deployed(tiny(), parse_target("v5e-1"), Parallelism())
    memory = pages and pages * 4 * 2 * 8 * 2  # of 4 cells of keys and values of 8 numbers
    config = EngineConfig(4, 36, buckets, decode_steps=4, page_size=4, cache_memory=memory)
    simulated = simulate(it, config, offers)
    expected, sent = sent[:], []
    assert bool(simulated.steps.preemptions) == (pages is not None)
    model = abstract_model(tiny(), "bfloat16")
    engine = Engine(model, model.random_weights(), config)
    sequences = []
    for i, offer in enumerate(offers):
        params = SamplingParams(temperature=0.0, max_tokens=offer.output_len, ignore_eos=True)
        salt = None if alike else str(i)
        sequences.append(Sequence([0] * offer.input_len, params, offer.output_len, seed=0, salt=salt))
        engine.add(sequences[-1])
    while engine.busy:
        engine.advance()
    assert sent == expected
    assert simulated.service.output_tokens == engine.stats.generated_tokens
    assert sum(simulated.steps.dispatches.values()) == engine.stats.dispatches
    assert simulated.steps.preemptions == engine.scheduler.preemptions
    assert simulated.steps.cached == engine.stats.cached_tokens
    assert (simulated.steps.cached > 50) == alike
    if pages is None:
        assert simulated.steps.prompt + simulated.steps.cached == sum(offer.input_len for offer in offers)


def test_one_request_by_hand():
    """A prompt of one step, and decode steps: the dispatch that has the last tokens runs as many steps as are left."""
    it = deployed("llama3-8b", "v5e-4", "tp=4")
    config = engine_config(it, 1, 1024)
    result = simulate(it, config, [Offer(512, 9)])
    prefill = step_time(it.prefill(512, 0), it.network).seconds
    decode = step_time(it.decode(1, 512 + 8 / 2), it.network).seconds
    (ttft,) = result.service.ttft
    assert ttft == pytest.approx(prefill)
    assert result.service.seconds == pytest.approx(prefill + 8 * decode, rel=1e-3)
    assert result.steps.dispatches["prefill"] == 1
    assert result.steps.padded == 0


FURTHER = ("tp=4", "cp=2,tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tp=2,dp=2", *(pytest.param(x, marks=pytest.mark.release) for x in FURTHER)])
def test_requests_come_when_they_are_offered(parallel):
    it = deployed("llama3-8b", "v5e-4", parallel)
    offers = at_rate(usual_trace(60), rate=6.0)
    result = simulate(it, engine_config(it, 8, 2048), offers)
    assert result.service.output_tokens == sum(offer.output_len for offer in offers)
    assert result.service.seconds > offers[-1].arrival
    assert min(result.service.ttft) > 0
    assert sum(result.steps.seconds.values()) <= result.service.seconds * 1.01
    # Slower than they come, they wait for each other.
    crowd = simulate(it, engine_config(it, 8, 2048), [Offer(o.input_len, o.output_len) for o in offers])
    assert max(crowd.service.ttft) > max(result.service.ttft)


def test_a_target_bounds_steps_beside_rows():
    """Prompts of 1,000 tokens come while others decode: with a target no step is longer, and prompts wait more."""
    it, offers = deployed("llama3-8b", "v5e-4", "tp=4"), [Offer(1000, 40, 0.05 * i) for i in range(24)]
    config = engine_config(it, 16, 2048)
    free = simulate(it, config, offers)
    times = Device(it, config).step_times()
    target = (times.decode + max(times.mixed.values())) / 2
    bounded = simulate(it, replace(config, itl=target), offers)
    assert bounded.service.output_tokens == free.service.output_tokens == 24 * 40

    def longest(simulation: Simulation) -> float:
        return simulation.steps.seconds["both"] / simulation.steps.dispatches["both"]

    assert longest(bounded) < target < longest(free)
    assert percentiles(bounded.service.itl)["p99"] < percentiles(free.service.itl)["p99"]
    assert percentiles(bounded.service.ttft)["mean"] > percentiles(free.service.ttft)["mean"]
    with pytest.raises(ConfigurationError, match=r"itl 0\.0001 is less than a decode step of 16 rows"):
        simulate(it, replace(config, itl=1e-4), offers)


def test_a_request_that_cannot_run_is_named():
    it = deployed("llama3-8b", "v5e-4", "tp=4")
    with pytest.raises(PlanError, match=r"request 2 has 600 \+ 500 tokens, and max_len is 1024"):
        simulate(it, engine_config(it, 4, 1024), [Offer(1, 1), Offer(600, 500)])


def test_choices_of_plans():
    config, target, offers = config_from_hf(load("llama3-8b")), parse_target("v5e-4"), usual_trace(20)
    ranking = rank(config, target, mean_workload(offers, 16))
    it, engine = choose(ranking, offers, "tp=2,dp=2", 24)
    assert str(it.parallel) == "tp=2,dp=2"
    assert (engine.max_batch, engine.max_len) == (24, max(o.input_len + o.output_len for o in offers))
    assert choose(ranking, offers)[0] == ranking.best.deployed
    with pytest.raises(PlanError, match="take one that the ranking shows"):
        choose(ranking, offers, "tp=8")
    with pytest.raises(ConfigurationError, match="lower max_batch"):
        choose(ranking, offers, max_batch=1 << 20)


# ---- requests


def test_traces_are_read(tmp_path):
    file = tmp_path / "requests.jsonl"
    second = '{"prompt_token_ids": [7, 8], "max_tokens": 4, "arrival": 1.5}'
    file.write_text(f'{{"input_len": 5, "output_len": 3, "arrival": 2}}\n\n{second}\n')
    assert read_trace(file) == [Offer(2, 4, 1.5, (7, 8)), Offer(5, 3, 2.0)]
    file.write_text('[{"input_len": 5, "output_len": 3}]')
    assert read_trace(file) == [Offer(5, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{", "not JSON lines"),
        ("[" * 100_000, "not JSON lines"),
        ("3", "request 1: write an object"),
        ('{"output_len": 3}', '"input_len" must be a whole number from 1, got None'),
        ('{"input_len": 1, "output_len": 0}', '"output_len" must be a whole number from 1, got 0'),
        ('{"input_len": 1, "output_len": 1, "arrival": -1}', '"arrival" must be seconds'),
        ('{"prompt_token_ids": [1, -2], "output_len": 1}', "must be a list of token ids"),
    ],
)
def test_traces_that_cannot_be_read(text, message, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match=message.replace("[", r"\[")):
        read_trace(file)
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "absent")


def test_what_users_see():
    offers, served = [Offer(1, 3), Offer(1, 1)], [Served(1.0), Served(2.0)]
    served[0].take(3.0, 1)
    served[0].take(3.0, 1)
    served[0].take(7.0, 3)
    served[1].take(4.0, 1)
    service = Service.of(offers, served)
    assert (service.seconds, service.output_tokens, service.ttft, service.itl) == (6.0, 4, (2.0, 2.0), (2.0,))
    assert percentiles(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == {}


# ---- the command


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.mark.slow
def test_plan_of_a_trace(tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps({"input_len": 100, "output_len": 20, "arrival": i / 9}) for i in range(9)))
    command = ["--config", "llama3-8b", "--target", "v5e-4", "--trace", str(file)]
    facts = json.loads(run_plan(*command, "--json").stdout)
    assert (facts["requests"], facts["output_tokens"], facts["meets_slo"]) == (9, 180, True)
    assert facts["seconds"] > 8 / 9
    options = ["--rate", "100", "--parallel", "tp=4", "--max-batch", "2", "--slo", "ttft=0.001", "--second-slice"]
    shown = run_plan(*command, *options)
    assert shown.exit_code == 1
    assert "tp=4, " in shown.stdout
    assert "up to 2 rows of 120 tokens" in shown.stdout
    assert "misses the SLO" in shown.stdout
    assert all(name in " ".join(shown.stdout.split()) for name in ("two alike", "prefill apart"))
    for options, message in [
        (["--verify", "1"], "--verify is about the ranking"),
        (["--cache-policy", "keydiff:128"], "--cache-policy is about the ranking"),
        (["--rate", "0"], "--rate is a number of requests"),
        (["--batch-buckets", "x"], "buckets are whole numbers"),
        (["--batch-buckets", "4,2"], "ascending"),
    ]:
        assert message in error_of(run_plan(*command, *options))
    assert "--max-batch is about --trace" in error_of(run_plan(*command[:4], "--max-batch", "3"))
