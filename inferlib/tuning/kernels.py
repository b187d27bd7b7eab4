"""Times of TPU kernels without a TPU, from the listing that the TPU compiler writes.

A child process, which runs this module as a program, compiles a case and executes its listing (see
`inferlib.inspection.bundles`). Only child processes load the compiler. The times are estimates, not measurements.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from inferlib.aot.child import Answer, Child, serve
from inferlib.aot.compile import CompileError, check_compiler, environment
from inferlib.inspection.bundles import CLOCKS, DELAYS, LATENCY, Listing, dump_flags, find_listing
from inferlib.pallas_kernels.tuned_tpu import Asked, trying
from inferlib.sharding.mesh import Device, alone
from inferlib.targets import Target, parse_target
from inferlib.tuning.kernel_cases import Case
from inferlib.tuning.kernel_cases.collective_matmul import CollectiveMatmul


@dataclass(frozen=True)
class Figures:
    """The figures of a case on one device.

    cycles: bundles executed. hbm_bytes: bytes copied, by as many copies as `copies`. bundles: length of the listing.
    cycles_seconds: seconds of the cycles. busy: seconds of the cycles, or of copied or sent bytes at the published
    bandwidth, whichever is longest. whole: seconds with waits for copies, which arrive `LATENCY`, or that of a hop,
    after their last byte.
    """

    cycles: int
    hbm_bytes: int
    copies: int
    bundles: int
    cycles_seconds: float
    busy: float
    whole: float


class KernelCompiler:
    """Compiles kernels for one device of a TPU target. Close it after use, or use it as a context.

    limit: most seconds for a case. Raises CompileError if the compiler is not installed.
    """

    def __init__(self, target: Target, limit: float | None = None):
        check_compiler(target)
        self.target, self._limit = target, limit
        self._folder = TemporaryDirectory()
        module, settings = "inferlib.tuning.kernels", environment(target)
        flags = {"LIBTPU_INIT_ARGS": dump_flags(Path(self._folder.name))}
        first = {"target": target.name, "folder": self._folder.name}
        self._child = Child(module, first, settings | flags)
        # Writing listings makes the compiler up to five times slower.
        self._timed = Child(module, {"target": target.name, "folder": None}, settings)

    def __enter__(self) -> KernelCompiler:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._child.close()
        self._timed.close()
        self._folder.cleanup()

    def measure(self, case: Case) -> Figures:
        """The figures with the blocks that the library takes. Raises CompileError with the reason if there are none."""
        return Figures(**self._ask(self._child, case)["figures"])

    def compile_seconds(self, case: Case) -> float:
        """CPU seconds of this machine to trace and compile a case as programs are compiled. Raises CompileError."""
        return self._ask(self._timed, case)["seconds"]

    def trial(self, case: Case, blocks: Mapping[str, int] | None) -> tuple[Figures, Asked]:
        """The figures with these fields of the kernel's `Blocks` (None: its rule's), and what it asked for.

        Raises CompileError.
        """
        answer = self._ask(self._child, case, blocks=blocks)
        if not answer["asked"]:
            raise CompileError("the kernel has no blocks to choose")
        return Figures(**answer["figures"]), Asked(**answer["asked"][-1])

    def floor(self, case: Case) -> float:
        """The least seconds of a case: to read and write, to compute, or to send, whichever takes longest."""
        sent = case.sent_bytes if isinstance(case, CollectiveMatmul) else 0
        return max(
            case.floor_bytes / self.target.hbm_bandwidth,
            case.floor_flops / self.target.rate("bfloat16"),
            _sending(self.target, sent),
        )

    def _ask(self, child: Child, case: Case, **trial: Any) -> dict[str, Any]:
        answer = child.ask({"case": pickle.dumps(case).hex(), **trial}, self._limit)
        if error := answer.get("error"):
            raise CompileError(error)
        return answer


# ---- in the child


def _prepared(first: Mapping[str, Any]) -> Answer:
    target = parse_target(first["target"])
    name, options = target.topology_name, target.topology_options
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices

    def timed(job: Mapping[str, Any]) -> dict[str, Any]:
        case, start = _case(job), time.process_time()
        _compile(case, devices)
        return {"seconds": time.process_time() - start}

    if first["folder"] is None:
        return timed
    folder = Path(first["folder"])

    def answer(job: Mapping[str, Any]) -> dict[str, Any]:
        case = _case(job)
        trial: AbstractContextManager = trying(job["blocks"]) if "blocks" in job else nullcontext([])
        try:
            with trial as asked:
                scalars = case.scalars()
                _compile(case, devices)
            text = find_listing(folder, case.kernel).read_text()
        finally:
            for file in folder.iterdir():
                file.unlink()
        figures = _figures(target, Listing(text, DELAYS.get(target.chip.name)), scalars)
        return {"figures": asdict(figures), "asked": [asdict(x) for x in asked]}

    return answer


def _case(job: Mapping[str, Any]) -> Case:
    return pickle.loads(bytes.fromhex(job["case"]))


def _compile(case: Case, devices: Sequence[Device]) -> None:
    if isinstance(case, CollectiveMatmul):
        if len(devices) < case.devices:
            raise CompileError(f"it is for {case.devices} devices, and the target has {len(devices)}")
        mesh = Mesh(devices[: case.devices], (case.axis,))
        function, context = case.on(mesh), nullcontext()
        shardings = {key: NamedSharding(mesh, spec) for key, spec in case.specs()[0].items()}
    else:
        function, context = case.function(), jax.sharding.use_abstract_mesh(alone(devices[0]))
        shardings = defaultdict(lambda: SingleDeviceSharding(devices[0]))
    with context:
        arguments = {
            key: jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[key])
            for key, (shape, dtype) in case.arguments().items()
        }
        jax.jit(function).lower(**arguments).compile()


def _sending(target: Target, sent: int) -> float:
    """Seconds to send `sent` bytes, half of them to each neighbour."""
    return sent / 2 / target.chip.link_bandwidth


def _figures(target: Target, listing: Listing, scalars: Mapping[int, Any]) -> Figures:
    clock, bandwidth = CLOCKS[target.chip.name], target.hbm_bandwidth
    link = target.chip.link_bandwidth / clock, target.chip.hop_latency * clock
    rates = {"bandwidth": bandwidth / clock, "latency": LATENCY * clock, "link": link}
    run = listing.run(scalars, **rates, cores=target.chip.cores)
    if run.unmet or run.unknown:
        raise CompileError(f"the listing was not understood: {run}")
    busy = max(run.cycles / clock, run.hbm_bytes / bandwidth, _sending(target, run.sent))
    return Figures(
        cycles=run.cycles,
        hbm_bytes=run.hbm_bytes,
        copies=run.copies,
        bundles=listing.size,
        cycles_seconds=run.cycles / clock,
        busy=busy,
        whole=max(busy, run.elapsed / clock),
    )


if __name__ == "__main__":
    serve(_prepared)
