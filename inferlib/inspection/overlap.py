"""Which weights a compiled step fetches while a collective runs.

XLA copies weights to on-chip memory ahead of the products that read them (`copy-start` and `slice-start`, waited for by
`copy-done` and `slice-done`). A copy that starts before a collective and is waited for behind it hides the collective:
the step would have to wait for these bytes anyway. The text of a scheduled module has operations in the order in which
they run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from inferlib.inspection.hlo import ON_CHIP, Computation, Instruction, Module
from inferlib.pallas_kernels.fetch_ahead_tpu import FINISH, START

# Arguments of the program that each value is, by index within a tuple.
Origins = dict[str, dict[tuple[int, ...], int]]
_SAME = ("bitcast", "while", "opt-barrier")
_COPIES = ("copy-start", "slice-start")
_CALLS = ("call", "call-start", "async-start")


@dataclass(frozen=True)
class Overlap:
    """`count` collectives of a step that are equal. nbytes: of one whole array, as in `CollectiveCall`. ahead: bytes of
    weights that are on their way to on-chip memory while one of them runs."""

    kind: str
    nbytes: int
    ahead: int
    count: int


def overlaps(module: Module, weights: int) -> tuple[Overlap, ...]:
    """The collectives of a step of a scheduled module, whose first `weights` arguments are the weights."""
    counts: Counter[tuple[str, int, int]] = Counter()
    arguments: Origins = {p.name: {(): int(p.content)} for p in module.entry.parameters}
    _walk(module, module.entry, 1, arguments, weights, counts)
    return tuple(Overlap(*key, count) for key, count in sorted(counts.items()))


def _walk(
    module: Module, computation: Computation, times: int, origins: Origins, weights: int, counts: Counter
) -> None:
    """Count the collectives of `times` runs of a computation. This call extends `origins`."""
    places = {name: at for at, name in enumerate(computation.instructions)}
    for i in computation.instructions.values():
        _track(i, origins)
        if i.op == "while":
            body, _, trips = module.loop(i, times)
            inside = {body.parameters[0].name: dict(origins.get(i.operands[0], {}))}
            _walk(module, body, times * trips, inside, weights, counts)
    copies = list(_copies(computation, places, origins, weights))
    for i, kind, nbytes in _collectives(module, computation):
        start = places[i.name]
        end = max(_ends(computation, i, places), default=start)
        ahead = sum(size for first, last, size in copies if first < end and last > start)
        counts[kind, nbytes, ahead] += times


def _collectives(module: Module, computation: Computation) -> Iterator[tuple[Instruction, str, int]]:
    """The instructions that are or start collectives, with their kind and bytes."""
    for i in computation.instructions.values():
        if i.collective:
            yield i, i.collective, module.collective_bytes(computation, i)
        elif called := module.computations.get(i.called("to_apply") or i.called("calls") if i.op in _CALLS else ""):
            for inner in called.instructions.values():
                if inner.collective:
                    yield i, inner.collective, module.collective_bytes(called, inner)


def _copies(
    computation: Computation, places: Mapping[str, int], origins: Origins, weights: int
) -> Iterator[tuple[int, int, int]]:
    """For each copy of weights to on-chip memory: the place where it starts, the place where it is waited for, and its
    bytes."""
    for i in computation.instructions.values():
        if i.kernel == START:
            yield from _fetches(computation, i, places)
        elif i.op in _COPIES and origins.get(i.operands[0], {}).get((), weights) < weights:
            size = sum(shape.nbytes for shape in i.shapes if shape.space == ON_CHIP)
            if size:
                yield places[i.name], max(_ends(computation, i, places)), size


def _fetches(computation: Computation, i: Instruction, places: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """The copies that a kernel starts, which are of weights, as `_copies` yields them."""
    ends = [(places[j.name], j.shapes) for j in computation.instructions.values() if j.kernel == FINISH]
    for shape in i.shapes:
        if shape.space == ON_CHIP:
            waits = (place for place, shapes in ends if place > places[i.name] and shape in shapes)
            yield places[i.name], next(waits, len(places)), shape.nbytes


def _ends(computation: Computation, i: Instruction, places: Mapping[str, int]) -> list[int]:
    """The places where an asynchronous instruction is waited for."""
    return [places[user.name] for user in computation.users.get(i.name, ()) if user.op.endswith("-done")]


def _track(i: Instruction, origins: Origins) -> None:
    """Follow the program's arguments through an instruction that gives them other names."""
    if i.op == "tuple":
        origins[i.name] = {(n, *path): a for n, o in enumerate(i.operands) for path, a in origins.get(o, {}).items()}
    elif i.op == "get-tuple-element":
        index = int(re.findall(r"\bindex=(\d+)", i.rest)[0])
        whole = origins.get(i.operands[0], {})
        origins[i.name] = {path[1:]: a for path, a in whole.items() if path[:1] == (index,)}
    elif i.op in _SAME:
        origins[i.name] = dict(origins.get(i.operands[0], {}))
