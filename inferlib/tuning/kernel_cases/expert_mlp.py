"""Cases of a layer's experts for a decode-sized number of tokens, which choose at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from inferlib.tuning.kernel_cases.draws import bits, scheme_of, stored, tokens_of_experts


@dataclass(frozen=True)
class ExpertMlp:
    """Tokens [T, D], each of which chooses `chosen` of `experts` of width `hidden`, with weights of a scheme. The floor
    counts the stored weights of the experts that are chosen."""

    tokens: int
    dim: int = 2048
    hidden: int = 768
    experts: int = 128
    chosen: int = 8
    scheme: str = "bfloat16"
    bias: bool = False

    kernel = "expert_mlp"
    floor_flops = 0

    @staticmethod
    def of(x, gate_up, down) -> dict[str, ExpertMlp]:
        """The case with these arguments of `default_blocks`."""
        scheme, (experts, _, _, hidden) = scheme_of(gate_up)
        return {"at random": ExpertMlp(x[1], x[2], hidden, experts, min(8, experts), scheme)}

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of tokens of each expert."""
        return tokens_of_experts(self.tokens, self.experts, self.chosen)

    @property
    def floor_bytes(self) -> int:
        weights = np.count_nonzero(self.counts) * 3 * self.dim * self.hidden * bits(self.scheme) / 8
        return int(weights) + 4 * self.tokens * self.dim

    def function(self):
        import jax

        from inferlib.pallas_kernels.expert_mlp_tpu import Experts, expert_mlp
        from inferlib.pallas_kernels.packed_weights_tpu import Weight

        def run(x, factors, **arrays):
            gate_up, down = (
                {name: arrays.pop(f"{part}.{name}") for name in _NAMES if f"{part}.{name}" in arrays}
                for part in ("gate_up", "down")
            )
            gate_up, down = (Weight(**w) if len(w) > 1 else w["values"] for w in (gate_up, down))
            activation = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
            return expert_mlp(x, Experts(gate_up, down, **arrays, layer=1), factors, activation)

        return run

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        experts, dim, hidden = self.experts, self.dim, self.hidden
        arrays: dict[str, tuple[tuple[int, ...], str]] = {
            "x": ((self.tokens, dim), "bfloat16"),
            "factors": ((self.tokens, experts), "float32"),
        }
        if self.bias:
            arrays["gate_up_bias"] = (1, experts, 2, hidden), "bfloat16"
        for part, shape in (("gate_up", (2, dim, hidden)), ("down", (1, hidden, dim))):
            parts = stored(self.scheme, 2, experts, *shape)
            arrays |= {f"{part}.{name}": array for name, array in parts.items()}
        if self.scheme in ("int8", "fp8"):
            arrays["gate_up_scales"] = (1, experts, 2, hidden), "float32"
            arrays["down_scales"] = (1, experts, dim), "float32"
        return arrays

    def scalars(self) -> dict[int, np.ndarray]:
        return {0: np.ones(1, int), 1: self.counts}


_NAMES = ("values", "scales", "tops")
GPT_OSS: dict[str, Any] = {"dim": 2880, "hidden": 2880, "experts": 32, "chosen": 4, "bias": True}
MIXTRAL: dict[str, Any] = {"dim": 4096, "hidden": 3584, "experts": 8, "chosen": 2}
CASES = {
    "Qwen3-30B-A3B, 1 token": ExpertMlp(1),
    "Qwen3-30B-A3B, 32 tokens": ExpertMlp(32),
    "Qwen3-30B-A3B, 128 tokens": ExpertMlp(128),
    "Qwen3-30B-A3B, 32 tokens, int8": ExpertMlp(32, scheme="int8"),
    "Mixtral 8x7B, tp 4, 32 tokens": ExpertMlp(32, **MIXTRAL),
    "Qwen3-30B-A3B, 1 token, mxfp4": ExpertMlp(1, scheme="mxfp4"),
    "Qwen3-30B-A3B, 32 tokens, mxfp4": ExpertMlp(32, scheme="mxfp4"),
    "Qwen3-30B-A3B, 32 tokens, fp8_block": ExpertMlp(32, scheme="fp8_block"),
    "gpt-oss-20b, 1 token, mxfp4": ExpertMlp(1, scheme="mxfp4", **GPT_OSS),
    "gpt-oss-20b, 32 tokens, mxfp4": ExpertMlp(32, scheme="mxfp4", **GPT_OSS),
    "gpt-oss-20b, 128 tokens, mxfp4": ExpertMlp(128, scheme="mxfp4", **GPT_OSS),
    "Mixtral 8x7B, tp 4, 32 tokens, mxfp4": ExpertMlp(32, scheme="mxfp4", **MIXTRAL),
}
