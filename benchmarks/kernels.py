"""How near the TPU kernels are to the floor, by the TPU compiler's listings, for each target and shape. Needs no TPU.

python benchmarks/kernels.py [--kernels decode_attention] [--targets "v5e-1;v6e-1"] [--cases "A;F"] [--json]

The floor is the longest of three times at published rates: to read and write what the kernel must, to compute it, and
to send it to neighbours in a ring. R is the larger of the kernel's cycles (bundles that its slower core executes, see
`inferlib.inspection.bundles`) and its bytes, as a multiple of the floor. r adds the waits for copies, which arrive half
a microsecond (from a neighbour: a hop's latency) after their bytes could have. All are estimates, except for the time
to compile a kernel: seconds of this machine's CPU, without the time for listings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from inferlib.aot.compile import CompileError
from inferlib.targets import Target, parse_target
from inferlib.tuning.kernel_cases import CASES, FIXED, RINGS, check_devices, chosen_cases
from inferlib.tuning.kernels import KernelCompiler

TARGETS = ("v5e-1", "v6e-1", "v5p:1x1x1", "v7x:1x1x1")
SLICES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "v7x:2x2x1")  # for kernels on eight devices
ALL = {**CASES, **FIXED, **RINGS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help="targets with as many devices as the kernels need, separated by semicolons")
    parser.add_argument("--kernels", help="separated by semicolons; by default all that the targets have devices for")
    parser.add_argument("--cases", help="separated by semicolons; by default all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        targets = args.targets and [parse_target(name) for name in args.targets.split(";")]
        ring_fits = not targets or all(target.devices >= 8 for target in targets)
        kernels = args.kernels.split(";") if args.kernels else [name for name in ALL if ring_fits or name not in RINGS]
        cases = chosen_cases(kernels, args.cases and args.cases.split(";"), ALL)
        check_devices(cases, targets or ())
    except ValueError as error:
        parser.error(str(error))
    lines = [
        line
        for kernel, names in cases.items()
        for target in targets or map(parse_target, SLICES if kernel in RINGS else TARGETS)
        for line in _of_target(target, kernel, names)
    ]
    if args.json:
        print(json.dumps(lines))
    else:
        for kernel in cases:
            _show(kernel, [line for line in lines if line["kernel"] == kernel])


def _of_target(target: Target, kernel: str, names: Sequence[str]) -> list[dict[str, Any]]:
    with KernelCompiler(target) as compiler:
        return [_line(compiler, kernel, name) for name in names]


def _line(compiler: KernelCompiler, kernel: str, name: str) -> dict[str, Any]:
    """`measured` and the time to compile, or why this generation does not run the case."""
    try:
        return {**measured(compiler, kernel, name), "compile_seconds": compiler.compile_seconds(ALL[kernel][name])}
    except CompileError as error:
        return {"target": compiler.target.name, "kernel": kernel, "case": name, "refused": str(error)}


def measured(compiler: KernelCompiler, kernel: str, name: str) -> dict[str, Any]:
    """One line of the table."""
    case = ALL[kernel][name]
    listing, floor = compiler.measure(case), compiler.floor(case)
    return {
        "target": compiler.target.name,
        "kernel": kernel,
        "case": name,
        "R": listing.busy / floor,
        "r": listing.whole / floor,
        "cycles": listing.cycles,
        "cycles_us": 1e6 * listing.cycles_seconds,
        "bytes_to_floor": listing.hbm_bytes / case.floor_bytes,
        "floor_us": 1e6 * floor,
        "copies": listing.copies,
        "bundles": listing.bundles,
    }


def _show(kernel: str, lines: list[dict[str, Any]]) -> None:
    table = Table(title=f"{kernel}: R (r), as multiples of the floor; bytes / floor; microseconds")
    for column in ("case", "target", "R", "(r)", "cycles", "bytes / floor", "floor", "bundles", "compiled in"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    notes: list[str] = []
    for line in sorted(lines, key=lambda line: list(ALL[kernel]).index(line["case"])):
        if refused := line.get("refused"):
            table.add_row(line["case"], line["target"], "-")
            notes.append(f"{line['case']} on {line['target']}: {refused}")
            continue
        table.add_row(
            line["case"],
            line["target"],
            f"{line['R']:.2f}",
            f"({line['r']:.2f})",
            f"{line['cycles_us']:.1f} us",
            f"{line['bytes_to_floor']:.3f}",
            f"{line['floor_us']:.1f} us",
            str(line["bundles"]),
            f"{line['compile_seconds']:.1f} s",
        )
    Console(width=None if Console().is_terminal else 120).print(table, *notes, sep="\n")


if __name__ == "__main__":
    main()
