"""Blocks of prompts, the table of replicas, and the router's choice. No cluster."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from inferlib.cluster.forwarding import ForwardedRequest
from inferlib.cluster.prefixes import BLOCK, PrefixTable, prefix_blocks
from inferlib.cluster.router import PrefixRouter


def blocks(**fields: Any) -> tuple[bytes, ...]:
    return prefix_blocks(json.dumps({"model": "m", **fields}).encode())


def test_prompts_share_the_blocks_up_to_where_they_part():
    first, second = blocks(prompt="a" * 3 * BLOCK), blocks(prompt="a" * 2 * BLOCK + "b" * 2 * BLOCK)
    assert [len(first), len(second)] == [3, 4]
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


def test_conversations_share_what_was_said_before():
    said = [{"role": "user", "content": "a" * 2 * BLOCK}]
    more = [*said, {"role": "assistant", "content": "b" * BLOCK}]
    assert blocks(messages=said)[:2] == blocks(messages=more)[:2]
    assert len(blocks(messages=more)) == 3


@pytest.mark.parametrize("change", [{"model": "other"}, {"cache_salt": "s"}, {"tools": [{}]}])
def test_what_changes_the_cells_of_a_prompt_changes_its_blocks(change):
    prompt = "a" * BLOCK
    assert not set(blocks(prompt=prompt)) & set(blocks(**{"prompt": prompt, **change}))


def test_token_ids_and_texts():
    assert len(blocks(prompt=list(range(2 * BLOCK)))) == 2
    assert blocks(input=["a" * BLOCK, "b"]) == blocks(input=["a" * BLOCK, "c"])
    assert blocks(prompt="\ud800" * BLOCK)


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b'{"prompt": 1.5}', b'{"prompt": ""}', b'{"messages": "a"}', b"[" * 99999]
)
def test_bodies_without_a_long_prompt_have_no_blocks(body):
    assert prefix_blocks(body) == ()


def test_the_replica_that_got_the_longest_prefix():
    table, (a, b, c) = PrefixTable(), blocks(prompt="a" * 3 * BLOCK)
    table.add([a, b, c], "one")
    table.add([a, b], "two")
    assert table.longest([a, b, c], {"one", "two"}) == "one"
    assert table.longest([a, b], {"one", "two"}) == "two"
    assert table.longest([a, b, c], {"two"}) == "two"
    assert table.longest([a], {"three"}) is None


def test_the_table_forgets_what_was_used_least_recently():
    table = PrefixTable(capacity=2)
    for block in (b"a", b"b", b"a", b"c"):
        table.add([block], "one")
    assert len(table) == 2
    assert [table.longest([x], {"one"}) for x in (b"a", b"b", b"c")] == ["one", None, "one"]


class Router(PrefixRouter):
    """The router alone: replicas have a name and so many open requests."""

    def __init__(self, loads: dict[str, int | None], imbalance: int = 2):
        self.loads = loads
        self.initialize_state(imbalance=imbalance)
        self.all: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in loads]

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(get=lambda replica: self.loads[replica.unique_id])

    def choice(self, prompt: str) -> list[list[str]]:
        pending: Any = SimpleNamespace(args=[ForwardedRequest("POST", "/", (), b"", blocks(prompt=prompt))])
        groups = asyncio.run(self.choose_replicas(self.all, pending))
        return [[replica.replica_id.unique_id for replica in group] for group in groups]

    def sent(self, prompt: str, replica: str) -> None:
        pending: Any = SimpleNamespace(args=[ForwardedRequest("POST", "/", (), b"", blocks(prompt=prompt))])
        where: Any = SimpleNamespace(unique_id=replica)
        self.on_request_routed(pending, where, None)


def test_a_request_goes_where_its_prefix_is_unless_load_says_otherwise():
    router, prompt = Router({"one": 2, "two": 0, "three": None}), "a" * BLOCK
    assert len(router.choice(prompt)) == 1
    router.sent(prompt, "one")
    assert router.choice(prompt + "more")[0] == ["one"]
    assert len(router.choice(prompt + "more")[1]) == 2
    router.loads["one"] = 3
    assert len(router.choice(prompt)) == 1
    assert len(router.choice("b" * BLOCK)) == 1


def test_nobody_to_choose_and_requests_of_others():
    router = Router({"one": 0})
    assert asyncio.run(router.choose_replicas([], None)) == []
    assert len(asyncio.run(router.choose_replicas(router.all, None))) == 1
