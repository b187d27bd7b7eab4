"""What the engine keeps of prompts."""

from __future__ import annotations

from inferlib.cache.prefix_tree import Node, PrefixTree


def nodes_of(tree: PrefixTree | None) -> list[Node]:
    """All nodes that have a page."""
    rest, nodes = list(tree._roots.values()) if tree else [], {}
    while rest:
        children = [node for siblings in rest.pop().children.values() for node in siblings]
        rest += [node for node in children if node not in nodes]
        nodes |= dict.fromkeys(children)
    return list(nodes)
