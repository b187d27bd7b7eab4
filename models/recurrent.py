"""What the library asks of a recurrent mixer: a mixer that keeps a state of fixed size for each row, however long the
row.

Each kind is one module of `models.mixers`. `ModelConfig` takes its spec where attention stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

from flax import nnx

from inferlib.models.heads import HeadLayout, grouped_heads
from inferlib.models.pieces import Assembly


class StateArray(NamedTuple):
    """One array of a row's state, in float32 (`wide`) or the model's dtype. axes: logical names of the dimensions."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    wide: bool


class HeadCollective(NamedTuple):
    """A collective over the devices that split a mixer's heads. The sum that ends every mixer is not listed.

    numbers: float32 numbers of each token in its result.
    """

    kind: Literal["all-reduce", "all-gather"]
    purpose: str
    numbers: int


class Recurrent:
    """The base class of the specs of recurrent mixers: frozen dataclasses of sizes that tell everything about a mixer.

    A row's tokens run through the mixer in order, from a state of zeros. heads: number of value heads; kv_heads: number
    of key heads, each shared by equally many value heads; head_dim, value_dim: sizes of keys and values.
    """

    title: ClassVar[str]
    absent: ClassVar[bool] = False  # a layer without a mixer, see `mixers.no_mixer`
    rope: ClassVar[None] = None
    reach: ClassVar[None] = None
    cache_of: ClassVar[None] = None
    o_bias: ClassVar[bool] = False

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.heads // self.kv_heads

    @property
    def cache_heads(self) -> int:
        return self.heads

    def head_layout(self, shards: int) -> HeadLayout:
        """The heads as `shards` devices store them: value heads stand for queries, key heads for key/value heads."""
        return grouped_heads(self.heads, self.kv_heads, shards)

    def cache_heads_in(self, layout: HeadLayout) -> int:
        """Heads that have a state, as laid out."""
        return layout.groups * layout.queries

    # ---- what each mixer says

    def states(self, layout: HeadLayout) -> tuple[StateArray, ...]:
        """The arrays of a row's state."""
        raise NotImplementedError

    def build(self, layout: HeadLayout, dim: int, dtype) -> nnx.Module:
        """The layer of a model of width `dim`. Called with x [T, dim], a `StepContext` and a `LayerCache` of `states`,
        it returns this device's part of the sum over heads [T, dim], and the cache. Its method `rule` is a
        `mixers.states.Rule`, by which it runs all tokens."""
        raise NotImplementedError

    def assemblies(self, names: Mapping[str, str], dim: int) -> dict[str, Assembly]:
        """How checkpoint tensors become each of the layer's parameters. names: the family's map of parts to modules,
        prefix included."""
        raise NotImplementedError

    @property
    def token_products(self) -> int:
        """Multiplications for one token and head, without those by weights."""
        raise NotImplementedError

    def collectives(self, layout: HeadLayout, devices: int) -> tuple[HeadCollective, ...]:
        """The collectives of one step, if `devices` devices split the heads."""
        return ()

    def summary(self) -> str:
        """What `inferlib info` shows."""
        raise NotImplementedError


def keeps_state(mixer: object) -> bool:
    """True for a recurrent mixer, which keeps a state of each row."""
    return isinstance(mixer, Recurrent) and not mixer.absent


def is_absent(mixer: object) -> bool:
    """True for what stands in a mixer's place in a layer that is a feed-forward alone."""
    return isinstance(mixer, Recurrent) and mixer.absent
