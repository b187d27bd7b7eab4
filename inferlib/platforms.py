"""What JAX is told before it starts: which platforms to leave alone, and how much of a GPU's memory to take."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax

_GOOGLE = "0x1ae0"  # vendor of TPUs on the PCI bus
_CUDA = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_OF_GPU = "0.9"  # share of a GPU's memory; the rest is for CUDA's context, code, and what libraries allocate themselves


def prepare_jax() -> None:
    """Everything below. Call it before JAX starts; later it does nothing."""
    leave_out_absent_tpu()
    take_gpu_memory()


def take_gpu_memory() -> None:
    """Let JAX take 90 % of an NVIDIA GPU's memory, since the cache uses all that it gets; JAX itself takes 75 %.

    JAX reads this from the environment alone. A user's own variables are left as they are.
    """
    chosen = {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & os.environ.keys()
    if not chosen and any(map(importlib.util.find_spec, _CUDA)):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = _OF_GPU


def leave_out_absent_tpu() -> None:
    """Keep JAX from starting libtpu on a machine that has the library, to compile with, but no TPU.

    Starting it takes seconds, prints warnings and locks the library, so that compiling has to wait. Changes nothing if
    JAX has started already, if the user chose platforms, or if another accelerator's plugin is installed.
    """
    config: Any = jax.config
    if config.jax_platforms or importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    if any(map(importlib.util.find_spec, (*_CUDA, "jax_rocm7_plugin"))):
        return
    config.update("jax_platforms", "cpu")


def has_tpu() -> bool:
    """True if the PCI bus or the drivers' files show a TPU."""
    vendors = (file.read_text().strip() for file in Path("/sys/bus/pci/devices").glob("*/vendor"))
    files = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return bool(files) or _GOOGLE in vendors
