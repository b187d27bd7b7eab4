"""A radix tree of pages by their tokens: a prompt that begins like an earlier one takes that one's pages (Zheng et al.
2024, "SGLang", section 3)."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

_TOKEN = array("i").itemsize


def encoded(tokens: Sequence[int]) -> bytes:
    """Tokens in the form that the tree takes."""
    return array("i", tokens).tobytes()


@dataclass(eq=False, slots=True)
class Node:
    """A page, which follows those of its ancestors.

    tokens: whose cells the page has, from its first slot on, encoded. Only a node without children may have fewer than
    a page. references: how many sequences need it. pending: its cells are not written yet, though a sequence is about
    to. children: by each prefix of their tokens, in units.
    """

    parent: Node | None
    tokens: bytes = b""
    page: int = -1
    references: int = 0
    pending: bool = False
    children: dict[bytes, dict[Node, None]] = field(default_factory=dict, repr=False)
    key: Hashable = None  # of a root
    digest: bytes = b""  # see `inferlib.cache.host_tier.key_of`

    @property
    def count(self) -> int:
        """How many tokens it holds."""
        return len(self.tokens) // _TOKEN

    def child(self, tokens: bytes) -> Node | None:
        """A child whose tokens begin like this, if possible one that is not pending."""
        children = self.children.get(tokens, ())
        return next((node for node in children if not node.pending), next(iter(children), None))


@dataclass(frozen=True)
class Match:
    """The first `tokens` tokens of a prompt in the tree. nodes: the whole pages. part: the node whose page has the
    tokens after those, from its first slot on; None if there are none."""

    nodes: tuple[Node, ...] = ()
    part: Node | None = None
    tokens: int = 0

    @property
    def pending(self) -> Node | None:
        """The last node, if its cells are not written yet. Those before it are written no later."""
        return self.last if self.last is not None and self.last.pending else None

    @property
    def last(self) -> Node | None:
        """The last node."""
        return self.part or (self.nodes[-1] if self.nodes else None)


class PrefixTree:
    """Finds the page that has the cells of some tokens, after the tokens before them.

    page: positions of a page. unit: it divides the page; matches and the tokens of a node end at a multiple of it.

    A node that a sequence needs is referenced, and so are its ancestors. The others are evicted from the leaves on, the
    least recently used first. Nodes of different keys share nothing. on_removal: called with a node that was taken out.
    """

    def __init__(self, page: int, unit: int):
        if page % unit:
            raise ValueError(f"a unit of {unit} positions does not divide a page of {page}")
        self.page, self.unit = page, unit
        self.pages = 0
        self.on_removal: Callable[[Node], None] = lambda node: None
        self._roots: dict[Hashable, Node] = {}
        # Nodes without references, in the order of their last use; of those used together, the deepest first. So every
        # node comes after its descendants, and the first one is a leaf.
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """How many pages can be evicted."""
        return len(self._idle)

    @property
    def coldest(self) -> Node:
        """The leaf that `evict` takes out."""
        return next(iter(self._idle))

    def root(self, key: Hashable) -> Node:
        """The node that all tokens of a key descend from."""
        return self._roots.get(key) or Node(None, key=key)

    def match(self, key: Hashable, tokens: bytes, most: int) -> Match:
        """The longest prefix of some tokens, at most `most` of them, whose cells are in the tree."""
        nodes, node, at = [], self._roots.get(key), 0
        if node is None:
            return Match()
        page, unit = self.page * _TOKEN, self.unit * _TOKEN
        end = min(len(tokens), most * _TOKEN) // unit * unit
        while at + page <= end and (child := node.child(tokens[at : at + page])):
            nodes.append(child)
            node, at = child, at + page
        for size in range(min(end - at, page - unit), 0, -unit):
            if child := node.child(tokens[at : at + size]):
                return Match(tuple(nodes), child, (at + size) // _TOKEN)
        return Match(tuple(nodes), None, at // _TOKEN)

    def goes_on(self, match: Match) -> bool:
        """Whether the tree has other tokens behind those of a match."""
        if match.part is not None:
            return match.part.count > match.tokens % self.page
        return bool(match.nodes) and bool(match.nodes[-1].children)

    def part(self, tokens: bytes, column: int) -> bytes:
        """The tokens that a node for page number `column` can have; none if there are too few."""
        first, unit = column * self.page * _TOKEN, self.unit * _TOKEN
        part = tokens[first : first + self.page * _TOKEN]
        return part[: len(part) // unit * unit]

    def insert(self, parent: Node, tokens: bytes, page: int, *, pending: bool = False) -> Node:
        """A new node with one reference. The parent, which has a whole page, has no child whose tokens begin so."""
        assert parent.parent is None or parent.count == self.page, "a part of a page has no children"
        assert tokens, "a node has at least a unit of tokens"
        assert tokens not in parent.children, "the tokens are there already"
        node = Node(parent, tokens, page, references=1, pending=pending)
        if parent.parent is None:
            self._roots[parent.key] = parent
        self._index(node, 0)
        self.pages += 1
        return node

    def extend(self, node: Node, tokens: bytes) -> None:
        """Give a node more tokens: those that it has, and more after them. No sibling begins with them."""
        assert tokens.startswith(node.tokens), "a page's tokens do not change"
        assert not node.children
        before, node.tokens = len(node.tokens), tokens
        self._index(node, before)

    def refer(self, nodes: Iterable[Node]) -> None:
        """Count one more reference to each node. Whoever refers to a node refers to its ancestors."""
        for node in nodes:
            if not node.references:
                del self._idle[node]
            node.references += 1

    def release(self, path: Sequence[Node]) -> None:
        """Give back a reference to each node of a path from a root."""
        for node in reversed(path):
            node.references -= 1
            assert node.references >= 0, "a reference was given back twice"
            if not node.references:
                self._idle[node] = None

    def touch(self, node: Node) -> None:
        """Count this as a use of a node, whose ancestors are referenced."""
        assert node.parent is not None
        assert node.parent.parent is None or node.parent.references, "an ancestor may be evicted first"
        if not node.references:
            self._idle.move_to_end(node)

    def remove(self, node: Node) -> None:
        """Take out a node without children that one sequence refers to, which keeps the page."""
        assert node.references == 1
        self._take_out(node)

    def evict(self) -> int:
        """Take out the leaf that was not used for the longest time, of those without references. Returns its page."""
        node, _ = self._idle.popitem(last=False)
        self._take_out(node)
        return node.page

    def _take_out(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children, "children would lose their ancestors"
        unit = self.unit * _TOKEN
        for size in range(unit, len(node.tokens) + 1, unit):
            siblings = parent.children[node.tokens[:size]]
            del siblings[node]
            if not siblings:
                del parent.children[node.tokens[:size]]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]
        node.pending = False  # so that nobody waits for it
        self.pages -= 1
        self.on_removal(node)

    def _index(self, node: Node, before: int) -> None:
        """Let a node be matched by those prefixes of its tokens that are longer than `before` bytes."""
        assert node.parent is not None
        unit = self.unit * _TOKEN
        for size in range(before + unit, len(node.tokens) + 1, unit):
            node.parent.children.setdefault(node.tokens[:size], {})[node] = None
