"""What programs are specialised for: a program is compiled for each key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

Mode = Literal["greedy", "sample", "logprobs", "processed", "embed"]
MODES: tuple[Mode, ...] = get_args(Mode)  # of those that sample, the programs of each do all that those before do
DEVICE_MODES = MODES[:3]  # in which tokens are chosen on the device: what is compiled unless another is asked for


@dataclass(frozen=True, order=True)
class ProgramKey:
    """What a program is specialised for.

    rows: decode rows (B) of each replica; limit: no position reaches it; mode: what sampling must do, "processed" of a
    part before it, or "embed", which does without; steps: decode steps. chunks, chunk: P chunks of C prefill tokens of
    each replica (then steps is 1).
    detail: what else a prefill returns for every prompt position, log-probabilities of the next token or the logits; or
    "embed": its hidden states, pooled over each chunk. cascade: decode steps read a prefix that rows share once for all
    of them. part: of a step, if that is two programs: up to the logits, or from them on, where limit is 0. drafts:
    tokens of each row that a decode step verifies beside the last one; of a step of two programs, the host gives them.
    """

    mode: Mode
    rows: int
    limit: int
    steps: int = 1
    chunks: int = 0
    chunk: int = 0
    detail: Literal["", "logprobs", "logits", "embed"] = ""
    cascade: bool = False
    part: Literal["", "forward", "choose"] = ""
    drafts: int = 0

    @property
    def most_tokens(self) -> int:
        """Most tokens of a row that a call generates; the least, of a row that goes on, are `steps`."""
        return self.steps * (1 + self.drafts)

    @property
    def decoded(self) -> int:
        """Tokens of decode rows in one step."""
        return self.rows * (1 + self.drafts)

    @property
    def tokens(self) -> int:
        """Tokens of a step: of decode rows, and of chunks of prompts."""
        return self.decoded + self.chunks * self.chunk

    def choosing(self, mode: Mode) -> ProgramKey:
        """The key of the program that chooses tokens from the logits of this one."""
        return replace(self, mode=mode, limit=0, detail="", part="choose")

    def __str__(self) -> str:
        detail = f" {self.detail}" if self.detail not in ("", self.mode) else ""
        prefill = f"prefill {self.chunks}x{self.chunk}{detail} " if self.chunks else ""
        drafts = f"x{1 + self.drafts}" if self.drafts else ""
        cascade = " cascade" if self.cascade else ""
        decode = f"decode {self.rows}x{self.steps}{drafts}{cascade} " if self.rows else ""
        part = f" {self.part}" if self.part else ""
        return f"{prefill}{decode}{self.mode}{part} cache {self.limit}"
