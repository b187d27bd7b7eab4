"""What is installed, which devices JAX sees, and which the machine has."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from inferlib.doctor.findings import Finding, public
from inferlib.pallas_kernels.generations_tpu import GENERATIONS
from inferlib.platforms import has_tpu
from inferlib.targets import CHIPS, Chip

AREA = "installation"
_PACKAGES = ("inferlib", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "neuronx-cc", "nki")
_INSTALL = {
    "gpu": ("an NVIDIA GPU", "pip install 'inferlib[cuda13]', or jax[cuda12] for an older driver"),
    "tpu": ("a TPU", "pip install 'inferlib[tpu]'"),
}


def versions() -> Iterator[Finding]:
    """The versions of the packages that decide what runs."""
    system = f"Python {platform.python_version()}, {platform.system()} on {platform.machine()}, {os.cpu_count()} CPUs"
    yield Finding(AREA, "system", "ok", system)
    installed = {name: _version(name) for name in _PACKAGES}
    text = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    yield Finding(AREA, "packages", "ok", text, {name: version for name, version in installed.items() if version})
    wanted = installed["jaxlib"]
    for name, version in installed.items():
        if name.endswith("plugin") and version and version != wanted:
            fix = f"pip install '{name}=={wanted}'"
            yield Finding(AREA, name, "wrong", f"{version} beside jaxlib {wanted}: the two must be equal: {fix}")


def devices() -> Iterator[Finding]:
    """The devices of JAX, and accelerators of this machine that JAX does not see."""
    try:
        all_devices = jax.devices()
    except RuntimeError as error:
        yield Finding(AREA, "devices", "wrong", public(f"JAX starts no backend: {error}"))
        return
    kinds = {device.device_kind for device in all_devices}
    memory = memory_bytes(all_devices[0])
    text = f"{len(all_devices)} x {', '.join(sorted(kinds))}"
    text += f", {memory / 2**30:.1f} GiB each" if memory else ""
    figures = {"platform": jax.default_backend(), "count": len(all_devices), "memory": memory}
    yield Finding(AREA, "devices", "ok", text, figures)
    for kind, (name, fix) in _INSTALL.items():
        if _present(kind) and jax.default_backend() != kind:
            yield Finding(AREA, name, "wrong", f"this machine has {name}, and JAX does not use it: {fix}")
    if neuron_devices():
        yield Finding(AREA, "Trainium", "ok", f"{neuron_devices()} devices; kernels are checked by NKI")


def chip_of(device: Any) -> Chip | None:
    """The data sheet of a `jax.Device`, None if there is none."""
    if device.platform == "tpu":
        return CHIPS.get(GENERATIONS.get(device.device_kind, ""))
    match = re.search(r"\b(H100|H200)\b", device.device_kind)
    # The figures are those of the SXM module: other forms of an H100 have less.
    forms = ("PCIe", "NVL")
    return CHIPS[match[1].lower()] if match and not any(form in device.device_kind for form in forms) else None


def memory_bytes(device: Any) -> int | None:
    """Bytes that JAX may use of a device, None if it does not say."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None


def neuron_devices() -> int:
    """The number of Trainium or Inferentia devices of this machine."""
    return len(list(Path("/dev").glob("neuron[0-9]*")))


def _present(kind: str) -> bool:
    """True if the machine has this accelerator, whether JAX sees it or not."""
    if kind == "tpu":
        return has_tpu()
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
