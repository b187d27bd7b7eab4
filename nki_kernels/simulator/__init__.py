"""A strict stand-in for NKI on a CPU: kernels that it accepts should run on Trainium, and it refuses what the hardware
forbids.

Kernels are written against the vendor's API and import `nki`. Where the real one is not installed, `inject` puts this
one in its place. It computes with numpy, checks every rule of `rules.RULES`, and counts bytes, instructions and slots;
times that follow from published rates are estimates.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from inferlib.nki_kernels.simulator import isa, language, launch
from inferlib.nki_kernels.simulator.launch import check_inputs
from inferlib.nki_kernels.simulator.machine import Counters, Session, generation, session
from inferlib.nki_kernels.simulator.rules import RULES, RuleError, SubsetError

__all__ = [
    "RULES",
    "Counters",
    "RuleError",
    "Session",
    "check_inputs",
    "generation",
    "inject",
    "is_injected",
    "session",
]


def inject() -> None:
    """Make `import nki` find the stand-in, unless the real NKI can be imported."""
    if is_injected():
        return
    try:
        importlib.import_module("nki.isa")
    except ImportError:
        # The package of that name on PyPI is an empty placeholder.
        parts = {"language": _module("nki.language", language.NAMES), "isa": _module("nki.isa", isa.NAMES)}
        _module("nki", {"jit": launch.jit, **parts})


def is_injected() -> bool:
    """Whether `nki` is the stand-in."""
    return isinstance(sys.modules.get("nki"), _StandIn)


class _StandIn(ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise SubsetError(f"{self.__name__}.{name}")


def _module(name: str, members: dict) -> ModuleType:
    made = _StandIn(name)
    made.__path__ = []
    vars(made).update(members)
    sys.modules[name] = made
    return made
