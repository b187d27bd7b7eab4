"""Cases for judging TPU kernels: a module for each kernel, with `CASES` by name.

`benchmarks/kernels.py` shows their figures, and `inferlib tune` searches their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from inferlib.targets import Target
from inferlib.tuning.kernel_cases import (
    antidiagonals,
    chunk_write,
    collective_matmul,
    decode_attention,
    expert_mlp,
    group_order,
    grouped_matmul,
    mla_decode_attention,
    mla_prefill_attention,
    mx_matmul,
    prefill_attention,
)


class Case(Protocol):
    """A kernel with shapes of its arguments. A case on several devices is a `collective_matmul.CollectiveMatmul`."""

    kernel: str  # the kernel's name in the compiler's listings

    @property
    def floor_bytes(self) -> int:
        """Bytes that the kernel must read and write."""
        ...

    @property
    def floor_flops(self) -> int:
        """Operations in bfloat16 that the kernel must do; 0 if memory bounds it anyway."""
        ...

    def function(self) -> Callable:
        """The function of the arguments, by name."""
        ...

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes, in the form for the TPU of the trace."""
        ...

    def scalars(self) -> dict[int, np.ndarray]:
        """The kernel's operands in scalar memory, by index."""
        ...


CASES: Mapping[str, Mapping[str, Case]] = {
    "decode_attention": decode_attention.CASES,
    "expert_mlp": expert_mlp.CASES,
    "grouped_matmul": grouped_matmul.CASES,
    "mla_decode_attention": mla_decode_attention.CASES,
    "mla_prefill_attention": mla_prefill_attention.CASES,
    "mx_matmul": mx_matmul.CASES,
    "prefill_attention": prefill_attention.CASES,
}
# Kernels without blocks to choose.
FIXED: Mapping[str, Mapping[str, Case]] = {
    "antidiagonals": antidiagonals.CASES,
    "chunk_write": chunk_write.CASES,
    "group_order": group_order.CASES,
}
# Kernels on several devices.
RINGS: Mapping[str, Mapping[str, collective_matmul.CollectiveMatmul]] = {"collective_matmul": collective_matmul.CASES}
_KINDS = {
    "collective_matmul": collective_matmul.CollectiveMatmul,
    "decode_attention": decode_attention.DecodeAttention,
    "expert_mlp": expert_mlp.ExpertMlp,
    "grouped_matmul": grouped_matmul.GroupedMatmul,
    "mla_decode_attention": mla_decode_attention.MlaDecodeAttention,
    "mla_prefill_attention": mla_prefill_attention.MlaPrefillAttention,
    "mx_matmul": mx_matmul.MxMatmul,
    "prefill_attention": prefill_attention.PrefillAttention,
}


def chosen_cases(
    kernels: Sequence[str], names: Collection[str] | None, cases: Mapping[str, Mapping[str, Case]] = CASES
) -> dict[str, list[str]]:
    """The names of the chosen cases, all if None, of the kernels that have any. Raises ValueError for unknown names."""
    if unknown := [kernel for kernel in kernels if kernel not in cases]:
        raise ValueError(f"no kernels {unknown}; there are {'; '.join(cases)}")
    known = [name for kernel in kernels for name in cases[kernel]]
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"no cases {unknown}; there are {'; '.join(known)}")
    chosen = {kernel: [name for name in cases[kernel] if names is None or name in names] for kernel in kernels}
    return {kernel: some for kernel, some in chosen.items() if some}


def check_devices(kernels: Collection[str], targets: Collection[Target]) -> None:
    """Raise ValueError if a target has fewer devices than the cases of one of the kernels."""
    for kernel in kernels:
        need = max((case.devices for case in RINGS.get(kernel, {}).values()), default=1)
        if small := [str(target) for target in targets if target.devices < need]:
            raise ValueError(
                f"the cases of {kernel} are for {need} devices, and {small[0]} has fewer: name a larger slice, such as "
                "v5e-8"
            )


def standing_for(kernel: str, shape: Mapping[str, Any], devices: int) -> dict[str, Case]:
    """Cases by name in which the kernel asks for blocks of a shape (see `tuned_tpu.Entry`), with different data that it
    must do well on: full and unequal rows, first and last chunks. devices: the number of devices, for kernels on
    several. Raises ValueError if there are no cases."""
    if kernel not in _KINDS:
        raise ValueError(f"no cases stand for shapes of {kernel}")
    return _KINDS[kernel].of(**shape, **({"devices": devices} if kernel in RINGS else {}))
