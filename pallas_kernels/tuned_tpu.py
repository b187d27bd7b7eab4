"""Block sizes of TPU kernels that a search found to be better than the kernel's rule: a table for each generation, in
`tuned/`.

A kernel's function that picks blocks is wrapped in `tuned`: where the table of the generation that is traced for has
its arguments, blocks are the table's, else the function's. `inferlib tune` writes the tables.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from inferlib.pallas_kernels.generations_tpu import generation

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Entry:
    """A line of a table. shape: the arguments of the kernel's function that picks blocks; blocks: fields of its
    `Blocks`. microseconds, rule_microseconds: modelled times of all searched cases together, with these and with the
    rule's; gain: share of the rule's, the mean of the cases; compiler: whose listings gave them."""

    kernel: str
    shape: Mapping[str, Any]
    blocks: Mapping[str, int]
    microseconds: float
    rule_microseconds: float
    gain: float
    compiler: str

    @property
    def key(self) -> tuple[str, str]:
        return _key(self.kernel, self.shape)


def _key(kernel: str, shape: Mapping[str, Any]) -> tuple[str, str]:
    return kernel, json.dumps(shape, sort_keys=True)


def read(file: Path) -> list[Entry]:
    """The entries of a table, none if there is no such file. Raises ValueError if it is not one."""
    try:
        return [Entry(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(Entry))
        raise ValueError(f"{file} is not a list of objects with {names}: {error}") from error


@functools.cache
def _table(generation: str) -> dict[tuple[str, str], Mapping[str, int]]:
    return {entry.key: entry.blocks for entry in read(FOLDER / f"{generation}.json")}


@dataclass(frozen=True)
class Asked:
    """One request for a kernel's blocks, and the answer."""

    kernel: str
    shape: Mapping[str, Any]
    blocks: Mapping[str, int]


@dataclass(frozen=True)
class _Trial:
    blocks: Mapping[str, int] | None
    asked: list[Asked]


_trial: ContextVar[_Trial | None] = ContextVar("trial", default=None)


@contextmanager
def trying(blocks: Mapping[str, int] | None) -> Iterator[list[Asked]]:
    """Within this context, kernels take these fields of their `Blocks`, or the rule's if None, whatever the tables say.

    Yields the list of their requests.
    """
    trial = _Trial(blocks, [])
    token = _trial.set(trial)
    try:
        yield trial.asked
    finally:
        _trial.reset(token)


def tuned(kernel: str, blocks: type) -> Callable[[Callable], Callable]:
    """Decorate the rule of a kernel: the function that picks its blocks, of the dataclass `blocks`.

    The table finds cases by the rule's arguments: numbers, tuples of numbers, and arrays or dataclasses of arrays, by
    their dtypes and last four dimensions (earlier ones belong to a stack).
    """

    def wrap(rule: Callable) -> Callable:
        signature = inspect.signature(rule)

        @functools.wraps(rule)
        def choose(*args, **kwargs):
            shape = {name: _json_value(value) for name, value in signature.bind(*args, **kwargs).arguments.items()}
            trial = _trial.get()
            if trial is None:
                entry = _table(at).get(_key(kernel, shape)) if (at := generation()) else None
            else:
                entry = trial.blocks
            chosen = rule(*args, **kwargs) if entry is None else blocks(**entry)
            if trial is not None:
                trial.asked.append(Asked(kernel, shape, vars(chosen)))
            return chosen

        return choose

    return wrap


def _json_value(value: Any) -> Any:
    """The value as JSON represents it."""
    if is_dataclass(value):  # arrays that belong together, without missing ones and flags that are not set
        return {name: _json_value(part) for name, part in vars(value).items() if part is not None and part is not False}
    if hasattr(value, "dtype"):
        return [str(value.dtype), *value.shape[-4:]]
    return list(value) if isinstance(value, tuple) else value
