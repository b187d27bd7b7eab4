"""MiniCPM 3: latent attention, dense, with multipliers on the embedding, the branches and the logits."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, mlp, model, need
from inferlib.models.families.latent import LATENT, latent_attention

DEFAULTS = {
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def minicpm3(hf: Hf) -> ModelConfig:
    """Multipliers that are null change nothing."""
    count, width = need(hf, "num_hidden_layers"), need(hf, "hidden_size")
    hf = {**hf, "v_head_dim": hf.get("v_head_dim") or width // need(hf, "num_attention_heads")}
    layer = LayerSpec(latent_attention(hf, interleaved=False), mlp(hf))
    depth, base = hf["scale_depth"], hf["dim_model_base"]
    return model(
        hf,
        "minicpm3",
        [layer] * count,
        embed_scale=hf["scale_emb"],
        residual_scale=1.0 if depth is None else depth / count**0.5,
        logit_scale=1.0 if base is None else base / width,
    )


MINICPM3 = Family("minicpm3", ("MiniCPM3ForCausalLM",), minicpm3, DEFAULTS, LATENT)
