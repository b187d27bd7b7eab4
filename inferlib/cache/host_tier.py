"""Pages in host memory that the cache on the devices had no room for, and the keys by which pages are known there."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TypeAlias

from inferlib.cache.host_memory import OnHost
from inferlib.cache.prefix_tree import Node

# The cells of a page, as `inferlib.programs.page_transfer` cuts them: nobody writes to these arrays.
Page: TypeAlias = tuple[OnHost, ...]
KEY_BYTES = 20


def root_key(key: Hashable) -> bytes:
    """What the first page of a prompt follows. key: of the root of the prompt's tree."""
    return hashlib.blake2b(repr(key).encode(), digest_size=KEY_BYTES, person=b"inferlib root").digest()


def page_key(before: bytes, tokens: bytes) -> bytes:
    """The key of a page: a hash of all tokens up to its end. before: the key of the page before it, or of the root.
    tokens: its own, encoded."""
    return hashlib.blake2b(before + tokens, digest_size=KEY_BYTES, person=b"inferlib page").digest()


def page_keys(key: Hashable, tokens: bytes, page: int) -> Iterator[bytes]:
    """The keys of the whole pages of some tokens, one after the other. page: bytes of a page's tokens."""
    before = root_key(key)
    for first in range(0, len(tokens) - page + 1, page):
        before = page_key(before, tokens[first : first + page])
        yield before


def place_key(before: bytes, tokens: bytes) -> bytes:
    """The key of a place in a page, behind these of its tokens, encoded. before: the key of the page before it, or of
    the root."""
    return hashlib.blake2b(before + tokens, digest_size=KEY_BYTES, person=b"inferlib place").digest()


def key_of(node: Node) -> bytes:
    """The key of a node with a whole page, which it remembers."""
    path = []
    while not node.digest:
        path.append(node)
        if node.parent is None:
            break
        node = node.parent
    for node in reversed(path):
        node.digest = root_key(node.key) if node.parent is None else page_key(node.parent.digest, node.tokens)
    return path[0].digest if path else node.digest


def nbytes_of(page: Page) -> int:
    return sum(array.nbytes for array in page)


class HostTier:
    """Pages by their keys, of at most `most` bytes; the least recently used leave first. Any thread may call it."""

    def __init__(self, most: int):
        self.most, self.evictions, self.nbytes = most, 0, 0
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def get(self, key: bytes) -> Page | None:
        """A page, if it is here, which this counts as a use of it."""
        with self._lock:
            if (page := self._pages.get(key)) is not None:
                self._pages.move_to_end(key)
            return page

    def put(self, key: bytes, page: Page) -> list[tuple[bytes, Page]]:
        """Store a page. Returns those that left for it, or the page itself if there is room for none."""
        with self._lock:
            self.nbytes += nbytes_of(page) - nbytes_of(self._pages.pop(key, ()))
            self._pages[key], left = page, []
            while self.nbytes > self.most:
                left.append(self._pages.popitem(last=False))
                self.nbytes -= nbytes_of(left[-1][1])
            self.evictions += len(left)
            return left

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self.nbytes = 0
