"""How long each collective of a compiled module takes, by the cost model of `inferlib.planning.network`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from inferlib.inspection.hlo import Computation, Instruction, Module
from inferlib.planning.collectives import Collective
from inferlib.planning.network import Efficiency, Network


class CollectivePrices:
    """Seconds of the collectives of a module on a mesh. mesh: size of each axis, in the order of device numbers."""

    def __init__(self, module: Module, network: Network, mesh: Mapping[str, int], efficiency: Efficiency):
        self._module, self._network, self._mesh, self._efficiency = module, network, mesh, efficiency

    def seconds(self, computation: Computation, i: Instruction) -> float:
        axis = "+".join(axes_of(i, self._mesh))
        if not axis or not i.collective:
            return 0.0
        kind: str = "collective-permute" if i.collective == "collective-broadcast" else i.collective
        nbytes = self._module.collective_bytes(computation, i)
        return self._network.seconds(Collective(kind, "", axis, nbytes), self._efficiency)  # type: ignore[arg-type]


def axes_of(i: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes whose devices take part in a collective, read off the first group that its text names."""
    sizes, devices = tuple(mesh.values()), prod(mesh.values())
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", i.rest):
        group = np.array([int(pairs[1]), int(pairs[2])])
    elif groups := re.search(r"replica_groups=\{\{([\d,]+)\}", i.rest):
        group = np.array([int(x) for x in groups[1].split(",")])
    elif iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", i.rest):
        shape = [int(x) for x in iota[3].split(",")]
        order = [int(x) for x in iota[4].split(",")] if iota[4] else list(range(len(shape)))
        numbers = np.arange(prod(shape)).reshape(shape).transpose(order)
        group = numbers.reshape(int(iota[1]), int(iota[2]))[0]
    else:
        group = np.arange(devices)
    places = np.stack(np.unravel_index(group, sizes))
    return tuple(axis for axis, along in zip(mesh, places, strict=True) if (along != along[0]).any())
