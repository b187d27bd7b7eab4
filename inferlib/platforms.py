"""Which of JAX's platforms are worth starting on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax

_GOOGLE = "0x1ae0"  # the vendor of TPUs on the PCI bus


def leave_out_absent_tpu() -> None:
    """Keep JAX from starting the library of TPUs on a machine that has it to compile with, and no TPU.

    That takes seconds, prints warnings and holds the library's lock, which compiling then waits for. Changes nothing
    once devices were asked for, where the user chose platforms, or where another accelerator's plugin is installed.
    """
    if jax.config.jax_platforms or importlib.util.find_spec("libtpu") is None or _tpu_chips():
        return
    if any(importlib.util.find_spec(f"jax_{name}_plugin") for name in ("cuda12", "cuda13", "rocm7")):
        return
    jax.config.update("jax_platforms", "cpu")


def _tpu_chips() -> bool:
    """Whether the PCI bus or the drivers' files show any."""
    vendors = (file.read_text().strip() for file in Path("/sys/bus/pci/devices").glob("*/vendor"))
    files = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return bool(files) or _GOOGLE in vendors
