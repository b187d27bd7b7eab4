"""Cases of products with a layer's experts, for tokens that choose at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from inferlib.tuning.kernel_cases.draws import bits, scheme_of, stored, tokens_of_experts


@dataclass(frozen=True)
class GroupedMatmul:
    """Tokens, each of which chooses `chosen` of `experts`, with weights [E, P, I, O] of a scheme. The floor counts the
    stored weights of the experts that are chosen, the rows of x and the result, each once."""

    tokens: int
    parts: int = 2
    inner: int = 2048
    outer: int = 768
    experts: int = 128
    chosen: int = 8
    scheme: str = "bfloat16"

    kernel = "grouped_matmul"

    @staticmethod
    def of(x, w) -> dict[str, GroupedMatmul]:
        """The case with these arguments of `default_blocks`."""
        scheme, (experts, parts, inner, outer) = scheme_of(w)
        return {"at random": GroupedMatmul(x[1], parts, inner, outer, experts, chosen=1, scheme=scheme)}

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of rows of each expert."""
        return tokens_of_experts(self.tokens, self.experts, self.chosen)

    @property
    def floor_bytes(self) -> int:
        read = np.count_nonzero(self.sizes)
        rows = self.tokens * self.chosen
        weights = read * self.parts * self.inner * self.outer * bits(self.scheme) / 8
        return int(weights) + 2 * rows * (self.inner + self.parts * self.outer)

    @property
    def floor_flops(self) -> int:
        return 2 * self.tokens * self.chosen * self.parts * self.inner * self.outer

    def function(self):
        from inferlib.pallas_kernels.grouped_matmul_tpu import grouped_matmul
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        def run(x, sizes, values, by_channel=None, **groups):
            w = Weight(values, **groups) if groups else values
            return grouped_matmul(x, w, sizes, layer=1, scales=by_channel)

        return run

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        x = (self.tokens * self.chosen, self.inner), "bfloat16"
        arrays = {"x": x, "sizes": ((self.experts,), "int32")}
        arrays |= stored(self.scheme, 2, self.experts, self.parts, self.inner, self.outer)
        if self.scheme in ("int8", "fp8"):
            arrays["by_channel"] = (self.experts, self.parts, self.outer), "float32"
        return arrays

    def scalars(self) -> dict[int, np.ndarray]:
        return {0: np.ones(1, int), 1: self.sizes}


DOWN: dict[str, Any] = {"parts": 1, "inner": 768, "outer": 2048}
GPT_OSS = {"inner": 2880, "outer": 2880, "experts": 32, "chosen": 4}
DEEPSEEK: dict[str, Any] = {"experts": 16, "chosen": 1, "scheme": "fp8_block"}
CASES = {
    "gate and up, 1 token": GroupedMatmul(1),
    "gate and up, 32 tokens": GroupedMatmul(32),
    "gate and up, 4096 tokens": GroupedMatmul(4096),
    "down, 32 tokens": GroupedMatmul(32, **DOWN),
    "down, 4096 tokens": GroupedMatmul(4096, **DOWN),
    "gate and up, 32 tokens, int8": GroupedMatmul(32, scheme="int8"),
    "gate and up, 4096 tokens, int8": GroupedMatmul(4096, scheme="int8"),
    "gate and up, 1 token, mxfp4": GroupedMatmul(1, scheme="mxfp4"),
    "gate and up, 32 tokens, mxfp4": GroupedMatmul(32, scheme="mxfp4"),
    "down, 32 tokens, mxfp4": GroupedMatmul(32, scheme="mxfp4", **DOWN),
    "gate and up, 4096 tokens, mxfp4": GroupedMatmul(4096, scheme="mxfp4"),
    "gpt-oss, gate and up, 32 tokens, mxfp4": GroupedMatmul(32, scheme="mxfp4", **GPT_OSS),
    "gpt-oss, gate and up, 4096 tokens, mxfp4": GroupedMatmul(4096, scheme="mxfp4", **GPT_OSS),
    "gate and up, 32 tokens, mxfp8": GroupedMatmul(32, scheme="mxfp8"),
    "gate and up, 32 tokens, int4": GroupedMatmul(32, scheme="int4"),
    "gate and up, 32 tokens, fp8_block": GroupedMatmul(32, scheme="fp8_block"),
    "gate and up, 4096 tokens, fp8_block": GroupedMatmul(4096, scheme="fp8_block"),
    "DeepSeek-V3, gate and up, 2048 rows, fp8_block": GroupedMatmul(2048, inner=7168, outer=2048, **DEEPSEEK),
    "DeepSeek-V3, down, 2048 rows, fp8_block": GroupedMatmul(2048, parts=1, inner=2048, outer=7168, **DEEPSEEK),
}
