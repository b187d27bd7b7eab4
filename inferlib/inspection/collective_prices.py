"""How long each collective of a compiled module takes, by the cost model of `inferlib.planning.network`.

An all-reduce takes the algorithm that the compiler chose, as its text and the bytes that its listing sends say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from inferlib.inspection.hlo import Computation, Instruction, Module
from inferlib.inspection.prices import Price
from inferlib.planning.all_reduce import Algorithm
from inferlib.planning.collectives import Collective
from inferlib.planning.network import ATTAINED, Network

Sent = Callable[[Computation, Instruction], int | None]


class CollectivePrices:
    """Prices of the collectives of a module on a mesh. mesh: size of each axis, in the order of device numbers. sent:
    bytes that a device sends by the listing of a collective, None if there is none."""

    def __init__(self, module: Module, network: Network, mesh: Mapping[str, int], sent: Sent):
        self._module, self._network, self._mesh, self._sent = module, network, mesh, sent

    def price(self, computation: Computation, i: Instruction) -> Price:
        kind: Any = i.collective
        axis, nbytes = "+".join(axes_of(i, self._mesh)), self._module.collective_bytes(computation, i)
        if not axis:  # of one device
            return Price(kind, "model", 0.0, 0.0)
        algorithm = self._algorithm(computation, i, axis, nbytes) if kind == "all-reduce" else None
        moved = Collective("collective-permute" if kind == "collective-broadcast" else kind, "", axis, nbytes)
        seconds = self._network.seconds(moved, ATTAINED, algorithm)
        return Price(f"{kind}, {algorithm}" if algorithm else kind, "model", seconds, 0.0)

    def _algorithm(self, computation: Computation, i: Instruction, axis: str, nbytes: int) -> Algorithm:
        """The algorithm that the program has; the model's choice if the program does not say."""
        if '"strategy":"UniDirection' in i.rest:
            return "one way"
        sent = self._sent(computation, i)
        if not sent or '"strategy"' not in i.rest:  # a few numbers, without a strategy, are exchanged
            return self._network.algorithm(axis, nbytes)
        return self._network.sends(axis, sent / nbytes)


def axes_of(i: Instruction, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes whose devices take part in a collective, read off the first group that its text names."""
    sizes, devices = tuple(mesh.values()), prod(mesh.values())
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", i.rest):
        group = np.array([int(pairs[1]), int(pairs[2])])
    elif named := re.search(r"replica_groups=mesh\[[^\]]*\] ?\{([^}]*)\}", i.rest):  # since jax 0.12
        names = re.findall(r"'([^']+)'", named[1])
        return tuple(axis for axis, size in mesh.items() if axis in names and size > 1)
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
