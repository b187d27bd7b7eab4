"""What each operation of a program compiled for a TPU takes: by its listing where that can be read.

The compiler's own estimate of an XLA operation (`estimated_cycles`) is up to 28 times what its listing takes. So an
operation is priced by executing its listing (`inferlib.inspection.bundles`): its cycles, or its bytes at the published
bandwidth, with waits for its copies. Where a listing cannot be read or executed, XLA's operations take the compiler's
estimate, and kernels their bytes or operations at the published rates, times the ratio that listings of such a kernel
have (`inferlib.planning.rates.RATIOS`). Starting an operation is not priced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inferlib.inspection.bundles import CLOCKS, DELAYS, LATENCY, Execution, Listing, listing_files
from inferlib.inspection.hlo import Computation, Instruction, Module, Shape
from inferlib.inspection.kernel_scalars import KERNELS, scalars_of
from inferlib.planning.rates import RATIOS
from inferlib.programs.keys import ProgramKey
from inferlib.targets import Target

How = Literal["listing", "estimate", "bytes", "model"]
SMALL = 1024  # elements: XLA writes such operations into the program itself, a few bundles each
MOST_CYCLES = 20_000_000  # of one execution


@dataclass(frozen=True)
class Price:
    """The price of one run of an operation.

    name: of the operation, without its number. how: "listing"; "estimate", the compiler's; "bytes", bytes or operations
    at the published rates, of kernels times the ratio of their listings; or, of collectives, the cost "model". seconds:
    with waits for its own copies. nbytes: to and from HBM.
    """

    name: str
    how: How
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Rates:
    """A device in cycles: of one core's listing, `bandwidth` and link in bytes per cycle, `latency` in cycles."""

    clock: float
    bandwidth: float
    latency: float
    link: tuple[float, float]
    delay: int | None

    @staticmethod
    def of(target: Target) -> Rates:
        clock, chip = CLOCKS[target.chip.name], target.chip
        link = chip.link_bandwidth / clock, chip.hop_latency * clock
        return Rates(clock, target.hbm_bandwidth / clock, LATENCY * clock, link, DELAYS.get(chip.name))


class Prices:
    """The prices of a module's operations, for a step of `key`. folder: the listings (`bundles.dump_flags`)."""

    def __init__(self, module: Module, folder: Path, key: ProgramKey, target: Target):
        self._module, self._key, self._target = module, key, target
        self._files, self._rates = listing_files(folder), Rates.of(target)
        self._alike: dict[str, str] = {}  # the listing of operations that are equal but for their names
        for computation in module.computations.values():
            for i in computation.instructions.values():
                if i.name in self._files:
                    self._alike.setdefault(_signature(module, computation, i), i.name)
        self._prices: dict[str, Price | None] = {}
        self._runs: dict[tuple[str, str], Execution | None] = {}

    def price(self, computation: Computation, i: Instruction) -> Price | None:
        """The price of an instruction that is no control flow, copy in the background or collective; None if it takes
        no time of its own."""
        if i.name not in self._prices:
            self._prices[i.name] = self._price(computation, i)
        return self._prices[i.name]

    def _price(self, computation: Computation, i: Instruction) -> Price | None:
        name, moved = re.sub(r"[.\d]+$", "", i.name), float(self._module.moved(computation, i))
        if (run := self._run(computation, i, name)) is not None and not (run.unmet or run.unknown):
            cycles = max(run.elapsed, run.hbm_bytes / self._rates.bandwidth)
            return Price(name, "listing", cycles / self._rates.clock, run.hbm_bytes)
        if declared := self._module.declared(computation, i):
            nbytes, flops, sent = declared
            floor = max(nbytes / self._target.hbm_bandwidth, flops / self._target.rate("bfloat16"))
            ratio = RATIOS.get(name, {}).get(self._target.chip.name, 1.0)
            return Price(name, "bytes", max(ratio * floor, sent / 2 / self._target.chip.link_bandwidth), nbytes)
        if i.cycles is not None:
            return Price(name, "estimate", i.cycles / self._rates.clock, moved)
        if not moved or all(shape.elements <= SMALL for shape in i.shapes):
            return None
        return Price(name, "bytes", moved / self._target.hbm_bandwidth, moved)

    def sent(self, computation: Computation, i: Instruction) -> int | None:
        """Bytes that a device sends by the listing of a collective; None if there is none."""
        run = self._run(computation, i, "")
        return run.sent if run else None

    def _run(self, computation: Computation, i: Instruction, name: str) -> Execution | None:
        """The execution of the listing; None if there is none, or it is not understood."""
        listing = self._alike.get(_signature(self._module, computation, i)) if self._files else None
        if listing is None:
            return None
        if (listing, name) not in self._runs:
            self._runs[listing, name] = self._execute(self._files[listing], computation, i, name)
        return self._runs[listing, name]

    def _execute(self, file: Path, computation: Computation, i: Instruction, name: str) -> Execution | None:
        operands = [shape for o in i.operands for shape in computation.instructions[o].shapes[:1]]
        rates = self._rates
        try:
            scalars = scalars_of(name, i, operands, self._key) if name in KERNELS else {}
            return Listing(file.read_text(), rates.delay).run(
                scalars,
                bandwidth=rates.bandwidth,
                latency=rates.latency,
                link=rates.link,
                zeros=True,
                most=MOST_CYCLES,
                cores=self._target.chip.cores,
            )
        except (LookupError, ValueError, TypeError, RuntimeError):
            return None


def _signature(module: Module, computation: Computation, i: Instruction) -> str:
    """Text that is equal for operations for which the compiler writes one listing."""
    operands = [_shapes_text(computation.instructions[o].shapes) for o in i.operands]
    called = module.computations.get(i.called("calls")) if i.op == "fusion" else None
    inside = [] if called is None else [_line(called, inner) for inner in called.instructions.values()]
    rest = re.sub(r"metadata=\{[^}]*\}|channel_id=\d+|calls=%?[\w.\-]+|to_apply=%?[\w.\-]+", "", i.rest)
    return "\n".join([i.op, _shapes_text(i.shapes), *operands, rest, *inside])


def _line(computation: Computation, i: Instruction) -> str:
    """An instruction with numbers in place of names."""
    numbers: Mapping[str, int] = {name: n for n, name in enumerate(computation.instructions)}
    operands = ",".join(str(numbers[o]) for o in i.operands)
    content = i.content if i.op in ("constant", "parameter") else ""
    rest = re.sub(r"metadata=\{[^}]*\}|(calls|to_apply)=%?[\w.\-]+|backend_config=.*", "", i.rest)
    return f"{i.op} {_shapes_text(i.shapes)} {operands} {content} {rest}"


def _shapes_text(shapes: tuple[Shape, ...]) -> str:
    return " ".join(f"{s.dtype}{s.dims}{s.order}{s.tile}{s.space}" for s in shapes)
