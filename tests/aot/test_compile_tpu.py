"""The real TPU compiler, without a TPU: collectives as promised, layouts, fit. About 60 s; skipped without libtpu."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from inferlib import Buckets, configs
from inferlib.aot import compile
from inferlib.aot.compile import Compilers, compile_programs
from inferlib.inspection.report import ProgramReport, Report
from inferlib.models.quantization import Quantization
from inferlib.ops.quantized import Scheme
from inferlib.pallas_kernels.fetch_ahead_tpu import FINISH, START
from inferlib.planning.explain import explain
from inferlib.planning.plans import load_plan
from inferlib.programs.deployment import Deployment
from inferlib.programs.memory import too_large
from inferlib.sharding.mesh import Parallelism
from inferlib.targets import Target
from tests.helpers.tpu_models import EXPERTS, TINY

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs pip install "jax[tpu]"')

LAYERS_OF_EXPERTS = 1
ONE_LAYER = TINY | {"num_hidden_layers": 1}
STATE_SPACES = TINY | {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*ME*",
    "mamba_num_heads": 16,
    "n_routed_experts": 16,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
}
LATENTS = {key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "head_dim")} | {
    "architectures": ["MiniCPM3ForCausalLM"],
    "num_hidden_layers": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
CHUNKS = TINY | {
    "architectures": ["Llama4ForCausalLM"],
    "num_hidden_layers": 8,
    "intermediate_size_mlp": 512,
    "num_local_experts": 4,
    "attention_chunk_size": 128,
}
SLICES = [
    ("v5e-8", "tp=8"),
    pytest.param("v5e-8", "tp=4,dp=2,rules=tp_sp", marks=pytest.mark.release),
    pytest.param("v6e-8", "ep=4,tp=2", marks=pytest.mark.slow),
]


def tiny(target: str, parallel: str) -> Deployment:
    buckets = Buckets((128,), (128,), (512,))
    hf = EXPERTS | {"num_hidden_layers": LAYERS_OF_EXPERTS} if "ep" in parallel else TINY
    return Deployment(hf, target, "bfloat16", buckets, Parallelism.parse(parallel), ("greedy",))


@cache
def compiled(deployment: str, parallel: str) -> tuple[Deployment, Report]:
    """A decode program of one step and a prefill; of replicas and experts the loop of several steps, which has one step
    inside, in its place."""
    made = tiny(deployment, parallel)
    one, several, *prefills = keys_of(made)
    priced = parallel == "tp=8"
    return made, report_of(made, [one if priced else several, *prefills], priced)


def keys_of(made: Deployment) -> list:
    """Decode programs of one step and of several, and then those that only prefill."""
    return [key for key in list(made.keys()) if not (key.chunks and key.rows) and not key.detail]


def report_of(made: Deployment, keys, priced: bool = False) -> Report:
    """priced: with the compiler's listings and what they say, which take longer than compilation."""
    with TemporaryDirectory() as folder:
        outcomes, _ = compile_programs(made, keys, Path(folder), compilers=compilers_of(made.slice, priced))
    assert [outcome.error for outcome in outcomes] == [""] * len(keys)
    return Report.of(made, outcomes)


_compilers: dict[tuple[Target, bool], Compilers] = {}
MOST_COMPILERS = 3  # each takes three seconds to start, and up to a gigabyte


def compilers_of(target: Target, priced: bool) -> Compilers:
    """One process, which tests of a target share, unless those of three others come between them."""
    if (target, priced) not in _compilers:
        while len(_compilers) >= MOST_COMPILERS:
            _compilers.pop(next(iter(_compilers))).close()
        with pytest.MonkeyPatch.context() as patch:
            if not priced:
                patch.setattr(compile, "PRICED", ())
            _compilers[target, priced] = Compilers(target, 1)
    _compilers[target, priced] = latest = _compilers.pop((target, priced))
    return latest


def close_compilers() -> None:
    while _compilers:
        _compilers.popitem()[1].close()


@pytest.fixture(scope="module", autouse=True)
def last_compilers() -> Iterator[None]:
    yield
    close_compilers()


@pytest.mark.parametrize(("target", "parallel"), SLICES)
@pytest.mark.slow
def test_collectives_are_those_that_explain_promises(target, parallel):
    made, report = compiled(target, parallel)
    planned = made.planned()
    for p in report.programs:
        promised = _large_apart(
            (c.kind, c.nbytes, c.count)
            for c in explain(planned.model, planned.plan, planned.config, [p.key]).steps[0].collectives
        )
        counts = _large_apart((c["kind"], c["nbytes"], c["count"]) for c in p.collectives)
        if made.parallel.tensor < 8:
            # These slices have two hosts, so the tokens of all replicas are gathered for process 0.
            counts.pop(("all-gather", 4 * 128 * p.key.steps), None)
            for total in (counts, promised):
                total.pop("small", None)
        assert counts == promised, str(p.key)


def _large_apart(collectives) -> Counter:
    """Count of each kind and size; of those of a few numbers per row, which the compiler may merge or make another kind
    of, their bytes. Ragged ones are promised by what they send and found by what they could, so that they are counted
    only."""
    total = Counter()
    for kind, nbytes, count in collectives:
        if kind == "ragged-all-to-all":
            total[kind, "ragged"] += count
            continue
        total[(kind, nbytes) if nbytes > 2048 else "small"] += count if nbytes > 2048 else count * nbytes
    return total


def _but_products(program: ProgramReport) -> dict[str, int]:
    """How often each kernel is called but those of products and of their weights, which are for few rows."""
    others = ("mx_matmul", START, FINISH)
    return {k["name"]: k["count"] for k in program.kernels if k["name"] not in others}


@pytest.mark.parametrize(("target", "parallel"), SLICES)
def test_no_program_copies_the_cache_or_lays_out_a_weight(target, parallel):
    made, report = compiled(target, parallel)
    assert report.ok
    assert [p.copies for p in report.programs] == [[]] * 2
    assert all(p.peak < report.capacity for p in report.programs)
    assert parallel != "tp=8" or all(p.estimate > 0 for p in report.programs)
    kernels = [_but_products(p) for p in report.programs if not p.key.chunks]
    names = ["decode_attention", "expert_mlp"] if "ep" in parallel else ["decode_attention"]
    assert kernels == [dict.fromkeys(names, made.hf["num_hidden_layers"])]


def test_weights_are_fetched_while_collectives_run():
    """Layers are unrolled and multiplied by XLA, so that a layer's all-reduces have the next weights in flight."""
    made, report = compiled("v5e-8", "tp=8")
    assert not made.planned().config.scan
    decode = next(p for p in report.programs if p.key.rows and p.key.steps == 1)
    residual = 128 * TINY["hidden_size"] * 2
    ahead = [o["ahead"] for o in decode.overlaps for _ in range(o["count"]) if o["nbytes"] == residual]
    assert len(ahead) == 1 + 2 * TINY["num_hidden_layers"]
    smallest = TINY["hidden_size"] * TINY["intermediate_size"] // 8 * 2  # of a layer's matrices on a device
    assert sum(size >= smallest for size in ahead) >= len(ahead) - 2


@pytest.mark.slow
def test_weights_of_a_stack_arrive_while_collectives_run():
    """Layers with experts are scanned. Those of attention arrive beside the experts and what returns their sums."""
    made = replace(tiny("v6e-8", "ep=4,tp=2"), hf=EXPERTS)
    (decode,) = report_of(made, keys_of(made)[:1]).programs
    layers, attention = EXPERTS["num_hidden_layers"], 256 * 128 * (32 + 16) // 2 * 2
    kernels = {kernel["name"]: kernel["count"] for kernel in decode.kernels}
    assert kernels["start_fetch"] == kernels["finish_fetch"] == 1 + layers
    ahead = Counter()
    for o in decode.overlaps:
        ahead[o["kind"], o["ahead"]] += o["count"]
    assert ahead["reduce-scatter", attention] == layers


@pytest.mark.release
def test_no_program_copies_a_quantised_cache():
    """Its scales least of all, which chunks and decode rows write in different ways."""
    made = replace(tiny("v5e-8", "tp=8"), kv_cache_dtype="int8")
    keys = made.keys()
    report = report_of(made, [key for key in keys[1:] if not key.detail])
    assert report.ok
    for p in report.programs:
        names = ["decode_attention"] * (p.key.rows > 0) + ["chunk_write", "prefill_attention"] * (p.key.chunks > 0)
        assert _but_products(p) == dict.fromkeys(names, TINY["num_hidden_layers"]), str(p.key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hf",
    [LATENTS, *(pytest.param(hf, marks=pytest.mark.release) for hf in (STATE_SPACES, CHUNKS))],
    ids=["latents", "state spaces", "chunks"],
)
def test_no_program_copies_a_cache_of_another_kind(hf):
    made = replace(tiny("v5e-8", "tp=8"), hf=hf)
    report = report_of(made, keys_of(made)[1:])  # the loop of several steps has one inside
    assert report.ok
    if hf is LATENTS:
        decode = [p for p in report.programs if not p.key.chunks]
        kernels = [_but_products(p) for p in decode]
        assert kernels == [{"mla_decode_attention": LATENTS["num_hidden_layers"]}]
        assert all(p.moved_bytes < 1.02 * p.floor_bytes for p in decode)
        prefill = [_but_products(p) for p in report.programs if p.key.chunks]
        assert prefill == [{"mla_prefill_attention": LATENTS["num_hidden_layers"]}] * len(prefill)


@pytest.mark.release
def test_the_layouts_that_the_compiler_chose_hold_for_every_program(tmp_path):
    made = replace(tiny("v5e-8", "tp=8"), dtype="float32")  # others are packed
    keys = made.keys()
    outcomes, layouts = compile_programs(made, keys[:2], tmp_path)  # two processes
    names = [spec.name for spec in made.planned().model.specs]
    order = dict(zip(names, (layout["major_to_minor"] for layout in layouts), strict=True))
    assert any(major_to_minor != sorted(major_to_minor) for major_to_minor in order.values())
    assert all(outcome.facts["weight_copies"] == [] for outcome in outcomes)


@pytest.mark.release
def test_lists_of_blocks_are_made_by_the_kernel():
    """And taken by that of prefill attention, in pages as they lie."""
    made = replace(tiny("v5e-8", "tp=8"), buckets=Buckets((512,), (8,), (2048,)), sparse_prefill="xattention:0.9")
    report = report_of(made, [key for key in keys_of(made) if key.chunks == 1])
    assert report.ok
    for program in report.programs:
        assert _but_products(program) == dict.fromkeys(("antidiagonals", "chunk_write", "prefill_attention"), 3)


@pytest.mark.slow
def test_a_model_that_cannot_fit_says_by_how_much_and_what_would_do():
    """In a process where JAX itself has no reason to load the compiler, which a child loads alone."""
    arguments = ["compile", "--config", "llama3-8b", "--target", "v5e-1", "--json"]
    program = """
import sys
from inferlib.cli import app

try:
    app()
finally:
    print(open("/proc/self/maps").read(), file=sys.stderr)
"""
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--batch-buckets", "4", "--modes", "greedy"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1, run.stderr
    assert "libjax" in run.stderr
    assert "libtpu" not in run.stderr
    report = json.loads(run.stdout)
    assert not report["ok"]
    assert [p["status"] for p in report["programs"]] == ["too large"]
    assert "exceed a device's memory by 0.2" in report["advice"][0]
    assert "--target v5e-4 --parallel tp=4 would do" in report["advice"]
    assert "--target v6e-1 --parallel tp=1 would do" in report["advice"]


@pytest.mark.release
def test_kernels_take_what_v4_has_of_on_chip_memory_and_leave_floats_of_8_bits_to_xla():
    wide = {"hidden_size": 2048, "moe_intermediate_size": 5632, "num_hidden_layers": 1}
    sizes = Buckets((512,), (8,), (512,)), Parallelism.parse("tp=4"), ("greedy",)
    made = Deployment(EXPERTS | wide, "v4-8", "bfloat16", *sizes, kv_cache_dtype="fp8")
    (program,) = report_of(made, [key for key in list(made.keys()) if key.chunks and key.rows]).programs
    assert _but_products(program) == {"group_order": 1, "grouped_matmul": 1}  # and of attention none


def test_on_chip_memory_that_a_kernel_lacks_is_no_fault_of_the_model():
    full = "RESOURCE_EXHAUSTED: Allocation (size=17301504) would exceed memory (size=16777216) :: #allocation2 ["
    assert too_large("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.2G of 15.7G hbm.")
    assert not too_large(
        full + "shape = 'u8[17301504]{0}', space=vmem, size = 0x1080000, scoped, tag = 'scoped memory']"
    )
    assert not too_large("Ran out of memory in memory space vmem while allocating on stack for %grouped_matmul")


@pytest.mark.slow
def test_few_rows_are_reduced_whole():
    """With fewer rows a device than a tile holds, the compiler makes an all-reduce of a reduce-scatter."""
    made = replace(tiny("v5e-8", "tp=8,rules=tp_sp"), buckets=Buckets((128,), (32,), (512,)))
    (program,) = report_of(made, made.keys()[:1]).programs
    counts = {(c["kind"], c["nbytes"]): c["count"] for c in program.collectives}
    assert counts == {("all-gather", 2048): 1, ("all-reduce", 16384): 7, ("all-gather", 16384): 7}


# ---- whole models


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "target", "parallel", "batch", "most"),
    [
        ("llama3-70b", "v5p:16x16x16", "tp=8,dp=512", 16384, 1.08),  # attention scores leave its smaller VMEM
    ],
)
def test_decoding_moves_only_what_it_must(name, target, parallel, batch, most):
    buckets = Buckets((512,), (batch,), (4096,))
    made = Deployment(configs.load(name), target, "bfloat16", buckets, Parallelism.parse(parallel), ("greedy",))
    (program,) = report_of(made, made.keys()[:1]).programs
    assert_moves(program, most)


def assert_moves(program: ProgramReport, most: float) -> None:
    """most: of the bytes that it must read and write, how many times."""
    assert program.copies == []
    assert program.temporaries < 160 << 20  # unrolled layers of 70B on v6e take 129 MiB
    assert program.moved_bytes <= most * program.floor_bytes


@cache
def small_decode(quantization: Quantization | None) -> tuple[Deployment, ProgramReport]:
    sizes = (Buckets((128,), (8,), (512,)), Parallelism.parse("tp=4"), ("greedy",))
    made = Deployment(ONE_LAYER, "v5e-4", "bfloat16", *sizes, quantization=quantization)
    return made, report_of(made, made.keys()[:1]).programs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantization",
    [
        Quantization.named("mxfp4"),
        pytest.param(Quantization("awq", Scheme("int4", 128, zeros=True)), marks=pytest.mark.release),
    ],
    ids=str,
)
def test_quantised_weights_are_read_packed(quantization):
    """No program unpacks a weight to memory: it holds and moves little that one of bfloat16 weights does not."""
    (made, program), (_, usual) = small_decode(quantization), small_decode(None)
    assert program.outcome.ok
    assert program.copies == []
    unpacked = 2 * sum(math.prod(w.shape) for w in made.planned().model.weights if w.scheme is not None) // 4
    assert program.temporaries < usual.temporaries + unpacked // 4
    assert program.moved_bytes - program.floor_bytes < usual.moved_bytes - usual.floor_bytes + unpacked // 6


@pytest.mark.release
def test_the_core_of_a_loop_is_read_once():
    """A core of 12.6 million weights, which a decode step runs 12 times. No trip reads it, and the copy before the
    loop all of it."""
    hf = configs.load("parcae-370m") | {"n_layers_in_recurrent_block": 1, "mean_recurrence": 12}
    hf |= {"n_layers_in_prelude": 1, "n_layers_in_coda": 1}
    sizes = (Buckets((128,), (8,), (512,)), Parallelism(), ("greedy",))
    auto = Deployment(hf, "v5e-1", "bfloat16", *sizes, quantization=Quantization.named("int8"))
    keys, backends = [replace(auto.keys()[0], steps=8)], ("auto", "loop_weights=xla")
    ((once,), (each,)) = (report_of(replace(auto, backend=b), keys).programs for b in backends)
    weights = [w for w in auto.planned().model.weights if auto.planned().model.passes(w) > 1 and w.contracting]
    core = sum(array.nbytes for weight in weights for array in weight.arrays)
    (copied,) = (k for k in once.kernels if k["name"] == "copy_on_chip")
    assert (copied["count"], copied["nbytes"]) == (1, core)
    assert each.moved_bytes - once.moved_bytes == pytest.approx(11 * core, rel=0.03)
    assert_moves(once, 1.06)


@pytest.mark.slow
def test_quantised_caches_are_read_as_they_are():
    """No program copies keys or values or their scales or writes them in another type, nor are scales spread over
    heads."""
    hf = ONE_LAYER | {"num_key_value_heads": 4, "max_position_embeddings": 8192}
    sizes = (Buckets((128,), (32,), (8192,)), Parallelism.parse("tp=4"), ("greedy",))
    made = Deployment(hf, "v5e-4", "bfloat16", *sizes, kv_cache_dtype="fp8")
    keys = made.keys()
    decode, prefill = report_of(made, [keys[0], next(key for key in keys if key.chunks)]).programs
    for program in (decode, prefill):
        assert program.copies == []
    assert decode.temporaries < sum(math.prod(s) for b in made.planned().plan.blocks for s in b.shapes) // 4 // 8
    assert decode.moved_bytes < 1.2 * decode.floor_bytes


MOST_MOVED = {"llama3-8b-v5e-8": 1.01}
# Of models whose layers are unrolled, so many that each kind is among them.
LAYERS = {"qwen3-30b-a3b-v6e-4": 2, "gemma3-27b-v6e-4": 6, "llama3-70b-int8-v5e-16": 2}
# One of each kind of model, and of each dtype of weights but MXFP4, whose kernels `test_bundles` compiles. What all of
# them need is in `test_planner`, tiny models are compiled above, and half of an 8B in `test_prices`.
PLANS = (
    "llama3-8b-v5e-8",
    "qwen3-30b-a3b-v6e-4",
    "llama3-70b-int8-v5e-16",
    "gemma3-27b-v6e-4",
    "deepseek-v3-fp8-v6e-64",
)


@pytest.mark.release
@pytest.mark.parametrize("name", PLANS)
def test_plans_compile(name):
    """What a program takes beside all the weights and the cache fits, too."""
    plan = load_plan(name)
    parallel = Parallelism.parse(plan.parallel)
    sizes = (plan.dtype, plan.engine.buckets, parallel, ("greedy",), plan.stored)
    made = Deployment(configs.load(plan.model), str(plan.slice), *sizes)
    whole = Report.of(made, ()).budget
    if name in LAYERS:
        made = replace(made, hf=made.hf | {"num_hidden_layers": LAYERS[name]})
    report = report_of(made, made.keys()[:1])
    assert report.ok
    assert whole.weights + whole.cache + report.overhead < report.capacity
    if name in MOST_MOVED:
        assert_moves(*report.programs, MOST_MOVED[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kernels"), [("v5e:2x4", 4), pytest.param("v5p:2x2x2", 0, marks=pytest.mark.release)]
)
def test_products_take_place_with_their_collective_as_explain_promises(target, kernels):
    """In a program of a chunk and of decode rows. The kernels read weights where they lie. v5p has two cores a device,
    and XLA's products are faster."""
    hf = ONE_LAYER | {"hidden_size": 1024, "intermediate_size": 2048}
    made = Deployment(
        hf, target, "bfloat16", Buckets((1024,), (32,), (2048,)), Parallelism.parse("tp=8,rules=tp_sp"), ("greedy",)
    )
    keys, planned = [key for key in list(made.keys()) if key.chunks and key.rows], made.planned()
    for program in report_of(made, keys).programs:
        (step,) = explain(planned.model, planned.plan, planned.config, [program.key]).steps
        fused = [c for c in step.collectives if c.kind.startswith("fused")]
        assert len(fused) == kernels
        compiled, promised, padded = Counter(), Counter(), planned.config.shards.padded(step.tokens)
        for k in program.kernels:
            compiled[k["sent"], k["flops"]] += k["count"] * bool(k["sent"])
        for c in fused:
            promised[c.nbytes * 7 // 8, c.flops * padded // step.tokens] += c.count
        assert +compiled == promised
        assert program.copies == []
        apart = {(c["kind"], c["nbytes"]): c["count"] for c in program.collectives if c["nbytes"] > 1 << 16}
        assert sum(apart.values()) == (2 if kernels else 2 + 4 * hf["num_hidden_layers"])
