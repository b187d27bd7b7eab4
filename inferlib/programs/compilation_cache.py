"""Where compiled programs are kept between processes.

JAX's persistent cache, in the user's cache folder and bounded: what was used least recently goes first. It is written
under a lock, so several processes may share it. On GPUs XLA keeps the choices of its autotuner beside the programs.
Whoever can write to the folder can run code in the processes that read it. Child processes that serialise their
executables must not use it: those that come out of it cannot be serialised again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from inferlib.option_checks import ConfigurationError, checked_path

log = logging.getLogger(__name__)

OFF = "none"
MOST_BYTES = 4 << 30
_FASTEST = 0.2  # seconds: what compiles sooner is not worth a file
_ours: str | None = None  # the folder that this module gave JAX


def use_compile_cache(folder: str | Path | None = None) -> None:
    """Take programs that an earlier process compiled, and keep those that this one compiles.

    folder: by default `default_folder()`, unless the application gave JAX a folder of its own
    (`JAX_COMPILATION_CACHE_DIR`); "none": keep none there. The setting is the whole process's. If the default folder
    cannot be written to, that is logged and none is used. Raises ConfigurationError for any other such folder.
    """
    global _ours
    current: str | None = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (pyright does not know it)
    others = current is not None and current != _ours
    off = folder is not None and str(folder) == OFF
    if others and (off or folder is None):
        return
    path = None
    if not off:
        path = default_folder() if folder is None else checked_path("compile_cache", folder)
        if reason := _unwritable(path):
            message = f"compile_cache {str(path)!r} cannot be written to: {reason}"
            if folder is not None:
                raise ConfigurationError(f"{message}; give another folder, or 'none'")
            log.warning("%s; programs are compiled in every process", message)
            path = None
    _ours = path and str(path)
    if _ours == current:
        return
    jax.config.update("jax_compilation_cache_dir", _ours)
    if path is not None:
        _date_all(path)
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _FASTEST)
    compilation_cache.reset_cache()  # else JAX keeps to what it decided at its first compilation


def default_folder() -> Path:
    """In the user's cache folder, one for each kind of CPU: programs for CPUs have the instructions of one kind."""
    if sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "inferlib" / "xla" / f"{platform.machine()}-{_cpu()}"


def _date_all(folder: Path) -> None:
    """Give entries without a time of their last use one, in the file that JAX has for it.

    A process that was killed while it wrote leaves such an entry, and so does one that does not bound the folder. JAX
    looks at all times before it writes, and would write nothing there any more.
    """
    try:
        for entry in folder.glob("*-cache"):
            used = entry.with_name(f"{entry.name.removesuffix('-cache')}-atime")
            if not used.exists():
                used.write_bytes(entry.stat().st_mtime_ns.to_bytes(8, "little"))
    except OSError as error:  # such as an entry that another process evicts
        log.debug("entries of %s are not all dated: %s", folder, error)


def _cpu() -> str:
    """A hash of the CPU's features as Linux lists them; elsewhere, of its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(features.encode()).hexdigest()[:8]


def _unwritable(path: Path) -> str | None:
    """Why no file can be made in a folder, which is made if it is missing; None if one can."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror or str(error)
