"""Model shapes (each YAML file is a Hugging Face config dictionary) and deployment plans by name, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The names that `load` knows."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load(name: str) -> dict[str, Any]:
    """The Hugging Face config dictionary of a shape, e.g. "llama3-8b". Raises KeyError listing the known names."""
    path = _FOLDER / f"{name}.yaml"
    if name not in names():
        raise KeyError(f"no model shape is called {name!r}; known: {', '.join(names())}")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def cache_policies() -> dict[str, Any]:
    """What cache policies lose: how many of `questions` about `tokens` a `model` answers.

    It keeps `budget` tokens by each of `policies`, or all (`none`). Two numbers each: asked in the prompt, and later.
    """
    return yaml.safe_load((_FOLDER / "measurements" / "cache-policies.yaml").read_text(encoding="utf-8"))


def plan_names() -> tuple[str, ...]:
    """The names that `plan_text` knows."""
    return tuple(sorted(path.stem for path in (_FOLDER / "plans").glob("*.yaml")))


def plan_text(name: str) -> str:
    """The YAML text of a deployment plan (see `inferlib.planning.plans`)."""
    return (_FOLDER / "plans" / f"{name}.yaml").read_text(encoding="utf-8")


def measurements(name: str) -> dict[str, Any]:
    """A table of measurements, e.g. "h200-decode"."""
    return yaml.safe_load((_FOLDER / "measurements" / f"{name}.yaml").read_text(encoding="utf-8"))
