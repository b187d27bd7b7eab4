"""Compiles the programs of a deployment ahead of time, several at a time, in child processes."""

from __future__ import annotations

import importlib.util
import os
import queue
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inferlib.aot.child import Child
from inferlib.aot.neuron import HLO_SUFFIX
from inferlib.inspection.bundles import dump_flags
from inferlib.inspection.outcome import Outcome
from inferlib.models.config import MoeSpec
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.programs.memory import too_large
from inferlib.targets import Target

START = "start.xla"  # see `inferlib.programs.start_functions`


class CompileError(ValueError):
    """Programs cannot be compiled on this machine. The message says what is missing."""


def check_compiler(target: Target) -> None:
    """Raise CompileError if this machine has no compiler for the target."""
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise CompileError('the TPU compiler is not installed (no TPU is needed): pip install "jax[tpu]"')


def compile_programs(
    deployment: Deployment,
    keys: Sequence[ProgramKey],
    folder: Path,
    *,
    checkpoint: str | None = None,
    reuse: Callable[[ProgramKey, list | None], dict[str, Any] | None] = lambda key, layouts: None,
    started: Callable[[ProgramKey], None] = lambda key: None,
    done: Callable[[Outcome], None] = lambda outcome: None,
    compilers: Compilers | None = None,
) -> tuple[list[Outcome], list[dict] | None]:
    """Compile `keys` (see `Deployment.keys`) into files of `folder`, named by `file_name`.

    checkpoint: a model as for `LLM`, if it will be loaded on this machine: the functions that load it are compiled into
    `START`. reuse: returns the facts of a program that need not be compiled again, given the layouts of the weights
    (None if that program chooses them). compilers: of the deployment's target, which are left open; None: two for this
    call. Returns the outcomes in the order of `keys`, and the layouts of the weights as a manifest stores them. The
    first program decides the layouts: if it fails, returns its outcome alone, and None. Raises CompileError if the
    checkpoint cannot be loaded, or without a compiler.
    """
    target = deployment.slice
    with Compilers(target) if compilers is None else nullcontext(compilers) as pool:

        def one(key: ProgramKey, layouts: list | None) -> Outcome:
            with pool.worker() as worker:
                started(key)
                facts = reuse(key, layouts)
                outcome = (
                    Outcome(key, "reused", facts)
                    if facts
                    else worker.compile(deployment, key, layouts, folder / file_name(key, target))
                )
            done(outcome)
            return outcome

        first = one(keys[0], None)
        if not first.ok:
            return [first], None
        layouts = (first.facts or {})["layouts"]
        # Experts are loaded one by one, by separate functions.
        mixed = any(isinstance(layer.mlp, MoeSpec) for layer in deployment.model.layers)
        if checkpoint is not None and target.platform in ("cpu", "gpu") and not mixed:
            with pool.worker() as worker:
                worker.compile_start(deployment, checkpoint, layouts, folder / START)
        with ThreadPoolExecutor(pool.count) as threads:
            rest = threads.map(lambda key: one(key, layouts), keys[1:])
            return [first, *rest], layouts


def file_name(key: ProgramKey, target: Target) -> str:
    return re.sub(r"[^\w]+", "-", str(key)) + (HLO_SUFFIX if target.platform == "neuron" else ".xla")


def environment(target: Target) -> dict[str, str]:
    settings = {"cpu": {"JAX_PLATFORMS": "cpu"}, "gpu": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}
    settings["neuron"] = settings["cpu"]  # the child only traces
    settings["tpu"] = {
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": target.accelerator_type,
        "TPU_WORKER_HOSTNAMES": "localhost",
        # No queries to the cloud, no lock on a chip, no log files: this machine has neither cloud nor chip.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
    # An executable from JAX's own cache cannot be serialised again: it loads nowhere.
    return os.environ | settings[target.platform] | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


PRICED = ("tpu",)  # platforms whose compiler writes listings, by which operations are priced


class Compilers:
    """Child processes that compile programs of deployments for a target, `count` at a time.

    Each starts with its first program. Those for CPUs have as many devices as their first deployment. Close them after
    use, or use them as a context. Raises CompileError if this machine has no compiler for the target.
    """

    def __init__(self, target: Target, count: int = 2):
        check_compiler(target)
        self.target, self.count = target, count
        # The last that worked is the first to work again: others may not have started.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._workers = [_Worker(target) for _ in range(count)]
        for worker in self._workers:
            self._idle.put(worker)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """A process that is idle, when there is one."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)


class _Worker:
    """A child process that compiles programs."""

    def __init__(self, target: Target):
        settings, first = environment(target), {"target": target.name, "listings": None}
        self._listings = TemporaryDirectory()
        if target.platform in PRICED:
            first["listings"], flags = self._listings.name, dump_flags(Path(self._listings.name))
            settings["LIBTPU_INIT_ARGS"] = f"{settings.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
        self._child = Child("inferlib.aot.worker", first, settings)

    def compile(self, deployment: Deployment, key: ProgramKey, layouts: list | None, path: Path) -> Outcome:
        answer = self._ask(deployment, layouts, path, key=asdict(key))
        if error := answer.get("error"):
            return Outcome(key, "too large" if too_large(error) else "failed", error=error)
        return Outcome(key, answer.pop("status"), answer)

    def compile_start(self, deployment: Deployment, checkpoint: str, layouts: list | None, path: Path) -> None:
        answer = self._ask(deployment, layouts, path, key=None, model=checkpoint)
        if error := answer.get("error"):
            raise CompileError(error)

    def _ask(self, deployment: Deployment, layouts: list | None, path: Path, **job: Any) -> dict[str, Any]:
        return self._child.ask({"deployment": deployment.to_json(), "layouts": layouts, "path": str(path), **job})

    def close(self) -> None:
        self._child.close()
        self._listings.cleanup()
