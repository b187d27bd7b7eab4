"""When layers are unrolled so that weights hide collectives, and that this changes no result. About 15 s."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from inferlib import Buckets, configs
from inferlib.config import DeviceKind, EngineOptions
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.planning.costs import step_time
from inferlib.planning.plans import load_plan
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import planned_shards
from inferlib.unrolling import MOST_LAYERS
from tests.helpers.llms import build_llm
from tests.helpers.sequences import logits_and_tokens


def resolved(
    name="llama3-8b", parallel="tp=8", quantization=None, device="tpu", layers=None, generation="v5e", **options
):
    """(scan, how products are made, whether gate and up are separate) of a deployment."""
    model = config_from_hf(configs.load(name))
    model = model if layers is None else replace(model, layers=model.layers[:1] * layers)
    stored = None if quantization is None else Quantization.named(quantization)
    shards, kind = planned_shards(Parallelism.parse(parallel)), DeviceKind(device, generation=generation)
    config = EngineOptions(max_batch=16, max_len=1024, **options).resolve(kind, shards, model, stored)
    return config.scan, config.backend.matmul, config.backend.gate_up == "separate"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "llama3-70b", "quantization": "int8"},
        {"quantization": "fp8_a8", "parallel": "tp=4,dp=2"},
        {"parallel": "cp=2,tp=4"},
        {"backend": "matmul=xla"},
        {"layers": MOST_LAYERS},
        {"generation": "v6e"},
    ],
)
def test_layers_with_collectives_between_readable_weights_are_unrolled(options):
    assert resolved(**options) == (False, "xla", True)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": "tp=1"},
        {"parallel": "dp=8"},
        {"parallel": "tp=8,rules=tp_sp"},
        {"quantization": "int4"},
        {"quantization": "mxfp4"},
        {"quantization": "fp8_block"},
        {"name": "qwen3-30b-a3b", "parallel": "ep=2,tp=4"},
        {"layers": MOST_LAYERS + 1},
        {"scan": True},
        {"generation": "v5p"},
        {"generation": "v7x"},
        {"backend": Backend.for_platform("tpu", planned_shards(Parallelism.parse("tp=8")))},
        {"speculation": "draft:smaller:3"},
    ],
)
def test_others_are_scanned_and_multiplied_by_kernels(options):
    assert resolved(**options) == (True, "pallas_tpu", False)


def test_other_platforms_are_as_before():
    assert resolved(device="cpu") == (False, "xla", False)
    assert resolved(device="gpu") == (False, "pallas_gpu", False)
    assert resolved(device="tpu", scan=False) == (False, "pallas_tpu", False)


@pytest.mark.parametrize("name", configs.plan_names())
def test_the_cost_model_says_so_too(name):
    """The planner prices the form that runs, and that is never the slower one."""
    plan = load_plan(name)
    if plan.slice.platform != "tpu":
        return
    work = plan.deployed.decode(8, 1024.0)
    stored = plan.deployed.quantization and str(plan.deployed.quantization)
    scan, product, _ = resolved(plan.model, plan.parallel, stored, generation=plan.slice.chip.name)
    assert (work.ahead_bytes == inf) == (product == "xla") == (not scan)
    times = [step_time(replace(work, ahead_bytes=ahead), plan.deployed.network).seconds for ahead in (inf, 1e8, 0.0)]
    assert times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tokens_and_logits_are_those_of_scanned_layers(quantization, checkpoint):
    """On a mesh of CPUs, bit for bit. Scanned layers have gate and up in one array."""
    sizes = Buckets(prefill=(8,), batch=(4,), cache=(64,))
    options = dict(parallel="tp=2", platform="tpu", free_layouts=False, quantization=quantization)
    results = []
    for form in ({"backend": "xla"}, {"backend": "xla", "scan": True}):
        llm = build_llm(checkpoint("llama"), sizes, **options, **form)
        assert llm.config.scan == form.get("scan", False)
        assert any(weight.separate for weight in llm.engine.model.weights) == (not llm.config.scan)
        results.append(logits_and_tokens(llm, [[3, 1, 4, 1, 5], [9, 2, 6]], 12))
    (logits, tokens), (expected, wanted) = results
    assert tokens == wanted
    np.testing.assert_array_equal(np.concatenate(logits), np.concatenate(expected))
    assert [len(of_prompt) for of_prompt in tokens] == [12, 12]
