"""The pages of a replica: which sequences have them, and which stay for prompts that begin alike."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import replace

from inferlib.cache.pages import PagePool
from inferlib.cache.prefix_tree import Match, Node, PrefixTree, encoded
from inferlib.cache.snapshots import Resumed, Snapshot, Snapshots
from inferlib.engine.level_pages import LevelPages
from inferlib.engine.sequence import Sequence
from inferlib.programs.row_changes import Restore, Save


class ReplicaPages:
    """A pool of `count` pages of `page` positions, and the tree of those whose cells other sequences can read.

    unit: a sequence goes on behind a multiple of this many tokens; None: no pages are shared. evicting: called with
    each node whose page is taken for others. cells: for how many a sequence gets pages when it starts; by default for
    its context.

    A sequence that starts takes the pages of the tree that its tokens begin with, of the one behind them a copy, and
    new pages for the rest. These enter the tree at once, for others to wait for them until they are written. What it
    generates enters the tree when it ends, or is preempted. Pages of the tree that no sequence needs count as free, and
    are evicted once the pool has no others.

    snapshots: of rings and states, if rows have some. Then a sequence takes pages only as far as a snapshot lets it go
    on, and computes in pages of its own what others may have too.
    """

    def __init__(self, count: int, page: int, unit: int | None, snapshots: Snapshots | None = None):
        self.pool, self.page, self.snapshots = PagePool(count), page, snapshots
        self.evicting: Callable[[Node], None] = lambda node: None
        self.cells: Callable[[Sequence], int] = lambda s: s.length
        self.tree = None if unit is None else PrefixTree(page, unit)
        if self.tree is not None and snapshots is not None:
            self.tree.on_removal = snapshots.removed
        self.unsent: set[Node] = set()  # whose cells the dispatch that is planned writes
        self.hit_tokens = self.evictions = 0
        self._running: list[Sequence] = []
        self.levels: LevelPages | None = None  # pages of layers that keep more, if there are any

    @property
    def free(self) -> int:
        """How many pages can be taken."""
        return self.pool.free + (self.tree.idle if self.tree else 0)

    @property
    def cached(self) -> int:
        """How many pages are in the tree."""
        return self.tree.pages if self.tree else 0

    def find(self, s: Sequence) -> Match:
        """What the tree has of a sequence that waits, but for its last token, whose logits are computed in any case."""
        if self.tree is None:
            return Match()
        s.encoded = s.encoded or encoded(s.prompt + s.tokens)
        if not s.takes_cached:
            return Match()
        match = self.tree.match(s.cache_key, s.encoded, s.length - 1)
        return match if self.snapshots is None else self._resumed(match, self.snapshots)

    def need(self, s: Sequence, match: Match) -> int:
        """How many of the free pages a sequence takes that begins with a match."""
        return -(-self.cells(s) // self.page) - sum(node.references > 0 for node in match.nodes)

    def has_room(self, s: Sequence) -> bool:
        """True if layers that keep more have pages for a sequence that starts."""
        return self.levels is None or self.levels.has_room(s)

    def load(self, need: int) -> int:
        """What it costs a replica to take one more sequence, in pages: to prefill those that are new, and to read in
        each step what is in use. So routers weigh a prefix against a load (Dynamo, "KV cache routing")."""
        return self.pool.count - self.free + 2 * need

    def take(self, count: int) -> list[int]:
        """Take pages. Raises ValueError if fewer are free."""
        self.evict(count - self.pool.free)
        return self.pool.take(count)

    def evict(self, count: int) -> None:
        """Free `count` pages that no sequence needs, or all of these if there are fewer."""
        if (tree := self.tree) is None:
            return
        for _ in range(min(count, tree.idle)):
            self.evicting(tree.coldest)
            if self.snapshots is not None:
                self.snapshots.evicting(tree.coldest)
            self.pool.give_back([tree.evict()])
            self.evictions += 1

    def start(self, s: Sequence, match: Match) -> tuple[int, int] | None:
        """Give a sequence that begins with a match the pages of its context. Returns the page to copy, and the one to
        copy it to, if part of a page is to be copied."""
        nodes, copied, parts = match.nodes, match.part, self._parting_position(match)
        if self.tree is not None:
            self.tree.refer(nodes)
            if copied is not None:
                self.tree.touch(copied)
        source = -1 if copied is None else copied.page
        s.pages = [node.page for node in nodes] + self.take(-(-self.cells(s) // self.page) - len(nodes))
        s.nodes = list(nodes)
        s.serves = match.serves if isinstance(match, Resumed) else 0
        self.hit_tokens += match.tokens
        if self.tree is not None:
            self._insert(s, s.encoded, pending=True)
            self._expect(s, parts, self.tree)
            self._running.append(s)
        return None if copied is None else (source, s.pages[len(nodes)])

    def written(self, s: Sequence, start: int) -> None:
        """The dispatch that is planned writes the cells of a sequence from `start` up to those that it has prefilled:
        every later one can read them. Before its first one, the pages that the sequence fetched are written."""
        for column in range(0 if start == s.hit else start // self.page, len(s.nodes)):
            node = s.nodes[column]
            if column * self.page + node.count > s.prefilled:
                break
            if node.pending:
                node.pending = False
                self.unsent.add(node)

    def restores(self, s: Sequence, match: Match) -> list[Restore]:
        """What a sequence's row gets before it begins with a match."""
        if self.snapshots is None or not isinstance(match, Resumed) or match.snapshot is None:
            return []
        return [Restore(s.row, self.snapshots.use(match.snapshot))]

    def stop(self, s: Sequence, end: int) -> int:
        """The position at which a step ends that could prefill a sequence up to `end`: where a state is to be saved, if
        that comes first."""
        exact = self.snapshots is not None and self.snapshots.slack == 0
        return min(end, s.snapshots[0].last) if exact and s.snapshots else end

    def saves(self, s: Sequence) -> Iterator[Save]:
        """What is to be saved of a sequence's row behind the dispatch that is planned, which prefills it: one after the
        other, as each may take the place of one before."""
        while s.snapshots and s.snapshots[0].last <= s.prefilled:
            yield from self._saved(s, s.snapshots.pop(0), s.prefilled, s.encoded)

    def keep(self, s: Sequence, count: int) -> None:
        """Take the pages of a sequence that decodes but for the first `count`, which other sequences do not share; in
        layers that keep more, but for those that it may still need."""
        self.pool.give_back(s.pages[count:])
        del s.pages[count:]
        if self.levels is not None:
            self.levels.keep_decoding(s)

    def give_back(self, s: Sequence) -> list[Save]:
        """Take the pages of a sequence that ends or is preempted. What is written of it stays in the tree. Returns what
        is to be saved of its row, before another sequence gets it."""
        path, tree, saves = s.nodes, self.tree, []
        if tree is not None:
            self._running.remove(s)
            while path and path[-1].pending:
                tree.remove(path.pop())
            if s.prefilled > s.hit:  # else part of a page may be a copy that is not made yet, which is no source
                tokens = self._insert_written(s, tree)
                saves = self._saved(s, Snapshot(s.written, s.written), s.written, tokens)
            self._forget_expected(s)
            tree.release(path)
        apart = (page for column, page in enumerate(s.pages) if column >= len(path) or path[column].page != page)
        self.pool.give_back(page for page in apart if page >= 0)
        s.nodes, s.pages, s.encoded, s.hosted, s.wanted = [], [], b"", {}, None
        if self.levels is not None:
            self.levels.give_back(s)
        return saves

    def forget(self) -> None:
        """Free the pages that no sequence needs."""
        if self.tree is not None:
            self.pool.give_back([self.tree.evict() for _ in range(self.tree.idle)])

    def _resumed(self, match: Match, snapshots: Snapshots) -> Resumed:
        """How far a sequence can go on with a match, or could if it waits: the sequence that is about to compute the
        cells where the match ends is to save a snapshot there. If it fetched them, all pages are there soon."""
        resumed = snapshots.resume(match)
        if resumed.awaited is None and resumed.tokens < match.tokens and match.pending is not None:
            writer = next(s for s in self._running if match.pending in s.nodes)
            if writer.prefilled < match.tokens:
                awaited = snapshots.expect_at(match.tokens, match)
                insort(writer.snapshots, awaited, key=lambda snapshot: snapshot.last)
                return replace(resumed, awaited=awaited)
            if match.nodes and match.nodes[-1].pending:
                return replace(resumed, awaited=match.nodes[-1])
        return resumed

    def _parting_position(self, match: Match) -> int:
        """The position at which a sequence parts from others that go on behind its snapshot; 0 if it does not."""
        if self.tree is None or not isinstance(match, Resumed) or match.tokens == match.whole.tokens:
            return 0
        return match.whole.tokens if self.tree.goes_on(match.whole) else 0

    def _expect(self, s: Sequence, parts: int, tree: PrefixTree) -> None:
        """Plan to save snapshots of a sequence that starts: where it parts from others, as more may come that do, and
        where the last unit of its context ends, for those that begin with all of it."""
        if self.snapshots is None:
            return
        end = (s.length - 1) // tree.unit * tree.unit
        if end > s.hit:
            s.snapshots = [self.snapshots.expect(end, s.serves, tree.match(s.cache_key, s.encoded, end))]
        if 0 < parts < end and parts < s.snapshots[0].first:
            s.snapshots.insert(0, self.snapshots.expect_at(parts, tree.match(s.cache_key, s.encoded, parts)))

    def _forget_expected(self, s: Sequence) -> None:
        for snapshot in s.snapshots:
            assert self.snapshots is not None
            self.snapshots.drop(snapshot)
        s.snapshots = []

    def _saved(self, s: Sequence, snapshot: Snapshot, end: int, tokens: bytes) -> list[Save]:
        """What is to be saved for a snapshot of a sequence's row, of which `end` tokens are known to be written."""
        if self.snapshots is None or self.tree is None:
            return []
        match = self.tree.match(s.cache_key, tokens, end)
        number = self.snapshots.save(snapshot, (s.serves, end, s.most_written), match)
        return [] if number is None else [Save(s.row, number)]

    def _insert_written(self, s: Sequence, tree: PrefixTree) -> bytes:
        """Let a sequence's path go as far as its cells are written. Returns their tokens."""
        known = len(s.context) - len(s.prompt)  # of its tokens, those that were prefilled
        count = s.written
        tokens = s.encoded + encoded(s.tokens[known : count - len(s.prompt)])
        tokens = tokens[: len(encoded([0])) * count]
        if s.nodes and (last := s.nodes[-1]).count < self.page:
            part = tree.part(tokens, len(s.nodes) - 1)
            if len(part) > len(last.tokens) and last.parent is not None:
                if last.parent.child(part):
                    tree.remove(s.nodes.pop())  # a page of another sequence has them too
                else:
                    tree.extend(last, part)
        self._insert(s, tokens, pending=False)
        return tokens

    def _insert(self, s: Sequence, tokens: bytes, *, pending: bool) -> None:
        """Insert pages of a sequence that hold these tokens, behind its path, as far as no others hold the same.

        Of a sequence that ends, the path goes on through pages of others; and of one that computes these again.
        """
        tree, path = self.tree, s.nodes
        assert tree is not None
        parent = path[-1] if path else tree.root(s.cache_key)
        while not path or parent.count == self.page:
            part = tree.part(tokens, len(path))
            if not part:
                return
            node = parent.child(part)
            if node is None:
                node = tree.insert(parent, part, s.pages[len(path)], pending=pending)
            else:
                same = not node.pending and len(part) == len(node.tokens) and node.count == self.page
                if not same or (pending and not self._computes_again(s, node)):
                    return
                tree.refer([node])
            path.append(node)
            parent = node

    def _computes_again(self, s: Sequence, node: Node) -> bool:
        """Whether a sequence that starts refers to a page of others which it computes again, so that its own pages
        behind it can be found. It must leave those that it will need itself."""
        spare = self.free - (-(-s.most_length // self.page) - len(s.pages))
        return self.snapshots is not None and (node.references > 0 or spare > 0)
