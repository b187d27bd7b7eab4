"""Weights that arrive on chip while collectives run change no logits of sharded models. About 60 s."""

from __future__ import annotations

import numpy as np
import pytest

from inferlib import Buckets, SamplingParams
from inferlib.ops.backend import Backend
from inferlib.programs.program_set import ProgramSet
from tests.helpers.llms import build_llm, random_prompts
from tests.helpers.sequences import run, sequence

WIDE = dict(num_hidden_layers=4, hidden_size=256, vocab_size=512)
HEADS = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2)
LATENT = dict(kv_lora_rank=128, q_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128)
ATTENTION, DENSE = {"attn.qkv", "attn.o"}, {"mlp.gate_up", "mlp.down"}
CASES = {
    "dense": ("llama", HEADS | {"intermediate_size": 512}, "tp=2", ATTENTION | DENSE),
    "two layers in turn": ("gpt_oss", HEADS | {"intermediate_size": 128}, "ep=2", ATTENTION),
    "latents": (
        *("minicpm3", LATENT | {"num_attention_heads": 4, "intermediate_size": 512}, "tp=2"),
        {"attn.down", "attn.q", "attn.o"} | DENSE,
    ),
    "shared experts": (
        *("llama4_text", HEADS | {"intermediate_size": 256, "intermediate_size_mlp": 512}, "ep=2,tp=2"),
        ATTENTION | {"mlp.shared.gate_up", "mlp.shared.down"},
    ),
}


@pytest.mark.release
@pytest.mark.parametrize(("family", "changes", "parallel", "weights"), CASES.values(), ids=CASES)
def test_logits_are_the_same(family, changes, parallel, weights, checkpoint, monkeypatch):
    """Of prompts, and tokens. Without excess precision: XLA rounds to bfloat16 where copies start, and elsewhere not
    between operations that it fuses."""
    monkeypatch.setattr(ProgramSet, "options", lambda *_: {"xla_allow_excess_precision": False})
    path, buckets = checkpoint(family, **WIDE | changes), Buckets(prefill=(16,), batch=(4,), cache=(64,))

    def of(backend: Backend):
        llm = build_llm(path, buckets, dtype="bfloat16", parallel=parallel, platform="tpu", scan=True, backend=backend)
        programs = llm.engine.programs
        parts = {weight.name: weight.part for weight in programs.model.weights}
        fetched = {parts[name] for name in programs.choices.weights["fetch_ahead"]}
        assert fetched == (weights if backend.fetch_ahead == "pallas_tpu" else set())
        greedy, prompts = SamplingParams(temperature=0), random_prompts([9, 5], seed=5)
        sequences = [sequence(prompt, 6, greedy, detail="logits") for prompt in prompts]
        tokens = run(llm.engine, sequences)
        return tokens, np.concatenate([detail for s in sequences for detail in s.prompt_details])

    kernels = (Backend(matmul="pallas_tpu", fetch_ahead=fetch) for fetch in ("pallas_tpu", "xla"))
    (tokens, logits), (expected, expected_logits) = map(of, kernels)
    assert tokens == expected
    np.testing.assert_array_equal(logits, expected_logits)
