"""Snapshots: what layers keep of a row beside pages, rings and states, as it was behind some of its tokens. A prompt
that begins with these goes on from there (Pan et al. 2024, "Marconi", for states; sliding windows are the same but for
their slack)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inferlib.cache.prefix_tree import Match, Node


@dataclass(eq=False, slots=True)
class Snapshot:
    """A row's rings and states, for a sequence that begins with `first` to `last` tokens of the row.

    number: its place in the store, whose numbers are of a replica; -1 if it has none. pending: a sequence is about to
    reach its tokens. nodes: the pages that those tokens end in.
    """

    first: int
    last: int
    number: int = -1
    pending: bool = True
    nodes: list[Node] = field(default_factory=list, repr=False)

    def resume_position(self, tokens: int) -> int:
        """The position from which a sequence goes on that has `tokens` tokens in common with the row; 0 if none."""
        behind = min(tokens, self.last)
        return behind if behind >= self.first else 0


@dataclass(frozen=True)
class Resumed(Match):
    """What of a match a sequence takes that goes on from a snapshot. whole: the match. awaited: what is worth waiting
    for, as more of the match could be taken then. serves: the first place where its rings serve others, once they are
    those of the snapshot."""

    snapshot: Snapshot | None = None
    whole: Match = field(default_factory=Match)
    awaited: Node | Snapshot | None = None
    serves: int = 0

    @property
    def pending(self) -> Node | Snapshot | None:
        return self.awaited or super().pending


class Snapshots:
    """The `count` snapshots of a replica, which go with pages of the tree.

    page, unit: see `PrefixTree`. slack: how far a row may be ahead of where another sequence goes on. A ring has room
    for that many tokens behind those that a window sees; a state, whose slack is 0, has none.

    A snapshot goes when all its pages have left the tree, or when another one needs its place and it is the one that
    was not used for the longest time. leaving: called with a snapshot that goes, or that loses the page its tokens end
    in, before that.
    """

    def __init__(self, count: int, page: int, unit: int, slack: int):
        self.count, self.page, self.unit, self.slack = count, page, unit, slack
        self.evictions = 0
        self.leaving: Callable[[Snapshot], None] = lambda snapshot: None
        self._free = list(range(count))
        self._saved: OrderedDict[Snapshot, None] = OrderedDict()  # in the order of their last use
        self._of: dict[Node, list[Snapshot]] = {}

    @property
    def saved(self) -> int:
        """How many there are."""
        return len(self._saved)

    def resume(self, match: Match) -> Resumed:
        """The deepest place within a match where a snapshot lets a sequence go on."""
        best, behind, awaited, later = None, 0, None, 0
        for snapshot, common in self._candidates(match):
            at = snapshot.resume_position(common)
            if snapshot.pending and at > later:
                awaited, later = snapshot, at
            elif not snapshot.pending and at > behind:
                best, behind = snapshot, at
        column, rest = divmod(behind, self.page)
        part = None
        if rest:
            part = match.nodes[column] if column < len(match.nodes) else match.part
        serves = 0 if best is None else best.first
        return Resumed(match.nodes[:column], part, behind, best, match, awaited if later > behind else None, serves)

    def expect(self, end: int, least: int, match: Match) -> Snapshot:
        """The snapshot of a sequence that is about to reach `end`, the last unit of its tokens, for others to wait for
        it. least: see `save`. match: what of `end` is in the tree."""
        return self._expected(max(least, self.first(end + self.unit)) if self.slack else end, end, match)

    def expect_at(self, place: int, match: Match) -> Snapshot:
        """The snapshot of a sequence that is about to reach a place before the end of its tokens. No step takes it
        farther than a row may be ahead. match: what of `place` is in the tree."""
        return self._expected(place, place, match)

    def _expected(self, first: int, last: int, match: Match) -> Snapshot:
        snapshot = Snapshot(first, last)
        if match.tokens >= last:
            self._attach(snapshot, match)
        return snapshot

    def save(self, snapshot: Snapshot, row: tuple[int, int, int], match: Match) -> int | None:
        """The place where to save a snapshot of a row; None if nobody could use it, or if there is one like it.

        row: what its sequence was restored from serves nobody before `least`; `end` of its tokens are known; it is as
        far as `ahead` at most. match: what of `end` is in the tree.
        """
        least, end, ahead = row
        self._detach(snapshot)
        snapshot.pending = False
        first, last = max(least, self.first(ahead)), min(end // self.unit * self.unit, match.tokens)
        if not self.count or last < first:
            return None
        others = [other for other, common in self._candidates(match) if not other.pending and other.last <= common]
        for other in others:
            if other.last == last and other.first <= snapshot.first:
                self._saved.move_to_end(other)
                return None
        snapshot.first, snapshot.last = first, last
        for other in others:
            if first <= other.first and other.last <= last:
                self.drop(other)  # it does all that the other one did
        if not self._free:
            coldest = next(iter(self._saved))
            if self._is_whole(coldest):
                self.leaving(coldest)
            self.drop(coldest)
            self.evictions += 1
        snapshot.number = self._free.pop()
        self._saved[snapshot] = None
        self._attach(snapshot, match)
        return snapshot.number

    def first(self, ahead: int) -> int:
        """The first place that a row serves which is so far, unless it was restored."""
        return max(self.unit, -(-(ahead - self.slack) // self.unit) * self.unit)

    def use(self, snapshot: Snapshot) -> int:
        """The number of a snapshot, which now counts as used last."""
        self._saved.move_to_end(snapshot)
        return snapshot.number

    def drop(self, snapshot: Snapshot) -> None:
        """Give up a snapshot, saved or pending."""
        self._detach(snapshot)
        snapshot.pending = False
        if snapshot.number >= 0:
            del self._saved[snapshot]
            self._free.append(snapshot.number)
            snapshot.number = -1

    def evicting(self, node: Node) -> None:
        """A page is about to leave the tree for others."""
        for snapshot in self._of.get(node, ()):
            if not snapshot.pending and snapshot.nodes[-1] is node and self._is_whole(snapshot):
                self.leaving(snapshot)

    def removed(self, node: Node) -> None:
        """A page has left the tree."""
        for snapshot in self._of.pop(node, ()):
            snapshot.nodes.remove(node)
            if not snapshot.nodes:
                self.drop(snapshot)

    def _candidates(self, match: Match) -> list[tuple[Snapshot, int]]:
        """The snapshots that go with pages of a match, or with others that begin like the last one's part; and how many
        tokens the row of each has in common with the match, at least."""
        nodes = [(node, (column + 1) * self.page) for column, node in enumerate(match.nodes)]
        if (part := match.part) is not None and part.parent is not None:
            begin = part.tokens[: len(part.tokens) // part.count * (match.tokens % self.page)]
            nodes += [(node, match.tokens) for node in part.parent.children[begin]]
        # Of a snapshot's pages, the last one counts.
        return list({snapshot: common for node, common in nodes for snapshot in self._of.get(node, ())}.items())

    def _is_whole(self, snapshot: Snapshot) -> bool:
        """Whether the tree has all pages that a snapshot goes with."""
        return len(snapshot.nodes) == len(self._columns(snapshot))

    def _columns(self, snapshot: Snapshot) -> range:
        return range((snapshot.first - 1) // self.page, (snapshot.last - 1) // self.page + 1)

    def _attach(self, snapshot: Snapshot, match: Match) -> None:
        nodes: Sequence[Node] = match.nodes if match.part is None else (*match.nodes, match.part)
        snapshot.nodes = [nodes[column] for column in self._columns(snapshot)]
        for node in snapshot.nodes:
            self._of.setdefault(node, []).append(snapshot)

    def _detach(self, snapshot: Snapshot) -> None:
        for node in snapshot.nodes:
            others = self._of[node]
            others.remove(snapshot)
            if not others:
                del self._of[node]
        snapshot.nodes = []
