"""Kernels that CPUs interpret."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from inferlib.ops.by_platform import by_platform
from inferlib.pallas_kernels.generations_tpu import GENERATIONS


def run_kernel(kernel: Callable, *operands: Any) -> Any:
    """`kernel(*operands, interpret=...)`, compiled for accelerators and interpreted on CPUs. Traceable.

    If the mesh of the trace names a TPU, the interpreted form is not traced. That halves the time that kernels take to
    trace, which is seconds for those with thousands of operations.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    compiled = partial(kernel, interpret=False)
    if device is not None and device.device_kind in GENERATIONS:
        return compiled(*operands)
    return by_platform(*operands, cpu=partial(kernel, interpret=True), default=compiled)
