"""Real processes run one model together: the same tokens as one process, and clear ends. Some 30 s, three minutes
with the slow ones, nearly all of it compilations."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib import distributed
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.cli import app
from inferlib.sharding.mesh import Parallelism, ShardingError, make_mesh
from tests.helpers import hosts_program
from tests.helpers.cli_model import COMMAND, make_model, sharing_programs

ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
TIMEOUT = 300  # seconds; a test that needs them has failed


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def expected(model) -> Callable[[str], dict[str, Any]]:
    """What a scenario gives on one process and one device, from the first request of an LLM."""
    return cache(lambda scenario: hosts_program.SCENARIOS[scenario](hosts_program.build(model, None)))


class Processes:
    """Running commands: `wait` gives (exit code, stdout, stderr) of each."""

    def __init__(self, commands: list[list[str]]):
        pipe = subprocess.PIPE
        # A TPU's library, if installed, looks for a chip and complains.
        env = os.environ | sharing_programs() | {"JAX_PLATFORMS": "cpu"}
        options = dict(stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=env)
        self._all = [subprocess.Popen(c, **options) for c in commands]

    def __getitem__(self, i: int) -> subprocess.Popen:
        return self._all[i]

    def wait(self) -> list[tuple[int, str, str]]:
        ended = [process.communicate(timeout=TIMEOUT) for process in self._all]
        return [(p.returncode, out, err) for p, (out, err) in zip(self._all, ended, strict=True)]

    def until(self, line: str) -> str:
        """Wait until process 0 has printed a line; what it printed before."""
        before = []
        for printed in self._all[0].stdout:
            if printed.strip() == line:
                return "".join(before)
            before.append(printed)
        raise AssertionError(self._all[0].stderr.read())

    def kill(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.touch(0o600)
    file.write_text("what the processes of this test know")
    return file


@pytest.fixture
def start(model, secret) -> Iterator[Callable[..., Processes]]:
    """`start(processes, parallel, scenario, last, **options)`: see `hosts_program.main`; last: other options of the
    last process."""
    with contextlib.ExitStack() as stack:

        def begin(
            processes: int, parallel: str | None, scenario: str, last: dict | None = None, **options: Any
        ) -> Processes:
            options |= {"port": free_port(), "processes": processes, "parallel": parallel, "scenario": scenario}
            options = {"model": str(model), "devices": 1, "secret": str(secret), **options}
            every = [options | {"process": i} for i in range(processes)]
            every[-1] |= last or {}
            program = [sys.executable, "-m", "tests.helpers.hosts_program"]
            running = Processes([[*program, json.dumps(o)] for o in every])
            stack.callback(running.kill)
            return running

        yield begin


def results(running: Processes) -> list[dict[str, Any]]:
    ended = running.wait()
    for code, out, err in ended:
        assert code == 0, out + err
    return [result(out) for _, out, _ in ended]


def result(out: str) -> dict[str, Any]:
    return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Tokens, text and messages; numbers to 1e-4, as sums are made in another order."""
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        if name in ("logprobs", "logits"):
            np.testing.assert_allclose(result[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
        elif name == "scores":
            for a, b in zip(result[name], value, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        else:
            assert result[name] == value, name


@pytest.mark.slow
def test_the_same_as_one_process(start, expected, model):
    """Greedy, sampled and scored rows, and they time steps together. An error on process 0 ends the other well. Before
    that they refuse what does not take devices of every process, and what differs; and one process is misused."""
    last = {"refused": [None, "dp=2"], "fault": "misusing"}
    running = start(2, "tp=2", "everything", last, refused=[None, "tp=2"], then="error", sizes={"itl": 100})
    (code, out, err), (other, silent, other_err) = running.wait()
    assert (code, other) == (1, 0), err
    assert err.splitlines()[-1] == "RuntimeError: an error of the program"
    for lines in (err.splitlines(), other_err.splitlines()):
        assert "several processes run this model: split it over their 2 devices with parallel" in lines
        assert f"process 1 on {HOST} differs from process 0 in parallel" in lines
    assert "requests enter on process 0; on the others call LLM.follow()" in lines
    assert "on several processes a program runs one LLM, and there is one already" in lines
    first, second = result(out), result(silent)
    assert_same(first["found"], expected("everything"))
    assert second["found"] == {"followed": True}
    # Each reads its half of every matrix.
    source = SafetensorsSource(model)
    matrices = [name for name in source.names() if name.endswith(("_proj.weight", "embed_tokens.weight"))]
    assert len(matrices) == 7 + 1
    for name in matrices:
        assert [sum(r["taken"][name]) for r in (first, second)] == [source.nbytes(name) // 2] * 2, name


@pytest.mark.release
def test_a_good_end(start, expected):
    """With several devices of each process, and logits of a prompt."""
    first, second = results(start(2, "tp=2,dp=2", "with_logits", devices=2))
    assert_same(first["found"], expected("with_logits"))
    assert first["homes"] == [[0, 0], [1, 1]]
    assert second["found"] == {"followed": True}


def test_an_axis_stays_inside_a_process_where_it_can(monkeypatch):
    """And every process has a device of the mesh."""
    devices = [SimpleNamespace(process_index=i % 2, id=i, platform="cpu") for i in range(4)]
    monkeypatch.setattr("inferlib.sharding.mesh.jax", SimpleNamespace(devices=lambda: devices))
    monkeypatch.setattr("inferlib.sharding.mesh.Mesh", lambda array, axes: array)
    made = make_mesh(Parallelism.parse("tp=2,dp=2")).reshape(2, 2)
    assert [[device.process_index for device in row] for row in made] == [[0, 0], [1, 1]]
    with pytest.raises(ShardingError, match="takes 2 of 4 devices and leaves none for process 1: use devices of every"):
        make_mesh(Parallelism.parse("tp=2"))


# ---- ends


def lost(process: int, here: int) -> str:
    return f"inferlib: process {process} on {HOST} has ended; process {here} cannot go on without it"


def assert_lost(process: int, here: int, code: int, err: str) -> None:
    """This process ended because another one was lost. A thread of JAX may notice first, and abort."""
    assert code in (1, -signal.SIGABRT)
    assert code != 1 or lost(process, here) in err  # perhaps amid a traceback that was being written


@pytest.mark.slow
def test_the_first_process_dies_while_decoding(start):
    running = start(2, "tp=2", "endless")
    running.until("decoding")
    running[0].kill()
    code, _, err = running.wait()[1]
    assert_lost(0, 1, code, err)


@pytest.mark.release
def test_four_processes_until_one_dies(start, expected):
    """After a warm-up and a sleep, with the heads and the rows on several processes."""
    running = start(4, "tp=2,dp=2", "warm", then="endless")
    first = result(running.until("decoding"))
    assert_same(first["found"], expected("warm"))
    assert first["found"]["compiled"] == 0
    assert first["homes"] == [[0, 1], [2, 3]]
    running[2].kill()
    ended = running.wait()
    for i in (0, 1, 3):
        code, _, err = ended[i]
        assert_lost(2, i, code, err)
    assert 1 in [ended[i][0] for i in (0, 1, 3)]


@pytest.mark.release
def test_a_process_stops_while_decoding(start):
    """It neither ends nor goes on: JAX notices that its heartbeats do not come."""
    running = start(2, "tp=2", "endless", patience=10)
    running.until("decoding")
    running[1].send_signal(signal.SIGSTOP)
    _, err = running[0].communicate(timeout=TIMEOUT)
    assert running[0].returncode != 0
    assert "The following tasks are unhealthy (stopped sending heartbeats):\n1\n" in err


@pytest.mark.slow
def test_interrupt(start):
    """Ctrl-C reaches all processes: it ends process 0, and that ends the other."""
    running = start(2, "tp=2", "endless")
    running.until("decoding")
    for i in (1, 0):
        running[i].send_signal(signal.SIGINT)
    (code, _, err), (_, _, other) = running.wait()
    assert code != 0
    assert "KeyboardInterrupt" in err
    assert "Traceback" not in other


@pytest.mark.slow
def test_an_error_on_another_process_ends_process_0(start):
    (code, _, err), (other, _, other_err) = start(2, "tp=2", "endless", {"fault": "failing"}).wait()
    assert (code, other) == (1, 1)
    assert lost(1, 0) in err  # perhaps amid a traceback that was being written
    assert other_err.strip().splitlines()[-1] == "RuntimeError: an error of this process"


# ---- agreement, before anything reaches a device


@pytest.mark.release
def test_a_model_that_one_process_cannot_see(start, tmp_path):
    (code, _, err), (other, _, other_err) = start(2, "tp=2", "greedy", {"model": str(tmp_path / "none")}).wait()
    assert (code, other) == (1, 1)
    problem = f"model '{tmp_path}/none': the path does not exist"
    assert other_err.splitlines()[-1].startswith(f"inferlib.checkpoint.source.CheckpointError: {problem}")
    assert err.splitlines()[-1].startswith(f"inferlib.distributed.PeerError: process 1 on {HOST}: {problem}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "last", "message"),
    [
        (2, {"fault": "early"}, "it has ended"),
        pytest.param(3, {"fault": "early"}, "it has ended", marks=pytest.mark.release),
        pytest.param(2, {"parallel": "dp=2"}, "differs from process 0 in parallel", marks=pytest.mark.release),
    ],
)
def test_processes_that_do_not_agree(processes, last, message, start):
    bad = processes - 1
    for i, (code, _, err) in enumerate(start(processes, f"tp={processes}", "greedy", last).wait()):
        assert code == 1
        if i < bad or "parallel" in last:
            assert f"inferlib.distributed.PeerError: process {bad} on {HOST}" in err.splitlines()[-1]
            assert err.splitlines()[-1].endswith(message)


@pytest.mark.release
def test_devices_of_every_process_take_part(start):
    """And each process ends with what is wrong."""
    for code, _, err in start(2, "tp=2", "greedy", devices=2).wait():
        assert code == 1
        assert "takes 2 of 4 devices and leaves none for process 1: use devices of every process" in err
    for code, _, err in start(2, None, "greedy").wait():
        assert code == 1
        assert "several processes run this model: split it over their 2 devices with parallel" in err


NOBODY = """
import sys
from inferlib.distributed import initialize
try:
    initialize(secret=sys.argv[2])
except ValueError as error:
    print(error, file=sys.stderr)
initialize(sys.argv[1], 2, 0, secret=sys.argv[2], timeout=2)
"""


@pytest.mark.slow
def test_nothing_says_where_the_processes_are_and_they_do_not_come(secret):
    running = Processes([[sys.executable, "-c", NOBODY, f"localhost:{free_port()}", str(secret)]])
    ((status, _, err),) = running.wait()
    assert status == 1
    assert "Kubernetes says it here: give coordinator, processes and process\n" in err
    assert "inferlib: the processes did not find each other within 2 s" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "localhost"}, "coordinator must be HOST:PORT, got 'localhost'"),
        ({"coordinator": "a:1", "processes": 0, "process": 0}, "processes must be at least 1, got 0"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "a number from 0 to processes - 1, got 2 of 2"),
        ({"coordinator": "a:1", "processes": 2, "process": 1, "secret": "/none"}, "/none: No such file or directory"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**arguments)


# ---- the command line


@pytest.fixture
def command(model, secret) -> Iterator[Callable[..., Processes]]:
    """`command(*arguments)`: `inferlib generate` on two processes."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str) -> Processes:
            address = f"localhost:{free_port()}"
            place = ["--secret", str(secret), "--coordinator", address, "--processes", "2", "--process"]
            words = [*COMMAND, "generate", "--model", str(model), *arguments, "--parallel", "tp=2", *place]
            running = Processes([[*words, str(i)] for i in range(2)])
            stack.callback(running.kill)
            return running

        yield begin


@pytest.mark.release
def test_command(command, model):
    words = ["a tale", "--max-tokens", "9", "--temperature", "0"]
    one = CliRunner().invoke(app, ["generate", "--model", str(model), *words])
    assert one.exit_code == 0
    (code, out, err), (other, silent, quiet) = command(*words).wait()
    assert (code, other) == (0, 0), err + quiet
    assert without_gloo(out) == one.stdout
    assert (without_gloo(silent), quiet) == ("", "")


@pytest.mark.release
def test_command_with_files(command, tmp_path):
    """Only process 0 reads and writes them; a bad line is an error of that line."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    files = ["--input", str(source), "--output", str(target)]
    (code, _, err), (other, _, lost_err) = command(*files).wait()
    assert (code, other) == (2, 2)
    assert err.splitlines()[-1] == f"error: the input {source} does not exist"
    assert lost_err.splitlines()[-1] == f"error: process 0 on {HOST}: it has ended"

    source.write_text('{"prompt": "one"}\n{"prompt": 2}\n{"prompt": "three", "sampling_params": {"n": 2}}\n')
    (code, _, err), (other, _, quiet) = command(*files, "--temperature", "1").wait()
    assert (code, other) == (1, 0), err + quiet
    results = {record["line"]: record for record in map(json.loads, target.read_text().splitlines())}
    assert {line: len(record.get("outputs", ())) for line, record in results.items()} == {1: 1, 2: 0, 3: 2}
    assert quiet == ""


def without_gloo(out: str) -> str:
    """Gloo, which carries the collectives of CPUs, writes to stdout."""
    return "".join(line for line in out.splitlines(keepends=True) if not line.startswith("[Gloo]"))


@pytest.mark.parametrize(
    "arguments",
    [["--coordinator", "a:1"], ["--process", "0"], ["--distributed", "--coordinator", "a:1"], ["--processes", "2"]],
)
def test_options_go_together(arguments):
    result = CliRunner().invoke(app, ["generate", "a", *arguments])
    assert result.exit_code == 2
    assert "error: give --coordinator, --processes and --process together, or --distributed alone" in result.stderr
