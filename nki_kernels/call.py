"""Call a kernel from JAX: as a function where NKI is installed, otherwise by the stand-in on the host."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from inferlib.nki_kernels import simulator


def is_gen4() -> bool:
    """True if kernels are compiled for trn3: the stand-in's session or the vendor's environment variable says so."""
    if simulator.is_injected():
        return simulator.generation().number == 4
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") in ("trn3", "gen4")


def logical_cores() -> int:
    """Physical cores of a logical NeuronCore, as the host is configured; by default two, and one on the stand-in."""
    return int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", 1 if simulator.is_injected() else 2))


def call(
    name: str, kernel, lnc: int | None, results: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array, **static
) -> list[jax.Array]:
    """Launch `kernel[lnc](*arrays, **static)`, which returns `results`; inside or outside `jax.jit`.

    name: the operation's name, which marks it in a lowered program. lnc: physical cores of a logical NeuronCore, 1 or
    2; None for `logical_cores()`, which a Trainium host insists on. If a program is lowered for Trainium without NKI, a
    custom call without a binary stands for the kernel: the program can be checked, but not compiled.
    """
    lnc = logical_cores() if lnc is None else lnc
    if lnc not in (1, 2):
        raise ValueError(f"lnc {lnc}: a logical NeuronCore has 1 or 2 cores")
    with jax.named_scope(f"nki_{name}"):
        if not simulator.is_injected():
            return list(kernel[lnc](*arrays, **static))
        simulator.check_inputs(*arrays)

        def run(*values):
            return kernel[lnc](*map(np.asarray, values), **static)

        def on_host(*values):
            return jax.pure_callback(run, tuple(results), *values)

        place = jax.ffi.ffi_call("AwsNeuronCustomNativeKernel", tuple(results))
        return list(lax.platform_dependent(*arrays, neuron=place, default=on_host))
