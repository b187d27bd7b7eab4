"""Keep JAX from starting platforms that this machine does not have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax

_GOOGLE = "0x1ae0"  # vendor of TPUs on the PCI bus


def leave_out_absent_tpu() -> None:
    """Keep JAX from starting libtpu on a machine that has the library, to compile with, but no TPU.

    Starting it takes seconds, prints warnings and locks the library, so that compiling has to wait. Changes nothing if
    JAX has started already, if the user chose platforms, or if another accelerator's plugin is installed.
    """
    config: Any = jax.config
    if config.jax_platforms or importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    if any(importlib.util.find_spec(f"jax_{name}_plugin") for name in ("cuda12", "cuda13", "rocm7")):
        return
    config.update("jax_platforms", "cpu")


def has_tpu() -> bool:
    """True if the PCI bus or the drivers' files show a TPU."""
    vendors = (file.read_text().strip() for file in Path("/sys/bus/pci/devices").glob("*/vendor"))
    files = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return bool(files) or _GOOGLE in vendors
