"""The TPU that kernels are made for: its generation, and the limits of that generation.

JAX is imported only when a kernel is traced, so that looking up figures does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# As the TPU compiler names devices, and as JAX knows them too.
GENERATIONS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "v7x"}
GENERATIONS |= {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e"}
VMEM_BYTES = {"v4": 16 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "v7x": 64 << 20}  # of a core
# The part of `VMEM_BYTES` that XLA sets aside for the operation that runs.
SCRATCH_BYTES = {"v4": 16 << 20, "v5e": 16 << 20, "v5p": 16 << 20, "v6e": 32 << 20, "v7x": 32 << 20}
CORES = {"v4": 2, "v5p": 2}  # generations whose devices have several cores
FLOAT4 = ("v7x",)  # generations that convert float4_e2m1fn
# Types that matrix units multiply faster than bfloat16. bfloat16 holds their numbers exactly.
_EIGHT_BITS = {"v5e": "int8", "v5p": "int8", "v6e": "int8", "v7x": "float8_e4m3fn"}
_WITHOUT_FLOAT8 = ("v4",)  # generations whose matrix unit takes no 8-bit floats
_WIDE_INT4 = ("v4",)  # generations that hold 4-bit integers in bytes on chip
_USUAL_VMEM_BYTES = 64 << 20  # the on-chip memory that kernels' sizes are chosen for

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


@contextmanager
def planning_for(generation: str | None) -> Iterator[None]:
    """Within this context, kernels answer for this generation; None: for the mesh's generation, as without a
    context."""
    token = _planned.set(generation)
    try:
        yield
    finally:
        _planned.reset(token)


def generation() -> str | None:
    """The generation of the TPU that is planned for, or that the mesh of the trace names; it need not be present. None
    for other devices, and without a mesh."""
    if planned := _planned.get():
        return planned
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else GENERATIONS.get(device.device_kind)


def by_vmem(count: int) -> int:
    """A size `count` (in bytes or elements) that was chosen for chips with 64 MiB or more of on-chip memory; less in
    proportion on smaller chips."""
    return -(-count * _vmem_bytes() // _USUAL_VMEM_BYTES)


def vmem_limit(need: int) -> int:
    """The bytes that the compiler may use for a kernel that needs `need`, its probable additions included. On chips
    with less than 64 MiB it is all there is, because the compiler adds no less there."""
    have = _vmem_bytes()
    return need if have == _USUAL_VMEM_BYTES else max(need, have)


def cores() -> int:
    """The cores of a device. A kernel runs on the first of them, but for parallel dimensions of its grid."""
    return CORES.get(generation() or "", 1)


def on_chip_bytes() -> int:
    """Bytes of on-chip memory, for kernels and for the arrays that XLA keeps there."""
    return VMEM_BYTES.get(generation() or "", _USUAL_VMEM_BYTES)


def _vmem_bytes() -> int:
    return min(on_chip_bytes(), _USUAL_VMEM_BYTES)


def vmem_bits(bits: int) -> int:
    """Bits that an element of `bits` takes on chip."""
    return max(bits, 8) if generation() in _WIDE_INT4 else bits


def multiplies(dtype) -> bool:
    """Whether the matrix unit multiplies numbers of this dtype, of eight bits, faster than bfloat16."""
    import jax.numpy as jnp

    return _EIGHT_BITS.get(generation() or "") == jnp.dtype(dtype).name


def untaken(dtype) -> str | None:
    """Why the matrix unit does not take a dtype that kernels may pass to it; None if it does."""
    import jax.numpy as jnp

    lacking = generation() in _WITHOUT_FLOAT8 and dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    return f"the matrix unit of TPU {generation()} takes no {jnp.dtype(dtype)}" if lacking else None
