"""Executes the compiled listing of a TPU kernel without a TPU: its cycles, its bytes, and its waits for memory.

The TPU compiler schedules statically, one bundle of instructions a cycle, and can write its bundles to a file (see
`dump_flags`). Scalar, branch and copy instructions of a listing are executed exactly, on the scalars that decide its
path (lengths, page tables). Vector instructions are skipped: they take a cycle and decide nothing. Copies to and from
HBM run one after another at the memory's bandwidth and arrive a latency later; a wait for one stalls. Devices of a ring
do the same at the same time: a device receives from one neighbour what it sends to the other. The cores of a device
share the memory's bandwidth. Bank conflicts, the inefficiency of small copies and waits of cores for each other are not
modelled, so times are estimates.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MASK = 0xFFFFFFFF
_GRANULE = 32  # bytes: the unit in which copies and waits count
_OPERAND = 1 << 24  # spacing of the invented addresses of operands
_FLAG = (1 << 19) - (1 << 10)  # bits of a semaphore's address that name its device
_DELAY, _MOST_DELAY = 4, 8  # bundles executed after a taken branch: the default, and the most
DELAYS = {"v5e": 4, "v5p": 4, "v6e": 4, "v7x": 6}  # read from listings with loops behind loops
# Hz, inferred: with these clocks, the compiler's cycles of large matrix products match the chips' published peaks.
CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "v7x": 2.2e9}
LATENCY = 0.5e-6  # seconds from a copy's last byte in HBM to its arrival, assumed
_SUFFIX = "packed-bundles-post-ra.txt"
_HEAD = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*[> ]*\{(.*)$")


def dump_flags(folder: Path) -> str:
    """The LIBTPU_INIT_ARGS that make the compiler write listings to a folder. Set them before JAX is imported."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=.*packed-bundles-post-ra.*"


def listing_files(folder: Path) -> dict[str, Path]:
    """The listings of a folder, by the name of their operation. Of equal operations the compiler writes one."""
    files = sorted(p for p in folder.glob(f"*{_SUFFIX}") if "schedule-analysis" not in p.name)
    return {re.sub(rf"^\d+-(.*)-\d+-{_SUFFIX}$", r"\1", p.name): p for p in files}


def find_listing(folder: Path, kernel: str) -> Path:
    """The listing of the kernel that was compiled last under this name."""
    listings = [p for name, p in listing_files(folder).items() if name.startswith(kernel)]
    if not listings:
        raise FileNotFoundError(f"{folder} holds no listing of a kernel {kernel!r}: was `dump_flags` set?")
    return max(listings, key=lambda p: p.stat().st_mtime_ns)


@dataclass(frozen=True)
class Execution:
    """The costs of executing a listing.

    cycles: number of bundles executed. elapsed: cycles including stalls for copies. Of two cores, both are those of the
    slower one, and the others are sums. hbm_bytes: bytes that the kernel copies to and from HBM. copies: number of
    those copies. sent: bytes copied to other devices. unmet: number of waits for copies that never started. unknown:
    skipped instructions by name. Do not trust the figures unless both are empty.
    """

    cycles: int
    elapsed: float
    hbm_bytes: int
    copies: int
    sent: int
    unmet: int
    unknown: Mapping[str, int]

    @staticmethod
    def together(cores: Sequence[Execution]) -> Execution:
        """The costs of cores that run at the same time."""
        return Execution(
            cycles=max(run.cycles for run in cores),
            elapsed=max(run.elapsed for run in cores),
            hbm_bytes=sum(run.hbm_bytes for run in cores),
            copies=sum(run.copies for run in cores),
            sent=sum(run.sent for run in cores),
            unmet=sum(run.unmet for run in cores),
            unknown=dict(sum((Counter(run.unknown) for run in cores), Counter())),
        )


class Listing:
    """A kernel's bundles; `run` executes them. delay: number of bundles still executed after a taken branch, from
    `DELAYS`; None reads it from the listing."""

    def __init__(self, text: str, delay: int | None = None):
        self._bundles: list[list[str]] = []
        self._branches: list[tuple[int, int]] = []
        self._ends: list[bool] = []
        spaces = dict(re.findall(r"%(\w+) = (?:int_to_ptr|scalar_lea)\.(vmem|hbm|smem)", text))
        met = re.findall(r"%(\w+) = vpop\.ccrf", text)  # what the other core sends to a barrier, and nothing reads
        pops = {f"spop %{name}" for name, sent in re.findall(r"%(\w+) = vpush %(\w+)", text) if sent in met}
        for body in _bundles_of(text):
            instructions = [_directed(_without_comments(part), spaces) for part in re.split(r" ;; ", body)]
            scalar = [i for i in instructions if i and not _is_vector(i) and i.partition(" = ")[2] not in pops]
            self._bundles.append(scalar)
            self._ends.append("End region" in body)
        self._delay = delay or self._delay_slots()
        self._knows_core = any(" sld.core " in i for bundle in self._bundles for i in bundle)

    @property
    def size(self) -> int:
        """The number of bundles."""
        return len(self._bundles)

    def run(
        self,
        scalars: Mapping[int, np.ndarray],
        *,
        bandwidth: float,
        latency: float,
        link: tuple[float, float] | None = None,
        zeros: bool = False,
        most: int | None = None,
        cores: int = 1,
    ) -> Execution:
        """Execute the listing.

        scalars: the kernel's scalar operands, by index. zeros: those that are not named are zeros, as suits operations
        whose path no scalar decides. most: cycles after which a RuntimeError is raised. bandwidth: of HBM, in bytes per
        cycle. latency: of a copy, in cycles. link: bandwidth and latency of a copy to a neighbour; every instruction
        that sends has its own link. cores: of the device. Those that the listing tells apart run it at the same time,
        and each gets the share of the bandwidth that it has of the bytes.
        """

        def on(core: int, share: float) -> Execution:
            machine = _Machine(self._bundles, self._delay, scalars, share * bandwidth, latency, link, zeros, core)
            return machine.run(most)

        runs = [on(core, 1.0) for core in range(cores if self._knows_core else 1)]
        if sum(run.hbm_bytes > 0 for run in runs) > 1:
            total = sum(run.hbm_bytes for run in runs)
            runs = [on(core, run.hbm_bytes / total) for core, run in enumerate(runs)]
        return Execution.together(runs)

    def _delay_slots(self) -> int:
        """The number of bundles still executed after a taken branch. A loop's region ends with the last of them, behind
        its last branch."""
        delays = []
        for at, bundle in enumerate(self._bundles):
            if any(target is not None and target <= at for target in map(_branch_target, bundle)):
                ends = self._ends[at + 1 : at + 1 + _MOST_DELAY]
                delays += [max(n for n, end in enumerate(ends, 1) if end)] if any(ends) else []
        return min(delays, default=_DELAY)


def _bundles_of(text: str) -> Iterator[str]:
    lines = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            if lines is not None:
                yield "\n".join(lines)
            lines = [head[1]]
        elif lines is not None:
            lines.append(line)
    if lines is not None:
        yield "\n".join(lines)


def _without_comments(instruction: str) -> str:
    """The instruction without comments, except the kind of a division, the direction of a copy, and that the core's
    number is loaded."""
    instruction = re.sub(r"(sdivrem\.\w+)(.*?)/\* k(\w+) \*/", r"\1.\3\2", instruction)
    instruction = re.sub(r"dma\.general(.*?)/\* (\w+)-to-(\w+) \*/", r"dma.\2_to_\3\1", instruction, flags=re.S)
    instruction = re.sub(r"= sld (.*?/\* core id \*/)", r"= sld.core \1", instruction)
    return re.sub(r"\}\s*$", "", re.sub(r"/\*.*?\*/", "", instruction, flags=re.S)).strip()


def _directed(instruction: str, spaces: Mapping[str, str]) -> str:
    """The instruction, with the direction of a copy that only its pointers show. spaces: the memory of each pointer."""
    if match := re.search(r"= dma\.general[^%]*(?:\(!?%p\w+\)[^%]*)?%(\w+),[^,]*,\s*%(\w+)", instruction):
        source, target = (spaces.get(name) for name in match.groups())
        return instruction.replace("dma.general", f"dma.{source}_to_{target}")
    return instruction


def _is_vector(instruction: str) -> bool:
    op = re.match(r"%\w+ = ([\w.]+)", instruction)
    if op is None:
        return True
    return (op[1].startswith("v") and op[1] != "vsyncadd") or op[1] in (
        "shalt.err",
        "sfence",
        "strace",
        "snop",
        "sdelay",
    )


def _branch_target(instruction: str) -> int | None:
    match = re.search(r"= sbr\.\w+ .*target bundleno = (\d+)", instruction)
    return int(match[1]) if match else None


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
_BINARY: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smulhi": lambda a, b: (a * b) >> 32,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b & 31),
    "sshllo": lambda a, b: (a + 1 << (b & 31)) - 1,  # ones follow: of 0, the mask of b sublanes
    "sshrl": lambda a, b: a >> (b & 31),
    "sshra": lambda a, b: _signed(a) >> (b & 31),
    "smulhi.u32": lambda a, b: a * b >> 32,
    "scalar_lea": operator.add,
    "por": operator.or_,
    "pand": operator.and_,
    "pxor": operator.xor,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
}
_MOVES = {"smov", "pmov"}
_RENAMES = {"int_to_ptr", "ptr_to_int"}  # no instructions: the register's value does not change


class _Machine:
    """One execution. Registers have their names in the listing, each written once in an iteration. `_physical` has the
    current value of the register of a name's suffix, which a phi reads."""

    def __init__(self, bundles, delay, scalars, bandwidth, latency, link, zeros, core):
        self._bundles, self._delay, self._zeros, self._core = bundles, delay, zeros, core
        self._scalars = {index: np.asarray(value).astype(np.int64) & _MASK for index, value in scalars.items()}
        self._bandwidth, self._latency, self._link = bandwidth, latency, link
        self._registers: dict[str, int] = {}
        self._physical: dict[str, int] = {}
        self._memory: dict[int, int] = {}
        self._allocations: dict[str, int] = {}
        self._quotients: deque[int] = deque()
        self._pending: dict[int, deque[list[float]]] = defaultdict(deque)
        self._time, self._free = 0.0, 0.0
        self._bytes = self._copies = self._sent = self._unmet = 0
        self._unknown: Counter[str] = Counter()
        self._idle = [0] * len(bundles)  # of each bundle, how many behind it have nothing to execute
        for at in range(len(bundles) - 2, -1, -1):
            self._idle[at] = 0 if bundles[at + 1] else self._idle[at + 1] + 1
        self._code: dict[int, tuple[list[Callable[[], None]], tuple[Callable[[], int], int] | None]] = {}

    def run(self, most: int | None) -> Execution:
        at, cycles, target, left = 0, 0, None, 0
        while at < len(self._bundles):
            if most is not None and cycles > most:
                raise RuntimeError(f"the listing has not ended after {most} cycles")
            if at not in self._code:
                self._code[at] = self._translate(self._bundles[at])
            actions, branch = self._code[at]
            for act in actions:
                act()
            # Bundles that only compute vectors pass together, but not those behind a branch.
            idle = 0 if branch else self._idle[at] if target is None else min(self._idle[at], left - 1)
            cycles, self._time = cycles + 1 + idle, self._time + 1 + idle
            if target is not None:
                left -= 1 + idle
                if left == 0:
                    at, target = target, None
                    continue
            elif branch is not None and branch[0]():
                target, left = branch[1], self._delay
            at += 1 + idle
        traffic = self._bytes, self._copies, self._sent
        return Execution(cycles, self._time, *traffic, self._unmet, dict(self._unknown))

    # ---- translation: each instruction becomes a function

    def _translate(self, bundle: list[str]):
        """Actions in the order of their dependences, and the branch's condition and target."""
        actions, branch = [], None
        for instruction in _ordered(bundle):
            if (target := _branch_target(instruction)) is not None:
                if branch is None:
                    match = re.search(r"\((!?)%(p\w+)\)", instruction)
                    branch = (self._predicate(match) if match else lambda: 1), target
            elif action := self._action(instruction):
                actions.append(action)
        return actions, branch

    def _predicate(self, match: re.Match) -> Callable[[], int]:
        value = self._value("%" + match[2])
        return (lambda: not value()) if match[1] else value

    def _action(self, instruction: str) -> Callable[[], None] | None:
        name, op, rest = re.findall(r"^%(\w+) = ([\w.]+)\s*(.*)$", instruction, re.S)[0]
        if op.startswith("inlined_call_operand"):
            index = int(re.findall(r"index: (\d+)", rest)[0])
            if "<no memory space>" in instruction:
                scalar = self._scalars.get(index) if self._zeros else self._scalars[index]
                number = 0 if scalar is None else int(scalar.reshape(-1)[0])
                return self._set(name, lambda: number)
            offset = 128 if "kind: input" not in rest else 0  # outputs are never read
            return self._set(name, lambda: (index + offset + 1) * _OPERAND)
        if op in ("sphi", "pphi"):
            suffix = name.rsplit("_", 1)[-1]
            return self._set(name, lambda: self._physical.get(suffix, 0))
        guard = re.search(r"\((!?)%(p\w+)(?:, (%\w+))?\),?", rest)
        if guard:
            rest = (rest[: guard.start()] + rest[guard.end() :]).strip().lstrip(",")
        action = self._unguarded(name, op, _arguments(rest))
        if action is None or guard is None:
            return action
        predicate = self._predicate(guard)
        keep = self._set(name, self._value(guard[3])) if guard[3] else lambda: None
        return lambda: action() if predicate() else keep()

    def _unguarded(self, name: str, op: str, arguments: list[str]) -> Callable[[], None] | None:
        base, _, kind = op.partition(".")
        if base == "dma":
            if kind == "done.wait":
                return self._wait(*map(self._value, arguments[:2]))
            if kind == "vmem_to_vmem" and self._link:  # within a device, copies are loads and stores
                return self._send(*map(self._value, (arguments[1], *arguments[3:5])))
            return self._copy(*kind.split("_to_"), *map(self._value, arguments[:4]))
        if base == "vsyncadd":
            return self._signal(*map(self._value, arguments[:2]))
        if base == "sst":
            place, value = self._value(arguments[0]), self._value(arguments[1])
            return lambda: self._memory.__setitem__(place(), value())
        if op == "sld.core":
            return self._set(name, lambda: self._core)
        if base == "sld":
            place = self._value(arguments[0])
            return self._set(name, lambda: self._memory.get(place(), 0))
        if base == "sdivrem":
            a, b = map(self._value, arguments[:2])
            parts = {"Div": slice(1), "Rem": slice(1, 2)}.get(kind.split(".")[-1], slice(2))
            return lambda: self._quotients.extend(divmod(a(), max(b(), 1))[parts])
        if op == "spop.drf":
            return self._set(name, self._quotients.popleft)
        if base in _MOVES:
            return self._set(name, self._value(arguments[0]))
        if base in _RENAMES:
            value = self._value(arguments[0])
            return lambda: self._registers.__setitem__(name, value())
        if (f := _BINARY.get(op) or _BINARY.get(base)) and not kind.endswith("f32"):
            a, b = map(self._value, arguments[:2])
            return self._set(name, lambda: f(a(), b()) & _MASK)
        if base in ("smin", "smax", "scmp"):
            f = {"smin": min, "smax": max}.get(base) or _COMPARE[kind.split(".")[0]]
            a, b = map(self._value, arguments[:2])
            if "u32" in kind:
                return self._set(name, lambda: int(f(a(), b())) & _MASK)
            return self._set(name, lambda: int(f(_signed(a()), _signed(b()))) & _MASK)
        if base == "pneg":
            a = self._value(arguments[0])
            return self._set(name, lambda: 1 - a())
        if base == "scalar_select":
            condition, a, b = map(self._value, arguments[:3])
            return self._set(name, lambda: a() if condition() else b())
        self._unknown[op] += 1
        return self._set(name, lambda: 0)

    def _set(self, name: str, value: Callable[[], int]) -> Callable[[], None]:
        registers, physical, suffix = self._registers, self._physical, name.rsplit("_", 1)[-1]

        def act():
            registers[name] = physical[suffix] = value()

        return act

    def _value(self, text: str) -> Callable[[], int]:
        text = re.sub(r"^(\S+) \[#[^\]]*\]$", r"\1", text.strip())
        if text.startswith("["):
            parts = [self._value(part) for part in text[1:-1].split(" + ")]
            return parts[0] if len(parts) == 1 else lambda: sum(part() for part in parts) & _MASK
        if text.startswith("%"):
            name, registers = text[1:], self._registers
            return lambda: registers.get(name, 0)
        if text.startswith("#"):
            address = self._allocations.setdefault(text, (len(self._allocations) + 1) << 19)
            return lambda: address
        if text.startswith("$"):
            number = int(text[1:], 16)
        elif re.fullmatch(r"-?\d+", text):
            number = int(text) & _MASK
        else:
            number = {"true": 1}.get(text, 0)
        return lambda: number

    # ---- copies

    def _copy(self, source: str, target: str, start, size, destination, flag) -> Callable[[], None]:
        def act():
            count = size()
            if target == "smem":
                self._fill(destination(), start())
                done = self._time
            elif "hbm" in (source, target):
                self._free = max(self._time, self._free) + count * _GRANULE / self._bandwidth
                done = self._free + self._latency
                self._bytes += count * _GRANULE
                self._copies += 1
            else:
                done = self._time
            self._pending[flag()].append([done, count])

        return act

    def _send(self, size, there, here) -> Callable[[], None]:
        """A copy to a neighbour: it signals the semaphore `here` when it has left, and `there` when it arrives."""
        bandwidth, latency = self._link
        free = 0.0

        def act():
            nonlocal free
            count = size()
            free = max(self._time, free) + count * _GRANULE / bandwidth
            self._sent += count * _GRANULE
            self._pending[here() & ~_FLAG].append([free, count])
            self._pending[there() & ~_FLAG].append([free + latency, count])

        return act

    def _fill(self, at: int, address: int) -> None:
        """Copy the operand at an address to scalar memory, with rows padded to 128."""
        names = (i for i in self._scalars if address in ((i + 1) * _OPERAND, ((i + 1) * _OPERAND << 4) & _MASK))
        index = next(names, None)
        if index is None and self._zeros:
            return
        array = np.atleast_1d(self._scalars[index])
        if array.ndim > 1:
            array = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, -array.shape[-1] % 128)])
        self._memory.update(enumerate(array.reshape(-1).tolist(), at))

    def _signal(self, flag, size) -> Callable[[], None]:
        """The end of a copy on chip that consists of loads and stores. Signals behind a wait have a negative size."""

        def act():
            if _signed(size()) > 0:
                self._pending[flag()].append([self._time, size()])

        return act

    def _wait(self, flag, size) -> Callable[[], None]:
        def act():
            need, pending = size(), self._pending[flag()]
            while need and pending:
                done, count = pending[0]
                self._time = max(self._time, done)
                taken = min(need, count)
                need, pending[0][1] = need - taken, count - taken
                if not pending[0][1]:
                    pending.popleft()
            self._unmet += need > 0

        return act


def _arguments(text: str) -> list[str]:
    """The operands: the text split at commas outside brackets."""
    text = re.sub(r"\[(?:thread|resolvable|timing)[^\]]*\]", "", text)
    text = re.sub(r"^\[smem:(\[[^\]]*\])\]", r"\1,", text.strip())
    parts = re.findall(r"(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|[^,\[\]])+", text)
    return [part.strip() for part in parts if part.strip()]


def _ordered(bundle: list[str]) -> list[str]:
    """Phis first, then each instruction behind those of its bundle that define what it reads."""
    defined = {match[1]: i for i, text in enumerate(bundle) if (match := re.match(r"%([sp]\d\w*) =", text))}
    phis = [i for i, text in enumerate(bundle) if re.search(r"= [sp]phi ", text)]
    order = dict.fromkeys(phis)

    def visit(i: int) -> None:
        if i not in order:
            for used in re.findall(r"%([sp]\d\w*)", bundle[i].split("=", 1)[1]):
                if used in defined and defined[used] != i:
                    visit(defined[used])
            order[i] = None

    for i in range(len(bundle)):
        visit(i)
    return [bundle[i] for i in order]
