"""Whole models with the TPU kernels, interpreted, against XLA's forms. 15 s; two minutes with the slow ones."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from inferlib import Buckets, SamplingParams
from inferlib.compile.program_set import ProgramSet
from inferlib.config import EngineConfig
from inferlib.models.abstract import abstract_model
from inferlib.models.batch import Backend, kernel_lacks
from inferlib.models.families import config_from_hf
from tests.conftest import MAX_LEN, assert_greedy, build_llm, random_prompts
from tests.test_compile_tpu import TINY

pytestmark = pytest.mark.usefixtures("quick_compilations")


@pytest.mark.slow
@pytest.mark.parametrize("size", [24, 128])
def test_a_model_decodes_the_same_tokens(size, checkpoint):
    """Sliding windows whose rings wrap, and full attention, in stacked layers and a single one; rows that start and end
    at different times. With heads of 24, keys and values are one array."""
    buckets = Buckets(prefill=(16,), batch=(4,), cache=(MAX_LEN,))
    prompts, found = random_prompts([1, 7, 20, 40, 33]), []
    for backend in (Backend(), Backend(decode_attention="pallas_tpu")):
        path = checkpoint("ministral", head_dim=size)
        llm = build_llm(path, buckets, scan=True, platform="tpu", backend=backend)
        assert llm.engine.programs.config.backend == backend
        assert {len(block.shapes) for block in llm.engine.plan.blocks} == {2 if size == 128 else 1}
        assert not any(kernel_lacks(layer.attention, "pallas_tpu") for layer in llm.model_config.layers)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_a_model_that_the_kernel_cannot_run_gets_xlas_form_and_one_warning(caplog):
    model = abstract_model(config_from_hf(TINY | {"num_attention_heads": 4096, "num_key_value_heads": 8}), "bfloat16")
    config = EngineConfig.make("tpu", 2, 64)
    assert config.backend.decode_attention == "pallas_tpu"
    programs = ProgramSet.make(model, config)
    (warning,) = caplog.messages
    assert warning.endswith("XLA's, not the TPU kernel: 1 x 512 queries of a KV head exceed 128")
    assert programs.config == dataclasses.replace(config, backend=Backend())


def test_keys_and_values_in_one_cell_change_no_logit(checkpoint):
    buckets, (tokens,) = Buckets(prefill=(16,), batch=(2,), cache=(32,)), random_prompts([27])
    apart, one = (
        build_llm(checkpoint("llama", num_hidden_layers=1), buckets, platform=platform) for platform in ("cpu", "tpu")
    )
    assert [block.shapes for block in one.engine.plan.blocks] == [((2, 2, 128, 128),)]
    np.testing.assert_allclose(one.logits(tokens), apart.logits(tokens), rtol=0, atol=1e-5)
    (output,) = one.generate([tokens], SamplingParams(temperature=0, max_tokens=4))
    assert_greedy(checkpoint("llama", num_hidden_layers=1), tokens, output.outputs[0].token_ids)


def test_slots_are_whole_tiles_where_the_kernel_reads_them():
    model = abstract_model(config_from_hf(TINY), jnp.bfloat16)
    programs = ProgramSet.make(model, EngineConfig.make("tpu", 2, 300))
    assert {shape[-2] for block in programs.plan.blocks for shape in block.shapes} == {384}
    assert programs.plan.max_len == 300
