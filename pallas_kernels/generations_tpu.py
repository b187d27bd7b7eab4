"""What kernels must know of the TPU that they are made for: its generation, and what that has less of than others.

Without JAX until a kernel is traced: who only looks figures up need not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# As the TPU compiler names devices, and as JAX knows them too.
GENERATIONS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "v7x"}
GENERATIONS |= {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e"}
VMEM_BYTES = {"v4": 16 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20, "v7x": 64 << 20}  # of a core
FLOAT4 = ("v7x",)  # that convert float4_e2m1fn
_WITHOUT_FLOAT8 = ("v4",)  # whose matrix unit takes no floats of 8 bits
_WIDE_INT4 = ("v4",)  # that keep integers of 4 bits in bytes, on chip
_USUAL_VMEM_BYTES = 64 << 20  # that kernels' sizes are chosen for

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


@contextmanager
def planning_for(generation: str | None) -> Iterator[None]:
    """Kernels are asked within what they can do on this generation, be it traced or not; None: as without this, on
    that of the mesh."""
    token = _planned.set(generation)
    try:
        yield
    finally:
        _planned.reset(token)


def generation() -> str | None:
    """Of the TPU that is planned for, or traced for, as its mesh says, be the TPU here or not. None for others, and
    without a mesh."""
    if planned := _planned.get():
        return planned
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else GENERATIONS.get(device.device_kind)


def by_vmem(count: int) -> int:
    """`count` bytes of on-chip memory (or elements that take them), chosen for chips with 64 MiB or more, as they are
    there; elsewhere the chip's share of them."""
    return -(-count * _vmem_bytes() // _USUAL_VMEM_BYTES)


def vmem_limit(need: int) -> int:
    """Bytes to let the compiler use for a kernel that needs `need` with what it probably adds. All there are on chips
    with fewer than 64 MiB, as the compiler does not add less there."""
    have = _vmem_bytes()
    return need if have == _USUAL_VMEM_BYTES else max(need, have)


def on_chip_bytes() -> int:
    """Of on-chip memory, for kernels and what XLA keeps there beside them."""
    return VMEM_BYTES.get(generation() or "", _USUAL_VMEM_BYTES)


def _vmem_bytes() -> int:
    return min(on_chip_bytes(), _USUAL_VMEM_BYTES)


def vmem_bits(bits: int) -> int:
    """Bits that an element of `bits` takes on chip."""
    return max(bits, 8) if generation() in _WIDE_INT4 else bits


def untaken(dtype) -> str | None:
    """Why the matrix unit does not take a dtype that kernels may give it, None if it does."""
    import jax.numpy as jnp

    lacking = generation() in _WITHOUT_FLOAT8 and dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    return f"the matrix unit of TPU {generation()} takes no {jnp.dtype(dtype)}" if lacking else None
