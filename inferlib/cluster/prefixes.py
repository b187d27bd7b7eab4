"""Which replica has the longest prefix of a prompt in its cache, as far as the requests sent to it tell."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import Any

# Characters, or token ids, of a block. Shorter prefixes are not worth a choice.
BLOCK = 256
_MOST_BLOCKS = 256


def prefix_blocks(body: bytes) -> tuple[bytes, ...]:
    """A hash for each whole block of a request's prompt, each of everything up to that block's end.

    body: a request of OpenAI's interface, in JSON. Prompts share a block's hash if they have the same model, salt and
    tools, and the same text up to its end. Empty for a body that has no prompt.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(fields, dict):
        return ()
    prompt = next((fields[name] for name in ("messages", "prompt", "input") if fields.get(name)), None)
    if prompt is None:
        return ()
    text = prompt if isinstance(prompt, str | list) and not _is_texts(prompt) else _written(prompt)
    chain = blake2b(_written([fields.get(name) for name in ("model", "cache_salt", "tools")]).encode(), digest_size=16)
    blocks = []
    for start in range(0, min(len(text) // BLOCK, _MOST_BLOCKS) * BLOCK, BLOCK):
        part = text[start : start + BLOCK]
        chain.update((part if isinstance(part, str) else _written(part)).encode("utf-8", "surrogatepass"))
        blocks.append(chain.digest())
    return tuple(blocks)


def _is_texts(prompt: Any) -> bool:
    """Whether it is a list, but not of token ids."""
    return isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)


def _written(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class PrefixTable:
    """The replica that got each block last. The least recently used blocks go when there are more than `capacity`."""

    def __init__(self, capacity: int = 1 << 16):
        self._capacity = capacity
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, blocks: Sequence[bytes], replica: str) -> None:
        """A request with these blocks went to this replica."""
        for block in blocks:
            self._replicas[block] = replica
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def longest(self, blocks: Sequence[bytes], replicas: Container[str]) -> str | None:
        """The one of these replicas that got the longest prefix; None if none of them got a block."""
        for block in reversed(blocks):
            if (replica := self._replicas.get(block)) is not None and replica in replicas:
                return replica
        return None
