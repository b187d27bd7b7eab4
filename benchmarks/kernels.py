"""The TPU kernels by the TPU compiler's own account, without a TPU: for each target and shape, how near to the floor.

python benchmarks/kernels.py [--targets v5e,v6e] [--cases A,F] [--json]

The floor is what a kernel must read, at the published bandwidth of a device. R is the larger of its cycles (bundles
executed, see `inferlib/compile/bundles.py`) and its bytes, as a multiple of the floor; r adds the waits for copies that
arrive half a microsecond after their bytes could have. Estimates, never measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib.compile.aot import environment
from inferlib.compile.bundles import Listing, dump_flags, find_listing
from inferlib.compile.report import CLOCKS
from inferlib.compile.targets import Target, parse_target

TARGETS = ("v5e-1", "v6e-1", "v5p:1x1x1", "v7x:1x1x1")
LATENCY = 0.5e-6  # seconds, assumed
_RNG = np.random.default_rng(0)
UNEVEN = tuple(_RNG.integers(17, 8193, 64).tolist())
SHORT = tuple(np.exp(_RNG.uniform(np.log(17), np.log(8192), 64)).astype(int).tolist())


@dataclass(frozen=True)
class DecodeAttention:
    """Rows of `lengths` positions, `queries` new ones each; bfloat16. page: positions of one; None: rows are pages.
    slots: of a ring."""

    lengths: tuple[int, ...]
    heads: int = 1
    group: int = 4
    size: int = 128
    page: int | None = None
    queries: int = 1
    window: int | None = None
    slots: int | None = None

    kernel = "decode_attention"

    @property
    def floor_bytes(self) -> int:
        seen = sum(min(length, (self.window or length) + self.queries - 1) for length in self.lengths)
        return 4 * seen * self.heads * self.size

    def function(self):
        from inferlib.pallas_kernels.decode_attention_tpu import decode_attention

        return partial(
            decode_attention, scale=self.size**-0.5, window=self.window, ring=self.slots is not None, layer=0
        )

    @property
    def pages(self) -> np.ndarray | None:
        """A table of pages in no order."""
        if self.page is None:
            return None
        columns = -(-max(self.lengths) // self.page)
        count = len(self.lengths) * columns
        return np.random.default_rng(1).permutation(count).reshape(-1, columns).astype(np.int32)

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes."""
        rows, slots = len(self.lengths), self.page or self.slots or -(-max(self.lengths) // 128) * 128
        count = rows if self.page is None else self.pages.size
        cache = (4, count, self.heads, slots, self.size), "bfloat16"
        q = (rows, self.queries, self.heads, self.group, self.size), "bfloat16"
        found = {"q": q, "k": cache, "v": cache, "lengths": ((rows,), "int32")}
        return found if self.page is None else {**found, "pages": (self.pages.shape, "int32")}

    def scalars(self) -> dict[int, np.ndarray]:
        """What the kernel is given in scalar memory, in its order."""
        given = [np.array(self.lengths), np.zeros(1, int)]
        if self.slots is not None:
            first = np.maximum(np.array(self.lengths) - self.queries + 1 - self.window, 0)
            unit = math.gcd(self.slots, 128)
            given.append(first // unit * unit % self.slots)
        if self.page is not None:
            given.append(self.pages)
        return dict(enumerate(given))


BATCH, LONG = (4096,) * 32, (131072,)
CASES: dict[str, DecodeAttention] = {
    "A": DecodeAttention(BATCH),
    "F": DecodeAttention(BATCH, heads=8),
    "L": DecodeAttention(LONG),
    "LF": DecodeAttention(LONG, heads=8),
    "A, page 128": DecodeAttention(BATCH, page=128),
    "F, page 128": DecodeAttention(BATCH, heads=8, page=128),
    "L, page 128": DecodeAttention(LONG, page=128),
    "LF, page 128": DecodeAttention(LONG, heads=8, page=128),
    "A, page 16": DecodeAttention(BATCH, page=16),
    "F, page 16": DecodeAttention(BATCH, heads=8, page=16),
    "uneven": DecodeAttention(UNEVEN),
    "uneven, 8 heads": DecodeAttention(UNEVEN, heads=8),
    "short": DecodeAttention(SHORT),
    "short, 8 heads": DecodeAttention(SHORT, heads=8),
    "A, head 64": DecodeAttention(BATCH, size=64),
    "A, head 256": DecodeAttention(BATCH, size=256),
    "A, 4 queries": DecodeAttention(BATCH, queries=4),
    "F, 4 queries": DecodeAttention(BATCH, heads=8, queries=4),
    "A, window 1024": DecodeAttention((5000,) * 32, window=1024, slots=1536),
    "F, window 1024": DecodeAttention((5000,) * 32, heads=8, window=1024, slots=1536),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=";".join(TARGETS), help="of one chip, between semicolons")
    parser.add_argument("--cases", default=";".join(CASES), help="between semicolons")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # where the compiler writes its listings
    chosen = parser.parse_args()
    targets, cases = chosen.targets.split(";"), chosen.cases.split(";")
    if unknown := [name for name in cases if name not in CASES]:
        parser.error(f"no cases {unknown}; there are {'; '.join(CASES)}")
    if chosen.child:
        for name in cases:
            print(
                json.dumps({"case": name, **_measure(parse_target(targets[0]), CASES[name], chosen.child)}), flush=True
            )
        return
    found = [line for target in targets for line in _in_child(parse_target(target), cases)]
    if chosen.json:
        print(json.dumps(found))
    else:
        _show(found)


def _in_child(target: Target, cases: list[str]) -> list[dict[str, Any]]:
    """In a process of its own, the only kind that the TPU compiler is loaded in."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", folder, "--targets", target.name, "--cases", ";".join(cases)]
        env = environment(target) | {"LIBTPU_INIT_ARGS": dump_flags(Path(folder))}
        run = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [{"target": target.name, **json.loads(line)} for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode:
        raise RuntimeError(f"{target} after {len(lines)} of {len(cases)} cases: {run.stderr[-3000:]}")
    return lines


def _measure(target: Target, case: DecodeAttention, listings: Path) -> dict[str, Any]:
    """Compile a case for a target and execute its listing."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    name, options = target.topology_name, target.topology_options
    device = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices[0]
    sharding = SingleDeviceSharding(device)
    arguments = {
        key: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for key, (shape, dtype) in case.arguments().items()
    }
    start = time.perf_counter()
    jax.jit(case.function()).lower(**arguments).compile()
    seconds = time.perf_counter() - start
    listing = Listing(find_listing(listings, case.kernel).read_text())
    clock, bandwidth = CLOCKS[target.chip.name], target.hbm_bandwidth
    run = listing.run(case.scalars(), bandwidth=bandwidth / clock, latency=LATENCY * clock)
    if run.unmet or run.unknown:
        raise RuntimeError(f"the listing was not understood: {run}")
    floor = case.floor_bytes / bandwidth
    return {
        "R": max(run.cycles / clock, run.hbm_bytes / bandwidth) / floor,
        "r": run.elapsed / clock / floor,
        "cycles": run.cycles,
        "cycles_us": 1e6 * run.cycles / clock,
        "bytes_to_floor": run.hbm_bytes / case.floor_bytes,
        "floor_us": 1e6 * floor,
        "copies": run.copies,
        "bundles": listing.size,
        "compile_seconds": seconds,
    }


def _show(found: list[dict[str, Any]]) -> None:
    table = Table(title="decode_attention, bfloat16: R (r), as multiples of the floor; bytes / floor; microseconds")
    for column in ("case", "target", "R", "(r)", "cycles", "bytes / floor", "floor", "bundles", "compiled in"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    for line in sorted(found, key=lambda line: list(CASES).index(line["case"])):
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
