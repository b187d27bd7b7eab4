"""List the kernels that a decode step launches on an NVIDIA H100, compiled on a machine without a GPU.

    pip install "jax[cuda13]"
    python benchmarks/launches.py --config llama3-8b --quantization int8

XLA compiles the step of a model's first --layers layers; the table lists the kernels of the last of them, XLA's and
ours, in order. A launch costs 1.5 to 4 us besides its bytes, and a step of a small batch is little else. Nothing is
tuned without a GPU: on a device XLA may choose other kernels for its own products.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from decode import of_experts
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from inferlib import configs
from inferlib.config import DeviceKind, EngineOptions
from inferlib.inspection.hlo import Instruction, Module
from inferlib.models.abstract import abstract_model
from inferlib.models.config import ModelConfig
from inferlib.models.families import config_from_hf
from inferlib.models.quantization import QUANTIZATIONS, Quantization
from inferlib.programs.compiler_options import compiler_options
from inferlib.programs.keys import ProgramKey
from inferlib.programs.program import build
from inferlib.programs.program_set import ProgramSet
from inferlib.sharding.mesh import alone
from inferlib.speculation.settings import Speculation

# An H100 SXM, as XLA describes it (xla/stream_executor/device_description.proto).
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 }
"""
# Instructions that start nothing on the device.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"}


def device() -> Any:
    try:
        topology = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x1")
    except NotImplementedError as e:
        raise SystemExit('XLA\'s compiler for NVIDIA GPUs is not installed: pip install "jax[cuda13]"') from e
    return topology.devices[0]


def launches(
    model: ModelConfig, layers: int, options: EngineOptions, quantization: Quantization | None
) -> list[Instruction]:
    """The launches of a decode step of the first `layers` layers, in order."""
    config = options.resolve(DeviceKind("gpu"))
    first = replace(model, layers=model.layers[:layers])
    abstract = abstract_model(first, "bfloat16", backend=config.backend, scan=config.scan, quantization=quantization)
    drafts = config.speculation.tokens if config.speculation else 0
    key = ProgramKey("greedy", config.rows, config.max_len, drafts=drafts)
    programs, gpu = ProgramSet.make(abstract, config), device()
    on_gpu = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(gpu))
    inputs = jax.tree.map(lambda x: on_gpu(x.shape, x.dtype), programs.inputs(key))
    step = jax.jit(build(programs.model, programs.plan, programs.config, key), donate_argnums=(1, 2))
    told = compiler_options(abstract, config.platform, key.tokens)
    with jax.sharding.use_abstract_mesh(alone(gpu)):
        compiled = step.trace(*inputs).lower(lowering_platforms=("cuda",)).compile(told or None)
    return [i for i in Module(compiled.as_text() or "").entry.instructions.values() if i.op not in _FREE]


def place(launch: Instruction) -> str:
    """The part of the model that it belongs to."""
    match = re.search(r'op_name="(?:jit\(decode\)/)?([^"]*)"', launch.rest)
    words = match[1].split("/") if match else ["?"]
    return "/".join(w for w in words if not re.fullmatch(r"cond|branch_\d_fun|jit\(.*\)|pallas_call", w))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), default="llama3-8b", help="a shape from configs/")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--experts-only", action="store_true", help="quantize nothing but experts")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cache", type=int, default=2048, help="cache length in tokens")
    parser.add_argument("--attention-pages", help="what a step reads of a row, such as quest:16; default: all")
    parser.add_argument("--speculation", help="the drafter and how many tokens a step verifies, such as ngram:7")
    parser.add_argument("--layers", type=int, default=4, help="number of layers to compile, at least 2")
    args = parser.parse_args()
    if (args.experts_only and not args.quantization) or args.layers < 2:
        parser.error("--experts-only says what --quantization is for, and --layers is at least 2")
    jax.config.update("jax_platforms", "cpu")  # else the plugin would look for a GPU
    model = config_from_hf(configs.load(args.config))
    if args.layers > len(model.layers):
        parser.error(f"--layers {args.layers}: {args.config} has {len(model.layers)}")
    scheme = args.quantization and Quantization.named(args.quantization)
    if args.experts_only:
        scheme = of_experts(scheme, model, "bfloat16")
    speculation = args.speculation and Speculation.read(args.speculation)
    sizes = dict(max_batch=args.batch, max_len=args.cache)
    options = EngineOptions(**sizes, attention_pages=args.attention_pages, speculation=speculation)
    counted = partial(launches, model, options=options, quantization=scheme)
    all_launches = counted(args.layers)
    each = len(all_launches) - len(counted(args.layers - 1))
    end = next(n for n, launch in enumerate(all_launches) if place(launch).startswith("head"))
    stored = f"{'experts in ' if args.experts_only else ''}{args.quantization or 'bfloat16'}"
    title = f"{args.config}, {stored}, batch {args.batch}: {each} launches of a layer"
    table = Table("launch", "of", "result", title=title)
    for launch in all_launches[end - each : end]:
        ours = launch.op == "custom-call" and "triton" in launch.rest
        result = ", ".join(f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in launch.shapes)
        table.add_row("a kernel of ours" if ours else launch.name, place(launch), result)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
