"""The collectives of a compiled module, read from its text."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from math import prod

import numpy as np
from jax.sharding import Mesh

from inferlib.planning.explain import explain
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_MEMBERS = r"\{\{[\d,{}]+\}\}|mesh\[.*?\] \{[^{}]*\}"
_COLLECTIVE = re.compile(rf"= (\(?[^=]*?\)?) ({_KINDS})\(.*?(?:replica_groups|source_target_pairs)=({_MEMBERS})")
_ARRAY = re.compile(r"(?:f32|s32|u32)\[([\d,]*)\]")
_CALL = re.compile(r"(?:condition|body|calls|to_apply|true_computation|false_computation)=%([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{%([^}]*)\}")

Collectives = Counter[tuple[str, str, int]]


def compiled_collectives(hlo: str, mesh: Mesh) -> Collectives:
    """How many collectives of each (kind, mesh axes, bytes) a run of a compiled module makes.

    XLA merges reductions and gathers that do not wait for each other into one over several arrays: every array counts;
    those of an all-to-all are its parts. The body of a loop counts as often as it runs, or once where that is not
    known, and both branches of a condition count.
    """
    groups, result, calls = _groups(mesh), {}, {}
    name = entry = ""
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
            name = head[2]
            entry = name if head[1] else entry
            result[name], calls[name] = Counter(), []
        elif match := _COLLECTIVE.search(line):
            arrays, kind, members = match.groups()
            axis, count = _over(members, kind, groups, mesh)
            sizes = [4 * prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(arrays)]
            if kind == "all-to-all":
                sizes = [sum(sizes)]
            for nbytes in sizes:
                result[name][kind, axis, nbytes * (count if kind == "reduce-scatter" else 1)] += 1
        elif re.search(r" (while|call|fusion|conditional)\(", line):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            branches = [branch for some in _BRANCHES.findall(line) for branch in some.split(", %")]
            calls[name] += [(called, int(trips[1]) if trips else 1) for called in _CALL.findall(line) + branches]

    def total(computation: str) -> Collectives:
        counts = Counter(result[computation])
        for called, times in calls[computation]:
            for key, count in total(called).items():
                counts[key] += times * count
        return counts

    return total(entry)


def _over(members: str, kind: str, groups: dict, mesh: Mesh) -> tuple[str, int]:
    """The mesh axes that a collective goes over, and how many devices: of "{{0,1},{2,3}}", or, as XLA writes it from
    jax 0.11 on, of "mesh['data'=1,'tensor'=8] {'tensor'}"."""
    if members.startswith("mesh"):
        named = re.findall(r"'(\w+)'", members.split("] ")[1])
        used = [axis for axis in mesh.axis_names if axis in named and mesh.shape[axis] > 1]
        return "+".join(used), prod(mesh.shape[axis] for axis in used)
    lists = [tuple(map(int, group.split(","))) for group in members.strip("{}").split("},{")]
    return groups[kind == "collective-permute", frozenset(map(frozenset, lists))], len(lists[0])


def _groups(mesh: Mesh) -> dict[tuple[bool, frozenset], str]:
    """The mesh axes of each way to group devices: (whether by pairs, of a ring or of numbers that differ in bits, the
    groups or pairs) -> axes."""
    result, used = {}, [axis for axis, size in mesh.shape.items() if size > 1]
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    for count in range(1, len(used) + 1):
        for axes in itertools.combinations(used, count):
            at = [mesh.axis_names.index(axis) for axis in axes]
            members = np.moveaxis(places, at, range(-count, 0)).reshape(-1, prod(mesh.shape[axis] for axis in axes))
            pairs = np.stack([members, np.roll(members, -1, axis=1)], axis=-1).reshape(-1, 2)
            size = members.shape[1]
            swaps = [pairs_by_bits(members, bits) for bits in range(1, size)] if size in (2, 4, 8) else []
            for by_pairs, rows in ((False, members), (True, pairs), *((True, swap) for swap in swaps)):
                result.setdefault((by_pairs, frozenset(frozenset(row) for row in rows.tolist())), "+".join(axes))
    return result


def pairs_by_bits(members: np.ndarray, bits: int) -> np.ndarray:
    """Of each row of devices, the pairs [., 2] whose numbers differ in these bits."""
    partner = np.arange(members.shape[1]) ^ bits
    return np.stack([members, members[:, partner]], axis=-1).reshape(-1, 2)


def promised(programs: ProgramSet, key: ProgramKey) -> Collectives:
    (step,) = explain(programs.model, programs.plan, programs.config, [key]).steps
    counts = Counter()
    for c in step.collectives:
        counts[c.kind, c.axis, c.nbytes] += c.count
    return counts


def assert_collectives_equal(programs: ProgramSet, key: ProgramKey, beside: Collectives | None = None) -> Collectives:
    """Of a program on more than one device; returns its collectives. beside: those of its output on several hosts."""
    counts = compiled_collectives(programs.get(key).as_text(), programs.config.shards.mesh)
    assert counts == promised(programs, key) + (beside or Counter()), str(key)
    return counts
