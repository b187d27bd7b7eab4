"""Checks plans with the real compiler: compiles the programs of the best ones, and compares with the cost model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferlib.aot.compile import CompileError, Compilers, check_compiler, compile_programs
from inferlib.buckets import Buckets
from inferlib.inspection.outcome import Outcome
from inferlib.inspection.report import ProgramReport, Report
from inferlib.planning.costs import StepTime, Work, step_time
from inferlib.planning.network import ATTAINED
from inferlib.planning.planner import Option, Ranking
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey


@dataclass(frozen=True)
class Check:
    """A program of a plan: a decode step of all rows, or a prefill chunk. Both read the whole cache bucket.

    work, time: the cost model's figures. compiled: the compiler's report.
    """

    option: Option
    work: Work
    time: StepTime
    compiled: ProgramReport

    @property
    def seconds(self) -> float | None:
        """Seconds by the compiler's report, at the memory bandwidth that is attained. None without an estimate."""
        if self.compiled.step is None:
            return None
        bandwidth = self.option.deployed.target.hbm_bandwidth * ATTAINED.memory
        return self.compiled.step.attained(bandwidth)

    @property
    def difference(self) -> float | None:
        """The compiler's seconds over the cost model's, less 1; None if there are none."""
        return None if self.seconds is None else self.seconds / self.time.seconds - 1.0

    def facts(self) -> dict[str, Any]:
        """The check as JSON values: seconds, bytes that a device moves in a step, and the bytes of its `memory`."""
        p, option = self.compiled, self.option
        return {
            "parallel": str(option.deployed.parallel),
            "weights": option.deployed.weights,
            "batch": option.batch,
            "program": str(p.key),
            "status": p.outcome.status,
            "error": p.outcome.error,
            "model": {"seconds": self.time.seconds, "memory": option.memory.total, "bytes": self.work.nbytes},
            "difference": self.difference,
            "compiler": {"seconds": self.seconds, "memory": p.peak, "bytes": p.moved_bytes},
        }


def candidates(ranking: Ranking, count: int) -> list[Option]:
    """The best plan of each of the `count` best meshes. Raises CompileError for a target without the TPU compiler, and
    for plans with drafts, a cache policy or a depth."""
    if ranking.target.platform != "tpu":
        raise CompileError(f"plans are verified with the TPU compiler, and {ranking.target} is no TPU slice")
    if any(option.drafts for option in ranking.options):
        raise CompileError("plans with drafts are not verified: leave out speculation, or compile the plan with it")
    if any(option.deployed.cache_policy for option in ranking.options):
        raise CompileError("plans with cache_policy are not verified: leave it out, or compile the plan with it")
    if ranking.workload.depth is not None:
        raise CompileError("plans with a depth are not verified, as programs count all steps of the core: leave it out")
    check_compiler(ranking.target)
    by_mesh: dict[str, Option] = {}
    for option in ranking.options:
        by_mesh.setdefault(str(option.deployed.parallel), option)
    return list(by_mesh.values())[:count]


def by_compiler(ranking: Ranking, checks: Sequence[Check]) -> Ranking | None:
    """The verified plans, ranked again by the model's times, each multiplied by how far the compiler's time exceeds the
    model's. None if no plan compiled and fits."""
    plans: dict[int, Option] = {}
    failed = {id(check.option) for check in checks if not check.compiled.outcome.ok}
    for check in checks:
        key, factor = id(check.option), 1.0 + (check.difference or 0.0)
        if key not in failed:
            option = plans.get(key, check.option)
            plans[key] = option.slower(prefill=factor) if check.compiled.key.chunks else option.slower(decode=factor)
    return ranking.of(plans.values()) if plans else None


def deployment(hf: Mapping[str, Any], option: Option) -> Deployment:
    """The deployment of a plan, with one bucket of each kind. hf: the model's Hugging Face config dictionary."""
    work, deployed = option.workload, option.deployed
    buckets = Buckets((work.chunk,), (option.batch,), (max(work.max_len, work.chunk),))
    return Deployment(
        hf,
        deployed.target.name,
        "bfloat16",
        buckets,
        deployed.parallel,
        modes=("greedy",),
        quantization=deployed.quantization,
        kv_cache_dtype=deployed.kv_cache_dtype,
        cache_policy=deployed.cache_policy and str(deployed.cache_policy),
    )


def programs(made: Deployment) -> tuple[ProgramKey, ProgramKey]:
    """The two programs of a plan: a decode step, which decides the layouts of the weights, and a chunk's prefill."""
    (chunk,) = made.buckets.prefill
    return made.keys()[0], ProgramKey("greedy", 0, made.max_len, chunks=1, chunk=chunk)


def verify(
    hf: Mapping[str, Any],
    options: Sequence[Option],
    *,
    started: Callable[[Option, ProgramKey], None] = lambda option, key: None,
    done: Callable[[Option, Outcome], None] = lambda option, outcome: None,
    workers: int = 2,
) -> list[Check]:
    """Compile the programs of some plans (see `candidates`) of one target in `workers` child processes.

    If a plan's decode step does not compile, the result lacks its prefill.
    """

    def one(option: Option) -> list[Check]:
        made = deployment(hf, option)
        with tempfile.TemporaryDirectory() as folder:
            outcomes, _ = compile_programs(
                made,
                programs(made),
                Path(folder),
                started=lambda key: started(option, key),
                done=lambda outcome: done(option, outcome),
                compilers=compilers,
            )
        return [_check(option, p) for p in Report.of(made, outcomes).programs]

    if not options:
        return []
    target = deployment(hf, options[0]).slice
    with Compilers(target, workers) as compilers, ThreadPoolExecutor(workers) as threads:
        return [check for checks in threads.map(one, options) for check in checks]


def _check(option: Option, compiled: ProgramReport) -> Check:
    key, deployed = compiled.key, option.deployed
    work = deployed.prefill(key.chunk, key.limit - key.chunk) if key.chunks else deployed.decode(key.rows, key.limit)
    return Check(option, work, step_time(work, deployed.network), compiled)
