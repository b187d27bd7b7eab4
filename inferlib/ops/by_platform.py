"""Operations that platforms compute in forms of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax

from inferlib.sharding.mesh import Device

DEFAULT = "default"  # a platform without forms of its own
_traced_for = jax.make_user_context(None)


def traced_for(platform: str | None) -> AbstractContextManager:
    """A context for traces of programs that are lowered for one platform, as JAX names it for lowering: "cpu", "cuda",
    "tpu", "neuron"; `DEFAULT`: with the default forms; None: with all forms, for any platform."""
    return _traced_for(platform)


def platform_of(device: Device) -> str | None:
    """The platform of a device's programs, as JAX names it for lowering; None for GPUs that are not NVIDIA's."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if device.device_kind.startswith("NVIDIA") else None


def by_platform(*operands: Any, default: Callable, **forms: Callable) -> Any:
    """What the platform's form returns of the operands, such as `cuda=`, or `default` where the platform has none.

    Under `traced_for` only this form is traced, otherwise all are: a sampler's form for GPUs takes longer to trace than
    a small model.
    """
    platform = _traced_for.value
    if platform is not None:
        return forms.get(platform, default)(*operands)
    return lax.platform_dependent(*operands, default=default, **forms)
