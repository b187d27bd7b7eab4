"""Whole models with the kernels, interpreted, against transformers or XLA."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compile as compile_benchmark
from benchmarks import decode as decode_benchmark
from inferlib import LLM, Buckets, SamplingParams
from inferlib.config import DeviceKind, EngineConfig
from inferlib.deploy.compile import CompileResult
from inferlib.inspection.report import Report
from inferlib.inspection.report_html import page
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.attention_choices import choose_attention
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import QUANTIZATIONS, Quantization
from inferlib.ops.backend import Backend
from inferlib.option_checks import OPERATIONS, ConfigurationError, backend_option
from inferlib.programs.deployment import Deployment
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program import build
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, planned_shards
from tests.helpers.engines import smallest_model
from tests.helpers.kernels import kernels_in
from tests.helpers.llms import MAX_LEN, assert_decoded, assert_greedy, build_llm, random_prompts, reference
from tests.helpers.poison import tokens_of
from tests.helpers.sequences import run, sequence
from tests.helpers.tpu_models import EXPERTS, TINY

# One step a call: its program is the one that decides about layouts on a TPU, too.
TPU, GPU = {"platform": "tpu", "decode_steps": 1}, "pallas_gpu"
DEALT = {"platform": "tpu", "parallel": "cp=2"}  # and several steps
GREEDY = SamplingParams(temperature=0, max_tokens=12)


KERNELS = Backend(decode_attention="pallas_tpu", prefill_attention="pallas_tpu")
# Stacked.
WINDOWS = {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "sliding_attention")}
RING = {"num_hidden_layers": 1, "layer_types": ("sliding_attention",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "options", "rows", "backend"),
    [
        # All kernels for TPUs together are below, and rings in `tests/kernels`.
        pytest.param("ministral", WINDOWS | {"head_dim": 24}, TPU, 4, KERNELS, marks=pytest.mark.release),
        pytest.param(
            *("ministral", RING | {"head_dim": 128}, TPU | {"kv_cache_dtype": "int8"}, 3, KERNELS),
            marks=pytest.mark.release,
        ),
        pytest.param(
            *("llama", {"head_dim": 128}, DEALT, 3, Backend(decode_attention="pallas_tpu")), marks=pytest.mark.release
        ),
        # Experts are multiplied by all kernels for TPUs below, and by each kernel in `test_moe`.
        pytest.param(
            *("qwen3_moe", {"num_experts": 64}, {"scan": False}, 4, Backend(grouped_matmul=GPU, qkv_attention=GPU)),
            marks=pytest.mark.release,
        ),
        pytest.param(
            *("gpt_oss", {}, {}, 4, Backend(grouped_matmul="pallas_tpu", expert_mlp="pallas_tpu")),
            marks=pytest.mark.release,
        ),
        # Rings and sinks are in `test_qkv_attention_gpu`, and a model is with branches of low rank below.
        pytest.param(
            *("gpt_oss", {"num_hidden_layers": 1}, {"scan": False}, 4, Backend(qkv_attention="pallas_gpu")),
            marks=pytest.mark.release,
        ),
    ],
    ids=[
        "attention",
        "attention over int8",
        "attention over dealt positions",
        "few rows on a GPU",
        "experts",
        "attention from products on",
    ],
)
def test_a_model_generates_what_transformers_does(family, changes, options, rows, backend, checkpoint):
    """Sliding windows whose rings wrap, in stacked layers and a single one, and full attention, with keys and values
    apart, in one cell, quantised and dealt out to devices; experts in stacked layers; rows that start and end at
    different times. The TPU kernel has four rows at a time, and three one after the other."""
    buckets = Buckets(prefill=(16,), batch=(rows,), cache=(MAX_LEN,))
    path, prompts = checkpoint(family, **changes), random_prompts([1, 7, 20, 40, 33])
    stored = options.get("kv_cache_dtype")
    llm = build_llm(path, buckets, backend=backend, **{"scan": True} | options)
    assert llm.engine.programs.config.backend == backend
    if backend.decode_attention == "pallas_tpu":
        choose = partial(choose_attention, operation="decode_attention", backend=backend, scaled=stored is not None)
        assert not any(choose(layer.attention).reason for layer in llm.model_config.layers)
        assert {len(block.shapes) for block in llm.engine.plan.blocks} == {2 if changes["head_dim"] == 128 else 1}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=20 if stored else None)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        if stored:
            assert_decoded(path, output, lambda tokens: reference(path, tokens, stored))
        else:
            assert_greedy(path, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [KERNELS, pytest.param(Backend(), marks=pytest.mark.release)], ids=["tpu", "xla"])
def test_a_model_of_latents_generates_what_transformers_does(backend, checkpoint):
    """Rotary keys are folded as on a TPU, to rows of 128, of which prompts and new tokens fill one part after the
    other."""
    buckets = Buckets(prefill=(64,), batch=(3,), cache=(192,))
    sizes = dict(kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=128)
    path = checkpoint("minicpm3", num_hidden_layers=1, max_position_embeddings=256, **sizes)
    prompts = random_prompts([1, 20, 120, 140, 7])
    llm = build_llm(path, buckets, backend=backend, free_layouts=False, **TPU)
    assert llm.engine.programs.config.backend == backend
    choose = partial(choose_attention, operation="decode_attention", backend=backend, scaled=False)
    assert not any(choose(layer.attention).reason for layer in llm.model_config.layers)
    shapes = {shape[-2:] for block in llm.engine.plan.blocks for shape in block.shapes}
    assert shapes == {(256, 128), (128, 128)}  # pages of folded keys
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6)):
        assert_greedy(path, output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.slow
def test_a_model_with_all_that_tpus_get_has_the_same_logits(checkpoint):
    """But for bfloat16. All experts are chosen: rounding picks among near equals."""
    sizes = dict(head_dim=128, hidden_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=4)
    path, buckets = checkpoint("qwen3_moe", num_hidden_layers=1, **sizes), Buckets((16,), (2,), (64,))
    options = dict(dtype="bfloat16", quantization="mxfp4", free_layouts=False, **TPU)
    kernels, unquantized = (build_llm(path, buckets, backend=backend, **options) for backend in ("auto", "xla"))
    chosen = Backend.for_platform("tpu", Shards())
    assert kernels.config.backend == chosen
    assert unquantized.config.backend == dataclasses.replace(chosen, **dict.fromkeys(OPERATIONS, "xla"))
    assert any(weight.packed for weight in kernels.engine.programs.model.weights)
    (tokens,) = random_prompts([20])
    prompt = sequence(tokens, 4, detail="logits")  # a program fewer than `logits` and `generate` have
    (new,) = run(kernels.engine, [prompt])
    logits = unquantized.logits([*tokens, *new])
    margin, prompts = 0.1 * np.std(logits), np.concatenate(prompt.prompt_details)[:, : logits.shape[1]]
    np.testing.assert_allclose(prompts, logits[: len(tokens)], rtol=0, atol=margin)
    steps = logits[len(tokens) - 1 : -1]
    assert np.max(steps.max(-1) - steps[np.arange(len(new)), new]) < 2 * margin


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "batch", "fused"), [("int8", 2, True), ("int8", 5, False), (None, 1, False)])
def test_sums_that_follow_our_products_are_made_with_their_norms(quantization, batch, fused, checkpoint):
    path, buckets = checkpoint("llama", num_hidden_layers=1), Buckets((16,), (batch,), (64,))
    options = dict(quantization=quantization, platform="gpu", scan=False)
    llm = build_llm(path, buckets, **options, backend=Backend(add_norm=GPU, matmul=GPU))
    programs, key = llm.engine.programs, ProgramKey("greedy", batch, 64)
    called = kernels_in(build(programs.model, programs.plan, programs.config, key), *programs.inputs(key))
    assert ("add_norm" in called) == fused
    if fused:
        unquantized = build_llm(path, buckets, **options, backend=Backend())
        ours, theirs = (tokens_of(each, random_prompts([7] * batch), GREEDY) for each in (llm, unquantized))
        assert ours == theirs


@pytest.mark.slow
# Which attention sums the products depends neither on the family's norms nor on the scheme, nor the norms on either.
@pytest.mark.parametrize(
    ("family", "quantization", "attention"),
    [
        # With branches of low rank below, where one layer is enough; which norms beside experts do, too.
        *(pytest.param("llama", name, GPU, marks=pytest.mark.release) for name in ("mxfp4", None)),
        pytest.param("qwen3_moe", "int8", "xla", marks=pytest.mark.release),
    ],
)
def test_norms_of_few_rows_get_their_factor_after_their_products(family, quantization, attention, checkpoint):
    """In layers that are dense; equal to what is normed first but for bfloat16. Attention sums products itself, if it
    is by the kernel."""
    sizes = dict(hidden_size=192, intermediate_size=128, head_dim=32)
    sizes |= dict(decoder_sparse_step=2, moe_intermediate_size=64) if family == "qwen3_moe" else {}
    path, buckets, (tokens,) = checkpoint(family, **sizes), Buckets((16,), (1,), (64,)), random_prompts([7])
    options = dict(dtype="bfloat16", quantization=quantization, platform="gpu", scan=False)
    llm = build_llm(path, buckets, **options, backend=Backend(add_norm=GPU, matmul=GPU, qkv_attention=attention))
    programs, key = llm.engine.programs, ProgramKey("greedy", 1, 64)
    called = kernels_in(build(programs.model, programs.plan, programs.config, key), *programs.inputs(key))
    assert "added" in called
    assert ("qkv_attention" in called) == (attention == GPU)
    assert ("add_norm" in called) == (family == "qwen3_moe")
    (output,) = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=12))
    new = output.outputs[0].token_ids
    logits = build_llm(path, buckets, **options, backend=Backend()).logits([*tokens, *new])
    steps = logits[len(tokens) - 1 : -1]
    assert np.max(steps.max(-1) - steps[np.arange(len(new)), new]) < 0.1 * np.std(logits)


@pytest.mark.parametrize(("family", "named"), [("gemma2", set()), ("qwen3_moe", {"added", "add_norm"})])
def test_norms_stand_behind_their_products_where_layers_are_dense(family, named, checkpoint):
    """Gemma's stand elsewhere, and come before their products. Beside a layer of experts, dense ones have both."""
    sizes = dict(hidden_size=192, intermediate_size=128, head_dim=32)
    more = dict(decoder_sparse_step=2, moe_intermediate_size=64) if family == "qwen3_moe" else {"num_hidden_layers": 1}
    path = checkpoint(family, **sizes, **more)
    config = EngineConfig.make("gpu", 1, 64, Buckets((16,), (1,), (64,)), backend=Backend(add_norm=GPU, matmul=GPU))
    options = dict(quantization=Quantization.named("int8"), backend=config.backend)
    programs = ProgramSet.make(abstract_model(ModelFiles.open(path).config, "bfloat16", **options), config)
    key = ProgramKey("greedy", 1, 64)
    called = kernels_in(build(programs.model, programs.plan, programs.config, key), *programs.inputs(key))
    assert called
    assert {"added", "add_norm"} & set(called) >= named
    assert ("added" in called) == bool(named)


@pytest.mark.slow
def test_branches_of_low_rank_reach_the_kernels_that_sum_products(checkpoint, monkeypatch):
    """Tokens and logits are those of XLA's form but for bfloat16; without the branches they would be others."""
    four_bits = Quantization("mxfp4", QUANTIZATIONS["mxfp4"], rank=4)
    monkeypatch.setattr(Quantization, "named", staticmethod(lambda name: four_bits))
    path = checkpoint("llama", num_hidden_layers=1, hidden_size=192, intermediate_size=128, head_dim=32)
    buckets, (tokens,) = Buckets((16,), (1,), (64,)), random_prompts([7])
    options = dict(dtype="bfloat16", quantization="mxfp4", platform="gpu", scan=False)
    kernels = Backend(add_norm=GPU, matmul=GPU, qkv_attention=GPU)
    ours, theirs = (build_llm(path, buckets, **options, backend=backend) for backend in (kernels, Backend()))
    programs, key = ours.engine.programs, ProgramKey("greedy", 1, 64)
    called = kernels_in(build(programs.model, programs.plan, programs.config, key), *programs.inputs(key))
    assert {"added", "qkv_attention"} <= set(called)
    unfactored, rng = theirs.logits(tokens), np.random.default_rng(0)
    names = [array.name for array in programs.model.specs]
    factors = {n: rng.normal(size=w.shape) * 0.1 for n, w in enumerate(ours.engine.weights) if "factor_" in names[n]}
    for llm in (ours, theirs):
        weights = llm.engine.weights
        llm.engine.weights = tuple(jnp.asarray(factors.get(n, w), w.dtype) for n, w in enumerate(weights))
    assert np.std(theirs.logits(tokens) - unfactored) > 0.1 * np.std(unfactored)
    (output,) = ours.generate([tokens], SamplingParams(temperature=0, max_tokens=12))
    new = output.outputs[0].token_ids
    logits = theirs.logits([*tokens, *new])
    steps = logits[len(tokens) - 1 : -1]
    assert np.max(steps.max(-1) - steps[np.arange(len(new)), new]) < 0.1 * np.std(logits)


def test_the_option_has_one_spelling():
    assert backend_option("matmul=xla, decode_attention=xla,matmul=xla") == "decode_attention=xla,matmul=xla"
    assert backend_option(",".join(f"{name}=xla" for name in reversed(OPERATIONS))) == "xla"
    for wrong in ("pallas", "", "matmul", "matmul=xla,", {"matmul": "xla"}, None):
        with pytest.raises(ConfigurationError, match="operations are decode_attention, "):
            backend_option(wrong)


@pytest.mark.parametrize(
    ("option", "left"),
    [
        ("xla", set()),
        (
            "matmul=xla,expert_mlp=xla",
            {"decode_attention", "prefill_attention", "chunk_write", "group_order", "grouped_matmul"},
        ),
        ("auto", {"decode_attention", "prefill_attention", "chunk_write", "mx_matmul", "expert_mlp"}),
    ],
)
@pytest.mark.fast_cases(1)
def test_operations_are_left_to_xla(option, left):
    """By the kernels that a program calls."""
    buckets, stored = Buckets((16,), (2,), (128,)), Quantization.named("mxfp4")
    made = Deployment(EXPERTS, "v5e-1", "bfloat16", buckets, quantization=stored, backend=option).planned()
    key = ProgramKey("greedy", 2, 128, chunks=1, chunk=16)
    assert kernels_in(build(made.model, made.plan, made.config, key), *made.inputs(key), of_gpus=False) == left


def test_reports_say_what_programs_were_compiled_with():
    made = Deployment(TINY, "v5e-1", "bfloat16", Buckets((16,), (2,), (128,)), kv_cache_dtype="int8", backend="xla")
    report, settings = Report.of(made, ()), "tp=1, bfloat16, int8 cache, backend xla"
    assert CompileResult("tiny", report).text().splitlines()[0] == f"tiny on v5e-1, {settings}"
    assert f"<h1>tiny on v5e-1</h1><p>{settings}: " in page(report, "tiny")


@pytest.mark.parametrize("words", ["compile.py --only 8b", "decode.py --config llama3-8b"])
def test_benchmarks_explain_a_wrong_option(words, monkeypatch, capsys):
    program, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [program, *arguments, "--backend", "pallas"])
    with pytest.raises(SystemExit):
        {"compile.py": compile_benchmark, "decode.py": decode_benchmark}[program].main()
    assert f"{program}: error: backend 'pallas' is neither 'auto' nor 'xla'" in capsys.readouterr().err


@pytest.mark.slow
def test_decode_is_measured_up_to_the_end_of_the_rows():
    model = smallest_model()
    row = decode_benchmark.measure(model, model.random_weights(), batch=2, cache=64, steps=32, shards=Shards())
    assert row["ms"] > 0
    assert row["gb_per_second"] > 0


def test_options_that_do_not_hold_are_refused(checkpoint):
    path, text = checkpoint("llama", num_hidden_layers=1), r"is neither 'auto' nor 'xla' .* are decode_attention, "
    for option in ("pallas", "matmul", "xla,matmul=xla", "matmul=auto", "", {"matmul": "xla"}):
        message = text if isinstance(option, str) else "backend must be text such as 'auto', or a Backend"
        with pytest.raises(ConfigurationError, match=message):
            LLM(path, backend=option, progress=False)


@pytest.mark.parametrize(
    ("option", "left"),
    [
        ("auto", {"qkv_attention", "choose_experts", "grouped_matmul", "add_norm"}),
        ("decode_attention=xla,matmul=xla,add_norm=xla", {"choose_experts", "grouped_matmul"}),
        ("choose_experts=xla,grouped_matmul=xla,all_reduce=xla", {"qkv_attention", "add_norm"}),
        ("xla", set()),
    ],
)
def test_operations_are_left_to_xla_on_gpus(option, left):
    """By the kernels that a decode program calls, and for "xla" by what it lowers to."""
    buckets = Buckets((16,), (4,), (64,))
    config = EngineConfig.make("gpu", 4, 64, buckets, backend=option)
    model = abstract_model(config_from_hf(EXPERTS), "bfloat16", backend=config.backend)
    programs, key = ProgramSet.make(model, config), ProgramKey("greedy", 4, 64)
    function = build(programs.model, programs.plan, programs.config, key)
    assert kernels_in(function, *programs.inputs(key)) == left
    if option == "xla":
        assert "triton" not in programs.lower(key, "cuda").as_text()


@pytest.mark.parametrize(("rows", "quantization"), [(4, None), (1, "int8"), (4, "mxfp4")])
def test_xla_leaves_no_triton_kernel_for_products(rows, quantization):
    """Of one row and of several, whatever the weights are stored as."""
    stored = quantization and Quantization.named(quantization)

    def text(option):
        config = EngineConfig.make("gpu", rows, 64, Buckets((16,), (rows,), (64,)), backend=option)
        hf = TINY | {"num_hidden_layers": 1}
        model = abstract_model(config_from_hf(hf), "bfloat16", quantization=stored, backend=config.backend)
        programs = ProgramSet.make(model, config)
        return programs.lower(ProgramKey("greedy", rows, 64), "cuda").as_text()

    assert "triton" not in text("xla")
    if quantization == "int8":
        assert "row_matmul" not in text("matmul=xla")
        assert "triton" in text("auto")


def test_a_model_that_the_kernel_cannot_run_gets_xlas_form_and_a_warning(caplog):
    model = abstract_model(config_from_hf(TINY | {"num_attention_heads": 4096, "num_key_value_heads": 8}), "bfloat16")
    config = EngineConfig.make("tpu", 2, 64)
    assert config.backend.decode_attention == "pallas_tpu"
    programs = ProgramSet.make(model, config)
    decode, prefill, products = caplog.messages
    assert decode.endswith("runs in XLA, not in the TPU kernel: 1 x 512 queries of a KV head exceed 128")
    assert prefill.startswith("prefill attention runs in XLA, not in the TPU kernel: 512 heads of size 128 need")
    assert products.startswith("matmul with attn.o runs in XLA, not in the TPU kernel: 524288 inputs need")
    assert programs.config.backend == dataclasses.replace(
        config.backend, decode_attention="xla", prefill_attention="xla"
    )


def test_a_compilation_says_once_what_xla_takes_over(caplog):
    made = Deployment(TINY, "v5e-1", "float16", Buckets((16,), (2,), (128,)))
    made.keys()
    Report.of(made, ())
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "decode attention runs in XLA, not in the TPU kernel",
        "prefill attention runs in XLA, not in the TPU kernel",
    ]


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="qkv_attention='pallas_tpu' is none of 'xla', 'pallas_gpu'"):
        Backend(qkv_attention="pallas_tpu")
    with pytest.raises(ValueError, match="generation='v3' is none of None, 'v4'"):
        Backend(generation="v3")


@pytest.mark.parametrize("kernel", ["pallas_gpu", "pallas_tpu", "nki"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "neuron"])
def test_a_platform_takes_its_own_kernels_and_a_cpu_all(platform, kernel):
    backend, sizes = Backend(decode_attention=kernel), (2, 64, Buckets((16,), (2,), (64,)))
    if platform == "cpu" or {"pallas_gpu": "gpu", "pallas_tpu": "tpu", "nki": "neuron"}[kernel] == platform:
        assert EngineConfig(*sizes, platform=platform, backend=backend).backend == backend
        return
    with pytest.raises(ConfigurationError, match=f"{kernel}.*and this is '{platform}': choose decode_attention='xla'"):
        EngineConfig(*sizes, platform=platform, backend=backend)


def test_experts_that_the_kernel_cannot_multiply_by_are_xlas(caplog):
    moe = EXPERTS | {"hidden_size": 8192, "moe_intermediate_size": 8100}
    programs = ProgramSet.make(abstract_model(config_from_hf(moe), "bfloat16"), EngineConfig.make("tpu", 2, 64))
    first, second = caplog.messages
    assert "grouped matmul runs in XLA, not in the TPU kernel: weights 2 x 8192 x 8100 need" in first
    assert "expert mlp runs in XLA, not in the TPU kernel: experts of 8192 x 8100 need" in second
    assert (programs.config.backend.grouped_matmul, programs.config.backend.expert_mlp) == ("xla", "xla")
    for op, message in (("grouped_matmul", first), ("expert_mlp", second)):
        (choice,) = set(programs.choices.layers[op].values())
        assert choice.name == "xla"
        assert message.endswith(choice.reason)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8_block", "mxfp8", "mxfp4", "mxfp4_a8"])
@pytest.mark.parametrize("generation", ["v4", "v5e"])
def test_floats_of_8_bits_are_xlas_where_the_matrix_unit_takes_none(generation, name, caplog):
    cached, sizes = name if name in ("int8", "fp8") else None, (2, 128, Buckets((128,), (2,), (128,)))
    config = EngineConfig.make(DeviceKind("tpu", generation=generation), *sizes, kv_cache_dtype=cached)
    backend = config.backend
    options = dict(quantization=Quantization.named(name), backend=backend, scan=True)
    model = abstract_model(config_from_hf(EXPERTS), "bfloat16", **options)
    runs = ProgramSet.make(model, config).config.backend
    if generation == "v5e" or name.startswith("int"):
        rounds = name.endswith("_a8")
        assert runs == dataclasses.replace(backend, expert_mlp="xla" if rounds else "pallas_tpu")
        assert len(caplog.messages) == rounds
        return
    assert not any(weight.packed for weight in model.weights if weight.scheme is not None)
    attention = {"decode_attention": "xla", "prefill_attention": "xla"} if cached else {}
    assert runs == dataclasses.replace(backend, grouped_matmul="xla", expert_mlp="xla", **attention)
    assert len(caplog.messages) == 3 + len(attention)
    lacks = "float8_e5m2" if "mxfp4" in name else "float8_e4m3fn"
    assert all(message.endswith(f": the matrix unit of TPU v4 takes no {lacks}") for message in caplog.messages)


@pytest.mark.slow
def test_keys_and_values_in_one_cell_change_no_logit(checkpoint):
    """Those of both KV heads."""
    buckets, (tokens,) = Buckets(prefill=(16,), batch=(2,), cache=(32,)), random_prompts([27])
    path, options = checkpoint("llama", num_hidden_layers=1), dict(scan=False, free_layouts=False, backend=Backend())
    apart, one = (build_llm(path, buckets, platform=platform, **options) for platform in ("cpu", "tpu"))
    assert [block.shapes for block in one.engine.plan.blocks] == [((2, 1, 128, 128),)]
    np.testing.assert_allclose(one.logits(tokens), apart.logits(tokens), rtol=0, atol=1e-5)
    (output,) = one.generate([tokens], SamplingParams(temperature=0, max_tokens=4))
    assert_greedy(path, tokens, output.outputs[0].token_ids)


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
    assert {shape[-2] for block in programs.plan.blocks for shape in block.shapes} == {128}
    assert programs.plan.columns == 3
    assert programs.plan.max_len == 300
