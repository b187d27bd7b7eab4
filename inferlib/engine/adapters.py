"""The adapters that requests may name, and the slots of the devices that they take turns in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from inferlib.checkpoint.adapter import Adapter
from inferlib.checkpoint.adapter_values import AdapterReader, AdapterValues
from inferlib.config import EngineOptions
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel
from inferlib.models.families import family_of
from inferlib.option_checks import ConfigurationError, brief, checked_path
from inferlib.programs.adapter_factors import AdapterFactors

T = TypeVar("T")
Weights = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory. path: of its directory."""

    name: str
    path: Path
    values: AdapterValues


class AdapterPool:
    """Which adapter is in which slot. One that no row needs stays in its slot until another one needs that: the least
    recently used leaves first.

    named: the adapters that requests may name. loads: slots that were written; evictions: of another adapter.
    """

    def __init__(self, factors: AdapterFactors):
        assert factors.model.adapters is not None
        self.factors, self.named = factors, dict[str, LoadedAdapter]()
        self.loads = self.evictions = 0
        self._slots: dict[LoadedAdapter, int] = {}
        self._users: dict[LoadedAdapter, int] = {}  # rows of each adapter in a slot
        self._free = list(range(factors.model.adapters.count, 0, -1))
        self._idle: OrderedDict[LoadedAdapter, None] = OrderedDict()  # in slots, without rows
        self._writes: dict[int, LoadedAdapter] = {}

    def has_room(self, adapter: LoadedAdapter | None) -> bool:
        """Whether a row may have this adapter now."""
        return adapter is None or adapter in self._slots or bool(self._free or self._idle)

    def take(self, adapter: LoadedAdapter | None) -> int:
        """The slot of a row's adapter, which is 0 for none. If it is in none, it takes a free one or an idle one's."""
        if adapter is None:
            return 0
        if adapter not in self._slots:
            self._slots[adapter] = slot = self._free.pop() if self._free else self._evict()
            self._users[adapter] = 0
            self._writes[slot] = adapter
            self.loads += 1
        self._idle.pop(adapter, None)
        self._users[adapter] += 1
        return self._slots[adapter]

    def give_back(self, adapter: LoadedAdapter | None) -> None:
        """A row is done with its adapter."""
        if adapter is None:
            return
        self._users[adapter] -= 1
        if self._users[adapter]:
            return
        if self.named.get(adapter.name) is adapter:
            self._idle[adapter] = None
        else:
            self._free.append(self._leave(adapter))

    def add(self, adapter: LoadedAdapter) -> None:
        """Raises ValueError if another adapter has the name."""
        if adapter.name in self.named:
            raise ValueError(
                f"an adapter is called {adapter.name!r} already, {self.named[adapter.name].path}: unload it first"
            )
        self.named[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Rows that have it go on. Raises ValueError for an unknown name."""
        adapter = self.find(name)
        del self.named[name]
        if adapter in self._idle:
            del self._idle[adapter]
            self._free.append(self._leave(adapter))

    def find(self, name: Any) -> LoadedAdapter:
        """Raises ValueError for an unknown name."""
        adapter = self.named.get(name) if isinstance(name, str) else None
        if adapter is None:
            known = ", ".join(map(repr, self.named)) or "none"
            raise ValueError(f"no adapter is called {brief(name)}; those that are loaded: {known}")
        return adapter

    def write(self, weights: Weights) -> Weights:
        """The weights, whose factors are donated, with every adapter in its slot."""
        for slot, adapter in self._writes.items():
            weights = self.factors.put(weights, slot, adapter.values.arrays)
        self._writes.clear()
        return weights

    def renewed(self, weights: Weights) -> Weights:
        """The weights with empty factors, once a program that failed may have taken these. No row has an adapter."""
        assert not any(self._users.values())
        for adapter in list(self._idle):
            del self._idle[adapter]
            self._free.append(self._leave(adapter))
        self._writes.clear()
        return self.factors.replaced(weights, self.factors.empty())

    @property
    def waits(self) -> bool:
        """True if slots are to be written."""
        return bool(self._writes)

    def _evict(self) -> int:
        adapter, _ = self._idle.popitem(last=False)
        self.evictions += 1
        return self._leave(adapter)

    def _leave(self, adapter: LoadedAdapter) -> int:
        """Take an adapter out of its slot, which is returned."""
        del self._users[adapter]
        slot = self._slots.pop(adapter)
        self._writes.pop(slot, None)
        return slot


class AdapterLibrary:
    """Reads adapters for a model. opened: adapters to `fill` a pool with, which are read at once.

    Raises CheckpointError for an adapter that does not suit the model.
    """

    def __init__(self, files: ModelFiles, model: AbstractModel, opened: Mapping[str, Adapter]):
        if model.adapters is not None:
            files.must_take_adapters()
        self._reader = None if model.adapters is None else AdapterReader(family_of(files.hf), model)
        self._first = [self.load(name, adapter) for name, adapter in opened.items()]

    def load(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Raises CheckpointError for an adapter that does not suit the model."""
        return LoadedAdapter(check_adapter_name(name), adapter.path, with_room(self._reader).read(adapter))

    def fill(self, pool: AdapterPool | None) -> None:
        for adapter in self._first:
            with_room(pool).add(adapter)
        self._first.clear()


def with_room(x: T | None) -> T:
    """What a model has for adapters. Raises ConfigurationError if it has nothing."""
    if x is None:
        raise ConfigurationError("this model has no room for adapters: build LLM(..., max_adapters=8)")
    return x


def opened_adapters(adapters: Any, options: EngineOptions) -> tuple[dict[str, Adapter], EngineOptions]:
    """The adapters that `LLM` is given, opened, and the options with room for them, by default. Raises
    ConfigurationError and CheckpointError."""
    if adapters is None:
        return {}, options
    if not isinstance(adapters, Mapping):
        raise ConfigurationError(f"adapters are a mapping of names to directories, got {brief(adapters)}")
    opened = {check_adapter_name(name): Adapter.open(checked_path("adapters", path)) for name, path in adapters.items()}
    if not opened:
        return opened, options
    count = options.max_adapters or len(opened)
    rank = options.max_adapter_rank or max(adapter.rank for adapter in opened.values())
    return opened, replace(options, max_adapters=count, max_adapter_rank=rank)


def check_adapter_name(name: Any) -> str:
    """Raise ConfigurationError for what is no name of an adapter."""
    if not isinstance(name, str) or not name.strip() or name != name.strip() or not name.isprintable():
        raise ConfigurationError(f"an adapter's name is a text without blanks around it, got {brief(name)}")
    return name
