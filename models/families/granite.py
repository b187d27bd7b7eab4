"""Granite 3, dense and MoE: Llama with multipliers on the embedding, the attention, the branches and the logits."""

from __future__ import annotations

from collections.abc import Iterable

from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import LAYER, Family, Hf, activation, attention, mlp, model, need, rope_spec

DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE_DEFAULTS = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}
FUSED_LAYER = LAYER | {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down": "block_sparse_moe.output_linear.weight",
}


def _granite(hf: Hf, family: str, feed_forward: MlpSpec | MoeSpec) -> ModelConfig:
    layer = LayerSpec(attention(hf, rope_spec(hf), scale=hf["attention_multiplier"]), feed_forward)
    return with_multipliers(hf, family, [layer] * need(hf, "num_hidden_layers"))


def with_multipliers(hf: Hf, family: str, layers: Iterable[LayerSpec]) -> ModelConfig:
    return model(
        hf,
        family,
        layers,
        embed_scale=hf["embedding_multiplier"],
        residual_scale=hf["residual_multiplier"],
        logit_scale=1 / hf["logits_scaling"],
    )


def granite(hf: Hf) -> ModelConfig:
    return _granite(hf, "granite", mlp(hf))


def granite_moe(hf: Hf) -> ModelConfig:
    router = RouterSpec(need(hf, "num_local_experts"), need(hf, "num_experts_per_tok"), renormalize=True)
    return _granite(hf, "granitemoe", MoeSpec(router, need(hf, "intermediate_size"), activation(hf, "hidden_act")))


GRANITE = Family("granite", ("GraniteForCausalLM",), granite, DEFAULTS)
GRANITE_MOE = Family("granitemoe", ("GraniteMoeForCausalLM",), granite_moe, MOE_DEFAULTS, FUSED_LAYER)
