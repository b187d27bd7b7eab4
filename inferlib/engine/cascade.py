"""Finds rows that share pages, so that a decode dispatch reads these once for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.engine.sequence import Sequence
from inferlib.programs.arguments import LEAST_SHARING, prefix_shape

# Bytes that a device reads in the time that a layer takes to launch a second attention and the merge.
_LAUNCHES = {"gpu": 48 << 20, "tpu": 4 << 20, "neuron": 4 << 20, "cpu": 1 << 18}


@dataclass(frozen=True)
class Prefix:
    """Sequences whose first `pages` pages are the same."""

    members: list[Sequence]
    pages: int

    @property
    def saved(self) -> int:
        """How many pages are not read if these are read once."""
        return (len(self.members) - 1) * self.pages


def shared_prefixes(sequences: SequenceOf[Sequence]) -> list[Prefix]:
    """The prefixes to read once, chosen so that the most pages are saved. No sequence is in two of them.

    Sequences that have the same page in one place share all pages before it as well.
    """
    by_page: defaultdict[int, list[Sequence]] = defaultdict(list)
    for s in sequences:
        if s.pages:
            by_page[s.pages[0]].append(s)
    groups = (members for members in by_page.values() if len(members) > 1)
    return [prefix for members in groups for prefix in _best_prefixes(members)]


def _best_prefixes(members: list[Sequence]) -> list[Prefix]:
    """For sequences that share their first page: the prefix of all of them, or longer ones of some, if those save
    more."""
    lists = [s.pages for s in members]
    common = next((i for i, pages in enumerate(zip(*lists, strict=False)) if len(set(pages)) > 1), min(map(len, lists)))
    whole = Prefix(members, common)
    by_page: defaultdict[int, list[Sequence]] = defaultdict(list)
    for s in members:
        if len(s.pages) > common:
            by_page[s.pages[common]].append(s)
    parts = [prefix for group in by_page.values() if len(group) > 1 for prefix in _best_prefixes(group)]
    return parts if sum(part.saved for part in parts) > whole.saved else [whole]


@dataclass(frozen=True)
class Cascade:
    """When and how the rows of a decode dispatch read what they share.

    page: positions of a page. least: the pages that must be saved to be worth launching a second attention.
    """

    config: EngineConfig
    page: int
    least: int

    @staticmethod
    def of(config: EngineConfig, plan: CachePlan, layers: int) -> Cascade | None:
        """The cascade of a model; None if the engine does without."""
        if not config.cascade:
            return None
        page_bytes = max(plan.bytes_of(config.shards)[0], 1)
        return Cascade(config, plan.page, -(-layers * _LAUNCHES[config.platform] // page_bytes))

    def prefixes(self, decoding: SequenceOf[Sequence], rows: int) -> np.ndarray | None:
        """The packed prefixes of a program with `rows` rows on each replica, int32 [replicas * T, 1 + m] (see
        `programs.arguments.unpack_prefixes`). None if too few pages are saved."""
        if not self.config.cascade or rows < LEAST_SHARING:
            return None
        count = self.config.rows
        tiles, width = prefix_shape(rows, self.config.platform)
        free = [tiles] * self.config.shards.replicas
        packed = np.full((len(free), tiles, width), rows, np.int32)
        packed[:, :, 0] = 0
        saved = 0
        for prefix in sorted(shared_prefixes(decoding), key=lambda prefix: -prefix.saved):
            replica, members = prefix.members[0].row // count, prefix.members
            # The newest cell of a row is never in a page that it shares.
            pages = min(prefix.pages, min(len(s.prompt) - 1 for s in members) // self.page)
            needed = -(-len(members) // (width - 1))
            if pages < 1 or needed > free[replica]:
                continue
            first = tiles - free[replica]
            for i, s in enumerate(members):
                tile, column = divmod(i, width - 1)
                packed[replica, first + tile, [0, 1 + column]] = pages, s.row % count
            free[replica] -= needed
            saved += pages * (len(members) - 1)
        return packed.reshape(-1, width) if saved >= self.least else None
