"""The tree of pages against a list of what it holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlib.cache.prefix_tree import Node, PrefixTree, encoded

PAGE, UNIT, PAGES = 4, 2, 12


@dataclass(eq=False)
class Entry:
    """A node as a list has it: all tokens up to its last, and how many of these are in its page."""

    key: str
    tokens: tuple[int, ...]
    count: int
    node: Node
    references: int = 1
    used: int = 0


class ListOfPages:
    """The same by looking through a list."""

    def __init__(self):
        self.entries: list[Entry] = []
        self.clock = 0

    def of(self, node: Node) -> Entry:
        return next(entry for entry in self.entries if entry.node is node)

    def match(self, key: str, tokens: tuple[int, ...], most: int) -> int:
        """How many tokens: each whole page, and then of each node as many units as agree."""
        best, tokens = 0, tokens[:most]
        for entry in self.entries:
            before = len(entry.tokens) - entry.count
            if entry.key != key or tokens[:before] != entry.tokens[:before]:
                continue
            pairs = zip(tokens[before:], entry.tokens[before:], strict=False)
            same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            best = max(best, before + same // UNIT * UNIT)
        return best

    def leaves(self) -> list[Entry]:
        inner = {id(entry.node.parent) for entry in self.entries}
        return [entry for entry in self.entries if id(entry.node) not in inner]

    def release(self, path: list[Node]) -> None:
        self.clock += 1
        for node in path:
            entry = self.of(node)
            entry.references -= 1
            entry.used = self.clock

    def first(self) -> Entry | None:
        """The one to evict."""
        return min((x for x in self.leaves() if not x.references), key=lambda x: x.used, default=None)


TOKENS = st.lists(st.integers(0, 1), max_size=3 * PAGE + 1).map(tuple)
CALL = st.one_of(
    st.tuples(st.just("start"), st.sampled_from("ab"), TOKENS),
    st.tuples(st.just("finish"), st.integers(0, 9), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 9), st.none()),
    st.tuples(st.just("evict"), st.none(), st.none()),
)


class Traffic:
    """Sequences that start and end at random."""

    def __init__(self):
        self.tree, self.oracle = PrefixTree(PAGE, UNIT), ListOfPages()
        self.free, self.running = list(range(PAGES)), []

    def start(self, key: str, tokens: tuple[int, ...]) -> None:
        tree, raw = self.tree, encoded(tokens)
        match = tree.match(key, raw, len(tokens) - 1)
        length = match.tokens
        assert length == self.oracle.match(key, tokens, len(tokens) - 1)
        for i, node in enumerate(match.nodes):
            entry = self.oracle.of(node)
            assert entry.tokens == tokens[: (i + 1) * PAGE]
            entry.references += 1
        if match.part is not None:
            assert self.oracle.of(match.part).tokens[:length] == tokens[:length]
        tree.refer(match.nodes)
        path, parent = list(match.nodes), match.nodes[-1] if match.nodes else tree.root(key)
        for column in range(len(path), -(-len(tokens) // PAGE)):
            part = tree.part(raw, column)
            if not part or parent.child(part) or not self.free:
                break
            parent = tree.insert(parent, part, self.free.pop(), pending=True)
            path.append(parent)
            self.oracle.entries.append(Entry(key, tokens[: column * PAGE + parent.count], parent.count, parent))
        self.running.append((path, len(match.nodes), tokens))

    def finish(self, number: int) -> None:
        """The last node gets the tokens that a unit leaves out, and one unit more, if nobody has them."""
        if number >= len(self.running):
            return
        path, first, tokens = self.running.pop(number)
        for node in path:
            node.pending = False
        if len(path) > first and path[-1].count < PAGE:
            more = (tokens + (2,) * PAGE)[: (len(path) - 1) * PAGE + path[-1].count + UNIT]
            part = self.tree.part(encoded(more), len(path) - 1)
            if not path[-1].parent.child(part):
                self.tree.extend(path[-1], part)
                entry = self.oracle.of(path[-1])
                entry.tokens, entry.count = more, path[-1].count
        self.oracle.release(path)
        self.tree.release(path)

    def abort(self, number: int) -> None:
        """What it was to write is not written."""
        if number >= len(self.running):
            return
        path, first, _ = self.running.pop(number)
        while len(path) > first and path[-1].references == 1:
            node = path.pop()
            self.tree.remove(node)
            self.oracle.entries.remove(self.oracle.of(node))
            self.free.append(node.page)
        self.oracle.release(path)
        self.tree.release(path)

    def evict(self) -> None:
        entry = self.oracle.first()
        assert (entry is None) == (self.tree.idle == 0)
        if entry is not None:
            page = self.tree.evict()
            assert page == entry.node.page
            self.oracle.entries.remove(entry)
            self.free.append(page)

    def check(self) -> None:
        entries, tree = self.oracle.entries, self.tree
        assert sorted([*self.free, *(entry.node.page for entry in entries)]) == list(range(PAGES))
        assert tree.pages == len(entries)
        assert tree.idle == sum(not entry.references for entry in entries)
        assert all(entry.references == entry.node.references for entry in entries)
        assert set(tree._roots) == {entry.key for entry in entries}


@pytest.mark.slow
@settings(max_examples=400)
@given(st.lists(CALL, max_size=40))
def test_the_tree_is_what_a_list_says(calls):
    traffic = Traffic()
    for name, *arguments in calls:
        if name == "start":
            traffic.start(*arguments)
        elif name == "evict":
            traffic.evict()
        else:
            getattr(traffic, name)(arguments[0])
        traffic.check()
    while traffic.running:
        traffic.finish(0)
    traffic.check()
    assert sorted([*traffic.free, *(traffic.tree.evict() for _ in range(traffic.tree.idle))]) == list(range(PAGES))
    assert not traffic.tree._roots


def test_the_least_recently_used_leaf_goes_first():
    tree = PrefixTree(2, 1)
    root = tree.root(None)
    trunk = tree.insert(root, encoded([1, 2]), 0)
    old, new = (tree.insert(trunk, encoded(tokens), page) for page, tokens in ((1, [3, 4]), (2, [5])))
    tree.refer([trunk])
    tree.release([trunk, old])
    tree.release([trunk, new])
    tree.refer([trunk])
    tree.touch(old)  # its first cells are copied
    tree.release([trunk])
    assert [tree.evict() for _ in range(3)] == [2, 1, 0]
    assert not tree.match(None, encoded([1, 2, 3]), 3).nodes


def test_a_unit_divides_a_page():
    with pytest.raises(ValueError, match="a unit of 3 positions does not divide a page of 8"):
        PrefixTree(8, 3)
