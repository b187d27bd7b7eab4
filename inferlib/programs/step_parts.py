"""What both kinds of programs, `Prefill` and `Decode`, are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from inferlib.programs.context import ProgramContext
from inferlib.programs.drafting import Drafting
from inferlib.programs.forward_pass import ForwardPass
from inferlib.programs.next_tokens import NextTokens


@dataclass(frozen=True)
class StepParts:
    program: ProgramContext

    @cached_property
    def forward_pass(self) -> ForwardPass:
        return ForwardPass(self.program)

    @cached_property
    def drafting(self) -> Drafting:
        return Drafting(self.program, self.forward_pass)

    @cached_property
    def next_tokens(self) -> NextTokens:
        return NextTokens(self.program)
