"""Reads XLA's text of compiled modules: bytes moved, collectives, kernels and copies of each step.

XLA's `cost_analysis` counts the body of a loop once; here it counts as often as it runs. The loop over the steps of a
decode program counts once, so figures are those of one step. If only the device knows the number of trips, as with
tokens that go to experts in rounds, a loop counts as often as `ops.loops.expected_trips` says for balanced load.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Instructions that move no bytes: new names for arrays, and control flow, whose computations are counted instead.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "copy-done", "call-start", "call-done"),
    *("async-start", "async-update", "async-done", "slice-done", *(f"{kind}-done" for kind in _COLLECTIVES)),
}
_MOVES = {"copy", "copy-start", "transpose", "reshape", "slice", "dynamic-slice", "pad", "concatenate", "reverse"}
_PLUMBING = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}


ON_CHIP = 1  # the memory space of arrays on chip; higher ones are of scalars and semaphores


@dataclass(frozen=True)
class Shape:
    """A compiled array's shape. order: dimensions from minor to major. space: 0 is HBM, higher numbers are on chip."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        digits = re.search(r"\d+", self.dtype)
        return _BITS[self.dtype] if self.dtype in _BITS else int(digits[0]) if digits else 0

    @property
    def nbytes(self) -> int:
        return self.elements * self.bits // 8

    @property
    def physical_bytes(self) -> int:
        """Bytes with the padding to whole tiles."""
        sizes = [self.dims[d] for d in self.order]
        for i, size in enumerate(reversed(self.tile)):
            if i < len(sizes):
                sizes[i] = -(-sizes[i] // size) * size
        return prod(sizes or self.dims) * self.bits // 8


def read_shapes(text: str) -> tuple[Shape, ...]:
    """The shapes in the text of a type; of a tuple, all in order."""
    shapes = []
    for dtype, dims, order, rest in _SHAPE.findall(re.sub(r"/\*.*?\*/", "", text)):
        tile = re.match(r"T\(([\d,]*)\)", rest)
        space = re.search(r"S\((\d+)\)", rest)
        shapes.append(
            Shape(dtype, _ints(dims), _ints(order), _ints(tile[1]) if tile else (), int(space[1] if space else 0))
        )
    return tuple(shapes)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


@dataclass(frozen=True)
class Instruction:
    """One instruction. shapes: of its result, flattened. content: text in parentheses. rest: text behind them."""

    name: str
    op: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    content: str
    rest: str
    root: bool

    def called(self, attribute: str) -> str:
        """The computation that an attribute such as "body" names, "" if there is none."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def collective(self) -> str | None:
        """The kind of collective that the instruction is or starts, if any."""
        kind = self.op.removesuffix("-start")
        return kind if kind in _COLLECTIVES else None

    @property
    def kernel(self) -> str | None:
        """The name of the kernel that it calls, if it calls one."""
        return re.sub(r"[.\d]+$", "", self.name) if self.op == "custom-call" else None

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of its cycles, if there is one."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(match[1]) if match and int(match[1]) < 1 << 60 else None

    @property
    def expected_trips(self) -> int | None:
        """The expected trips of a loop of unknown length, if it names them (see `inferlib.ops.loops`)."""
        match = re.search(r'op_name="[^"]*\b(?:expected|most)_trips=(\d+)/while"', self.rest)
        return int(match[1]) if match and "known_trip_count" not in self.rest else None

    @property
    def declared_cost(self) -> tuple[int, int, int] | None:
        """Bytes, FLOPs and sent bytes of a kernel that declares its cost."""
        if self.op != "custom-call":
            return None
        match = re.search(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"([^}]*)', self.rest)
        sent = match and re.search(r'"remote_bytes_transferred":"(\d+)"', match[3])
        return match and (int(match[2]), int(match[1]), int(sent[1]) if sent else 0)


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        parameters = (i for i in self.instructions.values() if i.op == "parameter")
        return tuple(sorted(parameters, key=lambda i: int(i.content)))

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in set(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(of) for name, of in users.items()}


@dataclass(frozen=True)
class CollectiveCall:
    """`count` equal collectives of a step. nbytes: of one whole array, as in `planning.collectives.Collective`."""

    kind: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Copy:
    """`count` times in a step, `nbytes` bytes of argument number `argument` are copied or change their layout."""

    argument: int
    instruction: str
    nbytes: int
    count: int


@dataclass(frozen=True)
class Kernel:
    """A kernel of this library that a step calls `count` times.

    nbytes, flops, sent: what one call declares: bytes to and from HBM (arrays on chip do not count), operations, and
    bytes sent to other devices.
    """

    name: str
    nbytes: int
    flops: int
    sent: int
    count: int


@dataclass
class StepCost:
    """The cost of one step on one device.

    bytes: to and from HBM. balanced: number of loops whose trips are those of balanced load.
    """

    bytes: int = 0
    balanced: int = 0
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)  # (kind, nbytes) -> count
    copies: Counter[tuple[int, str, int]] = field(default_factory=Counter)  # (argument, instruction, nbytes) -> count
    kernels: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)  # (name, nbytes, flops, sent) -> count


class Module:
    """A compiled module, parsed from `compiled.as_text()`.

    counted: trips of its loop over steps, which lies in no other loop; 1 if they are not known when compiling.
    """

    def __init__(self, text: str, counted: int = 1):
        self.counted = counted
        self.computations: dict[str, Computation] = {}
        self.entry = _parse(text, self.computations)

    @cached_property
    def cost(self) -> StepCost:
        cost = StepCost()
        arguments = {p.name: {(): int(p.content)} for p in self.entry.parameters}
        self._add(self.entry, 1, arguments, cost)
        return cost

    @property
    def collectives(self) -> tuple[CollectiveCall, ...]:
        return tuple(CollectiveCall(*key, count) for key, count in sorted(self.cost.collectives.items()))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(Kernel(*key, count) for key, count in sorted(self.cost.kernels.items()))

    def copies(self, arguments: Sequence[int], smallest: int = 1 << 20) -> tuple[Copy, ...]:
        """Copies and changes of layout of these arguments of the program, if they are of `smallest` bytes or more."""
        wanted = set(arguments)
        counts = self.cost.copies.items()
        return tuple(Copy(*key, count) for key, count in counts if key[0] in wanted and key[2] >= smallest)

    def loop(self, i: Instruction, times: int) -> tuple[Computation, Computation, int]:
        """The body and condition of a loop that runs `times` times in a step, and its trips."""
        body, condition = (self.computations[i.called(x)] for x in ("body", "condition"))
        trips = _trips(i, condition, self.computations)
        return body, condition, 1 if times == 1 and trips == self.counted else trips

    def branches(self, i: Instruction) -> list[Computation]:
        """The computations of a conditional, of which all count."""
        return [self.computations[name] for name in _branches(i)]

    def moved(self, computation: Computation, i: Instruction) -> int:
        """Bytes that an instruction reads from HBM and writes to HBM."""
        free = i.op in _FREE or '"AllocateBuffer"' in i.rest
        return 0 if free else sum(self._moved(computation, i))

    def declared(self, computation: Computation, i: Instruction) -> tuple[int, int, int] | None:
        """`Instruction.declared_cost` without the bytes of arrays on chip."""
        if (declared := i.declared_cost) is None:
            return None
        return max(declared[0] - self._on_chip(computation, i), 0), *declared[1:]

    def collective_bytes(self, computation: Computation, i: Instruction) -> int:
        """Bytes of a collective's whole arrays: the input of a reduce-scatter, the results of others."""
        if i.collective == "reduce-scatter":
            return sum(s.nbytes for o in i.operands for s in computation.instructions[o].shapes)
        shapes = i.shapes
        if i.op == "all-gather-start" or i.op == "collective-permute-start":
            shapes = shapes[len(i.operands) : 2 * len(i.operands)]
        elif i.op == "all-reduce-start":
            shapes = shapes[: len(i.operands)]
        return sum(s.nbytes for s in shapes)

    # ---- a step's cost

    def _add(self, computation: Computation, times: int, origins: dict[str, dict[tuple, int]], cost: StepCost) -> None:
        """Add the cost of `times` runs of a computation.

        origins: the argument of the program that each value is, by index within a tuple. This call extends it.
        """
        for i in computation.instructions.values():
            if i.op == "while":
                body, condition, trips = self.loop(i, times)
                cost.balanced += i.expected_trips is not None and "expected_trips=" in i.rest
                for part in (body, condition):
                    arguments = {part.parameters[0].name: dict(origins.get(i.operands[0], {}))}
                    self._add(part, times * trips, arguments, cost)
            elif i.op in ("call", "async-start", "call-start"):
                called = self.computations.get(i.called("to_apply") or i.called("calls") or "")
                if called:
                    pairs = zip(called.parameters, i.operands, strict=False)
                    self._add(called, times, {p.name: dict(origins.get(o, {})) for p, o in pairs}, cost)
            elif i.op == "conditional":
                for branch in self.branches(i):
                    self._add(branch, times, {}, cost)
            if kind := i.collective:
                cost.collectives[kind, self.collective_bytes(computation, i)] += times
            if declared := self.declared(computation, i):
                nbytes, flops, sent = declared
                cost.kernels[re.sub(r"[.\d]+$", "", i.name), nbytes, flops, sent] += times
                cost.bytes += times * nbytes
                continue
            cost.bytes += times * self.moved(computation, i)
            self._track(computation, i, times, origins, cost)

    def _track(self, computation: Computation, i: Instruction, times: int, origins: dict, cost: StepCost) -> None:
        """Follow the program's arguments through an instruction, and note whether it copies one."""
        first = origins.get(i.operands[0], {}) if i.operands else {}
        if i.op == "get-tuple-element":
            index = int(re.findall(r"\bindex=(\d+)", i.rest)[0])
            origin = {path[1:]: a for path, a in first.items() if path[:1] == (index,)}
        elif i.op == "tuple":
            origin = {(n, *p): a for n, o in enumerate(i.operands) for p, a in origins.get(o, {}).items()}
        elif i.op in ("bitcast", "while", "copy-done", "call-done", "async-done"):
            origin = first
        elif i.op in ("call-start", "async-start", "call"):
            origin = {(): first[()]} if i.op != "call" and () in first else {}
        elif i.op in _IN_PLACE:
            origin = first
        elif i.op == "fusion":
            origin = self._through_fusion(i, origins)
        else:
            origin = {(): first[()]} if i.op in _MOVES and () in first else {}
        if origin:
            origins[i.name] = origin
        if not self._only_moves(i):
            return
        for operand in i.operands:
            argument = origins.get(operand, {}).get(())
            source = computation.instructions[operand].shapes[:1]
            if argument is not None and not _prefetch(i, source):
                cost.copies[argument, i.name, i.shapes[0].nbytes] += times

    def _through_fusion(self, i: Instruction, origins: dict) -> dict[tuple, int]:
        """A fusion returns an argument if it updates it in place or only moves it."""
        called = self.computations[i.called("calls")]
        moves = self._only_moves(i)
        outputs = [called.root.name] if called.root.op != "tuple" else list(called.root.operands)
        result = {}
        for n, name in enumerate(outputs):
            at = called.instructions[name]
            while at.op in ("bitcast", *_IN_PLACE) or (moves and at.op in _MOVES):
                at = called.instructions[at.operands[0]]
            if at.op == "parameter":
                argument = origins.get(i.operands[int(at.content)], {}).get(())
                if argument is not None:
                    result[() if called.root.op != "tuple" else (n,)] = argument
        return result

    def _only_moves(self, i: Instruction) -> bool:
        if i.op == "fusion":
            inside = self.computations[i.called("calls")].instructions.values()
            big = [x for x in inside if x.shapes and x.shapes[0].elements > 1]
            return any(x.op in _MOVES for x in big) and all(x.op in _MOVES | _PLUMBING for x in big)
        return i.op in _MOVES

    def _reorders(self, i: Instruction) -> bool:
        return (
            i.op == "fusion"
            and self._only_moves(i)
            and i.shapes[0].elements
            == max(p.shapes[0].elements for p in self.computations[i.called("calls")].parameters)
        )

    def _on_chip(self, computation: Computation, i: Instruction) -> int:
        """Bytes of a kernel's operands and results that lie on chip."""
        inputs = (s for o in i.operands for s in computation.instructions[o].shapes[:1])
        return sum(s.nbytes for s in (*inputs, *i.shapes) if s.space)

    def _moved(self, computation: Computation, i: Instruction) -> Iterator[int]:
        """Bytes that an instruction reads from HBM and writes to HBM."""
        inputs = [computation.instructions[o] for o in i.operands]
        if i.collective == "ragged-all-to-all":  # into its second operand, in place
            del inputs[1]
        if i.op == "fusion":
            yield from self._moved_by_fusion(i, inputs)
        else:
            yield from (nbytes for shape, nbytes in _ends(i, inputs) if not shape.space)

    def _moved_by_fusion(self, i: Instruction, inputs: Sequence[Instruction]) -> Iterator[int]:
        called = self.computations[i.called("calls")]
        for parameter, value in zip(called.parameters, inputs, strict=False):
            for shape in value.shapes[:1] if value.op != "tuple" else ():
                if not shape.space:
                    yield self._read(called, parameter)
        outputs = [called.root]
        if called.root.op == "tuple":
            outputs = [called.instructions[o] for o in called.root.operands]
        for shape, output in zip(i.shapes, outputs, strict=False):
            if not shape.space:
                yield self._written(called, output, shape)

    def _read(self, called: Computation, value: Instruction) -> int:
        """Bytes that a fusion reads of an operand: those of the slices, if it only slices the operand."""
        total, whole = 0, value.shapes[0].physical_bytes
        if value.root:
            return whole
        for user in called.users.get(value.name, ()):
            if user.op in ("bitcast", "copy", "transpose", "reshape") or self._reorders(user):
                total += self._read(called, user)
            elif user.op == "fusion":
                inside = self.computations[user.called("calls")]
                total += sum(
                    self._read(inside, inside.parameters[n]) for n, o in enumerate(user.operands) if o == value.name
                )
            elif user.op in _SLICES and user.operands[0] == value.name:
                total += sum(s.physical_bytes for s in user.shapes)
            elif user.op not in _IN_PLACE or user.operands[0] != value.name:
                return whole
        return min(total, whole)

    def _written(self, called: Computation, output: Instruction, shape: Shape) -> int:
        """Bytes of a result that a fusion writes: those of the update, if it updates an operand in place."""
        while output.op == "bitcast":
            output = called.instructions[output.operands[0]]
        if output.op == "fusion":
            inside = self.computations[output.called("calls")]
            return self._written(inside, inside.root, shape)
        if output.op in _IN_PLACE:
            update = output.operands[1 if output.op == "dynamic-update-slice" else 2]
            return called.instructions[update].shapes[0].physical_bytes
        return shape.physical_bytes


def _ends(i: Instruction, inputs: Sequence[Instruction]) -> Iterator[tuple[Shape, int]]:
    """The arrays that an instruction, no fusion, reads and writes, and how many bytes of each."""
    if i.op == "copy-start":
        yield from ((shape, shape.physical_bytes) for shape in (i.shapes[0], inputs[0].shapes[0]))
    elif i.op == "slice-start":
        yield from ((shape, i.shapes[1].physical_bytes) for shape in i.shapes[:2])
    elif i.op in _SLICES:
        yield from ((shape, 2 * shape.physical_bytes) for shape in i.shapes)
    elif i.op in _IN_PLACE:
        update = inputs[1 if i.op == "dynamic-update-slice" else 2].shapes[0]
        yield from ((shape, update.physical_bytes) for shape in (update, i.shapes[0]))
    else:
        operands = (shape for value in inputs if value.op != "tuple" for shape in value.shapes[:1])
        yield from ((shape, shape.physical_bytes) for shape in (*operands, *i.shapes[:1]))


def _prefetch(i: Instruction, source: tuple[Shape, ...]) -> bool:
    """True if an instruction copies bytes unchanged to on-chip memory, which costs no more than reading them."""
    target = i.shapes[0]
    return bool(target.space and source and i.op != "transpose" and target.order == source[0].order)


def _branches(i: Instruction) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", i.rest)
    names = match[1].split(",") if match else [i.called("true_computation"), i.called("false_computation")]
    return [name.strip().lstrip("%") for name in names if name]


def _trips(i: Instruction, condition: Computation, computations: Mapping[str, Computation]) -> int:
    """The trips of a loop; if they are unknown when compiling, the expected trips that the loop names, or 1."""
    if known := re.search(r'known_trip_count[":{]+n[":]+(\d+)', i.rest):
        return int(known[1])
    if i.expected_trips is not None:
        return i.expected_trips
    root, constants = condition.root, condition.instructions
    if root.op == "fusion":
        called = computations[root.called("calls")]
        if called.root.op != "compare":
            return 1
        values = {p.name: constants[o] for p, o in zip(called.parameters, root.operands, strict=True)}
        root, constants = called.root, {**called.instructions, **values}
    if root.op != "compare" or "direction=LT" not in root.rest:
        return 1
    limit = constants[root.operands[1]]
    return int(limit.content) if limit.op == "constant" else 1


# ---- parsing

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


def _parse(text: str, computations: dict[str, Computation]) -> Computation:
    """Fill `computations`, and return the entry."""
    entry, name, instructions = None, None, {}
    # A kernel's metadata spans several lines.
    text = re.sub(r"kernel_metadata=\{\n([^}]*)\n\}", r"kernel_metadata={\1}", text)
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, instructions, is_entry = head[2], {}, bool(head[1])
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name, instructions)
            entry, name = computations[name] if is_entry else entry, None
        elif name is not None and (start := _LINE.match(line)):
            instruction = _instruction(start, line)
            instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("not the text of a compiled module: it has no ENTRY computation")
    return entry


def _instruction(start: re.Match, line: str) -> Instruction:
    at = start.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    opening = line.index("(", end)
    closing = _closing(line, opening)
    content = line[opening + 1 : closing]
    return Instruction(
        name=start[2],
        op=line[end:opening].strip(),
        shapes=read_shapes(line[at:end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", content)),
        content=content,
        rest=line[closing + 1 :],
        root=bool(start[1]),
    )


def _closing(line: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"unbalanced parentheses: {line[:120]}")
