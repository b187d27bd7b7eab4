"""nki.jit: runs a kernel as the cores of a logical core would, and returns numpy arrays."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from inferlib.nki_kernels.simulator import dtypes, lint, machine
from inferlib.nki_kernels.simulator.rules import require
from inferlib.nki_kernels.simulator.tensor import MemoryRegion, NkiTensor, Storage, check_generation


class Kernel:
    """A kernel that `kernel[lnc](...)` launches on `lnc` cores, `kernel(...)` on one."""

    def __init__(self, function: Callable, lnc: int = 1):
        functools.update_wrapper(self, function)
        self.function, self.lnc, self.name = function, lnc, function.__name__

    def __getitem__(self, lnc: int) -> Kernel:
        require(lnc in (1, 2), "lnc", f"{self.name}[{lnc}]: a logical core has 1 or 2 cores")
        return Kernel(self.function, lnc)

    def __call__(self, *args, **kwargs):
        configured = os.environ.get(machine.LNC_VARIABLE)
        matches = configured in (None, str(self.lnc))
        require(matches, "lnc", f"{self.name}[{self.lnc}] where {machine.LNC_VARIABLE}={configured}")
        _lint(self.function)
        generation, exchange = machine.generation(), machine.Exchange(self.lnc)
        cores = [machine.Core(i, self.lnc, generation, exchange) for i in range(self.lnc)]
        args = [_argument(generation, value, f"argument {i}") for i, value in enumerate(args)]
        kwargs = {name: _argument(generation, value, name) for name, value in kwargs.items()}
        results: list = [None] * self.lnc
        if self.lnc == 1:
            _run(self.function, cores[0], args, kwargs, results)
        else:
            threads = [threading.Thread(target=_run, args=(self.function, c, args, kwargs, results)) for c in cores]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        failures = [r for r in results if isinstance(r, BaseException)]
        if failures:
            # A core that breaks a rule leaves the other waiting: the rule is what matters.
            raise next((f for f in failures if getattr(f, "rule", "") != "core-pairing"), failures[0])
        machine.record([core.counters for core in cores])
        return _returned(self.name, results)


@functools.cache
def _lint(function: Callable) -> None:
    lint.check(function)


def jit(fn: Any = None, **kwargs):
    """Decorate a kernel."""
    require(not kwargs, "subset", f"nki.jit with {sorted(kwargs)}")
    return Kernel(fn)


def check_inputs(*arrays) -> None:
    """Refuse arrays whose dtype NKI or the target lacks, before anything is launched."""
    for array in arrays:
        check_generation(machine.generation(), dtypes.name_of(array.dtype))


def _argument(generation: machine.Generation, value: object, name: str):
    """Arrays become HBM tensors; numbers, strings and tuples of them pass."""
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, tuple):
        return tuple(_argument(generation, part, name) for part in value)
    require(hasattr(value, "__array__"), "argument", f"{name} of a kernel is a {type(value).__name__}")
    array = np.asarray(value)
    dtype = dtypes.name_of(array.dtype)
    check_generation(generation, dtype)
    require(array.ndim >= 1 and array.size > 0, "shape", f"{name} of a kernel has shape {array.shape}")
    strides = np.cumprod([1, *array.shape[:0:-1]])[::-1].tolist()
    return NkiTensor(Storage.of_input(array), dtype, array.shape, strides, name=name)


def _run(function: Callable, core: machine.Core, args, kwargs, results: list) -> None:
    machine.set_current(core)
    try:
        results[core.index] = function(*args, **kwargs)
    except Exception as error:
        results[core.index] = error
    finally:
        core.exchange.leave()
        machine.set_current(None)


def _returned(name: str, results: list):
    """Outputs of core 0, checked: shared HBM, and wholly written by either core."""
    value = results[0]
    outputs = value if isinstance(value, tuple) else (value,)
    for output in outputs:
        legal = isinstance(output, NkiTensor) and output.buffer is MemoryRegion.shared_hbm
        require(legal and not output.storage.read_only, "output", f"{name} returns {output}")
        written = output.flags(output.storage.written)
        require(bool((written != 0).all()), "output", f"{name} leaves parts of {output} unwritten")
    arrays = tuple(np.array(output.raw()) for output in outputs)
    return arrays if isinstance(value, tuple) else arrays[0]
