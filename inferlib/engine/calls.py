"""A program and its inputs from the host, as the engine starts it and as processes send it to each other."""

from __future__ import annotations

import itertools
from dataclasses import asdict, fields
from typing import Any, NamedTuple, get_args

import numpy as np

from inferlib.messages import Message, MessageError
from inferlib.programs.arguments import ChunkInput
from inferlib.programs.keys import Mode, ProgramKey
from inferlib.programs.row_changes import Changes, Count, Grant, Move, Past, Restore, Save

CALL, WARMUP, TIMES, SLEEP, WAKE = "call", "warmup", "times", "sleep", "wake"  # kinds of messages
_CHANGES = {"moves": Move, "grants": Grant, "counts": Count, "past": Past}
_PAIRS = ("copies", "adapters", "depths", "thresholds", "compacted")
_SNAPSHOTS = (Save, Restore)
_NONE = Changes()


class Call(NamedTuple):
    """cancel: rows to stop. yield_early: see `Control`. chunk: host arrays, if the program prefills. changes: before
    the program starts. prefixes: of a program that takes them, see `unpack_prefixes`. drafts: of a program that takes
    the host's, [B, C - 1]; it runs in one process."""

    key: ProgramKey
    cancel: tuple[int, ...]
    yield_early: bool
    chunk: ChunkInput | None
    changes: Changes = _NONE
    prefixes: np.ndarray | None = None
    drafts: np.ndarray | None = None

    def to_message(self) -> Message:
        head = {"key": asdict(self.key), "cancel": [int(row) for row in self.cancel], "yield_early": self.yield_early}
        head |= {name: [list(change) for change in getattr(self.changes, name)] for name in _CHANGES}
        head |= {name: [list(pair) for pair in getattr(self.changes, name).items()] for name in _PAIRS}
        head["snapshots"] = [[_SNAPSHOTS.index(type(x)), *x] for x in self.changes.snapshots]
        arrays: Any = self.chunk or (() if self.prefixes is None else (self.prefixes,))
        return Message(CALL, head, tuple(map(np.asarray, arrays)))

    @staticmethod
    def from_message(message: Message) -> Call:
        """Raises MessageError if the message is not what `to_message` makes."""
        try:
            key = ProgramKey(**message.fields["key"])
            cancel, yield_early = message.fields["cancel"], message.fields["yield_early"]
            arrays: Any = message.arrays
            chunk = ChunkInput(*arrays) if arrays and not key.cascade else None
            prefixes = arrays[0] if key.cascade else None
            lists: Any = {name: [kind(*x) for x in message.fields[name]] for name, kind in _CHANGES.items()}
            pairs: Any = {name: dict(message.fields[name]) for name in _PAIRS}
            lists["snapshots"] = [_SNAPSHOTS[kind](*x) for kind, *x in message.fields["snapshots"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise MessageError(f"a call of another version of inferlib: {error}") from None
        numbers = [getattr(key, f.name) for f in fields(key) if f.name not in ("mode", "detail", "part")]
        entries = itertools.chain(*lists.values(), *(x.items() for x in pairs.values()))
        numbers += [*cancel, *itertools.chain(*entries)]
        if key.mode not in get_args(Mode) or not all(isinstance(n, int) for n in numbers):
            raise MessageError(f"a call of another version of inferlib: {message.fields}")
        return Call(key, tuple(cancel), yield_early, chunk, Changes(**pairs, **lists), prefixes)


def modes_message(kind: str, modes: tuple[Mode, ...]) -> Message:
    """An order to warm up for these sampling modes, or to time their steps."""
    return Message(kind, {"modes": list(modes)})
