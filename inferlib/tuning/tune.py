"""Searches block sizes of TPU kernels without a TPU, and writes the tables that the kernels read them from.

The time of a candidate is modelled from its listing (`kernels.Figures.whole`): cycles, or bytes at the memory's
bandwidth if they take longer, and waits for copies that nothing hides. The search starts from the sizes of the kernel's
rule, and changes one at a time as long as that helps.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from inferlib.aot.compile import CompileError
from inferlib.pallas_kernels.tuned_tpu import Asked, Entry, read, trying
from inferlib.programs.deployment import Deployment, versions
from inferlib.programs.program import build
from inferlib.programs.program_set import planned_keys
from inferlib.targets import Target
from inferlib.tuning.kernel_cases import Case, standing_for
from inferlib.tuning.kernel_cases.collective_matmul import CollectiveMatmul
from inferlib.tuning.kernels import KernelCompiler

GAIN = 0.02  # share of the rule's time: a smaller gain is not worth a line of a table
WORSE = 0.01  # the most that any of several cases may lose
STEP = 0.002  # a smaller gain counts as none, and the search turns elsewhere
MOST = 32  # candidates of a search
FACTORS = (Fraction(2), Fraction(1, 2), Fraction(3, 2), Fraction(2, 3))

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Refused:
    """A candidate that could not be compiled, and the reason."""

    blocks: Sizes
    reason: str


@dataclass(frozen=True)
class Result:
    """The result of a search for cases of one shape, which get the same blocks (see `tuned_tpu.Entry`).

    seconds, rule_seconds: all cases together, with the best blocks and with the rule's. gain: share of the rule's time,
    mean of the cases. tried: number of candidates that compiled.
    """

    kernel: str
    cases: tuple[str, ...]
    shape: Mapping[str, Any]
    rule: Sizes
    best: Sizes
    rule_seconds: float
    seconds: float
    floor_seconds: float
    gain: float
    tried: int
    refused: tuple[Refused, ...]

    @property
    def pays(self) -> bool:
        """True if the gain is worth an entry in a table."""
        return self.gain > GAIN


@dataclass(frozen=True)
class Failed:
    """A case that does not compile with the rule's blocks, so that there is nothing to compare with."""

    kernel: str
    case: str
    reason: str


# ---- what to search for


def needed(deployment: Deployment) -> tuple[dict[str, dict[str, Case]], list[Failed]]:
    """Cases for the shapes in which a deployment's programs ask for blocks, by kernel, and the shapes without a case.

    Traces the programs, which takes seconds and no device.
    """
    programs = deployment.planned()
    with trying(None) as asked:
        for key in planned_keys(programs.config, ("greedy",)):
            if not key.detail:
                function = build(programs.model, programs.plan, programs.config, key)
                jax.eval_shape(function, *programs.inputs(key))
    shapes = {(x.kernel, _name(x)): x for x in asked}
    cases: dict[str, dict[str, Case]] = {}
    failed = []
    for (kernel, name), wanted in shapes.items():
        try:
            some = standing_for(kernel, wanted.shape, deployment.slice.devices)
            standing = {_name(_asked_by(case)) for case in some.values()}
        except ValueError as error:
            failed.append(Failed(kernel, name, str(error)))
            continue
        if standing == {name}:
            cases.setdefault(kernel, {}).update({f"{name}: {data}": case for data, case in some.items()})
        elif any((kernel, other) not in shapes for other in standing):  # otherwise the rows are not padded yet
            failed.append(Failed(kernel, name, f"the cases that stand for it ask for {' and '.join(standing)}"))
    return cases, failed


def _asked_by(case: Case) -> Asked:
    arguments = {name: jax.ShapeDtypeStruct(*spec) for name, spec in case.arguments().items()}
    if isinstance(case, CollectiveMatmul):
        function = case.on(AbstractMesh((case.devices,), (case.axis,), axis_types=(AxisType.Auto,)))
    else:
        function = case.function()
    with trying(None) as asked:
        jax.eval_shape(function, **arguments)
    return asked[-1]


def _name(asked: Asked) -> str:
    parts = []
    for name, value in asked.shape.items():
        if value is not None:
            arrays = value.values() if isinstance(value, Mapping) else [value]
            texts = (" x ".join(map(str, a)) if isinstance(a, Sequence) else str(a) for a in arrays)
            parts.append(f"{name} {' + '.join(texts)}")
    return ", ".join(parts)


# ---- the search


def tune(
    target: Target,
    cases: Mapping[str, Mapping[str, Case]],
    *,
    limit: float,
    workers: int = 2,
    told: Callable[[str], None] = lambda text: None,
    done: Callable[[int], None] = lambda cases: None,
) -> tuple[list[Result], list[Failed]]:
    """Search blocks for cases, by kernel and name, on a device of the target. Cases of one shape are searched together,
    and with those that stand for it (see `standing_for`).

    limit: most seconds for a candidate. workers: number of child processes that compile. told: called with what is
    about to be compiled. done: called with the number of cases whose search has ended. Raises CompileError if there is
    no compiler.
    """
    search = _Search(target, limit, workers, told)
    every = [(kernel, name, case) for kernel, named in cases.items() for name, case in named.items()]

    def run(members: list[_Member]) -> Result:
        result = search.run(members)
        done(len(members))
        return result

    try:
        with ThreadPoolExecutor(workers) as threads:
            members = list(threads.map(lambda one: search.member(*one), every))
            done(members.count(None))
            groups: dict[str, list[_Member]] = {}
            for one in filter(None, members):
                groups.setdefault(json.dumps([one.asked.kernel, one.asked.shape]), []).append(one)
            return list(threads.map(run, groups.values())), search.failed
    finally:
        search.close()


@dataclass(frozen=True)
class _Member:
    """A case of a search. seconds: its time with the blocks of the rule. asked: what its kernel asked for."""

    name: str
    case: Case
    seconds: float
    asked: Asked


class _Search:
    """Compilers that threads take in turn, and the cases that failed with the blocks of the rule."""

    def __init__(self, target: Target, limit: float, workers: int, told: Callable[[str], None]):
        self.target, self.told = target, told
        self.failed: list[Failed] = []
        self._pool = [KernelCompiler(target, limit) for _ in range(workers)]
        self._idle: queue.SimpleQueue[KernelCompiler] = queue.SimpleQueue()
        for compiler in self._pool:
            self._idle.put(compiler)

    def close(self) -> None:
        for compiler in self._pool:
            compiler.close()

    def member(self, kernel: str, name: str, case: Case) -> _Member | None:
        """A case with its figures by the rule, None if it failed."""
        try:
            return _Member(name, case, *self._measured(name, kernel, case, None))
        except CompileError as error:
            self.failed.append(Failed(kernel, name, str(error)))
            return None

    def run(self, members: list[_Member]) -> Result:
        """Search blocks for cases of one shape."""
        first = members[0]
        kernel, shape, rule = first.asked.kernel, first.asked.shape, first.asked.blocks
        others = [self.member(kernel, name, case) for name, case in _standing_beside(members, self.target).items()]
        everyone = [*members, *(one for one in others if one and one.asked.shape == shape)]
        rule_seconds = [one.seconds for one in everyone]
        floors = [self._pool[0].floor(one.case) for one in everyone]

        def seconds_of(number: int, blocks: Sizes) -> float:
            return self._measured(everyone[number].name, kernel, everyone[number].case, blocks)[0]

        best, seconds, tried, refused = climb(kernel, rule, rule_seconds, floors, seconds_of)
        names, gain = tuple(one.name for one in everyone), 1 - _mean_ratio(seconds, rule_seconds)
        sums = sum(rule_seconds), sum(seconds), sum(floors)
        return Result(kernel, names, shape, rule, best, *sums, gain, tried, tuple(refused))

    def _measured(self, name: str, kernel: str, case: Case, blocks: Sizes | None) -> tuple[float, Asked]:
        """The seconds of a case with these blocks (None: the rule's), and the kernel's request."""
        compiler = self._idle.get()
        try:
            self.told(f"{kernel}, {name} {sizes_text(blocks or {})}")
            figures, asked = compiler.trial(case, blocks)
            return figures.whole, asked
        finally:
            self._idle.put(compiler)


def _standing_beside(members: Sequence[_Member], target: Target) -> dict[str, Case]:
    """The cases that stand for the members' shape and are not members; none for types that no case has."""
    asked = members[0].asked
    try:
        standing = standing_for(asked.kernel, asked.shape, target.devices)
    except ValueError:
        return {}
    return {name: case for name, case in standing.items() if all(case != one.case for one in members)}


def sizes_text(blocks: Sizes, between: str = " ") -> str:
    return between.join(f"{name}={size}" for name, size in blocks.items())


def blocks_of(kernel: str) -> type:
    """The kernel's dataclass `Blocks`."""
    return importlib.import_module(f"inferlib.pallas_kernels.{kernel}_tpu").Blocks


def climb(
    kernel: str,
    rule: Sizes,
    rule_seconds: Sequence[float],
    floors: Sequence[float],
    seconds_of: Callable[[int, Sizes], float],
) -> tuple[Sizes, Sequence[float], int, list[Refused]]:
    """The best blocks, each case's seconds with them, the number of other blocks that compiled, and the refused ones.

    rule_seconds, floors: each case's seconds with the rule's blocks, and at best. seconds_of: returns a case's seconds,
    by its number, with some blocks; raises CompileError if they do not compile. The search ends if no neighbour gains,
    if all cases are at their floors, or after MOST candidates.
    """
    made = blocks_of(kernel)
    best, seconds, seen, refused = rule, rule_seconds, {made(**rule)}, []
    improved = 1 - _mean_ratio(floors, rule_seconds) > GAIN
    while improved:
        improved = False
        for move in _moves(rule):
            while _mean_ratio(floors, seconds) < 1 - STEP and len(seen) <= MOST:
                try:
                    blocks = move(best)
                    valid = made(**blocks)
                except ValueError:
                    break
                if valid in seen:
                    break
                seen.add(valid)
                try:
                    trial = _seconds_if_none_loses(blocks, rule_seconds, seconds_of)
                except CompileError as error:
                    refused.append(Refused(blocks, str(error)))
                    break
                if not trial or _mean_ratio(trial, rule_seconds) > _mean_ratio(seconds, rule_seconds) - STEP:
                    break
                best, seconds, improved = blocks, trial, True
    return best, seconds, len(seen) - 1 - len(refused), refused


def _seconds_if_none_loses(
    blocks: Sizes, rule_seconds: Sequence[float], seconds_of: Callable[[int, Sizes], float]
) -> list[float]:
    """The seconds of all cases, or [] if one takes longer than it may."""
    seconds = []
    for number, rule in enumerate(rule_seconds):
        seconds.append(seconds_of(number, blocks))
        if seconds[-1] > (1 + WORSE) * rule:
            return []
    return seconds


def _mean_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return sum(a / b for a, b in zip(values, others, strict=True)) / len(values)


def _moves(blocks: Sizes) -> Iterator[Callable[[Sizes], Sizes]]:
    """Moves to neighbours: one size or all sizes times a factor, or one buffer more or less. A move raises ValueError
    if there is no such neighbour."""
    sizes = [name for name, size in blocks.items() if name != "buffers" and not isinstance(size, bool)]

    def scaled(names: Sequence[str], factor: Fraction) -> Callable[[Sizes], Sizes]:
        def move(at: Sizes) -> Sizes:
            moved = {name: at[name] * factor for name in names}
            if any(size.denominator > 1 for size in moved.values()):
                raise ValueError("no whole sizes")
            return {**at, **{name: int(size) for name, size in moved.items()}}

        return move

    for name in sizes:
        yield from (scaled([name], factor) for factor in FACTORS)
    if len(sizes) > 1:
        yield from (scaled(sizes, factor) for factor in FACTORS[:2])
    if "buffers" in blocks:
        yield from (lambda at, n=n: {**at, "buffers": at["buffers"] + n} for n in (1, -1))


# ---- tables


def compiler_of(target: Target) -> str:
    """The compiler's name and version."""
    return f"libtpu {versions(target)['libtpu']}"


def updated(entries: Iterable[Entry], results: Iterable[Result], compiler: str) -> list[Entry]:
    """The entries of a table, with those of the shapes that were searched replaced."""
    table = {entry.key: entry for entry in entries}
    for one in results:
        seconds, rule_seconds = (round(1e6 * seconds, 3) for seconds in (one.seconds, one.rule_seconds))
        entry = Entry(one.kernel, one.shape, one.best, seconds, rule_seconds, round(one.gain, 3), compiler)
        table.pop(entry.key, None)
        if one.pays:
            table[entry.key] = entry
    return [table[key] for key in sorted(table)]


def write(file: Path, entries: Iterable[Entry]) -> None:
    """Write a table, whole or not at all."""
    text = "[\n" + ",\n".join(json.dumps(asdict(entry)) for entry in entries) + "\n]\n"
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        staged.write_text(text, encoding="utf-8")
        staged.replace(file)
    finally:
        staged.unlink(missing_ok=True)


def update(file: Path, results: Sequence[Result], compiler: str) -> bool:
    """Bring results to a table; True if that changed it."""
    old = read(file)
    new = updated(old, results, compiler)
    if new == old:
        return False
    write(file, new)
    return True
