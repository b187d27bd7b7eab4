"""Lowered kernels in files, beside the programs that JAX keeps in its persistent cache.

A process that finds all its programs in that cache still traces and lowers them, as JAX looks for what was lowered.
Kernels are half of that time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax import export

from inferlib import attention_values

MOST_FILES = 1024  # of a folder, some 50 kB each; the oldest go first


def path_of(function: Callable, static: tuple, tree: Any, shapes: tuple, device: Any) -> Path | None:
    """The file of a function's lowered form. None if JAX has no persistent cache or not the package that it writes such
    forms with, or if nothing tells a static argument apart from others in another process."""
    folder: str | None = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (pyright does not know it)
    if folder is None or importlib.util.find_spec("flatbuffers") is None:
        return None
    try:
        text = _description((function, static, str(tree), shapes, device))
    except LookupError:
        return None
    digest = hashlib.sha256(f"{_versions()} {text}".encode()).hexdigest()
    return Path(folder) / "kernels" / digest


def read(path: Path) -> export.Exported | None:
    """The lowered form in a file; None if there is none, or it is damaged."""
    try:
        return export.deserialize(bytearray(path.read_bytes()))
    except Exception:  # damaged files raise errors of many kinds
        return None


def write(path: Path, lowered: export.Exported) -> None:
    """Write a lowered form, at once or not at all. A folder that cannot be written to stays as it is."""
    data = lowered.serialize()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
        files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[:-MOST_FILES]:
            file.unlink(missing_ok=True)
    except OSError:
        pass


def _description(value: Any) -> str:
    """A text that only equal values have, in any process. Raises LookupError if there is none."""
    if isinstance(value, functools.partial):
        return f"partial{_description((value.func, value.args, *value.keywords.items()))}"
    if isinstance(value, tuple):
        return f"{type(value).__qualname__}({', '.join(map(_description, value))})"
    if inspect.isfunction(value):
        text = f"{value.__qualname__} of {_code(Path(inspect.getfile(value)))}"
    else:
        text = repr(value)
    if "<lambda>" in text or "<locals>" in text or " at 0x" in text:
        raise LookupError(text)
    return text


@functools.cache
def _versions() -> str:
    """What lowered forms depend on beside their arguments: JAX, the GPU, and the code of this package."""
    try:
        gpu = jax.local_devices(backend="gpu")[0].device_kind
    except RuntimeError:
        gpu = "none"
    files = [Path(inspect.getfile(attention_values)), *sorted(Path(__file__).parent.glob("*.py"))]
    return " ".join((version("jax"), version("jaxlib"), gpu, *map(_code, files)))


@functools.cache
def _code(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
