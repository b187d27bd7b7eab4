"""The results of `explain` as data: where arrays are placed, and the collectives of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inferlib.programs.keys import ProgramKey

# The purpose of permutations whose result a later layer adds: other operations run meanwhile.
LATE_SUMS = "late sums of lanes"

Kind = Literal[
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "fused all-reduce",
    "fused all-gather",
    "fused reduce-scatter",
]


@dataclass(frozen=True)
class Placement:
    """`count` arrays of one kind.

    axes: the logical axis of each dimension. mesh_axes: the mesh axes that split each dimension, None for none. shape,
    local_shape: of one whole array, and of its part on a device. nbytes: bytes of all `count` parts on a device.
    """

    name: str
    axes: tuple[str | None, ...]
    mesh_axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class Collective:
    """`count` equal collectives of a step.

    axis: mesh axes whose devices take part, joined by "+". nbytes: bytes of one whole array: the result of an
    all-reduce or an all-gather; the input of a reduce-scatter, an all-to-all or a permutation; what a ragged all-to-all
    is expected to send. flops: operations of the product that hides a fused all-gather or reduce-scatter, on a device
    (see `models.layers.ring`). A fused collective is part of a kernel, not one of XLA's. Where tokens go to experts in
    rounds, the first round counts (see `models.layers.exchange`).
    """

    kind: Kind
    purpose: str
    axis: str
    nbytes: int
    count: int = 1
    flops: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a program; of a decode program, each of its `key.steps`.

    tokens: number of tokens on each replica. expert_bytes: bytes of expert weights that a device is expected to read if
    all experts are equally likely (see `MoeSpec.read_share`).
    """

    key: ProgramKey
    tokens: int
    collectives: tuple[Collective, ...]
    expert_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its collectives, for each device."""
        return sum(c.count * c.nbytes for c in self.collectives)
