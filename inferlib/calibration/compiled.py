"""How the programs of a calibration are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import jax

# Each program runs some hundred times at most. Trying out kernels for its products took XLA:GPU 25 s a program, and all
# the rest of compiling it 1.3 s.
_ON_GPUS = {"xla_gpu_enable_triton_gemm": False}


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A `jax.jit` that compiles fast. options: of that."""

    def decorate(function):
        @cache
        def program():
            on_gpus = jax.default_backend() == "gpu"
            return jax.jit(function, compiler_options=_ON_GPUS if on_gpus else None, **options)

        @wraps(function)
        def run(*arguments, **named):
            return program()(*arguments, **named)

        return run

    return decorate
