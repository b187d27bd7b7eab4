"""`inferlib bench` against a server of a tiny model, and what it computes."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib.bench.client import Measured
from inferlib.bench.events import event_data
from inferlib.bench.report import Limits, Report
from inferlib.bench.workload import Asked, Lengths, Load, Prefixes, random_workload, read_trace
from inferlib.cli import app
from tests.helpers.cli_model import error_of
from tests.helpers.servers import free_port


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.slow
def test_a_run(address, tmp_path):
    """Every token is counted, and all times are there."""
    options = ["--requests", 6, "--prompt-tokens", 3, "--output-tokens", 9, "--ignore-eos", "--concurrency", 2]
    picture = tmp_path / "times.svg"
    done = bench(address, *options, "--prefixes", 2, "--prefix-tokens", 4, "--json", "--plot", picture)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["requests"], facts["answered"], facts["errors"]) == (6, 6, {})
    assert facts["output_tokens"] == 54
    assert facts["prompt_tokens"] > 6 * 7
    assert set(facts["times"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert facts["good"] == 6
    assert picture.read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_trace_of_both_kinds_as_a_table(address, tmp_path):
    trace = tmp_path / "trace.jsonl"
    chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "at": 5.05}
    trace.write_text(f'{json.dumps(chat)}\n\n{{"prompt": "ab", "output_tokens": 3, "at": 5}}\n')
    done = bench(f"{address}/v1", "--trace", trace, "--slo", "ttft=1e-9")
    assert done.exit_code == 0, done.output
    assert "2 of 2 requests answered" in done.stdout
    assert "goodput under TTFT 0.0 ms: 0.00 requests/s, 0 requests" in done.stdout
    assert "times of the trace" in done.stdout


def test_failed_requests_are_counted(address):
    done = bench(address, "--requests", 2, "--prompt-tokens", 500, "--json")
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["answered"], sum(facts["errors"].values())) == (1, 0, 2)
    for error in facts["errors"]:
        assert error.startswith("status 400: This model's maximum context length is 128 tokens")
    assert facts["times"]["ttft"] == {}
    assert "1 failed: status 400" in bench(address, "--requests", 1, "--prompt-tokens", 500).stdout


def test_what_is_wrong_is_one_line(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a"}\n')
    assert "no server answers at" in error_of(bench(f"http://127.0.0.1:{free_port()}"))
    assert "line 1: max_tokens must be" in error_of(bench("--trace", trace))
    assert "write seconds, such as" in error_of(bench("--slo", "ttft=fast"))
    assert "--rate must be" in error_of(bench("--rate", 0))
    assert "go together" in error_of(bench("--prefixes", 2))


def test_random_workloads():
    asked = random_workload(2000, Lengths(100, 0.5), Lengths(50), Prefixes(3, 20), seed=1)
    assert asked == random_workload(2000, Lengths(100, 0.5), Lengths(50), Prefixes(3, 20), seed=1)
    words = [request.prompt.split() for request in asked]
    assert len({tuple(prompt[:20]) for prompt in words}) == 3
    lengths = np.array([len(prompt) - 20 for prompt in words])
    assert lengths.mean() == pytest.approx(100, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.05)
    assert {request.max_tokens for request in asked} == {50}
    times = list(Load(rate=10).times(asked))
    assert np.diff(times).mean() == pytest.approx(0.1, rel=0.05)
    assert list(Load(concurrency=2).times(asked[:3])) == [0, 0, 0]


def test_traces_begin_at_zero(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"prompt_tokens": 4, "max_tokens": 1, "timestamp": 12}\n{"prompt": "a", "max_tokens": 2, "at": 10}'
    )
    first, second = read_trace(trace)
    assert (first, second.at, len(second.prompt.split())) == (Asked("a", 2, 0.0), 2.0, 4)
    trace.write_text('{"prompt": "a", "max_tokens": 2, "at": 10}\n{"prompt": "a", "max_tokens": 2}')
    with pytest.raises(ValueError, match="or none has"):
        read_trace(trace)


def test_goodput():
    measured = [
        Measured(0, first=0.1, end=1.1, output_tokens=11),
        Measured(0, first=0.3, end=0.4, output_tokens=2),
        Measured(1, end=2, error="gone"),
    ]
    for slo, good in (("", 2), ("ttft=0.2", 1), ("itl=0.09", 0), ("itl=0.11", 2), ("ttft=0.2,e2e=1", 0)):
        assert Report("", measured, Limits.parse(slo)).facts()["good"] == good, slo
    facts = Report("", measured, Limits()).facts()
    assert (facts["seconds"], facts["output_tokens"], facts["goodput"]) == (2, 13, 1)
    assert facts["times"]["ttft"]["p50"] == pytest.approx(0.2)


def test_lines_of_events_end_at_newlines_alone():
    """Whatever parts the bytes come in, and whatever else ends a line in Python."""
    sent = 'data: {"a":"x\u2028y\x85z\x0c"}\n\n: comment\r\nevent: e\ndata:[DONE]\r\n\ndata: cut'.encode()

    async def read(size: int) -> list[str]:
        async def parts():
            for start in range(0, len(sent), size):
                yield sent[start : start + size]

        return [data async for data in event_data(parts())]

    for size in (1, 7, len(sent)):
        assert asyncio.run(read(size)) == ['{"a":"x\u2028y\x85z\x0c"}', "[DONE]"]
