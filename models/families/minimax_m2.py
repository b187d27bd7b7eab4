"""MiniMax-M2."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig, MoeSpec, RouterSpec
from inferlib.models.families.common import Family, Hf, activation, attention, model, need, rope_spec
from inferlib.models.families.mistral import MIXTRAL_LAYER

LAYER_MAP = MIXTRAL_LAYER | {"mlp.router.correction": "block_sparse_moe.e_score_correction_bias"}
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 5e6,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
}


def minimax_m2(hf: Hf) -> ModelConfig:
    """`rotary_dim`, in the published configs, is how much of a head is rotated."""
    if hf.get("rotary_dim") is not None:
        hf = {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"], **hf}
    router = RouterSpec(
        need(hf, "num_local_experts"),
        need(hf, "num_experts_per_tok"),
        score="sigmoid",
        renormalize=True,
        correction=True,
    )
    experts = MoeSpec(router, need(hf, "intermediate_size"), activation(hf, "hidden_act"))
    layer = LayerSpec(attention(hf, rope_spec(hf, partial=True), qk_norm="full"), experts)
    return model(hf, "minimax_m2", [layer] * need(hf, "num_hidden_layers"))


MINIMAX_M2 = Family("minimax_m2", ("MiniMaxM2ForCausalLM",), minimax_m2, DEFAULTS, LAYER_MAP, drafts=("model.mtp",))
