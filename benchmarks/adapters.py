"""What adapters cost: decode steps of a batch whose rows have adapters beside the same model without, and swaps.

    python benchmarks/adapters.py --config llama3-8b --batch 64 --adapters 8 --rank 16 --load

A shape from configs/ with random weights. Each of --batch rows decodes --tokens tokens behind --prompt random ones, and
the rows have the adapters in turn, which change all projections of attention and feed-forward. Rows of the table: the
model without room for adapters; with room, but no row has one; every row has one; the best of --repeats runs, which
alternate. Prefix caching is off. --load also times what happens while a model serves: reading an adapter from its
directory into host memory, and writing it to the devices.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from inferlib import configs
from inferlib.checkpoint.adapter import Adapter
from inferlib.checkpoint.adapter_values import AdapterReader
from inferlib.config import DeviceKind, EngineOptions
from inferlib.engine.adapters import LoadedAdapter
from inferlib.engine.engine import Engine
from inferlib.engine.sequence import Sequence
from inferlib.models.abstract import AbstractModel, abstract_model
from inferlib.models.families import config_from_hf, family_of
from inferlib.models.quantization import QUANTIZATIONS, Quantization
from inferlib.programs.counter import compilations
from inferlib.programs.program_set import ProgramSet
from inferlib.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3-8b", choices=configs.names(), help="a shape from configs/")
    parser.add_argument("--layers", type=int, default=None, help="only so many layers of it")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--quantization", default=None, choices=QUANTIZATIONS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--parts", help="the weights that they change, such as attn.qkv; default: all that they can")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load", action="store_true", help="also time loading and swapping adapters")
    return parser.parse_args()


def write_adapters(hf: dict[str, Any], model: AbstractModel, folder: Path, count: int, rank: int) -> list[Path]:
    """Directories of random adapters as PEFT writes them, of all projections of attention and feed-forward."""
    targets, made = AdapterReader(family_of(hf), model).targets(), []
    for number in range(count):
        rng, tensors, target = np.random.default_rng(number), {}, folder / f"adapter{number}"
        for tensor, (rows, columns) in targets.items():
            for name, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                values = rng.standard_normal(shape, np.float32) * 0.01
                tensors[f"base_model.model.{tensor.removesuffix('.weight')}.{name}.weight"] = values.astype(
                    ml_dtypes.bfloat16
                )
        target.mkdir()
        (target / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
        save_file(tensors, target / "adapter_model.safetensors")
        made.append(target)
    return made


def build(hf: dict[str, Any], args: argparse.Namespace, weights: tuple[jax.Array, ...] | None = None) -> Engine:
    """An engine for the batch: with room for the adapters, or of these weights and without."""
    whole = config_from_hf(hf)
    config, device = replace(whole, layers=whole.layers[: args.layers]), DeviceKind.of(jax.devices()[0])
    sizes: dict[str, Any] = dict(max_batch=args.batch, max_len=args.prompt + args.tokens, prefix_caching=False)
    if weights is None:
        sizes |= {"max_adapters": args.adapters, "max_adapter_rank": args.rank, "adapter_parts": args.parts}
    engine = EngineOptions(**sizes, cascade=False).resolve(device, None, config)
    dtype = args.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    quantization = args.quantization and Quantization.named(args.quantization)
    options: dict[str, Any] = dict(quantization=quantization, backend=engine.backend, scan=engine.scan)
    model = abstract_model(config, dtype, adapters=engine.adapters, **options)
    programs = ProgramSet.make(model, engine)
    return Engine(model, weights or programs.random_weights(), engine, programs=programs)


def decode(engine: Engine, args: argparse.Namespace, adapters: list[LoadedAdapter | None]) -> tuple[float, float]:
    """Seconds of prefill and of a decode step. Rows have the adapters in turn."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(args.batch):
        prompt = rng.integers(3, engine.model.config.vocab, args.prompt).tolist()
        rows.append(Sequence(prompt, GREEDY, args.tokens, seed=0, adapter=adapters[i % len(adapters)]))
        engine.add(rows[-1])
    start, first, begun = time.perf_counter(), 0.0, 0
    while engine.busy:
        engine.advance()
        if not first and all(row.tokens for row in rows):
            first, begun = time.perf_counter(), sum(len(row.tokens) for row in rows)
    left = args.tokens - begun / args.batch
    return first - start, (time.perf_counter() - first) / left


def time_loads(engine: Engine, reader: AdapterReader, folders: list[Path], args: argparse.Namespace) -> Table:
    """Seconds from each adapter's directory to host memory, and from there to a slot of the devices."""
    assert engine.adapters is not None
    table = Table("adapter", "read, ms", "write, ms", "MB", title="loading and swapping")
    rest = engine.adapters.factors
    for folder in folders:
        start = time.perf_counter()
        values = reader.read(Adapter.open(folder))
        read = time.perf_counter()
        engine.weights = jax.block_until_ready(rest.put(engine.weights, 1, values.arrays))
        written = time.perf_counter()
        times = (f"{1e3 * seconds:.1f}" for seconds in (read - start, written - read))
        table.add_row(folder.name, *times, f"{values.nbytes / 1e6:.1f}")
    return table


def main() -> None:
    args = arguments()
    hf = configs.load(args.config)
    with tempfile.TemporaryDirectory() as folder:
        engine = build(hf, args)
        folders = write_adapters(hf, engine.model, Path(folder), args.adapters, args.rank)
        reader = AdapterReader(family_of(hf), engine.model)
        loaded = [LoadedAdapter(path.name, path, reader.read(Adapter.open(path))) for path in folders]
        for adapter in loaded:
            engine.adapters.add(adapter)  # pyright: ignore[reportOptionalMemberAccess]
        engine.warmup(["greedy"])
        title = f"{args.config}, batch {args.batch}, {args.adapters} adapters of rank {args.rank}"
        title += f" for {args.parts}" if args.parts else ""
        title += f", {jax.devices()[0].device_kind}"
        table = Table("rows", "prefill, s", "decode step, ms", "of without", title=title)
        without = build(hf, args, engine.weights[: engine.programs.factors.which.start])
        without.warmup(["greedy"])
        kinds = {"without adapters": (without, [None]), "room, none": (engine, [None]), "one each": (engine, loaded)}
        best = {name: (float("inf"), float("inf")) for name in kinds}
        before = compilations()
        for _ in range(args.repeats + 1):  # the first run has what starts once
            for name, (model, adapters) in kinds.items():
                best[name] = tuple(map(min, best[name], decode(model, args, adapters)))
        base = best["without adapters"][1]
        for name, (prefill, step) in best.items():
            table.add_row(name, f"{prefill:.3f}", f"{1e3 * step:.2f}", f"{step / base:.3f}")
        Console().print(table)
        if args.load:
            Console().print(time_loads(engine, reader, folders, args))
        print(f"compilations after warm-up: {compilations() - before}")


if __name__ == "__main__":
    main()
