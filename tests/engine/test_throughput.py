"""`benchmarks/throughput.py` on a tiny model, beside a stand-in for vLLM. About 10 s."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import throughput
from tests.helpers.cli_model import make_model

_PEER = '''
import time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        self.__dict__.update(options)

class Engine:
    """Answers a request a step."""

    def __init__(self):
        self.waiting = []

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def add_request(self, number, prompt, params, arrival_time):
        assert max(prompt["prompt_token_ids"]) < 264
        self.waiting.append((params.max_tokens, arrival_time))

    def step(self):
        tokens, arrival = self.waiting.pop(0)
        metrics = SimpleNamespace(first_token_latency=0.25, first_token_ts=1.0, last_token_ts=1.0 + 0.5 * (tokens - 1))
        return [SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[1] * tokens)], metrics=metrics)]

class LLM:
    def __init__(self, model, max_num_seqs, **arguments):
        assert max_num_seqs == 2 and arguments["extra"] == 7
        self.llm_engine = Engine()

    def reset_prefix_cache(self):
        pass
'''


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PEER)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    FINAL_ONLY = 2\n")
    return package.parent


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives at each call what it gave at the first."""
    results: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not results:
            results.append(function(*arguments))
        return results[0]

    return call


@pytest.mark.slow
def test_a_table_of_both(peer, tmp_path, monkeypatch, capsys):
    requests = [{"input_len": 3 + i, "output_len": 2 + i % 5, "arrival": i / 100} for i in range(6)]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, requests)))
    model = make_model(tmp_path / "model", layers=1)
    buckets = ["--max-batch", "2", "--prefill", "8", "--batch", "2", "--tile", "8"]
    words = ["--model", str(model), "--requests", str(file), *buckets, "--dtype", "float32", "--simulate", "v5e-1"]
    words += ["--peer", "vllm", "--peer-path", str(peer), "--peer-args", '{"extra": 7}']
    for name in ("measure", "peer_vllm"):  # both forms show the same run
        monkeypatch.setattr(throughput, name, once(getattr(throughput, name)))
    for form in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["throughput.py", *words, *form])
        throughput.main()
    text = capsys.readouterr().out
    table, facts = text[: text.rindex('{"model"')], json.loads(text[text.rindex('{"model"') :])
    assert all(name in table for name in ("inferlib", "vLLM", "estimate for v5e", "TTFT", "rows that generate"))
    ours, peers = facts["inferlib"], facts["vLLM"]
    assert ours["output_tokens"] == peers["output_tokens"] == sum(request["output_len"] for request in requests)
    assert ours["seconds"] >= 0.05
    assert 0 < ours["rows"] <= ours["program_rows"] <= 2
    assert 0 <= ours["padding"] < 1
    assert sum(ours["dispatches"].values()) >= 6
    assert (peers["ttft"]["p50"], peers["itl"]["p99"]) == (0.25, 0.5)
    assert facts["estimate for v5e:1x1"]["output_tokens"] == ours["output_tokens"]
