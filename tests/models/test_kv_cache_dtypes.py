"""Caches of int8, fp8 and int4 in whole models: against transformers with a cache that rounds alike, and what they
take. About 40 s."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from inferlib import LLM, Buckets, SamplingParams, configs
from inferlib.cache.plan import plan_cache
from inferlib.cli import app
from inferlib.config import EngineConfig
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.option_checks import ConfigurationError
from inferlib.planning.costs import Deployed
from inferlib.planning.explain import explain
from inferlib.programs.deployment import Deployment
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from inferlib.targets import parse_target
from tests.helpers.llms import assert_decoded, assert_rounded, build_llm, new_engine, random_prompts, reference
from tests.helpers.poison import before_each_dispatch, poison, tokens_of

BUCKETS = Buckets((8, 16), (2,), (64,))


@pytest.mark.parametrize(
    ("family", "sizes", "dtype"),
    [
        ("gemma2", {}, "int8"),
        pytest.param(
            *("ministral", {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")}, "int4"),
            marks=pytest.mark.slow,
        ),
        pytest.param("kimi_linear", {}, "fp8", marks=pytest.mark.release),
    ],
)
@pytest.mark.slow
def test_logits_are_those_of_a_cache_that_rounds(family, sizes, dtype, checkpoint):
    """Chunk by chunk and token by token, in whole rows and in rings that wrap, and beside states, which are not. What
    is not valid holds NaN, or other numbers, the second time, and changes nothing."""
    path, (prompt,), shares = checkpoint(family, **sizes), random_prompts([45]), []
    llm = build_llm(path, Buckets((16,), (2,), (64,)), kv_cache_dtype=dtype, decode_steps=1)
    logits, params = llm.logits(prompt), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=20)
    assert_rounded(logits, reference(path, prompt, dtype), reference(path, prompt))
    outputs = llm.generate([prompt[:20], prompt[20:27]], params)
    for output in outputs:
        assert_decoded(path, output, lambda tokens: reference(path, tokens, dtype))
    with before_each_dispatch(llm, lambda engine: shares.append(poison(engine))):
        np.testing.assert_array_equal(llm.logits(prompt), logits)
        again = llm.generate([prompt[:20], prompt[20:27]], params)
    assert [output.outputs[0].logprobs for output in again] == [output.outputs[0].logprobs for output in outputs]
    assert 0 < max(shares) < 1


@pytest.mark.release
@pytest.mark.parametrize(
    ("family", "dtype", "parallel"), [("llama", "int4", "cp=2,tp=2"), ("minicpm3", "int8", "cp=2,dp=2")]
)
def test_a_mesh_gives_the_same_logits(family, dtype, parallel, checkpoint):
    """Of prompts by the tokens that follow them."""
    path, (prompt,) = checkpoint(family, num_hidden_layers=1), random_prompts([36])
    sizes = dict(
        dtype="float32", max_batch=2, max_len=64, buckets=Buckets((16,), (2,), (64,)), decode_steps=1, progress=False
    )
    one, several = (LLM(path, kv_cache_dtype=dtype, parallel=p, **sizes) for p in (None, parallel))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    (output,) = several.generate([prompt], params)
    assert_decoded(path, output, one.logits)


def test_plans_hold_values_and_scales(checkpoint):
    """A byte for each number, four for each position and head; ring slots and latents included."""
    for family in ("gemma2", "minicpm3"):
        config = config_from_hf(json.loads((checkpoint(family) / "config.json").read_text()))
        model = abstract_model(config, "float32")
        plans = [plan_cache(model, rows=3, max_len=64, chunk=8, dtype=d) for d in ("float32", "int8", "fp8")]
        for plan, dtype in zip(plans[1:], (jnp.int8, jnp.float8_e4m3fn), strict=True):
            for block, whole in zip(plan.blocks, plans[0].blocks, strict=True):
                assert block.shapes == whole.shapes
                half = len(block.arrays) // 2
                for values, scales in zip(block.arrays[:half], block.arrays[half:], strict=True):
                    assert (values.dtype, scales.dtype) == (dtype, jnp.float32)
                    assert (scales.shape, scales.axes) == (values.shape[:-1], values.axes[:-1])
            assert plan.nbytes == plans[0].nbytes // 4 + sum(4 * np.prod(s[:-1]) for b in plan.blocks for s in b.shapes)
            arrays = plan.allocate()
            assert sum(array.nbytes for array in arrays) == plan.nbytes
            assert plan.flatten(plan.view(arrays)) == arrays


def test_the_cost_model_and_explain_count_them():
    config, target = config_from_hf(configs.load("llama3-8b")), parse_target("v5e-8")
    dense = Deployed(config, target, Parallelism.parse("tp=4,cp=2"))
    made = dataclasses.replace(dense, kv_cache_dtype="int8")
    # Of a KV head of 128 in each half: two bytes a number, or one and a scale.
    assert [d.blocks[0].cached for d in (dense, made)] == [2 * 2 * 2 * 128, 2 * 2 * (128 + 4)]
    assert made.memory(8, 4096, 512).cache * 256 == dense.memory(8, 4096, 512).cache * 132
    assert made.decode(8, 2048).cache_bytes * 256 == pytest.approx(dense.decode(8, 2048).cache_bytes * 132)
    shards = planned_shards(Parallelism.parse("tp=4,cp=2"))
    sizes = EngineConfig.make("cpu", 2, 64, Buckets((16,), (2,), (64,)), shards, kv_cache_dtype="int8")
    model = abstract_model(config, "bfloat16", scan=True, shards=shards)
    plan = plan_cache(model, rows=2, max_len=64, chunk=16, dtype="int8")
    explained = explain(model, plan, sizes, [])
    assert {p.name: p.local_shape for p in explained.cache} == {
        "cache": (2, 2, 32, 128),
        "cache scales": (2, 2, 32),
    }
    assert sum(p.nbytes for p in explained.cache) == plan.nbytes // 8
    with pytest.raises(ConfigurationError, match="'int3' is not supported; choose one of int8, fp8, int4"):
        dataclasses.replace(dense, kv_cache_dtype="int3")
    least = dataclasses.replace(made, target=parse_target("h100-8"), kv_cache_dtype="int4")
    assert least.blocks[0].cached == 2 * ((96 + 2) + (64 + 16 + 2))
    assert least.memory(8, 4096, 512).cache * 512 == dense.memory(8, 4096, 512).cache * 180


def test_deployments_say_it(checkpoint):
    hf = json.loads((checkpoint("llama") / "config.json").read_text())
    made = Deployment(hf, "cpu", "float32", BUCKETS, kv_cache_dtype="fp8")
    assert Deployment.from_json(json.loads(json.dumps(made.to_json()))).kv_cache_dtype == "fp8"
    key = made.keys()[0]
    assert made.program_hash(key, None) != dataclasses.replace(made, kv_cache_dtype=None).program_hash(key, None)
    assert {array.dtype.name for array in made.planned().inputs(key)[1]} == {"float8_e4m3fn", "float32"}


def test_commands_take_it():
    run = CliRunner().invoke
    shown = [
        json.loads(run(app, ["info", "--config", "llama3-8b", "--json", *more]).stdout)["cache_bytes"]["bfloat16"]
        for more in ([], ["--kv-cache-dtype", "int8"], ["--kv-cache-dtype", "int4"])
    ]
    assert [x["per_token"] for x in shown] == [32 * 8 * size for size in (128 * 4, 2 * (128 + 4), 96 + 2 + 64 + 16 + 2)]
    arguments = ["plan", "--config", "llama3-8b", "--target", "v6e-1", "--input-len", "8192", "--concurrency", "16"]
    dense, less = (
        json.loads(run(app, [*arguments, "--json", *more]).stdout)["best"] for more in ([], ["--kv-cache-dtype", "fp8"])
    )
    assert (dense["kv_cache_dtype"], less["kv_cache_dtype"]) == ("bfloat16", "fp8")
    assert less["tokens_per_second"] > dense["tokens_per_second"]
    assert "--kv-cache-dtype fp8" in run(app, [*arguments, "--kv-cache-dtype", "fp8"]).stdout
    for command in (["info", "--config", "llama3-8b"], arguments, ["compile", "--config", "llama3-8b"]):
        result = run(app, [*command, "--kv-cache-dtype", "int3"])
        assert result.exit_code
        assert "choose one of int8, fp8" in result.output


def test_what_cannot_be_is_named(checkpoint):
    with pytest.raises(ConfigurationError, match="kv_cache_dtype 'bfloat16' is not supported; choose one of int8, fp8"):
        LLM(checkpoint("llama"), kv_cache_dtype="bfloat16", progress=False)
    latents = config_from_hf(json.loads((checkpoint("minicpm3") / "config.json").read_text()))
    made = Deployed(latents, parse_target("v6e-1"), Parallelism(), kv_cache_dtype="int8")
    with pytest.raises(ConfigurationError, match=r"latent attention keeps its cache .* leave kv_cache_dtype out"):
        made.memory(1, 64, 16)
    with pytest.raises(ConfigurationError, match=r"'int4' is not for this model: latent attention .* take int8"):
        plan_cache(abstract_model(latents, "float32"), rows=1, max_len=64, chunk=8, dtype="int4")
    small = dataclasses.replace(made, config=config_from_hf(configs.load("llama3-1b")))
    with pytest.raises(ConfigurationError, match=r"attention with heads of 64 keeps its cache .* leave kv_cache_dtype"):
        small.memory(1, 64, 16)
    with pytest.raises(ConfigurationError, match="no kernel for TPUs reads such cells; take int8, or"):
        dataclasses.replace(small, kv_cache_dtype="int4").memory(1, 64, 16)
    odd = config_from_hf(configs.load("llama3-1b") | {"head_dim": 92})
    with pytest.raises(ConfigurationError, match="heads of 92 are not split into groups of 8"):
        plan_cache(abstract_model(odd, "float32"), rows=1, max_len=64, chunk=8, dtype="int4")


@pytest.mark.release
def test_preempted_rows_of_int4_go_on_with_the_same_tokens(checkpoint):
    """Alone, together, and together in fewer pages than the rows need; of stacked layers."""
    path = checkpoint("ministral", num_hidden_layers=4, layer_types=("sliding_attention", "full_attention") * 2)
    llm = build_llm(path, Buckets((16,), (2,), (96,)), scan=True, kv_cache_dtype="int4")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = random_prompts([40, 30], seed=3)
    alone = [tokens_of(llm, [prompt], params)[0] for prompt in prompts]
    assert tokens_of(llm, prompts, params) == alone
    with new_engine(llm, pages=6) as engine:
        assert tokens_of(llm, prompts, params) == alone
        assert engine.scheduler.preemptions


def test_kernels_that_lack_it_are_passed_over(checkpoint, caplog):
    config = config_from_hf(json.loads((checkpoint("llama") / "config.json").read_text()))
    for dtype in ("int8", "int4"):
        ProgramSet.make(abstract_model(config, "float32"), EngineConfig.make("gpu", 2, 64, kv_cache_dtype=dtype))
    assert caplog.messages == [
        f"{operation} attention in 2 of 2 layers runs in XLA, not in the GPU kernel: a cache of {stored}"
        for stored in ("int8 or fp8", "int4")
        for operation in ("decode", "prefill")
    ]
