"""Executables as bytes, and back, without running anything else that a pickle may name.

JAX serialises an executable as a pickle: the compiler's own bytes, and around them the shapes, shardings and layouts of
its arguments and results. Only the classes of those are looked up here, so a pickle that names anything else is refused
before it runs. The compiler's bytes are native code all the same: load them only from whom you trust.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental import serialize_executable

from inferlib.sharding.mesh import Device


class ExecutableError(ValueError):
    """Bytes that are no executable of this version of JAX, or hold other things. The message says which."""


# What executables are made of, by package: between versions of JAX classes change their modules. Names of JAX 0.10 to
# 0.12; those of programs for CPUs, and of TPUs with and without a mesh, were listed from their pickles.
_JAX = frozenset(
    {
        *("UnloadedMeshExecutable", "UnloadedPmapExecutable", "UnloadedPjrtExecutable", "AllArgsInfo", "DebugInfo"),
        *("ArgInfo", "ShapedArray", "ManualAxisType", "MemorySpace", "Layout", "AutoLayoutSingleton", "Format"),
        *("Mesh", "AbstractMesh", "AbstractDevice", "AxisType", "P", "PartitionSpec", "UnconstrainedSingleton"),
        *("_get_default_unconstrained", "NamedSharding", "GSPMDSharding", "SingleDeviceSharding", "_unpickle_mesh"),
        *("_unpickle_named_sharding", "_unpickle_gspmd_sharding", "_unpickle_single_device_sharding"),
        *("PyTreeDef", "default_registry", "tracing_registry", "none_leaf_registry"),
        *("DeviceList", "HloSharding", "OpSharding", "OpSharding_Type"),
    }
)
_NUMPY = frozenset({"dtype", "ndarray", "_reconstruct", "_frombuffer"})
_BUILTIN = frozenset({"set", "frozenset", "slice"})
# The trees of arguments and results.
_OURS = frozenset(
    {
        ("inferlib.programs.arguments", "ChunkInput"),
        ("inferlib.programs.arguments", "StepOutput"),
        ("inferlib.programs.row_state", "RowState"),
        ("inferlib.programs.verification", "Tally"),
        ("inferlib.sampling.sampler", "Sampled"),
    }
)


def _is_known(module: str, name: str) -> bool:
    match module.partition(".")[0]:
        case "jax" | "jaxlib":
            return name in _JAX
        case "numpy":
            return name in _NUMPY or (module == "numpy" and _is_number(getattr(np, name, None)))
        case "ml_dtypes":
            return _is_number(getattr(ml_dtypes, name, None))
        case "builtins":
            return name in _BUILTIN
    return (module, name) in _OURS


def _is_number(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, np.generic)


class _Known(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _is_known(module, name):
            raise ExecutableError(f"it holds {module}.{name}, which is no part of an executable")
        return super().find_class(module, name)


class _Executable(_Known, serialize_executable._JaxPjrtUnpickler):
    """An executable whose compiler's bytes are loaded too, for the devices that it is given."""


def serialized(programs: Mapping[str, jax.stages.Compiled]) -> bytes:
    """Executables by name as bytes, for `loaded`."""
    return pickle.dumps({name: serialize_executable.serialize(program) for name, program in programs.items()})


def loaded(data: bytes, devices: Sequence[Device]) -> dict[str, jax.stages.Compiled]:
    """The executables of `serialized`, for as many devices as they were compiled for.

    Raises ExecutableError for other bytes. The runtime's errors of too little memory are not changed.
    """
    if devices[0].platform == "cpu":
        _prepare_lapack()
    try:
        parts = _Known(io.BytesIO(data)).load()
        return {name: _program(part, devices) for name, part in parts.items()}
    except ExecutableError:
        raise
    except Exception as error:  # damaged pickles raise anything
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise ExecutableError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _prepare_lapack() -> None:
    """Let JAX look up the functions of LAPACK, as it does when it lowers one. Programs for CPUs call those of linear
    attention, and a process that only loads programs would call null pointers."""
    x = jax.ShapeDtypeStruct((1, 1), np.float32)
    jax.jit(jax.lax.linalg.triangular_solve).trace(x, x).lower(lowering_platforms=("cpu",))


def _program(part: tuple[bytes, Any, Any], devices: Sequence[Device]) -> jax.stages.Compiled:
    payload, inputs, outputs = part
    unloaded, arguments, no_kwargs = _Executable(io.BytesIO(payload), devices[0].client, devices).load()
    return jax.stages.Compiled(unloaded.load(), [], inputs.unflatten(arguments), outputs, no_kwargs=no_kwargs)
