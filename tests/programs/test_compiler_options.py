"""What XLA is told for a program beyond its defaults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferlib import configs
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.adapters import AdapterSlots
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import Quantization
from inferlib.ops.backend import Backend
from inferlib.ops.on_chip import OPTIONS
from inferlib.programs.compiler_options import compiler_options
from inferlib.programs.keys import ProgramKey

SLOTS = AdapterSlots(2, 4)
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "3"}


def model(quantization: str | None, dtype: str = "bfloat16", *, rank: int = 0, **options) -> AbstractModel:
    config = config_from_hf(configs.load("smollm2-135m"))
    scheme = replace(Quantization.named(quantization), rank=rank) if quantization else None
    return abstract_model(config, dtype, quantization=scheme, **options)


@pytest.mark.parametrize(
    ("quantization", "tokens", "options"),
    [
        (None, 31, {}),
        (None, 32, BY_CUBLAS),
        ("fp8_a8", 1, BY_CUBLAS),
        ("int8", 8192, {}),
        ("mxfp8_a8", 8192, {}),
    ],
)
def test_products_of_many_rows_and_of_eight_bits_are_left_to_cublas(quantization, tokens, options):
    assert compiler_options(model(quantization), "gpu", tokens) == options


@pytest.mark.parametrize("options", [{"quantization": "int4", "rank": 4}, {"quantization": None, "adapters": SLOTS}])
def test_products_of_low_rank_run_beside_those_of_weights(options):
    of_gpu = compiler_options(model(**options), "gpu", 1)
    assert of_gpu["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    assert of_gpu["xla_gpu_dot_merger_threshold_mb"] == "0"
    assert compiler_options(model(**options), "tpu", 1) == {}


def test_other_programs_are_compiled_as_ever():
    assert compiler_options(model(None), "tpu", 8192) == {}
    assert compiler_options(model(None, "float32"), "gpu", 8192) == {}


def test_loops_that_keep_weights_on_chip_say_so_to_the_compiler():
    assert compiler_options(model("int8"), "tpu", 64, on_chip=True) == OPTIONS
    assert compiler_options(model("int8"), "tpu", 65, on_chip=True) == {}
    assert compiler_options(model("int8"), "gpu", 8, on_chip=True) == {}


def test_tpus_place_the_largest_of_separate_weights_first_and_none_for_the_next_call():
    separate = model(None, backend=Backend(gate_up="separate"))
    options = compiler_options(separate, "tpu", 8)
    assert "size_gte: 33554432" in options["xla_tpu_msa_sort_order_overrides"]
    assert options["xla_max_cross_program_prefetches"] == "0"
    assert compiler_options(separate, "cpu", 8) == {}


def test_a_step_has_the_tokens_of_rows_and_of_prompts():
    assert ProgramKey("greedy", 64, 1024, chunks=16, chunk=32, drafts=1).tokens == 64 * 2 + 16 * 32
