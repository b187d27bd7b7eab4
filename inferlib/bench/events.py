"""Server-sent events, as clients read them."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


async def event_data(parts: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """What stands behind `data:` in each line of an answer, of which `parts` are the bytes as they come.

    Only a newline ends a line. httpx's `aiter_lines` also ends one at U+2028, U+0085 and the like, which JSON may have
    within a text.
    """
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
