"""Names of a layer's weights, by which users choose some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def is_named(part: str, names: Sequence[str]) -> bool:
    """True if a weight's name in its layer, such as "mlp.down", is one of these names, or begins with one ("mlp"). No
    names stand for all weights."""
    return not names or any(part == name or part.startswith(f"{name}.") for name in names)


def first_of_no_part(names: Sequence[str], parts: Iterable[str]) -> str | None:
    """The first of these names that is the name of none of these parts, nor the beginning of one; None: there is
    none."""
    parts = list(parts)
    return next((name for name in names if not any(is_named(part, (name,)) for part in parts)), None)
