"""When the caches of rows are compacted, so that a row keeps a budget of positions.

A prompt is compacted whenever it has a step's tokens more than the budget, and where it ends. A row that decodes is
compacted whenever it has an interval's tokens more. So where that happens depends on the sequence alone, and its tokens
do not depend on others: a step ends within a prompt where that is due, and the device lets a row wait that has as many
cells as it may have, until it is compacted.

Where layers have different budgets (see `inferlib.models.cache_levels`), those with the smallest, of level 0, decide:
the others are never fuller. Cells are counted as these layers have them.

The host plans ahead of what it knows, and takes a row to be further than it is if that ended a dispatch early, or
waited. To ask for a row too early changes nothing on the device. Once the host knows better, it asks again.
"""

from __future__ import annotations

from inferlib.engine.measured_policies import warn_of_losses
from inferlib.engine.sequence import Sequence, Status
from inferlib.ops.cache_policy import CachePolicy


class BoundedCache:
    """policy: what rows keep. tile: tokens of a prompt between two compactions."""

    def __init__(self, policy: CachePolicy, tile: int):
        self.policy, self.tile = policy, tile
        warn_of_losses(policy)

    def cells(self, s: Sequence, level: int = 0) -> int:
        """The most cells that a sequence ever has in layers of a level, if it starts now. So no other one has to give
        up pages for it."""
        return max(min(s.length, self.policy.budgets[level] + self.tile), self.decoding_cells(s, level))

    def decoding_cells(self, s: Sequence, level: int = 0) -> int:
        """The most cells that it has while it decodes, once it was compacted or if that is not due."""
        return min(s.most_tokens, self.policy.budgets[level] + self.policy.interval)

    def begin(self, s: Sequence) -> None:
        """A sequence is prefilled from its first token on."""
        s.dropped, s.boundary = 0, self.policy.budgets[0] + self.tile

    def decode(self, s: Sequence) -> None:
        """All tokens of a sequence's context are sent to the device."""
        s.boundary = self._first(s)

    def room(self, s: Sequence) -> int:
        """How many tokens a sequence that decodes generates before it is to be compacted, once all dispatches in
        flight have run."""
        return max(s.boundary - s.position_after(0), 0)

    def due(self, s: Sequence) -> int | None:
        """How many cells a row has that is to be compacted before the next dispatch, 0 if the device knows better; None
        if it is not to be."""
        policy, cells = self.policy, s.prefilled - s.dropped
        if s.status is Status.PREFILL:
            if s.prefilled < s.boundary:
                return None
            s.dropped, s.boundary = s.prefilled - policy.budgets[0], s.prefilled + self.tile
            return cells
        if not s.unfinished or self.room(s):
            return None
        while not self.room(s):
            s.boundary += policy.interval
        return 0

    def settle(self, s: Sequence, taken: int) -> None:
        """Note that a dispatch advanced a row by `taken` tokens, fewer than the host thought. What it asked for may
        have come too early, and a row that did not advance waits for it."""
        if s.status is not Status.DECODE:
            return
        least = max(self._first(s), s.length - 1 + (taken > 0))
        while s.boundary - self.policy.interval >= least:
            s.boundary -= self.policy.interval

    def _first(self, s: Sequence) -> int:
        """At how many tokens a sequence that decodes is compacted first."""
        return len(s.context) + max(self.policy.compacts_at - (len(s.context) - s.dropped), 0)
