"""What `benchmarks/kernels.py` compiles: a module for each kernel, with `CASES` by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from kernel_cases import (
    collective_matmul,
    decode_attention,
    expert_mlp,
    grouped_matmul,
    mla_decode_attention,
    mx_matmul,
    prefill_attention,
)


class Case(Protocol):
    """A kernel on arguments of some shapes. Of one on several devices there are also their number, `devices`, the bytes
    that each sends (`sent_bytes`), and `specs` of arguments and result over the mesh axis "x"."""

    kernel: str  # its name in the compiler's listings

    @property
    def floor_bytes(self) -> int:
        """What it must read and write."""

    @property
    def floor_flops(self) -> int:
        """Operations that it must do in bfloat16, 0 if memory bounds it in any case."""

    def function(self) -> Callable:
        """Of the arguments, by name."""

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes."""

    def scalars(self) -> dict[int, np.ndarray]:
        """What the kernel is given in scalar memory, in its order."""


CASES: Mapping[str, Mapping[str, Case]] = {
    "collective_matmul": collective_matmul.CASES,
    "decode_attention": decode_attention.CASES,
    "expert_mlp": expert_mlp.CASES,
    "grouped_matmul": grouped_matmul.CASES,
    "mla_decode_attention": mla_decode_attention.CASES,
    "mx_matmul": mx_matmul.CASES,
    "prefill_attention": prefill_attention.CASES,
}
