"""A cache of compiled programs between runs of the command line."""

from __future__ import annotations

from pathlib import Path

import jax


def keep_compilations(folder: str | Path | None = None) -> None:
    """Let XLA reuse compilations of earlier processes, stored in `folder` (by default in the user's cache directory).

    Does nothing if JAX already has a folder. The setting applies to the whole process, so the library leaves it to the
    application.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder or Path.home() / ".cache" / "inferlib" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
