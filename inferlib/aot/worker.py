"""A child process that compiles: `python -m inferlib.aot.worker`, driven by `inferlib.aot.compile`.

It reads JSON lines from stdin, first a target and then jobs, each with its deployment, and answers each with a line.
A compiler that crashes takes only this process with it. No other process loads a TPU's compiler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from inferlib.aot.child import Answer, serve
from inferlib.aot.compile import CompileError
from inferlib.aot.executables import serialized
from inferlib.aot.neuron import compile_neuron
from inferlib.cache.plan import CachePlan
from inferlib.draft_files import open_draft
from inferlib.engine.places import PlaceTransfer
from inferlib.inspection.collective_prices import CollectivePrices
from inferlib.inspection.hlo import Copy, Module
from inferlib.inspection.overlap import overlaps
from inferlib.inspection.prices import Prices
from inferlib.inspection.schedule import play
from inferlib.model_files import ModelFiles
from inferlib.planning.network import place
from inferlib.programs.arrivals import check_arrivals
from inferlib.programs.deployment import Deployment, layout_from_json, layout_to_json
from inferlib.programs.keys import ProgramKey
from inferlib.programs.page_transfer import PageTransfer
from inferlib.programs.program_set import ProgramSet
from inferlib.programs.start_functions import recorded
from inferlib.sharding.mesh import Device
from inferlib.sharding.shards import Shards
from inferlib.targets import Target, parse_target


def _prepared(first: Mapping[str, Any]) -> Answer:
    target, listings = parse_target(first["target"]), first["listings"] and Path(first["listings"])

    @cache
    def of(text: str) -> tuple[Deployment, Shards]:
        deployment = Deployment.from_json(json.loads(text))
        return deployment, deployment.shards(_devices(target, deployment.parallel.devices))

    def answer(job: Mapping[str, Any]) -> dict[str, Any]:
        deployment, shards = of(json.dumps(job["deployment"]))
        layouts = job["layouts"] and [layout_from_json(layout) for layout in job["layouts"]]
        programs, path = deployment.program_set(shards, layouts), Path(job["path"])
        if job["key"] is None:
            return _compile_start(programs, job["model"], path)
        key = ProgramKey(**job["key"])
        if target.platform == "neuron":
            return compile_neuron(programs, key, path, target)
        try:
            return _compile(programs, key, path, target, listings)
        finally:
            for file in listings.iterdir() if listings else ():
                file.unlink()

    return answer


def _devices(target: Target, count: int) -> list[Device]:
    if target.platform == "tpu":
        options = target.topology_options
        return topologies.get_topology_desc(platform="tpu", topology_name=target.topology_name, **options).devices
    if target.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if target.platform == "gpu" and devices[0].platform != "gpu":
        raise CompileError(
            f"programs for {target} are compiled where such GPUs are, and JAX finds none here; if there are: "
            'pip install "jax[cuda13]"'
        )
    return devices


def _compile(
    programs: ProgramSet, key: ProgramKey, path: Path, target: Target, listings: Path | None
) -> dict[str, Any]:
    """Compile a program, write it to `path`, and return its facts. listings: where the compiler writes listings."""
    start = time.perf_counter()
    lowered = programs.lower(key)
    traced = time.perf_counter()
    compiled = lowered.compile(programs.options(key))
    done = time.perf_counter()
    path.write_bytes(serialized({str(key): compiled}))
    counted = key.steps if programs.config.counted else 1
    text = compiled.as_text() or ""
    check_arrivals(text)
    memory, module = compiled.memory_analysis(), Module(text, counted)
    assert memory is not None
    weights, cache = len(programs.specs), len(programs.plan.arrays)
    cost, names = module.cost, [name for block in programs.plan.every_block if not block.shared for name in block.names]
    chosen = [layout_to_json(f.layout) for f in compiled.input_formats[0][0]] if programs.layouts is None else None
    return {
        "status": "compiled",
        "layouts": chosen,
        "device_kind": compiled.input_shardings[0][0][0]._device_assignment[0].device_kind,
        "trace_seconds": traced - start,
        "compile_seconds": done - traced,
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
        },
        "bytes": cost.bytes,
        "step": listings and _played(module, programs, key, target, listings),
        "balanced": cost.balanced,
        "collectives": [asdict(c) for c in module.collectives],
        "overlaps": [asdict(o) for o in overlaps(module, weights)] if programs.config.platform == "tpu" else [],
        "kernels": [asdict(k) for k in module.kernels],
        "cache_copies": _named(module.copies(range(weights, weights + cache)), names, weights),
        "weight_copies": _named(module.copies(range(weights)), [s.name for s in programs.specs], 0),
    }


def _played(module: Module, programs: ProgramSet, key: ProgramKey, target: Target, listings: Path) -> dict[str, Any]:
    """What a step takes (see `Played.facts`)."""
    shards = programs.config.shards
    mesh = dict(shards.mesh.shape) if shards.mesh else {}
    prices = Prices(module, listings, key, target)
    collectives = CollectivePrices(module, place(target, tuple(mesh.items())), mesh, prices.sent)
    return play(module, prices.price, collectives.price, target.hbm_bandwidth).facts()


def _compile_start(programs: ProgramSet, model: str, path: Path) -> dict[str, Any]:
    """Compile the functions that load this checkpoint and make an empty cache, and write them to `path`."""
    with recorded() as functions:
        speculation, files = programs.config.speculation, ModelFiles.open(model)
        files = files.selecting(programs.config.attention_pages).with_cache(programs.config.kv_cache_dtype)
        formats = programs.formats[: len(programs.model.specs)]
        files.load(programs.model, shards=programs.config.shards, formats=formats)
        if draft := open_draft(speculation, files, None):
            draft.load(programs)
        programs.plan.allocate(programs.config.shards)
        programs.plan.allocate_snapshots(programs.config.shards)
        programs.allocate_state()
        programs.prepare_changes()
        _compile_tiers(programs.plan, programs.config.shards)
    path.write_bytes(serialized(functions))
    return {}


def _compile_tiers(plan: CachePlan, shards: Shards) -> None:
    """Who runs the programs decides about tiers of the cache, which may be needed."""
    if all(plan.of_rows) or (any(plan.of_rows) and not plan.snapshots):
        return
    pages = PageTransfer(plan, shards)
    pages.prepare()
    if plan.snapshots:
        PlaceTransfer(plan, shards, pages).prepare()


def _named(copies: tuple[Copy, ...], names: list[str], first: int) -> list[dict[str, Any]]:
    return [{"array": names[c.argument - first], "nbytes": c.nbytes, "count": c.count} for c in copies]


if __name__ == "__main__":
    serve(_prepared)
