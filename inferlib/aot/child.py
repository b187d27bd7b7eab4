"""Child processes that answer JSON lines, for work that may crash or that loads a compiler."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]


class Child:
    """`python -m module`, started at its first job and again after a crash. first: the line that it reads first."""

    def __init__(self, module: str, first: Mapping[str, Any], environment: Mapping[str, str]):
        self._module, self._first, self._environment = module, first, environment
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)

    def ask(self, job: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
        """The answer to a job. It contains "error" if the process died, or was killed after `limit` seconds."""
        self._errors.truncate(0)
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        try:
            process = self._started()
            timer = threading.Timer(limit, kill) if limit else None
            if timer:
                timer.start()
            try:
                jobs, answers = _pipes(process)
                jobs.write(json.dumps(job) + "\n")
                jobs.flush()
                line = answers.readline()
            finally:
                if timer:
                    timer.cancel()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        died = self._died()
        return {"error": f"it took more than {limit:.0f} s" if late.is_set() else died}

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            jobs, answers = _pipes(process)
            with contextlib.suppress(BrokenPipeError):
                jobs.close()
            answers.close()
            process.kill()  # libtpu answers a request to end with a stack trace, which takes it a while
            process.wait()
        self._errors.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],  # -P: import nothing from the user's folder
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._environment,
            )
            _pipes(self._process)[0].write(json.dumps(self._first) + "\n")
        return self._process

    def _died(self) -> str:
        process, self._process = self._process, None
        code = process.wait() if process is not None else 0
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        how += ", as happens where the host runs out of memory: compile with --workers 1" if code == -9 else ""
        return "\n".join([f"the compiler's process {how}", *lines[-12:]])


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """The child's stdin and stdout."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def serve(prepared: Callable[[Mapping[str, Any]], Answer]) -> None:
    """The main loop of a child process. prepared: takes the first line and returns the function that answers jobs."""
    # Compilers print to stdout, so answers have a channel of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = prepared(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": str(error) or type(error).__name__}
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
