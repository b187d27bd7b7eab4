"""The feed-forwards of the experts of a layer, for few tokens that choose at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from inferlib.compile.kernel_cases.draws import tokens_of_experts


@dataclass(frozen=True)
class ExpertMlp:
    """tokens [T, D], each of which chooses `chosen` of `experts` of width `hidden`, with weights of `dtype`. The floor
    counts those of the experts that are chosen."""

    tokens: int
    dim: int = 2048
    hidden: int = 768
    experts: int = 128
    chosen: int = 8
    dtype: str = "bfloat16"

    kernel = "expert_mlp"
    floor_flops = 0

    @staticmethod
    def of(x, gate_up) -> dict[str, ExpertMlp]:
        """Of the arguments of `default_blocks`."""
        dtype, experts, _, dim, hidden = gate_up
        return {"at random": ExpertMlp(x[1], dim, hidden, experts, min(8, experts), dtype)}

    @cached_property
    def counts(self) -> np.ndarray:
        """Tokens of each expert."""
        return tokens_of_experts(self.tokens, self.experts, self.chosen)

    @property
    def floor_bytes(self) -> int:
        itemsize = 2 if self.dtype == "bfloat16" else 1
        return np.count_nonzero(self.counts) * 3 * self.dim * self.hidden * itemsize + 4 * self.tokens * self.dim

    def function(self):
        import jax

        from inferlib.pallas_kernels.expert_mlp_tpu import expert_mlp

        return partial(expert_mlp, activation=lambda gate, up: jax.nn.silu(gate) * up, layer=1)

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes."""
        experts, dim, hidden = self.experts, self.dim, self.hidden
        found = {
            "x": ((self.tokens, dim), "bfloat16"),
            "gate_up": ((2, experts, 2, dim, hidden), self.dtype),
            "down": ((2, experts, hidden, dim), self.dtype),
            "factors": ((self.tokens, experts), "float32"),
            "chosen": ((experts,), "int32"),
        }
        if self.dtype != "bfloat16":
            found |= {"gate_up_scales": ((experts, 2, hidden), "float32"), "down_scales": ((experts, dim), "float32")}
        return found

    def scalars(self) -> dict[int, np.ndarray]:
        """What the kernel is given in scalar memory, in its order."""
        return {0: np.ones(1, int), 1: self.counts}


MIXTRAL = {"dim": 4096, "hidden": 3584, "experts": 8, "chosen": 2}
CASES = {
    "Qwen3-30B-A3B, 1 token": ExpertMlp(1),
    "Qwen3-30B-A3B, 32 tokens": ExpertMlp(32),
    "Qwen3-30B-A3B, 128 tokens": ExpertMlp(128),
    "Qwen3-30B-A3B, 32 tokens, int8": ExpertMlp(32, dtype="int8"),
    "Mixtral 8x7B, tp 4, 32 tokens": ExpertMlp(32, **MIXTRAL),
}
