"""Whole models with the kernels, interpreted, against XLA's forms. 15 s; three minutes with the slow ones."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import Buckets, SamplingParams
from inferlib.compile.program_set import ProgramSet
from inferlib.config import EngineConfig
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import Backend, kernel_lacks
from inferlib.models.families import config_from_hf
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from tests.conftest import MAX_LEN, assert_greedy, build_llm, random_prompts
from tests.test_compile_tpu import EXPERTS, TINY

TPU = {"platform": "tpu"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "options", "backend"),
    [
        ("ministral", {"head_dim": 128}, TPU, Backend("pallas_tpu", "pallas_tpu")),
        ("ministral", {"head_dim": 24}, TPU, Backend("pallas_tpu", "pallas_tpu")),
        ("ministral", {"head_dim": 128}, TPU | {"kv_cache_dtype": "int8"}, Backend("pallas_tpu", "pallas_tpu")),
        ("llama", {"head_dim": 128}, TPU | {"parallel": "cp=2"}, Backend("pallas_tpu")),
        ("qwen3_moe", {}, {}, Backend(grouped_matmul="pallas_tpu")),
        ("qwen3_moe", {}, {}, Backend(grouped_matmul="pallas_gpu")),
        ("qwen3_moe", {"num_experts": 64}, {}, Backend(grouped_matmul="pallas_gpu")),  # decoding a row: in any order
        ("gpt_oss", {}, {}, Backend(expert_mlp="pallas_tpu")),
        ("llama", {}, {"platform": "gpu", "scan": False}, Backend(add_norm="pallas_gpu")),
    ],
    ids=[
        "attention",
        "attention over cells",
        "attention over int8",
        "attention over dealt positions",
        "grouped products",
        "experts on a GPU",
        "few rows on a GPU",
        "experts",
        "norms",
    ],
)
def test_a_model_generates_the_same_tokens(family, changes, options, backend, checkpoint):
    """Sliding windows whose rings wrap, and full attention, in stacked layers and a single one, with keys and values
    apart, in one cell, quantised and dealt out to devices; experts in stacked layers; rows that start and end at
    different times."""
    buckets = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
    prompts, found = random_prompts([1, 7, 20, 40, 33]), []
    for chosen in (Backend(), backend):
        llm = build_llm(checkpoint(family, **changes), buckets, backend=chosen, **{"scan": True} | options)
        assert llm.engine.programs.config.backend == chosen
        if chosen.decode_attention == "pallas_tpu":
            lacks = partial(
                kernel_lacks, backend=chosen, operation="decode_attention", scaled="kv_cache_dtype" in options
            )
            assert not any(lacks(layer.attention) for layer in llm.model_config.layers)
            assert {len(block.shapes) for block in llm.engine.plan.blocks} == {2 if changes["head_dim"] == 128 else 1}
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_model_of_latents_decodes_the_same_tokens(checkpoint):
    """Rotary keys are folded as on a TPU, to rows of 128, of which prompts and new tokens fill one part after the
    other; and plain."""
    buckets = Buckets(prefill=(16, 64), batch=(3,), cache=(192,))
    path = checkpoint("minicpm3", kv_lora_rank=128, qk_rope_head_dim=64, max_position_embeddings=256)
    prompts, found, shapes = random_prompts([1, 20, 120, 140, 7]), [], set()
    for options in (
        {"backend": Backend(), "scan": False},
        {"backend": Backend(), "scan": True, "platform": "tpu"},
        {"backend": Backend(decode_attention="pallas_tpu"), "scan": True, "platform": "tpu"},
    ):
        llm = build_llm(path, buckets, **options)
        assert llm.engine.programs.config.backend == options["backend"]
        shapes |= {shape[-2:] for block in llm.engine.plan.blocks for shape in block.shapes}
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
        found.append([output.outputs[0].token_ids for output in outputs])
    assert shapes == {(192, 128), (192, 64), (256, 128), (128, 128)}
    assert found[0] == found[1] == found[2]


def test_a_model_that_the_kernel_cannot_run_gets_xlas_form_and_a_warning(caplog):
    model = abstract_model(config_from_hf(TINY | {"num_attention_heads": 4096, "num_key_value_heads": 8}), "bfloat16")
    config = EngineConfig.make("tpu", 2, 64)
    assert config.backend.decode_attention == "pallas_tpu"
    programs = ProgramSet.make(model, config)
    decode, prefill, products = caplog.messages
    assert decode.endswith("XLA's, not the TPU kernel: 1 x 512 queries of a KV head exceed 128")
    assert prefill.startswith("prefill attention is XLA's, not the TPU kernel: 512 heads of size 128 need")
    assert products.startswith("products with attn.o are XLA's, not the TPU kernel's: 524288 inputs need")
    assert programs.config.backend == dataclasses.replace(
        config.backend, decode_attention="xla", prefill_attention="xla"
    )


def test_experts_that_the_kernel_cannot_multiply_by_are_xlas(caplog):
    moe = EXPERTS | {"hidden_size": 8192, "moe_intermediate_size": 8100}
    programs = ProgramSet.make(abstract_model(config_from_hf(moe), "bfloat16"), EngineConfig.make("tpu", 2, 64))
    first, second = caplog.messages
    assert "grouped matmul is XLA's, not the TPU kernel: weights 2 x 8192 x 8100 need" in first
    assert "expert mlp is XLA's, not the TPU kernel: experts of 8192 x 8100 need" in second
    assert (programs.config.backend.grouped_matmul, programs.config.backend.expert_mlp) == ("xla", "xla")


def test_keys_and_values_in_one_cell_change_no_logit(checkpoint):
    buckets, (tokens,) = Buckets(prefill=(16,), batch=(2,), cache=(32,)), random_prompts([27])
    apart, one = (
        build_llm(checkpoint("llama", num_hidden_layers=1), buckets, platform=platform) for platform in ("cpu", "tpu")
    )
    assert [block.shapes for block in one.engine.plan.blocks] == [((2, 2, 128, 128),)]
    np.testing.assert_allclose(one.logits(tokens), apart.logits(tokens), rtol=0, atol=1e-5)
    (output,) = one.generate([tokens], SamplingParams(temperature=0, max_tokens=4))
    assert_greedy(checkpoint("llama", num_hidden_layers=1), tokens, output.outputs[0].token_ids)


def test_shares_that_devices_pass_on_are_whole_tiles_or_xlas(caplog):
    shards = planned_shards(Parallelism.parse("cp=8"))
    model = abstract_model(config_from_hf(TINY), "bfloat16", shards=shards)
    config = EngineConfig.make("tpu", 2, 1024, Buckets((128,), (2,), (200, 1024)), shards)
    programs = ProgramSet.make(model, config)
    assert caplog.messages[-1].endswith("pages of 25 positions do not divide into tiles of 16")
    assert programs.config.backend == dataclasses.replace(config.backend, prefill_attention="xla")


def test_slots_are_whole_tiles_where_the_kernel_reads_them():
    model = abstract_model(config_from_hf(TINY), jnp.bfloat16)
    programs = ProgramSet.make(model, EngineConfig.make("tpu", 2, 300))
    assert {shape[-2] for block in programs.plan.blocks for shape in block.shapes} == {384}
    assert programs.plan.max_len == 300
