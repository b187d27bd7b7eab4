"""Programs for Trainium with the kernels' places marked, lowered without NKI; 6 s."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import AutoConfig

from inferlib.aot.neuron import nki_kernels
from inferlib.aot.neuron_lint import lint
from inferlib.buckets import Buckets
from inferlib.config import EngineConfig
from inferlib.inspection.hlo import Module
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.ops.backend import Backend
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program_set import ProgramSet
from tests.helpers.oracle_cases import FAMILIES, SIZES

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
KEY = ProgramKey("greedy", 4, 32, chunks=1, chunk=16)


def lowered(family: str, backend: Backend) -> Module:
    options = {k: v for k, v in {**SIZES, **FAMILIES[family]}.items() if v is not None or k != "head_dim"}
    hf = AutoConfig.for_model(family, **options).to_dict()
    hf["architectures"] = [ARCHITECTURES[family]]
    config = EngineConfig.make("neuron", 4, 64, Buckets((16,), (1, 4), (32, 64)))
    programs = ProgramSet.make(
        abstract_model(config_from_hf(hf), "bfloat16"), dataclasses.replace(config, backend=backend)
    )
    return Module(programs.lower(KEY, "neuron").compiler_ir("hlo").get_hlo_module().to_string())


def test_latents_and_experts_have_their_kernels_in_steps_of_few_tokens():
    layers = SIZES["num_hidden_layers"]
    module = lowered("deepseek_v3", Backend(decode_attention="nki", prefill_attention="nki", expert_mlp="nki"))
    assert nki_kernels(module) == {"mla_decode": layers, "expert_mlp": layers - 1}
    assert [str(finding) for finding in lint(module)] == []


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_layer_has_its_kernels_and_the_compiler_would_take_the_rest(family):
    module = lowered(family, Backend(decode_attention="nki", prefill_attention="nki"))
    layers = SIZES["num_hidden_layers"]
    assert nki_kernels(module) == {"flash_prefill": layers, "flash_decode": layers}
    assert [str(finding) for finding in lint(module)] == []


def test_without_nki_xla_does_all():
    assert nki_kernels(lowered("llama", EngineConfig.make("neuron", 4, 64).backend)) == {}
