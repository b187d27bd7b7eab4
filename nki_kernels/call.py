"""Call a kernel from JAX: as a function where NKI is installed, by host execution on the stand-in."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from inferlib.nki_kernels import simulator


def is_gen4() -> bool:
    """Whether kernels are compiled for trn3, as the stand-in's session or the vendor's variable says."""
    if simulator.is_injected():
        return simulator.generation().number == 4
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") in ("trn3", "gen4")


def logical_cores() -> int:
    """Physical cores of a logical NeuronCore: what the host is configured for, two unless told; on the stand-in one."""
    return int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", 1 if simulator.is_injected() else 2))


def call(
    name: str, kernel, lnc: int | None, results: Sequence[jax.ShapeDtypeStruct], *arrays: jax.Array, **static
) -> list[jax.Array]:
    """Launch `kernel[lnc](*arrays, **static)`, which returns `results`; inside or outside `jax.jit`.

    name: of the operation, which marks its place in a lowered program. lnc: physical cores of a logical NeuronCore, 1
    or 2; None for `logical_cores()`, which a Trainium host insists on. Lowered for Trainium without NKI, the place
    holds a custom call without the kernel's binary: programs can be checked so, not compiled.
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
