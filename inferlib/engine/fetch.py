"""What a sequence that waits brings from the tiers of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from inferlib.cache.host_tier import Page

TierName = Literal["host", "disk"]


@dataclass(eq=False)
class Fetch:
    """Pages of a sequence from its page number `first` on. pending: they are on their way; after that `pages` are those
    that came, each with the tier that it came from."""

    first: int
    keys: list[bytes] = field(default_factory=list)
    pages: list[tuple[Page, TierName]] = field(default_factory=list)
    pending: bool = False
