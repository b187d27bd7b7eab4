"""Compiling whole models for TPU slices, without a TPU: seconds, memory, copies, bytes, and the compiler's estimate.

python benchmarks/compile.py

Seconds are those of the CPU, the child processes' start included: on a machine that does nothing else, wall time is as
long for one program, and for many nearly half of it with two processes.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from inferlib import Buckets, configs
from inferlib.compile.aot import compile_programs
from inferlib.compile.deployment import Deployment
from inferlib.compile.report import Report
from inferlib.sharding.mesh import Parallelism

# Decode of 32 rows of each replica, 4096 positions of cache: shape, slice, mesh, batch, seconds it may take.
DECODE = (
    ("llama3-8b", "v5e:2x4", "tp=8", 32, 15),
    ("llama3-70b", "v6e:2x4", "tp=8", 32, 20),
    ("llama3-70b", "v5p:16x16x16", "tp=8,dp=512", 16384, 40),
)


def main() -> None:
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title="Decode, bfloat16, 32 rows a replica, cache 4096; times on chip are estimates, not measured")
    for column in ("model", "slice", "CPU seconds", "temporaries", "copies", "bytes / floor", "estimate", "floor"):
        table.add_column(column, justify="right")
    for name, target, parallel, batch, limit in DECODE:
        made = _deployment(name, target, parallel, Buckets((512,), (batch,), (4096,)))
        report, seconds, _ = _compile(made, made.keys()[:1])
        (program,) = report.programs
        table.add_row(
            name,
            target,
            f"{seconds:.1f} (of {limit})",
            f"{program.temporaries / 2**20:.2f} MiB",
            str(len(program.copies)),
            f"{program.moved_bytes / program.floor_bytes:.3f}",
            f"{1e3 * program.cycles:.2f} + {1e3 * program.network:.2f} ms",
            f"{1e3 * program.floor:.2f} ms",
        )
    console.print(table)
    made = _deployment("llama3-70b", "v6e:2x4", "tp=8", Buckets((128, 512), (8, 32), (4096,)))
    report, seconds, wall = _compile(made, made.keys())
    console.print(
        f"{len(report.programs)} programs of llama3-70b on v6e:2x4: {seconds:.0f} CPU seconds (of 2 x 180), "
        f"{wall:.0f} s on this machine, ok: {report.ok}"
    )


def _deployment(name: str, target: str, parallel: str, buckets: Buckets) -> Deployment:
    return Deployment(configs.load(name), target, "bfloat16", buckets, Parallelism.parse(parallel), ("greedy",))


def _compile(made: Deployment, keys) -> tuple[Report, float, float]:
    """The report, seconds of the CPU in the child processes, and on the clock."""
    start, before = time.perf_counter(), _children()
    with TemporaryDirectory() as folder:
        outcomes, _ = compile_programs(made, keys, Path(folder))
    return Report.of(made, outcomes), _children() - before, time.perf_counter() - start


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
