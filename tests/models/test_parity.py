"""Every family against transformers: logits of a whole prompt, float32, on tiny random checkpoints.

Layers run unrolled and operation by operation: equal operations of equal shapes, which most are, compile once, for all
families. A few families run stacked layers as one program, one of each way in which layers repeat. Programs of unrolled
layers are what `test_cache` and `test_attention_kinds` decode with.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import LLM
from inferlib.buckets import Buckets
from inferlib.cache.plan import plan_cache
from inferlib.checkpoint.load import load_weights
from inferlib.checkpoint.safetensors import SafetensorsSource
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.families import config_from_hf, family_of
from tests.helpers.oracle import make_checkpoint, reference_logits
from tests.helpers.oracle_cases import CASES, Case

TOLERANCE = 1e-4  # of the logits' standard deviation, which is 1 to 2; up to 5e-5 where products are not fused
# Equal layers, patterns of two kinds of attention, shared caches, states; a dense layer before experts.
STACKED = ("llama", "ministral", "gemma3", "gemma3n", "gemma4", "qwen3.5", "deepseek-v3", "lfm2-moe")
# Fewer layers than variants have: each kind once, or a dense one and one with experts.
_TWO = {"num_hidden_layers": 2}
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_HYBRID, _WINDOW = {**_TWO, "layer_types": [_LINEAR, _FULL]}, {**_TWO, "layer_types": [_SLIDING, _FULL]}
FEWER = dict.fromkeys(("qwen3-next", "qwen3.5-moe", "minimax", "kimi-linear", "olmo-hybrid", "qwen3.5-tied"), _HYBRID)
FEWER |= dict.fromkeys(("deepseek-v2", "glm4-moe-lite", "gpt-oss", "mimo-v2-flash", "mixtral", "qwen2-moe"), _TWO)
FEWER |= dict.fromkeys(("qwen3-moe", "olmoe", "granite-moe", "phimoe", "glm4-moe", "dots1", "minimax-m2"), _TWO)
FEWER |= dict.fromkeys(("deepseek-v2-groups", "deepseek-v3-halves", "qwen3-moe-mixed", "gpt2-scales"), _TWO)
FEWER |= dict.fromkeys(
    ("glm4-moe-normed-biases", "phimoe-longrope-biases", "minimax-plain", "minimax-m2-partial"), _TWO
)
FEWER |= dict.fromkeys(("gpt-oss-plain", "gemma4-experts", "gemma3-linear"), _WINDOW)
FEWER |= dict.fromkeys(("ministral3", "phi3-longrope-long", "llama-dynamic-beyond", "qwen2-moe-mixed"), _TWO)
FEWER |= {
    "mistral4": {**_TWO, "first_k_dense_replace": 1},
    "llama4": {**_TWO, "no_rope_layer_interval": 2},
    "llama4-mixed": {**_TWO, "no_rope_layers": [0, 1]},
    "dots1-windows": {**_TWO, "max_window_layers": 1},
    "laguna-elements": {**_TWO, "layer_types": [_FULL, _SLIDING], "num_attention_heads_per_layer": [6, 4]},
    "qwen3-next-mixed": {**_TWO, "layer_types": [_FULL, _LINEAR]},
    "kimi-linear-mixed": {**_TWO, "layer_types": [_FULL, _LINEAR], "mlp_layer_types": ["sparse", "dense"]},
    "granite-hybrid": {**_TWO, "layer_types": ["mamba", "attention"]},
    "nemotron-h-limited": {"layers_block_type": ["attention", "mlp", "mamba"]},
    "nemotron-h-moe": {"layers_block_type": ["mamba", "attention", "moe"]},
}
# Biases, which any family's tensors may have, and options that each are another case's too.
COMBINED = ("gemma2-no-caps", "olmo2-biases", "olmo3-yarn", "granite-tied-biases", "glm4-full-rotary", "cohere2-biases")
COMBINED += ("exaone4-global", "seed-oss-biases", "ernie4.5-biases", "mistral-no-window", "mimo-v2-flash-biases")
COMBINED += ("minicpm3-whole-queries", "minicpm3-yarn", "mixtral-windows", "dots1-windows", "smollm3-windows")
COMBINED += ("qwen3-windows", "qwen3-moe-mixed", "olmoe-normed-biases", "bamba-biases", "minimax-m2-partial")
COMBINED += ("phi3-partial", "hunyuan-dynamic", "gpt-oss-plain", "minimax-plain", "nemotron-h-feeds", "qwen3.5-tied")
COMBINED += ("gemma3n-own-caches", "gemma4-values", "llama-dynamic-within", "mistral3-mistral4", "mistral3-ministral3")
# Kinds of rotary embedding: `test_rope` has the frequencies of each, and some go in chunks below. Caps: `test_cache`.
COMBINED += ("llama-linear", "llama-llama3", "llama-yarn-factor", "phi3-longrope-short", "hunyuan-alpha")
COMBINED += ("gemma3-linear", "phi3-longrope-long", "llama-dynamic-beyond", "gemma2-caps")
BY_NAME = {case.name: case for case in CASES}
FIRST = {case.name for n, case in enumerate(CASES) if case.family not in {before.family for before in CASES[:n]}}


def prompt_of(case: Case) -> np.ndarray:
    return np.random.default_rng(len(case.name)).integers(0, 131, case.length).astype(np.int32)


def one_pass(path, tokens: np.ndarray, *, stacked: bool) -> np.ndarray:
    """Logits [T, V] of a prompt in one prefill chunk, by the decoder alone: stacked and compiled, or neither."""
    hf = json.loads((path / "config.json").read_text())
    config, length = config_from_hf(hf), len(tokens)
    model = abstract_model(config, "float32", scan=stacked)
    weights = load_weights(SafetensorsSource(path), family_of(hf), model)
    plan = plan_cache(model, rows=1, max_len=length, chunk=length, dtype="float32")

    def run(weights, cache, tokens):
        decoder, zero = model.merge(weights), jnp.zeros(1, jnp.int32)
        ctx = StepContext(StepBatch.of_chunks(tokens[None], zero, zero), config, plan.max_len)
        hidden, *_ = decoder(ctx, plan.view(cache))
        return decoder.logits(hidden, ctx.shards)

    return np.asarray((jax.jit(run) if stacked else run)(weights, plan.allocate(), tokens))


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """The quick part has each family once."""
    return [pytest.mark.release] if name in COMBINED else [] if name in FIRST else [pytest.mark.slow]


@pytest.mark.fast_cases(18)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks_of(case.name)) for case in CASES])
def test_logits_equal_transformers(case, tmp_path):
    options = case.options | FEWER.get(case.name, {})
    path, tokens = make_checkpoint(tmp_path, case.family, **options), prompt_of(case)
    expected = reference_logits(path, tokens)
    assert expected.std() >= 1
    logits = one_pass(path, tokens, stacked=case.name in STACKED)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * expected.std())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("ministral3", "gemma3-linear", "phi3-longrope-long", "llama-dynamic-beyond"),
        *(pytest.param(name, marks=pytest.mark.release) for name in ("mimo-v2-flash", "mistral4")),
    ],
)
def test_prompts_in_chunks_equal_transformers(name, tmp_path):
    """Chunks of 16 and windows of 8: the rings wrap, and scaling that depends on the length is constant."""
    case = BY_NAME[name]
    options = case.options | FEWER.get(name, {})
    path, tokens = make_checkpoint(tmp_path, case.family, seed=2, **options), prompt_of(case)
    buckets = Buckets(prefill=(16,), batch=(1,), cache=(case.length,))
    llm = LLM(path, dtype="float32", max_batch=1, max_len=case.length, buckets=buckets, progress=False)
    expected = reference_logits(path, tokens)
    np.testing.assert_allclose(llm.logits(tokens.tolist()), expected, rtol=0, atol=TOLERANCE * expected.std())
