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
import pytest
from typer.testing import CliRunner

from inferlib.cli import app
from tests.helpers.cli_model import COMMAND, error_of, make_model


def serve(*arguments: str) -> str:
    return error_of(CliRunner().invoke(app, ["serve", "/nowhere", *map(str, arguments)]))


def test_a_port_that_is_taken():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        assert (
            serve("--port", port) == f"127.0.0.1:{port} cannot be had (Address already in use): choose another --port"
        )


def test_hosts_and_files(tmp_path):
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("x")
    empty.write_text("\n")
    assert "no address of this machine" in serve("--host", "no.such.host.invalid")
    assert "go together" in serve("--ssl-certfile", text)
    assert "is no file: give a PEM file" in serve("--ssl-certfile", tmp_path / "a", "--ssl-keyfile", text)
    assert "no certificate and its key" in serve("--ssl-certfile", text, "--ssl-keyfile", text)
    assert "one or the other" in serve("--api-key", "x", "--api-key-file", text)
    assert "write a key a line" in serve("--api-key-file", empty)
    assert "No such file" in serve("--api-key-file", tmp_path / "a")
    assert "No such file" in serve("--chat-template", tmp_path / "a")
    assert "printable ASCII" in serve("--api-key", "a b\n")
    assert "must be auto, none, hermes" in serve("--tool-parser", "nope")
    assert "must be auto, none, think" in serve("--reasoning-parser", "nope")


def test_without_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "inferlib.serving.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve() == "uvicorn is not installed: pip install 'inferlib[serve]'"


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
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(60) == 0
    finally:
        server.kill()
