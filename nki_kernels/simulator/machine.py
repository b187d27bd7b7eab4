"""The simulated NeuronCores: what a generation allows, the state of a core, and a session that counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from inferlib.nki_kernels.simulator.rules import RuleError, require

PARTITIONS = 128
PSUM_BANKS, PSUM_BANK_BYTES = 8, 2048


@dataclass(frozen=True)
class Generation:
    """One generation of NeuronCore. Rates are those of the vendor's architecture and DMA guides.

    sbuf_bytes: per partition; dma_rate: GB/s of a core's 16 engines; clocks in GHz.
    """

    name: str
    number: int
    sbuf_bytes: int
    dma_rate: float
    tensor_clock: float
    vector_clock: float
    scalar_clock: float
    gpsimd_clock: float


GEN3 = Generation("trn2", 3, 224 * 1024, 368.0, 2.4, 0.96, 1.2, 1.2)
GEN4 = Generation("trn3", 4, 256 * 1024, 528.0, 2.4, 1.2, 1.2, 1.2)
TARGETS = {"trn2": GEN3, "gen3": GEN3, "trn3": GEN4, "gen4": GEN4}
TARGET_VARIABLE, LNC_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG"


class Engine(Enum):
    """Engines of a core, as `nki.isa.engine`."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


@dataclass
class Counters:
    """What one core did. Busy times follow published rates: estimates, never measurements.

    Matrix slots: the multiply-adds that the 128 x 128 array (four deep for MX) could have done during its instructions,
    and how many of them the operands filled. Short DMA bytes moved in contiguous runs of less than 512 bytes.
    """

    hbm_read: int = 0
    hbm_written: int = 0
    core_to_core: int = 0
    short_dma: int = 0
    matmuls: int = 0
    matmul_slots: int = 0
    matmul_useful: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    busy_us: dict[str, float] = field(default_factory=dict)
    sbuf_peak: int = 0
    psum_peak: int = 0

    def issue(self, engine: Engine, microseconds: float) -> None:
        self.instructions[engine.name] = self.instructions.get(engine.name, 0) + 1
        self.busy_us[engine.name] = self.busy_us.get(engine.name, 0.0) + microseconds

    def add(self, other: Counters) -> None:
        """Add another launch of the same core."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                mine = getattr(self, name)
                for key, part in value.items():
                    mine[key] = mine.get(key, 0) + part
            else:
                mine = getattr(self, name)
                setattr(self, name, max(mine, value) if name.endswith("_peak") else mine + value)

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read + self.hbm_written


class Core:
    """One physical NeuronCore during one launch: its live memory, reduce registers and counters."""

    def __init__(self, index: int, count: int, generation: Generation, exchange: Exchange):
        self.index, self.count, self.generation, self.exchange = index, count, generation, exchange
        self.counters = Counters()
        self.sbuf_live = self.psum_live = 0
        # Scalar and Vector engine: one register a lane, NaN while undefined.
        self.registers = {engine: np.full(PARTITIONS, np.nan, np.float32) for engine in (Engine.scalar, Engine.vector)}
        self.shared_allocations = 0

    def take(self, buffer: str, size: int) -> None:
        """Account for an SBUF tensor of `size` bytes a partition, or a PSUM tensor of `size` banks."""
        if buffer == "sbuf":
            self.sbuf_live += size
            limit = self.generation.sbuf_bytes
            require(self.sbuf_live <= limit, "sbuf-capacity", f"{self.sbuf_live} bytes a partition live, of {limit}")
            self.counters.sbuf_peak = max(self.counters.sbuf_peak, self.sbuf_live)
        else:
            self.psum_live += size
            require(self.psum_live <= PSUM_BANKS, "psum-capacity", f"{self.psum_live} banks live, of {PSUM_BANKS}")
            self.counters.psum_peak = max(self.counters.psum_peak, self.psum_live)

    def give(self, buffer: str, size: int) -> None:
        if buffer == "sbuf":
            self.sbuf_live -= size
        else:
            self.psum_live -= size


class Exchange:
    """What the cores of a launch share: HBM allocations, meetings and the tiles they send each other."""

    def __init__(self, count: int):
        self.count = count
        self.lock = threading.Lock()
        self.shared: list[tuple[tuple, Any]] = []
        self.mail: dict[int, np.ndarray] = {}
        self._met = threading.Condition()
        self._places: list[str] = []
        self._turn, self._alike, self._left = 0, True, False

    def meet(self, core: Core, place: object) -> None:
        """Wait for the other core at `place`; both must give the same name."""
        with self._met:
            turn = self._turn
            self._places.append(repr(place))
            if len(self._places) == self.count:
                self._alike, self._places, self._turn = len(set(self._places)) == 1, [], turn + 1
                self._met.notify_all()
            self._met.wait_for(lambda: self._turn > turn or self._left)
            met, alike = self._turn > turn, self._alike
        require(met, "core-pairing", f"core {core.index} waits at {place} and the other never comes")
        require(alike, "core-pairing", f"core {core.index} is at {place}, the other elsewhere")

    def leave(self) -> None:
        """A core is done, so the other must not wait for it."""
        with self._met:
            self._left = True
            self._met.notify_all()


_local = threading.local()


def current() -> Core:
    """The core that runs the calling kernel."""
    core = getattr(_local, "core", None)
    if core is None:
        raise RuleError("subset", "instructions run only inside a kernel launched with nki.jit")
    return core


def set_current(core: Core | None) -> None:
    _local.core = core


@dataclass
class Session:
    """A target, and what the kernels launched on it did, core by core."""

    generation: Generation
    cores: list[Counters] = field(default_factory=list)
    launches: int = 0

    def record(self, cores: list[Counters]) -> None:
        with _recording:
            self.launches += 1
            self.cores += [Counters() for _ in cores[len(self.cores) :]]
            for mine, new in zip(self.cores, cores, strict=False):
                mine.add(new)


# One for the whole process: XLA calls kernels back on threads of its own, for several devices at once.
_recording = threading.Lock()
_sessions: list[Session] = []


@contextmanager
def session(target: str) -> Iterator[Session]:
    """Run the kernels of the block on "trn2" or "trn3" and count what they do. Wait for JAX's results inside it."""
    if target not in TARGETS:
        raise ValueError(f"target {target!r}: the stand-in knows {', '.join(TARGETS)}")
    made = Session(TARGETS[target])
    _sessions.append(made)
    try:
        yield made
    finally:
        _sessions.remove(made)


def generation() -> Generation:
    """The generation of the innermost session, or the one in the environment, as the vendor's tools read it (trn3
    unless set)."""
    if _sessions:
        return _sessions[-1].generation
    target = os.environ.get(TARGET_VARIABLE, "trn3")
    if target not in TARGETS:
        raise ValueError(f"{TARGET_VARIABLE}={target}: the stand-in knows {', '.join(TARGETS)}")
    return TARGETS[target]


def record(cores: list[Counters]) -> None:
    if _sessions:
        _sessions[-1].record(cores)
