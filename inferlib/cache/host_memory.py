"""Arrays in the host's memory that a device reads and writes itself ("pinned"), where its backend has such memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from inferlib.sharding.mesh import Device

log = logging.getLogger(__name__)

OnHost: TypeAlias = "np.ndarray | jax.Array"
_KIND = "pinned_host"


class HostMemory:
    """Copies of arrays in the host's memory.

    They are arrays of JAX in pinned memory, which a device copies to and from at the speed of its link. Where a backend
    has no such memory, or no more of it, they are arrays of NumPy.
    """

    def __init__(self) -> None:
        self._pinned = True

    def copies(self, arrays: Sequence[OnHost], devices: Sequence[Device]) -> list[OnHost]:
        """Copies of arrays, each of which is on one device or on the host. It waits for them. devices: that copy to and
        from each of them."""
        places = [_pinned_of(device) for device in devices]
        if self._pinned and None not in places:
            try:
                return list(jax.block_until_ready(jax.device_put(list(arrays), places)))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self._pinned = False
                log.warning("pages go to the host's memory more slowly, as no more of it can be pinned: %s", error)
        for x in arrays:
            if isinstance(x, jax.Array):
                x.copy_to_host_async()
        return [np.asarray(x) for x in arrays]


def reachable(x: OnHost, device: Device) -> OnHost:
    """What can be copied to this device: pinned memory is that of one device."""
    if isinstance(x, np.ndarray) or x.devices() == {device} or x.sharding.memory_kind != _KIND:
        return x
    return as_numpy(x)


def as_numpy(x: OnHost) -> np.ndarray:
    """The numbers as an array of NumPy.

    An array of JAX remembers the copy that it made for NumPy. So the copy is made by a second array on the same memory,
    and the host does not hold both for as long as the first array lives.
    """
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x]))


@cache
def _pinned_of(device: Device) -> SingleDeviceSharding | None:
    kinds = {memory.kind for memory in device.addressable_memories()}
    return SingleDeviceSharding(device, memory_kind=_KIND) if _KIND in kinds else None
