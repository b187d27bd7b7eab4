"""Real processes run one model together: the same tokens as one process, and clear ends. Some 30 s, four minutes with
the slow ones, nearly all of it compilations."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferlib.checkpoint.safetensors import SafetensorsSource
from tests import hosts_program
from tests.cli_model import make_model

ROOT = Path(__file__).parents[1]
TIMEOUT = 180  # seconds; a test that needs them has failed


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model) -> Callable[[str], dict[str, Any]]:
    """What a scenario gives on one process and one device."""
    llm = hosts_program.build(model, None)
    return lambda scenario: hosts_program.SCENARIOS[scenario](llm)


class Processes:
    """Running commands: `wait` gives (exit code, stdout, stderr) of each."""

    def __init__(self, commands: list[list[str]]):
        pipe = subprocess.PIPE
        self._all = [subprocess.Popen(c, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) for c in commands]

    def __getitem__(self, i: int) -> subprocess.Popen:
        return self._all[i]

    def wait(self) -> list[tuple[int, str, str]]:
        ended = [process.communicate(timeout=TIMEOUT) for process in self._all]
        return [(p.returncode, out, err) for p, (out, err) in zip(self._all, ended, strict=True)]

    def until(self, line: str) -> None:
        """Wait until process 0 has printed a line."""
        assert any(printed.strip() == line for printed in self._all[0].stdout), self._all[0].stderr.read()

    def kill(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


@pytest.fixture
def start(model) -> Iterator[Callable[..., Processes]]:
    """`start(processes, parallel, scenario, last={}, **options)`: see `hosts_program.main`; last: other options of the
    last process."""
    with contextlib.ExitStack() as stack:

        def begin(processes: int, parallel: str, scenario: str, *, last: dict = {}, **options: Any) -> Processes:  # noqa: B006
            options = {
                "port": free_port(),
                "processes": processes,
                "parallel": parallel,
                "scenario": scenario,
                **options,
            }
            options = {"model": str(model), "devices": 1, **options}
            every = [options | {"process": i} for i in range(processes)]
            every[-1] |= last
            program = [sys.executable, "-m", "tests.hosts_program"]
            running = Processes([[*program, json.dumps(o)] for o in every])
            stack.callback(running.kill)
            return running

        yield begin


def results(running: Processes) -> list[dict[str, Any]]:
    ended = running.wait()
    for code, out, err in ended:
        assert code == 0, out + err
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Tokens, text and messages; numbers to 1e-4, as sums are made in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name in ("logprobs", "logits"):
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
        elif name == "scores":
            for a, b in zip(found[name], value, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        else:
            assert found[name] == value, name


def test_two_processes(start, expected, model):
    first, second = results(start(2, "tp=2", "greedy"))
    assert_same(first["found"], expected("greedy"))
    assert second["found"] == {"followed": True}
    # Each reads its half of every matrix.
    source = SafetensorsSource(model)
    matrices = [name for name in source.names() if name.endswith(("_proj.weight", "embed_tokens.weight"))]
    assert len(matrices) == 2 * 7 + 1
    for name in matrices:
        assert [sum(r["taken"][name]) for r in (first, second)] == [source.nbytes(name) // 2] * 2, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "parallel"),
    [(2, 1, "tp=2"), (2, 1, "dp=2"), (2, 2, "tp=2,dp=2"), (2, 2, "tp=4,rules=tp_sp"), (4, 1, "tp=2,dp=2")],
)
def test_the_same_as_one_process(processes, devices, parallel, start, expected):
    first, *others = results(start(processes, parallel, "everything", devices=devices))
    assert_same(first["found"], expected("everything"))
    assert all(other["found"] == {"followed": True} for other in others)


@pytest.mark.slow
def test_nothing_compiles_after_warmup(start):
    first, _ = results(start(2, "tp=2", "warm"))
    assert first["found"]["programs"] > 0
    assert first["found"]["compiled"] == 0


# ---- ends


def lost(process: int, here: int) -> str:
    return f"inferlib: process {process} on {socket.gethostname()} has ended; process {here} cannot go on without it"


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_dies_while_decoding(killed, start):
    running = start(2, "tp=2", "endless")
    running.until("decoding")
    running[killed].kill()
    ended = running.wait()
    code, _, err = ended[1 - killed]
    assert code == 1
    assert err.splitlines()[-1] == lost(killed, 1 - killed)


@pytest.mark.slow
def test_one_of_four_dies_while_decoding(start):
    running = start(4, "tp=2,dp=2", "endless")
    running.until("decoding")
    running[2].kill()
    for i, (code, _, err) in enumerate(running.wait()):
        if i != 2:
            assert code == 1
            assert lost(2, i) in err.splitlines()
