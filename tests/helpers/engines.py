"""Engines that compute nothing, and what holds of every engine after each step."""

from __future__ import annotations

import functools
from collections import Counter

from inferlib.cache.prefix_tree import Node
from inferlib.cache.snapshots import Snapshot, Snapshots
from inferlib.engine.engine import Engine
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from inferlib.sharding.shards import Shards
from tests.helpers.cached_pages import nodes_of


class Replicas(Shards):
    """So many replicas, of which the host need know nothing else."""

    replicas = 1

    def __init__(self, replicas: int):
        super().__init__()
        object.__setattr__(self, "replicas", replicas)


@functools.cache
def smallest_model() -> AbstractModel:
    """One layer, for engines whose programs are never called."""
    attention = AttentionSpec(heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=None)
    layer = LayerSpec(attention, MlpSpec(hidden=2))
    return abstract_model(ModelConfig("test", vocab=64, dim=2, layers=(layer,), context=64), "float32")


def assert_accounted(engine: Engine) -> None:
    """Every row is free, or of one sequence that runs. Every page is free, in the tree, or of one such sequence. Every
    snapshot is free, or goes with pages of the tree."""
    scheduler, rows = engine.scheduler, engine.config.rows
    free = [rows * replica + row for replica, of_one in enumerate(scheduler._free) for row in of_one]
    assert sorted([*scheduler.running, *free]) == list(range(engine.config.max_batch))
    for replica, pages in enumerate(scheduler.pages):
        running = [s for s in scheduler.running.values() if s.row // rows == replica]
        taken, nodes = [], nodes_of(pages.tree)
        for s in running:
            alone = [column >= len(s.nodes) or s.nodes[column].page != page for column, page in enumerate(s.pages)]
            assert not any(alone[: s.hit // pages.page if pages.snapshots else len(s.nodes)])
            taken += [page for page, untaken in zip(s.pages, alone, strict=True) if untaken and page >= 0]
        assert sorted([*taken, *(node.page for node in nodes), *pages.pool._free]) == list(range(pages.pool.count))
        for level, pool in enumerate(pages.levels.pools if pages.levels else ()):
            of_level = [page for s in running for page in s.level_pages[level]]
            assert sorted([*of_level, *pool._free]) == list(range(pool.count))
        uses = Counter(node for s in running for node in s.nodes)
        assert all(node.references == uses[node] for node in nodes)
        assert pages.free == len(pages.pool._free) + sum(not node.references for node in nodes)
        if pages.snapshots is not None:
            assert_snapshots(pages.snapshots, nodes, [x for s in running for x in s.snapshots])
    assert all(s.row < 0 and not s.pages and not s.level_pages for s in scheduler.waiting)


def assert_snapshots(snapshots: Snapshots, nodes: list[Node], expected: list[Snapshot]) -> None:
    """Of these nodes of a tree, and expected by sequences that run."""
    saved = list(snapshots._saved)
    assert sorted([*snapshots._free, *(x.number for x in saved)]) == list(range(snapshots.count))
    assert all(x.nodes and not x.pending and x.first <= x.last for x in saved)
    assert all(x.number < 0 for x in expected)
    listed = Counter((x, node) for node, of_node in snapshots._of.items() for x in of_node)
    assert listed == Counter((x, node) for x in [*saved, *expected] for node in x.nodes)
    assert {node for _, node in listed} <= set(nodes)
