"""Whole models with the NKI kernels, which the stand-in runs by host execution: greedy tokens as transformers'."""

from __future__ import annotations

import pytest

from inferlib import Buckets, SamplingParams
from inferlib.nki_kernels import mla_decode, simulator
from inferlib.ops.backend import Backend
from tests.helpers.llms import assert_greedy, build_llm, random_prompts
from tests.helpers.oracle import make_checkpoint
from tests.helpers.tokenizer import write_tokenizer

NKI = Backend(decode_attention="nki", prefill_attention="nki", expert_mlp="nki")
FAMILIES = [
    pytest.param("qwen3_moe", {"num_hidden_layers": 1}),
    # `test_drafts_are_verified_over_latents_by_the_kernel` has this one, too.
    pytest.param("deepseek_v3", {"num_hidden_layers": 2}, marks=pytest.mark.release),
    # Its sinks are among the cases of `test_kernels`.
    pytest.param("gpt_oss", {"num_hidden_layers": 2}, marks=pytest.mark.release),
    # A sliding window, whose ring wraps, and a softcap, as cases of `test_kernels` have them.
    pytest.param("gemma2", {"num_hidden_layers": 2, "attn_logit_softcapping": 2.0}, marks=pytest.mark.release),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_generates_what_transformers_does(family, overrides, tmp_path):
    path = make_checkpoint(tmp_path, family, **overrides)
    write_tokenizer(path)
    prompts, params = random_prompts([5, 37]), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    buckets = Buckets(prefill=(16,), batch=(2,), cache=(64,))
    with simulator.session("trn2") as session:
        llm = build_llm(path, buckets, backend=NKI, decode_steps=2)
        outputs = llm.generate(prompts, params)
    # Two prompts in chunks of 16, and eleven steps of both: a launch for each layer's attention, and one for its
    # experts. Chunks attend to latents in XLA.
    experts = 3 + 11 if family in ("deepseek_v3", "qwen3_moe") else 0
    assert session.launches >= (2 * 11 if family == "deepseek_v3" else 3 + 11) + experts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(path, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
def test_drafts_are_verified_over_latents_by_the_kernel(tmp_path, monkeypatch):
    kernel, tokens = mla_decode.mla_decode, set()

    def recorded(q, *rest):
        tokens.add(q.shape[1])
        return kernel(q, *rest)

    monkeypatch.setattr(mla_decode, "mla_decode", recorded)
    path = make_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=1)
    write_tokenizer(path)
    buckets = Buckets(prefill=(16,), batch=(2,), cache=(64,))
    prompts, params = [[5, 6, 7] * 4, [9, 8] * 6], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with simulator.session("trn2"):
        outputs = build_llm(path, buckets, backend=NKI, decode_steps=1, speculation="ngram:3").generate(prompts, params)
    assert 4 in tokens
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(path, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
def test_each_device_of_a_mesh_runs_the_kernels_on_its_heads(tmp_path):
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    write_tokenizer(path)
    buckets = Buckets(prefill=(16,), batch=(2,), cache=(64,))
    prompts, params = random_prompts([5, 19]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with simulator.session("trn2") as session:
        outputs = build_llm(path, buckets, backend=NKI, parallel="tp=2").generate(prompts, params)
    assert session.launches >= 2 * (2 + 5)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(path, prompt, output.outputs[0].token_ids)
