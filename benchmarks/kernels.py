"""The TPU kernels by the TPU compiler's own account, without a TPU: for each target and shape, how near to the floor.

python benchmarks/kernels.py [--kernels decode_attention] [--targets "v5e-1;v6e-1"] [--cases "A;F"] [--json]

The floor is what a kernel must read and write, at the published bandwidth of a device, or where it is longer what it
must compute, or send to its neighbours in a ring, at the published rates. R is the larger of its cycles (bundles
executed, see `inferlib/compile/bundles.py`) and its bytes, as a multiple of the floor; r adds the waits for copies that
arrive half a microsecond (from a neighbour a hop's latency) after their bytes could have. Estimates, never
measurements.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kernel_cases import CASES, Case
from rich.console import Console
from rich.table import Table

from inferlib.compile.aot import environment
from inferlib.compile.bundles import DELAYS, Listing, dump_flags, find_listing
from inferlib.compile.report import CLOCKS
from inferlib.compile.targets import Target, parse_target

TARGETS = ("v5e-1", "v6e-1", "v5p:1x1x1", "v7x:1x1x1")
SLICES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "v7x:2x2x1")  # for kernels on eight devices
LATENCY = 0.5e-6  # seconds, assumed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help="of as many devices as the kernel is for, between semicolons")
    parser.add_argument("--kernels", default=";".join(CASES), help="between semicolons")
    parser.add_argument("--cases", help="between semicolons; all, unless given")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # where the compiler writes its listings
    chosen = parser.parse_args()
    targets, kernels = chosen.targets and chosen.targets.split(";"), chosen.kernels.split(";")
    if unknown := [name for name in kernels if name not in CASES]:
        parser.error(f"no kernels {unknown}; there are {'; '.join(CASES)}")
    wanted = {
        kernel: [name for name in CASES[kernel] if chosen.cases is None or name in chosen.cases.split(";")]
        for kernel in kernels
    }
    if unknown := set((chosen.cases or "").split(";")) - {""} - {name for names in wanted.values() for name in names}:
        parser.error(f"no cases {sorted(unknown)}; there are {'; '.join(name for k in kernels for name in CASES[k])}")
    if chosen.child:
        target = parse_target(targets[0])
        for kernel, names in wanted.items():
            for name in names:
                line = {"kernel": kernel, "case": name, **_measure(target, CASES[kernel][name], chosen.child)}
                print(json.dumps(line), flush=True)
        return
    found = [
        line
        for kernel, names in wanted.items()
        if names
        for target in targets or (SLICES if hasattr(CASES[kernel][names[0]], "devices") else TARGETS)
        for line in _in_child(parse_target(target), kernel, names)
    ]
    if chosen.json:
        print(json.dumps(found))
    else:
        for kernel in kernels:
            _show(kernel, [line for line in found if line["kernel"] == kernel])


def _in_child(target: Target, kernel: str, cases: list[str]) -> list[dict[str, Any]]:
    """In a process of its own, the only kind that the TPU compiler is loaded in."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", folder, "--targets", target.name]
        command += ["--kernels", kernel, "--cases", ";".join(cases)]
        env = environment(target) | {"LIBTPU_INIT_ARGS": dump_flags(Path(folder))}
        run = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [{"target": target.name, **json.loads(line)} for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode:
        raise RuntimeError(f"{target} after {len(lines)} of {len(cases)} cases: {run.stderr[-3000:]}")
    return lines


def _measure(target: Target, case: Case, listings: Path) -> dict[str, Any]:
    """Compile a case for a target and execute its listing."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, SingleDeviceSharding

    name, options = target.topology_name, target.topology_options
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    function, arguments, chip = case.function(), case.arguments(), target.chip
    shardings, sent = dict.fromkeys(arguments, SingleDeviceSharding(devices[0])), getattr(case, "sent_bytes", 0)
    if sent:
        mesh = jax.sharding.Mesh(devices[: case.devices], ("x",))
        specs, out = case.specs()
        inner, order = function, tuple(specs)
        mapped = jax.shard_map(
            lambda *values: inner(*values), mesh=mesh, in_specs=tuple(specs.values()), out_specs=out, check_vma=False
        )
        function = lambda **values: mapped(*(values[key] for key in order))  # noqa: E731
        shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    arguments = {
        key: jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[key]) for key, (shape, dtype) in arguments.items()
    }
    start = time.perf_counter()
    jax.jit(function).lower(**arguments).compile()
    seconds = time.perf_counter() - start
    listing = Listing(find_listing(listings, case.kernel).read_text(), DELAYS[chip.name])
    clock, bandwidth, rate = CLOCKS[chip.name], target.hbm_bandwidth, target.rate("bfloat16")
    link = chip.link_bandwidth / clock, chip.hop_latency * clock
    run = listing.run(case.scalars(), bandwidth=bandwidth / clock, latency=LATENCY * clock, link=link)
    if run.unmet or run.unknown:
        raise RuntimeError(f"the listing was not understood: {run}")
    network = sent / 2 / chip.link_bandwidth  # a ring, in both directions
    floor = max(case.floor_bytes / bandwidth, case.floor_flops / rate, network)
    return {
        "R": max(run.cycles / clock, run.hbm_bytes / bandwidth, run.sent / 2 / chip.link_bandwidth) / floor,
        "r": run.elapsed / clock / floor,
        "cycles": run.cycles,
        "cycles_us": 1e6 * run.cycles / clock,
        "bytes_to_floor": run.hbm_bytes / case.floor_bytes,
        "network_us": 1e6 * network,
        "floor_us": 1e6 * floor,
        "copies": run.copies,
        "bundles": listing.size,
        "compile_seconds": seconds,
    }


def _show(kernel: str, found: list[dict[str, Any]]) -> None:
    table = Table(title=f"{kernel}: R (r), as multiples of the floor; bytes / floor; microseconds")
    for column in ("case", "target", "R", "(r)", "cycles", "bytes / floor", "floor", "bundles", "compiled in"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    for line in sorted(found, key=lambda line: list(CASES[kernel]).index(line["case"])):
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
