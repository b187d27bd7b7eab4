"""The small functions that a start needs beside its programs: they lay out the tensors of a checkpoint, and make an
empty cache and state. They are jitted when called, unless they were compiled earlier for the same arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import jax
import numpy as np

Compiled = Mapping[str, jax.stages.Compiled]
_adopted: ContextVar[Compiled] = ContextVar("adopted", default={})  # noqa: B039 (never changed)
_recorded: ContextVar[dict[str, jax.stages.Compiled] | None] = ContextVar("recorded", default=None)


def run(function: Callable, static: tuple, *arrays: Any, place: Any = None, donate: bool = False) -> Any:
    """`function(*static, *arrays)`. Arrays may be in lists. place: shardings or formats of the results. donate: the
    result takes over the first array's memory."""
    adopted, recorded = _adopted.get(), _recorded.get()
    if not adopted and recorded is None:
        return _jitted(function, len(static), place, donate)(*static, *arrays)
    leaves, tree = jax.tree.flatten(arrays)
    structs = tuple(_struct(x) for x in leaves)
    key = _key(function, static, structs, place)
    if recorded is None:
        compiled = adopted.get(key)
        return compiled(*arrays) if compiled else _jitted(function, len(static), place, donate)(*static, *arrays)
    lowered = _jitted(function, len(static), place, donate).lower(*static, *jax.tree.unflatten(tree, structs))
    if key not in recorded:
        recorded[key] = lowered.compile()
    return jax.tree.map(lambda x: _Result(x.shape, x.dtype, sharding=x.sharding), lowered.out_info)


def prepared(function: Callable, static: tuple, *arrays: Any, place: Any = None, donate: bool = True) -> Callable:
    """`function` with its static arguments as a compiled program of arrays like these: compiled now, unless it was
    earlier. donate: the result takes over the first array's memory."""
    leaves, tree = jax.tree.flatten(arrays)
    structs = tuple(_struct(x) for x in leaves)
    key, recorded = _key(function, static, structs, place), _recorded.get()
    if (program := _adopted.get().get(key)) is not None:
        return program
    jitted = _jitted(function, len(static), place, donate)
    program = jitted.lower(*static, *jax.tree.unflatten(tree, structs)).compile()
    if recorded is not None:
        recorded[key] = program
    return program


def join(shape: tuple[int, ...], sharding: jax.sharding.Sharding, parts: Sequence[jax.Array]) -> jax.Array:
    """An array made of its shards on the devices of this process."""
    if _recorded.get() is not None:
        return cast(jax.Array, _Result(shape, parts[0].dtype, sharding=sharding))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))


def fetched(arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """The arrays on the host; zeros for results of recorded functions."""
    return [np.zeros(x.shape, x.dtype) if isinstance(x, _Result) else np.asarray(x) for x in arrays]


@contextmanager
def adopted(compiled: Compiled) -> Iterator[None]:
    """A context in which functions that are in `compiled` are not compiled again."""
    token = _adopted.set(compiled)
    try:
        yield
    finally:
        _adopted.reset(token)


@contextmanager
def recorded() -> Iterator[dict[str, jax.stages.Compiled]]:
    """A context in which functions are compiled and not run; yields what `adopted` takes."""
    token = _recorded.set(compiled := {})
    try:
        yield compiled
    finally:
        _recorded.reset(token)


class _Result(jax.ShapeDtypeStruct):
    """What a recorded function would return."""

    def block_until_ready(self) -> _Result:
        return self


@cache
def _jitted(function: Callable, static: int, place: Any, donate: bool) -> Callable:
    donated = (static,) if donate else ()
    return jax.jit(function, static_argnums=tuple(range(static)), donate_argnums=donated, out_shardings=place)


@cache
def _key(function: Callable, static: tuple, structs: tuple[jax.ShapeDtypeStruct, ...], place: Any) -> str:
    arrays = [(x.shape, x.dtype.name, x.sharding) for x in structs]
    return hashlib.sha256(repr((function.__qualname__, static, arrays, place)).encode()).hexdigest()


def _struct(x: np.ndarray | jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
