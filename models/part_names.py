"""Names of a layer's weights, by which users choose some of them."""

from __future__ import annotations

from collections.abc import Sequence


def is_named(part: str, names: Sequence[str]) -> bool:
    """True if a weight's name in its layer, such as "mlp.down", is one of these names, or begins with one ("mlp"). No
    names stand for all weights."""
    return not names or any(part == name or part.startswith(f"{name}.") for name in names)
