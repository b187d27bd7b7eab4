"""What a sequence that waits fetches: pages whose cells the cache of its engine does not have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SourceName = Literal["host", "disk", "prefill"]


@dataclass(eq=False)
class Fetch:
    """Pages of a sequence from its page number `first` on. pending: they are on their way; after that `pages` are the
    contents of those that came, each with the source that it came from. cached: how many of the sequence's tokens were
    computed for others before; None: all that come. place: if it is not 0, the last of them is a place behind that many
    tokens (see `inferlib.engine.places`), without which the others are of no use."""

    first: int
    keys: list[bytes] = field(default_factory=list)
    pages: list[tuple[Any, SourceName]] = field(default_factory=list)
    pending: bool = False
    cached: int | None = None
    place: int = 0

    @property
    def came(self) -> bool:
        """Whether all pages came that were asked for by their keys, and some did."""
        return 0 < len(self.pages) >= len(self.keys)
