"""Compile whole models for TPU slices, without a TPU: memory, copies, bytes, and the compiler's estimate of a step.

    python benchmarks/compile.py --list
    python benchmarks/compile.py --only gpt-oss-20b --only "llama3-8b v5e:2x4"

--only chooses the deployments whose line of --list has all of its words; by default all are compiled. --backend xla
leaves kernels out. Estimates are the compiled schedule, with each operation as its listing says, plus the part of the
collectives that no operation hides. CPU seconds are for all programs of a deployment, including the start of child
processes.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from inferlib import Buckets, configs
from inferlib.aot.compile import compile_programs
from inferlib.inspection.report import Report
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.models.families.laneformer import LANEFORMER
from inferlib.models.quantization import Quantization
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism


@dataclass(frozen=True)
class Case:
    """A deployment whose decode step is compiled, and one prefill for each size of `chunks`.

    rows: on all replicas together. cache: positions. chunks: tokens of a chunk. only_experts: quantize nothing else.
    lanes: the same shapes in so many lanes, whose sums arrive one layer late; 0: a model as published.
    """

    config: str
    target: str
    parallel: str
    rows: int
    cache: int = 4096
    chunks: tuple[int, ...] = ()
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    only_experts: bool = False
    lanes: int = 0

    def __str__(self) -> str:
        weights = f"{self.quantization or 'bfloat16'}{' experts' if self.only_experts else ''}"
        cache = f"{self.cache} {self.kv_cache_dtype or 'bfloat16'}"
        name = f"{self.config} in {self.lanes} lanes" if self.lanes else self.config
        return f"{name} {self.target} {self.parallel} {weights}, {self.rows} rows x {cache}"

    def deployment(self, backend: str) -> Deployment:
        hf = configs.load(self.config)
        if self.lanes:
            architecture = {"architectures": list(LANEFORMER.architectures), "num_lanes": self.lanes}
            hf |= architecture | {"broadcast_delay": 1, "norm_eps": hf["rms_norm_eps"]}
        quantization = Quantization.named(self.quantization) if self.quantization else None
        if self.only_experts and quantization:
            weights = abstract_model(config_from_hf(hf), "bfloat16").weights
            others = {weight.part for weight in weights if axes.EXPERTS not in weight.axes}
            quantization = replace(quantization, unquantized=tuple(sorted(others)))
        buckets = Buckets(self.chunks or (512,), (self.rows,), (self.cache,))
        split = Parallelism.parse(self.parallel)
        return Deployment(
            hf,
            self.target,
            "bfloat16",
            buckets,
            split,
            ("greedy",),
            quantization=quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            backend=backend,
        )


_EXPERTS: dict[str, Any] = dict(quantization="mxfp4", only_experts=True)
CASES = (
    Case("llama3-8b", "v5e:2x4", "tp=8", 32),
    Case("llama3-70b", "v6e:2x4", "tp=8", 32),
    Case("llama3-70b", "v6e:2x4", "tp=8", 32, lanes=8),
    Case("llama3-70b", "v5p:16x16x16", "tp=8,dp=512", 16384),
    Case("deepseek-v2-lite", "v6e-4", "ep=4", 32, 8192, (128, 512)),
    Case("deepseek-v2-lite", "v5e-8", "tp=8", 32, 8192),
    Case("deepseek-v3", "v6e-64", "ep=16,tp=4", 128, chunks=(512,), quantization="fp8_block"),
    Case("kimi-k2", "v6e-64", "ep=16,tp=4", 128, quantization="fp8_block"),
    Case("glm-4.5", "v6e-32", "ep=8,tp=4", 64, quantization="fp8_block"),
    Case("qwen3-235b-a22b", "v6e-32", "ep=8,tp=4", 64, chunks=(512,)),
    Case("llama4-scout", "v6e-16", "ep=2,tp=8", 32),
    Case("mixtral-8x7b", "v6e-4", "tp=4", 32),
    Case("mixtral-8x7b", "v6e-8", "ep=8", 32, chunks=(512,)),
    Case("gpt-oss-20b", "v6e-1", "tp=1", 16, **_EXPERTS),
    Case("gpt-oss-20b", "v6e-4", "ep=4", 16, chunks=(512,), **_EXPERTS),
    Case("gpt-oss-120b", "v6e-8", "ep=8", 32, chunks=(512,), **_EXPERTS),
    Case("gpt-oss-120b", "v5p-8", "ep=4", 32, chunks=(512,), **_EXPERTS),
    Case("llama3-405b", "v6e-16", "tp=16", 16, quantization="int8"),
    Case("llama3-405b", "v6e-16", "cp=2,tp=8,rules=helix", 16, quantization="int8"),
    Case("llama3-70b", "v5e:4x4", "tp=16", 8, quantization="int8"),
    Case("llama3-70b", "v5e:4x4", "cp=2,tp=8,rules=helix", 8, quantization="int8"),
    Case("llama3-70b", "v5e:4x4", "tp=16", 16, quantization="int8"),
    Case("llama3-70b", "v5e:4x4", "tp=16", 16, quantization="int4"),
    Case("llama3-70b", "v5e:4x4", "tp=16", 16, quantization="mxfp4"),
    Case("llama3-8b", "v5e:2x4", "tp=8", 32, kv_cache_dtype="int8"),
    Case("llama3-8b", "v5e:2x4", "tp=8", 32, quantization="int8", kv_cache_dtype="int8"),
    Case("llama3-8b", "v5e:2x4", "tp=8", 8, 8192, (512, 2048)),
    Case("llama3-70b", "v7x:2x2x1", "tp=8", 8, chunks=(512,)),
    Case("parcae-370m", "v5e-1", "tp=1", 8, 1024, quantization="int8"),
    Case("parcae-370m", "v6e-1", "tp=1", 8, 1024, quantization="int8"),
    Case("llama3-8b", "v5e:2x4", "tp=8,rules=tp_sp", 8, 8192, (2048,)),
    Case("llama3-8b", "v6e:2x4", "tp=8,rules=tp_sp", 8, 8192, (2048,)),
    Case("llama3-8b", "v7x:2x2x1", "tp=8,rules=tp_sp", 8, 8192, (2048,)),
    Case("llama3-70b", "v6e:2x4", "tp=8,rules=tp_sp", 8, 8192, (4096,)),
)
COLUMNS = ("step", "weights", "memory", "temporaries", "copies", "GB moved", "/ floor", "estimate", "floor", "CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="WORDS", help="deployments that have all these words")
    parser.add_argument("--backend", default="auto", help="as of inferlib compile")
    parser.add_argument("--list", action="store_true", help="name the deployments, and compile nothing")
    args = parser.parse_args()
    wanted = [words.split() for words in args.only or [""]]
    cases = [case for case in CASES if any(all(word in str(case) for word in words) for words in wanted)]
    if not cases:
        parser.error(f"no deployment has all words of {args.only}; --list names them")
    if args.list:
        print(*cases, sep="\n")
        return
    try:
        deployments = [(case, case.deployment(args.backend)) for case in cases]
    except ValueError as error:
        parser.error(str(error))
    console = Console(width=None if Console().is_terminal else 160)
    for case, made in deployments:
        table = Table(title=str(case), title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "step" else "right")
        for row in measured(case, made):
            table.add_row(*row)
        console.print(table)


def measured(case: Case, made: Deployment) -> Iterator[tuple[str, ...]]:
    """The lines of the table: the decode step, which decides the layouts of the weights, then each prefill."""
    before = _children()
    decode, *others = made.keys()
    prefills = [key for key in others if key.chunks == 1 and not (key.rows or key.detail)]
    keys = [decode, *(key for key in prefills if case.chunks)]
    with TemporaryDirectory() as folder:
        outcomes, _ = compile_programs(made, keys, Path(folder))
    report, seconds = Report.of(made, outcomes), _children() - before
    program: Any
    for program in report.programs:
        if not program.outcome.ok:
            raise SystemExit(f"{case}, {program.key}: {program.outcome.error}")
        yield (
            _step(program.key),
            f"{report.budget.weights / 2**30:.2f} GiB",
            f"{program.peak / 2**30:.1f} of {(report.capacity or 0) / 2**30:.2f} GiB",
            f"{program.temporaries / 2**20:.1f} MiB",
            str(len(program.copies)),
            f"{program.moved_bytes / 1e9:.2f}",
            f"{program.moved_bytes / program.floor_bytes:.3f}",
            f"{1e3 * program.step.computing:.2f} + {1e3 * program.step.exposed:.2f} ms",
            f"{1e3 * program.floor:.1f} ms",
            f"{seconds:.0f}" if program is report.programs[-1] else "",
        )


def _step(key: ProgramKey) -> str:
    return f"prefill {key.chunk}" if key.chunks else "decode"


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
