"""Which weights adapters change, and the arrays that have the factors of several adapters (LoRA, Hu et al., 2021,
arXiv:2106.09685).

Letters: S slots, R rank; *I and *O the dimensions that a product with the weight sums over, and those of its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from inferlib.models.config import AttentionSpec, Mixer, MlaSpec
from inferlib.models.recurrent import Recurrent
from inferlib.sharding import axes

MOST_SLOTS, MOST_RANK = 1024, 512


@dataclass(frozen=True)
class AdapterSlots:
    """How many adapters are on the devices at a time, and the highest rank that they may have. Slot 0 is no adapter,
    and takes no memory.

    parts: the weights that they change, or how their names begin, see `part_names`; empty: all that adapters can.
    """

    count: int
    rank: int
    parts: tuple[str, ...] = ()


class FactorArray(NamedTuple):
    """Shape and logical axes of an array of factors."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def of_slot(shape: tuple[int, ...], names: tuple[str | None, ...]) -> FactorArray:
    """One slot of an array of factors."""
    dim = names.index(axes.ADAPTERS)
    return FactorArray(shape[:dim] + shape[dim + 1 :], names[:dim] + names[dim + 1 :])


# Parts of layers whose results, or whose inputs, are laid out like the checkpoint's rows or columns.
_BY_RESULT = ("attn.qkv", "attn.v", "attn.gate", "mlp.gate_up", "mlp.shared.gate_up")
_BY_INPUT = ("attn.o", "mlp.down", "mlp.shared.down")
_LATENT = ("attn.down", "attn.q", "attn.o")


@dataclass(frozen=True)
class Adaptable:
    """How adapters change a layer's weight [*I, *O], whose product is x [T, *I] times it.

    inputs: number of dimensions of *I. apart: the first dimension of *O counts parts, gate and up, each of which has
    factors of its own. pieces: tensors of the checkpoint, each with factors of its own, in one array of factors.
    by_input: the checkpoint's columns are laid out in *I; else its rows are in *O.
    """

    inputs: int
    apart: bool
    pieces: int
    by_input: bool

    @staticmethod
    def of(part: str, names: tuple[str | None, ...], contracting: tuple[int, ...], mixer: Mixer) -> Adaptable | None:
        """part: the weight's name in its layer. names: its logical axes; contracting: those that products sum over, the
        first ones. None: adapters do not change it."""
        if not contracting or part not in _parts_of(mixer):
            return None
        pieces = 1
        if part == "attn.qkv" and isinstance(mixer, AttentionSpec):
            pieces = 1 + mixer.fused_heads
        if part == "attn.down" and isinstance(mixer, MlaSpec):
            pieces = 1 + bool(mixer.q_rank)
        return Adaptable(len(contracting), axes.GATE_UP in names, pieces, part in _BY_INPUT)

    def factors(
        self, slots: AdapterSlots, shape: tuple[int, ...], names: tuple[str | None, ...]
    ) -> tuple[FactorArray, FactorArray]:
        """The arrays A [*I, P, S, R] and B [P, S, R, *O] of a weight of this shape. P counts the parts, and *O is
        without them; R is the rank for each piece. They are cut over devices as the weight is."""
        outer, parts = self.inputs + self.apart, shape[self.inputs] if self.apart else 1
        ranks = FactorArray((parts, slots.count, self.pieces * slots.rank), (None, axes.ADAPTERS, None))
        a = FactorArray((*shape[: self.inputs], *ranks.shape), (*names[: self.inputs], *ranks.axes))
        return a, FactorArray((*ranks.shape, *shape[outer:]), (*ranks.axes, *names[outer:]))


def _parts_of(mixer: Mixer) -> tuple[str, ...]:
    feeds = tuple(part for part in (*_BY_RESULT, *_BY_INPUT) if part.startswith("mlp."))
    if isinstance(mixer, Recurrent):
        return feeds
    return feeds + (_LATENT if isinstance(mixer, MlaSpec) else (*_BY_RESULT, *_BY_INPUT))
