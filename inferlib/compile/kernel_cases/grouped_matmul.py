"""Products of the experts of a layer, for tokens that choose at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from inferlib.compile.kernel_cases.draws import tokens_of_experts


@dataclass(frozen=True)
class GroupedMatmul:
    """tokens, each of which chooses `chosen` of `experts`; weights [E, P, I, O] of `dtype`. The floor counts the
    weights of the experts that are chosen, the rows of x and the result, each once."""

    tokens: int
    parts: int = 2
    inner: int = 2048
    outer: int = 768
    experts: int = 128
    chosen: int = 8
    dtype: str = "bfloat16"

    kernel = "grouped_matmul"

    @staticmethod
    def of(x, w) -> dict[str, GroupedMatmul]:
        """Of the arguments of `default_blocks`."""
        (_, rows, _), (dtype, experts, parts, inner, outer) = x, w
        return {"at random": GroupedMatmul(rows, parts, inner, outer, experts, chosen=1, dtype=dtype)}

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each expert."""
        return tokens_of_experts(self.tokens, self.experts, self.chosen)

    @property
    def floor_bytes(self) -> int:
        read = np.count_nonzero(self.sizes)
        rows = self.tokens * self.chosen
        weights = read * self.parts * self.inner * self.outer * (2 if self.dtype == "bfloat16" else 1)
        return weights + 2 * rows * (self.inner + self.parts * self.outer)

    @property
    def floor_flops(self) -> int:
        return 2 * self.tokens * self.chosen * self.parts * self.inner * self.outer

    def function(self):
        from inferlib.pallas_kernels.grouped_matmul_tpu import grouped_matmul

        return partial(grouped_matmul, layer=1)

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes."""
        x = (self.tokens * self.chosen, self.inner), "bfloat16"
        w = (2, self.experts, self.parts, self.inner, self.outer), self.dtype
        found = {"x": x, "w": w, "sizes": ((self.experts,), "int32")}
        if self.dtype != "bfloat16":
            found["scales"] = (self.experts, self.parts, self.outer), "float32"
        return found

    def scalars(self) -> dict[int, np.ndarray]:
        """What the kernel is given in scalar memory, in its order."""
        return {0: np.ones(1, int), 1: self.sizes}


DOWN = {"parts": 1, "inner": 768, "outer": 2048}
CASES = {
    "gate and up, 1 token": GroupedMatmul(1),
    "gate and up, 32 tokens": GroupedMatmul(32),
    "gate and up, 4096 tokens": GroupedMatmul(4096),
    "down, 32 tokens": GroupedMatmul(32, **DOWN),
    "down, 4096 tokens": GroupedMatmul(4096, **DOWN),
    "gate and up, 32 tokens, int8": GroupedMatmul(32, dtype="int8"),
    "gate and up, 4096 tokens, int8": GroupedMatmul(4096, dtype="int8"),
}
