"""Block sizes of TPU kernels, searched for without a TPU, and the tables that the kernels take them from.

A candidate's figure is the modelled time of its listing (`kernels.Figures.whole`): of cycles or bytes at the memory's
bandwidth, whichever is longer, and waits for copies that nothing hides. From the sizes of the kernel's rule one is
changed at a time, as long as that helps.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from inferlib.compile.aot import CompileError
from inferlib.compile.deployment import Deployment, versions
from inferlib.compile.kernel_cases import Case, standing_for
from inferlib.compile.kernels import KernelCompiler
from inferlib.compile.program_set import planned_keys
from inferlib.compile.programs import build
from inferlib.compile.targets import Target
from inferlib.pallas_kernels.tuned_tpu import Asked, Entry, read, trying

GAIN = 0.02  # of the rule's time: blocks that gain less are not worth a line of a table
WORSE = 0.01  # most that any of several cases may lose
STEP = 0.002  # less is no gain: the search goes elsewhere
MOST = 32  # candidates
FACTORS = (Fraction(2), Fraction(1, 2), Fraction(3, 2), Fraction(2, 3))

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Refused:
    """A candidate that has no figure, and why."""

    blocks: Sizes
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search found for cases of one shape, which get the same blocks (see `tuned_tpu.Entry`).

    seconds, rule_seconds: of all cases together; gain: share of the rule's time, the mean of the cases. tried: how many
    candidates have figures.
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
    def kept(self) -> bool:
        """Whether it is worth a line of a table."""
        return self.gain > GAIN


@dataclass(frozen=True)
class Failed:
    """A case whose kernel has no figure with the blocks of its rule, so that nothing is compared with it."""

    kernel: str
    case: str
    reason: str


# ---- what to search for


def needed(deployment: Deployment) -> tuple[dict[str, dict[str, Case]], list[Failed]]:
    """Cases for the shapes in which a deployment's programs ask for blocks, by kernel; and shapes that have none.

    Its programs are traced, which takes seconds and no device.
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
            case = standing_for(kernel, wanted.shape)
            found = _name(_asked_by(case))
        except ValueError as error:
            failed.append(Failed(kernel, name, str(error)))
            continue
        if (kernel, found) in shapes:  # it need not be this one, which may be asked for before rows are padded
            cases.setdefault(kernel, {})[found] = case
        else:
            failed.append(Failed(kernel, name, f"the case that stands for it asks for {found}"))
    return cases, failed


def _asked_by(case: Case) -> Asked:
    arguments = {name: jax.ShapeDtypeStruct(*spec) for name, spec in case.arguments().items()}
    with trying(None) as asked:
        jax.eval_shape(case.function(), **arguments)
    return asked[-1]


def _name(asked: Asked) -> str:
    parts = []
    for name, value in asked.shape.items():
        if value is not None:
            parts.append(f"{name} {' x '.join(map(str, value)) if isinstance(value, Sequence) else value}")
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
) -> tuple[list[Found], list[Failed]]:
    """Search blocks for cases by kernel and name, on a device of the target; those of one shape are searched together.

    limit: most seconds for a candidate. workers: child processes that compile. told: what is compiled; done: of
    how many cases the search has ended. Raises CompileError if there is no compiler.
    """
    pool = [KernelCompiler(target, limit) for _ in range(workers)]
    idle: queue.SimpleQueue[KernelCompiler] = queue.SimpleQueue()
    for compiler in pool:
        idle.put(compiler)
    lock, found, failed, groups = threading.Lock(), [], [], {}

    def measure(kernel: str, name: str, blocks: Sizes | None):
        compiler = idle.get()
        try:
            sizes = "" if blocks is None else " ".join(f"{field}={size}" for field, size in blocks.items())
            told(f"{kernel}, {name} {sizes}")
            return compiler.trial(cases[kernel][name], blocks)
        finally:
            idle.put(compiler)

    def by_rule(at: tuple[str, str]) -> None:
        try:
            figures, asked = measure(*at, None)
        except CompileError as error:
            with lock:
                failed.append(Failed(*at, str(error)))
            done(1)
            return
        with lock:
            groups.setdefault(json.dumps([asked.kernel, asked.shape]), []).append((*at, asked, figures.whole))

    def search(group: Sequence[tuple[str, str, Asked, float]]) -> None:
        kernel, _, asked, _ = group[0]
        rule = [seconds for *_, seconds in group]
        floors = [pool[0].floor(cases[kernel][name]) for _, name, *_ in group]

        def seconds_of(blocks: Sizes) -> list[float]:
            return [measure(kernel, name, blocks)[0].whole for _, name, *_ in group]

        best, seconds, tried, refused = climb(kernel, asked.blocks, rule, floors, seconds_of)
        with lock:
            found.append(
                Found(
                    kernel,
                    tuple(name for _, name, *_ in group),
                    asked.shape,
                    asked.blocks,
                    best,
                    sum(rule),
                    sum(seconds),
                    sum(floors),
                    1 - _mean_ratio(seconds, rule),
                    tried,
                    tuple(refused),
                )
            )
        done(len(group))

    try:
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(by_rule, [(kernel, name) for kernel in cases for name in cases[kernel]]))
            list(threads.map(search, groups.values()))
    finally:
        for compiler in pool:
            compiler.close()
    order = {(kernel, name): i for i, (kernel, name) in enumerate((k, n) for k in cases for n in cases[k])}
    found.sort(key=lambda one: order[one.kernel, one.cases[0]])
    return found, failed


def blocks_of(kernel: str) -> type:
    """Its dataclass `Blocks`."""
    return importlib.import_module(f"inferlib.pallas_kernels.{kernel}_tpu").Blocks


def climb(
    kernel: str,
    rule: Sizes,
    rule_seconds: Sequence[float],
    floors: Sequence[float],
    seconds_of: Callable[[Sizes], Sequence[float]],
) -> tuple[Sizes, Sequence[float], int, list[Refused]]:
    """The best blocks, the seconds of each case with them, how many others have figures, and those that were refused.

    rule_seconds, floors: of each case, with the rule's blocks and at best. seconds_of: of each case with some blocks;
    raises CompileError where they cannot be compiled. Ends where no neighbour gains, all cases are at their floors or
    MOST candidates were tried.
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
                    found = seconds_of(blocks)
                except CompileError as error:
                    refused.append(Refused(blocks, str(error)))
                    break
                loses = any(new > (1 + WORSE) * old for new, old in zip(found, rule_seconds, strict=True))
                if loses or _mean_ratio(found, rule_seconds) > _mean_ratio(seconds, rule_seconds) - STEP:
                    break
                best, seconds, improved = blocks, found, True
    return best, seconds, len(seen) - 1 - len(refused), refused


def _mean_ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(a / b for a, b in zip(some, others, strict=True)) / len(some)


def _moves(blocks: Sizes) -> Iterator[Callable[[Sizes], Sizes]]:
    """To neighbours: one size or all of them times a factor, a buffer more or less."""
    sizes = [name for name in blocks if name != "buffers"]

    def scaled(names: Sequence[str], factor: Fraction) -> Callable[[Sizes], Sizes]:
        return lambda at: {**at, **{name: int(at[name] * factor) for name in names}}

    for name in sizes:
        yield from (scaled([name], factor) for factor in FACTORS)
    if len(sizes) > 1:
        yield from (scaled(sizes, factor) for factor in FACTORS[:2])
    if "buffers" in blocks:
        yield from (lambda at, n=n: {**at, "buffers": at["buffers"] + n} for n in (1, -1))


# ---- tables


def compiler_of(target: Target) -> str:
    """Name and version."""
    return f"libtpu {versions(target)['libtpu']}"


def updated(entries: Iterable[Entry], found: Iterable[Found], compiler: str) -> list[Entry]:
    """A table's entries, with what was searched for in place of what they say of it."""
    table = {entry.key: entry for entry in entries}
    for one in found:
        times = (round(1e6 * seconds, 3) for seconds in (one.seconds, one.rule_seconds))
        entry = Entry(one.kernel, one.shape, one.best, *times, compiler)
        table.pop(entry.key, None)
        if one.kept:
            table[entry.key] = entry
    return [table[key] for key in sorted(table)]


def write(file: Path, entries: Iterable[Entry]) -> None:
    """Whole or not at all."""
    text = "[\n" + ",\n".join(json.dumps(asdict(entry)) for entry in entries) + "\n]\n"
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(exist_ok=True)
        staged.write_text(text, encoding="utf-8")
        staged.replace(file)
    finally:
        staged.unlink(missing_ok=True)


def update(file: Path, found: Sequence[Found], compiler: str) -> bool:
    """Bring what was found to a table; whether that changed it."""
    old = read(file)
    new = updated(old, found, compiler)
    if new == old:
        return False
    write(file, new)
    return True
