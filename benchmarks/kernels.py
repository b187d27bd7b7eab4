"""The TPU kernels by the TPU compiler's own account, without a TPU: for each target and shape, how near to the floor.

python benchmarks/kernels.py [--kernels decode_attention] [--targets "v5e-1;v6e-1"] [--cases "A;F"] [--json]

The floor is what a kernel must read and write, at the published bandwidth of a device, or where it is longer what it
must compute, or send to its neighbours in a ring, at the published rates. R is the larger of its cycles (bundles
executed, see `inferlib.inspection.bundles`) and its bytes, as a multiple of the floor; r adds the waits for copies that
arrive half a microsecond (from a neighbour a hop's latency) after their bytes could have. Estimates, never
measurements, but for what it takes to compile a kernel: seconds of this machine's CPU, without what listings take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from inferlib.targets import Target, parse_target
from inferlib.tuning.kernel_cases import CASES, FIXED, RINGS, check_devices, chosen_cases
from inferlib.tuning.kernels import KernelCompiler

TARGETS = ("v5e-1", "v6e-1", "v5p:1x1x1", "v7x:1x1x1")
SLICES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "v7x:2x2x1")  # of kernels on eight devices
ALL = {**CASES, **FIXED, **RINGS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help="of as many devices as the kernels are for, between semicolons")
    parser.add_argument("--kernels", help="between semicolons; all that there are devices for, unless given")
    parser.add_argument("--cases", help="between semicolons; all, unless given")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        targets = given.targets and [parse_target(name) for name in given.targets.split(";")]
        few = targets and any(target.devices < 8 for target in targets)
        kernels = given.kernels.split(";") if given.kernels else [name for name in ALL if not (few and name in RINGS)]
        cases = chosen_cases(kernels, given.cases and given.cases.split(";"), ALL)
        check_devices(cases, targets or ())
    except ValueError as error:
        parser.error(str(error))
    found = [
        line
        for kernel, names in cases.items()
        for target in targets or map(parse_target, SLICES if kernel in RINGS else TARGETS)
        for line in _of_target(target, kernel, names)
    ]
    if given.json:
        print(json.dumps(found))
    else:
        for kernel in cases:
            _show(kernel, [line for line in found if line["kernel"] == kernel])


def _of_target(target: Target, kernel: str, names: Sequence[str]) -> list[dict[str, Any]]:
    with KernelCompiler(target) as compiler:
        return [
            {**measured(compiler, kernel, name), "compile_seconds": compiler.compile_seconds(ALL[kernel][name])}
            for name in names
        ]


def measured(compiler: KernelCompiler, kernel: str, name: str) -> dict[str, Any]:
    """A line of the table."""
    case = ALL[kernel][name]
    found, floor = compiler.measure(case), compiler.floor(case)
    return {
        "target": compiler.target.name,
        "kernel": kernel,
        "case": name,
        "R": found.busy / floor,
        "r": found.whole / floor,
        "cycles": found.cycles,
        "cycles_us": 1e6 * found.cycles_seconds,
        "bytes_to_floor": found.hbm_bytes / case.floor_bytes,
        "floor_us": 1e6 * floor,
        "copies": found.copies,
        "bundles": found.bundles,
    }


def _show(kernel: str, found: list[dict[str, Any]]) -> None:
    table = Table(title=f"{kernel}: R (r), as multiples of the floor; bytes / floor; microseconds")
    for column in ("case", "target", "R", "(r)", "cycles", "bytes / floor", "floor", "bundles", "compiled in"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    for line in sorted(found, key=lambda line: list(ALL[kernel]).index(line["case"])):
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
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
