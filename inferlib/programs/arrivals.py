"""Whether a compiled program leaves weights alone that are still on their way to on-chip memory.

XLA knows nothing of a copy that a kernel has started: to it the buffer is an array like others, which it may move. What
moved before the copy has ended would be garbage (see `inferlib.ops.fetch_ahead`).
"""

from __future__ import annotations

import re

from inferlib.pallas_kernels.fetch_ahead_tpu import FINISH, START

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", re.MULTILINE)
_NAME = re.compile(r"%([\w.\-]+)")


def check_arrivals(text: str) -> None:
    """Raise RuntimeError if an operation of a compiled module takes the buffer of a copy that it does not wait for."""
    if START not in text:
        return
    uses: dict[str, list[tuple[str, str]]] = {}
    for name, rest in _LINE.findall(text):
        for operand in _NAME.findall(rest.split(", metadata=")[0]):
            uses.setdefault(operand, []).append((name, rest))
    buffers = [
        name
        for start, users in uses.items()
        if start.startswith(START)
        for name, rest in users
        if "get-tuple-element(" in rest and "S(1)}" in rest
    ]
    if wrong := sorted({user for name in buffers for user, _ in uses.get(name, ()) if not user.startswith(FINISH)}):
        raise RuntimeError(
            f"the compiler moves weights that are still arriving on chip, by {', '.join(wrong[:3])}: leave them in "
            "memory with backend='fetch_ahead=xla'"
        )
