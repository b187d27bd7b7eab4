"""`inferlib serve`: what is wrong at its start is one line; SIGTERM lets requests end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest
from typer.testing import CliRunner

from inferlib import Buckets
from inferlib.cli import app
from inferlib.programs.program_set import planned_keys
from inferlib.serving.structured import warmup_modes
from tests.helpers.cli_model import COMMAND, error_of, make_model
from tests.helpers.llms import build_llm
from tests.helpers.servers import NAME, serving


def refused(*arguments: str) -> str:
    return error_of(CliRunner().invoke(app, ["serve", "/nowhere", *map(str, arguments)]))


def test_a_port_that_is_taken():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        error = refused("--port", port)
    assert error == f"127.0.0.1:{port} cannot be had (Address already in use): choose another --port"


def test_hosts_and_files(tmp_path):
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("x")
    empty.write_text("\n")
    assert "no address of this machine" in refused("--host", "no.such.host.invalid")
    assert "go together" in refused("--ssl-certfile", text)
    assert "is no file: give a PEM file" in refused("--ssl-certfile", tmp_path / "a", "--ssl-keyfile", text)
    assert "no certificate and its key" in refused("--ssl-certfile", text, "--ssl-keyfile", text)
    assert "one or the other" in refused("--api-key", "x", "--api-key-file", text)
    assert "write a key a line" in refused("--api-key-file", empty)
    assert "No such file" in refused("--api-key-file", tmp_path / "a")
    assert "No such file" in refused("--chat-template", tmp_path / "a")
    assert "printable ASCII" in refused("--api-key", "a b\n")
    assert "must be auto, none, hermes" in refused("--tool-parser", "nope")
    assert "must be auto, none, think" in refused("--reasoning-parser", "nope")


def test_without_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "inferlib.serving.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused() == "uvicorn is not installed: pip install 'inferlib[serve]'"


def ask_in_all_ways(address: str) -> None:
    """Greedy, sampled and scored completions, one of a given form, and vectors."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
        for options in ({"temperature": 0}, {"seed": 1, "n": 2}, {"logprobs": 2, "echo": True}):
            client.completions.create(model=NAME, prompt=["ab", "b" * 30], max_tokens=8, **options)
        body = {"structured_outputs": {"choice": ["yes", "no"]}}
        client.completions.create(model=NAME, prompt="ab", max_tokens=8, extra_body=body)
        client.embeddings.create(model=NAME, input=["ab", "b" * 30])


@pytest.mark.slow
def test_all_programs_that_requests_take_are_of_the_warm_up(served_llm, address, monkeypatch):
    """What `serve` compiles has them, whoever compiled them here; that a warm-up compiles what it names is in
    `test_engine.py`."""
    programs, asked = served_llm.engine.programs, set()
    ready = programs.ready
    monkeypatch.setattr(programs, "ready", lambda key: asked.add(key) or ready(key))
    ask_in_all_ways(address)
    assert {key.mode for key in asked} == {"greedy", "sample", "logprobs", "processed", "embed"}
    assert asked <= set(planned_keys(served_llm.config, warmup_modes()))


@pytest.mark.release
def test_nothing_compiles_after_the_warm_up(tmp_path):
    buckets = Buckets(prefill=(16,), batch=(4,), cache=(128,))  # those of the shared server: equal programs
    llm = build_llm(make_model(tmp_path / "model", layers=1), buckets, decode_steps=2)
    llm.warmup(warmup_modes())
    before = llm.compilations
    with serving(llm) as address:
        ask_in_all_ways(address)
    assert llm.compilations == before
    assert llm.stats.program_misses == 0


@pytest.mark.slow
def test_a_server_ends_when_its_requests_have(tmp_path):
    """In a process of its own: it answers, and after SIGTERM it ends a stream before itself."""
    model, log = make_model(tmp_path / "model", layers=1), tmp_path / "log"
    command = [*COMMAND, "serve", str(model), "--port", "0", "--no-warmup", "--max-len", "128", "--max-batch", "2"]
    with log.open("w") as stderr:
        server = subprocess.Popen(command, stderr=stderr, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        while "is served at" not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        address = log.read_text().split("is served at ")[1].split("/v1")[0]
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(300) == 0
    finally:
        server.kill()
