"""What an engine takes of a device's memory, and the error that says so when there is not enough."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.quantization import Quantization
from inferlib.ops.quantized import nbytes
from inferlib.sharding import axes

_SHARE = 0.9  # of a memory, for what is said to fit: temporaries and the runtime take the rest
_SUGGESTED = "int8"


class OutOfMemoryError(RuntimeError):
    """The memory of a device, or of the host, does not hold a model. The message says what takes how much, and what
    would fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error of Python or the runtime says that memory is exhausted."""
    return isinstance(error, MemoryError) or (isinstance(error, jax.errors.JaxRuntimeError) and too_large(str(error)))


def too_large(error: str) -> bool:
    """True if a compiler or runtime says that arrays do not fit; exhausted on-chip memory does not count."""
    full = "RESOURCE_EXHAUSTED" in error or "out of memory" in error.lower()
    return full and not re.search(r"space[= ][vs]mem", error)


@dataclass(frozen=True)
class Demand:
    """Bytes that an engine takes on a device: weights, cache and the rows' sampling state, and the most that one of its
    programs takes beside them (0 if none is compiled). drafting: a model that drafts."""

    model: AbstractModel
    config: EngineConfig
    cache: int
    temporaries: int
    drafting: AbstractModel | None = None

    @staticmethod
    def of(
        model: AbstractModel,
        plan: CachePlan,
        config: EngineConfig,
        temporaries: int,
        drafting: AbstractModel | None = None,
    ) -> Demand:
        arrays = plan.arrays if plan.no_prefix_caching(config) else plan.arrays + plan.snapshot_arrays
        return Demand(model, config, sum(array.nbytes(config.shards) for array in arrays), temporaries, drafting)

    @property
    def weights(self) -> int:
        shape_of = self.config.shards.local_shape
        specs = self.model.specs + (() if self.drafting is None else self.drafting.specs)
        return sum(nbytes(shape_of(spec.axes, spec.shape), spec.dtype) for spec in specs)

    @property
    def state(self) -> int:
        counts = (self.config.max_batch, self.model.layout.vocab)
        local = self.config.shards.local_shape((axes.ROWS, axes.VOCAB), counts)
        speculation, rows = self.config.speculation, self.config.rows
        history = 0 if speculation is None else rows * self.config.max_len
        features = 0
        if speculation is not None and speculation.method in ("eagle3", "mtp") and self.drafting is not None:
            features = nbytes((rows, 1 + speculation.tokens, self.drafting.config.dim), self.drafting.dtype)
        return 4 * (math.prod(local) + history) + features

    def message(self, doing: str, capacity: int, *, host: bool) -> str:
        """One line. capacity: bytes of the memory that is exhausted. host: it is the host's."""
        config, where = self.config, "the host" if host else "a device"
        parts = [
            f"{_gib(self.weights)} of weights",
            f"{_gib(self.cache)} of cache"
            + (f" ({config.max_batch} rows of {config.max_len} positions)" if config.cache_memory is None else ""),
            f"{_gib(self.state)} of sampling state",
        ]
        parts += [f"{_gib(self.temporaries)} of temporaries"] if self.temporaries else []
        each = f" on each of {self._devices} devices" if self._devices > 1 else ""
        has = f"{where} has {_gib(capacity)}, and this" if capacity else "this"
        taken = f"{', '.join(parts[:-1])} and {parts[-1]}{each}"
        return f"out of memory while {doing}: {has} takes {taken}; {self._advice(capacity)}"

    @property
    def _devices(self) -> int:
        mesh = self.config.shards.mesh
        return 1 if mesh is None else mesh.size

    def _advice(self, capacity: int) -> str:
        """What would fit, or what to lower if nothing is known of the memory."""
        if not capacity:
            return "lower max_batch or max_len, quantise, or split the model over devices"
        most, replicas = int(_SHARE * capacity), self.config.shards.replicas
        if self.weights + self.cache + self.state + self.temporaries <= most:
            return "which should fit: something else takes memory too; end that, or lower max_batch or max_len"
        others = self.weights + self.state + self.temporaries
        if self.config.cache_memory is not None and most - others > self.config.cache_memory // 8:
            return f"cache_memory='{(most - others) >> 20}MiB' would fit"
        room, row = most - self.weights - self.temporaries, (self.cache + self.state) // self.config.rows
        if room >= row:
            return f"max_batch={room // row * replicas} would fit"
        if (positions := self.config.max_len * room // row) >= 2:
            return f"max_batch={replicas} with max_len={positions} would fit"
        return self._smaller_weights(most)

    def _smaller_weights(self, most: int) -> str:
        lines = []
        if all(weight.scheme is None for weight in self.model.weights):
            quantized = abstract_model(
                self.model.config, self.model.dtype, scan=True, quantization=Quantization.named(_SUGGESTED)
            )
            size = self.weights * quantized.nbytes // self.model.nbytes
            lines += [f"quantization={_SUGGESTED!r} ({_gib(size)} of weights)"] if size < most else []
        devices = 2
        while (self.weights + self.cache) / devices + self.temporaries > most and devices < 1024:
            devices *= 2
        lines.append(f"parallel='tp={devices * self._devices}'")
        return f"the weights alone are too large: {' or '.join(lines)} would fit"


@contextmanager
def explained(doing: str, demand: Callable[[], Demand]) -> Iterator[None]:
    """A context in which exhausted memory raises OutOfMemoryError. doing: what is being done, such as "loading the
    weights"."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if (mine := explanation(error, doing, demand)) is None:
            raise
        raise mine from error


def explanation(error: BaseException, doing: str, demand: Callable[[], Demand]) -> OutOfMemoryError | None:
    """The error to raise in place of one that says that memory is exhausted; None for other errors."""
    if not is_out_of_memory(error):
        return None
    devices = jax.local_devices()
    stats = [device.memory_stats() or {} for device in devices]
    host = isinstance(error, MemoryError) or devices[0].platform == "cpu"
    capacity = host_bytes() if host else min(entry.get("bytes_limit", 0) for entry in stats)
    return OutOfMemoryError(demand().message(doing, capacity, host=host))


def host_bytes() -> int:
    """Bytes of this machine's memory; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no such calls
        return 0


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 24 else f"{count / 2**20:.2f} MiB"
