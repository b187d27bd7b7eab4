"""Finds what the Trainium compiler rejects or gets wrong, in a lowered module, before the compiler sees it.

Rules cite the compiler's own error codes (NCC_E...), documented at
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from inferlib.inspection.hlo import Computation, Instruction, Module


@dataclass(frozen=True)
class Site:
    """An instruction and the computation that it is part of."""

    instruction: Instruction
    computation: Computation
    module: Module

    @property
    def dtype(self) -> str:
        """The dtype of its first result."""
        shapes = self.instruction.shapes
        return shapes[0].dtype if shapes else ""

    @property
    def operand_dtypes(self) -> set[str]:
        values = (self.computation.instructions[name] for name in self.instruction.operands)
        return {shape.dtype for value in values for shape in value.shapes}

    @property
    def combines(self) -> bool:
        """True if the function that it applies computes something, rather than return one of its parameters."""
        applied = self.instruction.called("to_apply")
        return applied is not None and self.module.computations[applied].root.op != "parameter"

    @property
    def place(self) -> str:
        """JAX's name of the operation that it was traced from."""
        match = re.search(r'\bop_name="([^"]*)"', self.instruction.rest)
        return match[1] if match else self.computation.name


@dataclass(frozen=True)
class Rule:
    """A rule about some operations. ops: their names, none for all. broken: True for an instruction that breaks it."""

    name: str
    why: str
    ops: frozenset[str] = frozenset()
    broken: Callable[[Site], bool] = lambda site: True


@dataclass(frozen=True)
class Finding:
    """A rule and the instruction that breaks it."""

    rule: Rule
    op: str
    instruction: str
    place: str

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.op} '{self.instruction}' at {self.place} ({self.rule.why})"


def _integer(dtype: str) -> bool:
    return dtype == "pred" or re.fullmatch(r"[su]\d+", dtype) is not None


_INT32 = {"s32", "u32", "s64", "u64"}
_WIDE = {"s64", "u64", "f64", "c64", "c128"}

RULES = (
    # XLA solves triangular systems in a loop.
    Rule("loop", "loops must be unrolled", frozenset({"while", "triangular-solve"})),
    Rule("branch", "nothing may branch on data: compute both and select", frozenset({"conditional"})),
    Rule("dynamic shape", "NCC_EMOD025", frozenset({"get-dimension-size", "set-dimension-size", "dynamic-reshape"})),
    Rule("host transfer", "a program cannot call the host", frozenset({"infeed", "outfeed", "send", "recv"})),
    Rule(
        "custom call",
        "NCC_EVRF015: only Neuron's own are known",
        frozenset({"custom-call"}),
        lambda s: not re.search(r'custom_call_target="AwsNeuron', s.instruction.rest),
    ),
    Rule(
        "variadic reduce",
        "a reduction takes one array: for an argmax, the least index that holds the maximum",
        frozenset({"reduce", "reduce-window"}),
        lambda s: len(s.instruction.shapes) > 1,
    ),
    Rule("sort", "NCC_EVRF029: take a top-k", frozenset({"sort"})),
    Rule("integer top-k", "NCC_EVRF013: take it of floats", frozenset({"topk"}), lambda s: _integer(s.dtype)),
    Rule(
        "integer scatter",
        "NCC_EVRF016, NCC_EVRF060: only floats can be combined, so gather, compute and overwrite",
        frozenset({"scatter"}),
        lambda s: _integer(s.dtype) and s.combines,
    ),
    Rule("integer dot", "NCC_EVRF035", frozenset({"dot"}), lambda s: bool(s.operand_dtypes & _INT32)),
    Rule(
        "integer all-reduce",
        "NCC_EVRF061, NCC_EVRF063: reduce float32, exact up to 2**24",
        frozenset({"all-reduce", "all-reduce-start", "reduce-scatter"}),
        lambda s: s.dtype in _INT32,
    ),
    Rule(
        "narrow shift",
        "NCC_EVRF022: shift 32-bit integers",
        frozenset({"shift-right-arithmetic"}),
        lambda s: not s.dtype.endswith("32"),
    ),
    Rule(
        "random algorithm",
        "NCC_EVRF006: only the default one, or bits computed from integers",
        frozenset({"rng-bit-generator"}),
        lambda s: "algorithm=rng_default" not in s.instruction.rest,
    ),
    Rule(
        "wide type",
        "NCC_EVRF004, NCC_EVRF062: 32-bit types at most, no complex ones",
        broken=lambda s: any(shape.dtype in _WIDE for shape in s.instruction.shapes),
    ),
)


def lint(module: Module) -> list[Finding]:
    """All breaches of `RULES` in a module that JAX lowered, in the module's order."""
    findings = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            site = Site(instruction, computation, module)
            findings += [
                Finding(rule, instruction.op, instruction.name, site.place)
                for rule in RULES
                if (not rule.ops or instruction.op in rule.ops) and rule.broken(site)
            ]
    return findings
