"""EXAONE 4: post-norms, QK-norm, and in models with windows no positions on the global layers."""

from __future__ import annotations

from inferlib.models.config import LayerSpec, ModelConfig
from inferlib.models.families.common import Family, Hf, attention, mlp, model, need, rope_spec, windows
from inferlib.models.families.olmo import POST_NORM

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def exaone4(hf: Hf) -> ModelConfig:
    rope, hybrid = rope_spec(hf), hf["sliding_window"] is not None
    layers = [
        LayerSpec(
            attention(hf, None if hybrid and window is None else rope, window, qk_norm="head"),
            mlp(hf),
            pre_norm=False,
            post_norm=True,
        )
        for window in windows(hf, lambda i: hybrid and (i + 1) % need(hf, "sliding_window_pattern") != 0)
    ]
    return model(hf, "exaone4", layers)


EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM",), exaone4, DEFAULTS, POST_NORM)
