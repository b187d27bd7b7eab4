"""Tensor parallelism: decode ms per step on 1, 2, 4 ... devices, and the fraction of their joint copy bandwidth.

python benchmarks/scaling.py --config llama3-8b --devices 1,2,4 --batch 1,16,64
"""

from __future__ import annotations

import argparse
import gc

import jax
from decode import engine_config, large_copies, measure
from rich.console import Console
from rich.table import Table

from inferlib import configs
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import make_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, choices=configs.names())
    parser.add_argument("--devices", default="1,2,4", help="comma-separated sizes of the tensor axis")
    parser.add_argument("--batch", default="1,16,64", help="comma-separated batch sizes")
    parser.add_argument("--cache", type=int, default=2048, help="cache length in tokens")
    parser.add_argument("--steps", type=int, default=128, help="decode steps to time")
    parser.add_argument("--rules", default="tp", help="sharding preset")
    args = parser.parse_args()
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config, copy = config_from_hf(configs.load(args.config)), large_copies()
    title = f"{args.config}, {dtype}, {jax.devices()[0].device_kind}, {args.rules}; copy {copy / 1e9:.0f} GB/s each"
    table = Table(title=title, min_width=100)
    for name in ("devices", "batch", "ms/step", "tokens/s", "of aggregate copy", "against the first"):
        table.add_column(name, justify="right")
    first: dict[int, float] = {}
    for devices in map(int, args.devices.split(",")):
        shards = make_shards(Parallelism(tensor=devices, rules=args.rules))
        run = engine_config(config, 1, args.cache, shards)
        model = abstract_model(config, dtype, backend=run.backend, scan=run.scan, shards=shards)
        weights = model.random_weights(shards=shards)
        for batch in map(int, args.batch.split(",")):
            row = measure(model, weights, batch, args.cache, args.steps, shards)
            share = row["gb_per_second"] * 1e9 / (copy * devices)
            speedup = first.setdefault(batch, row["ms"]) / row["ms"]
            cells = (f"{row['ms']:.2f}", f"{row['tokens_per_second']:.0f}", f"{share:.0%}", f"{speedup:.2f}x")
            table.add_row(str(devices), str(batch), *cells)
            gc.collect()
        del weights
        gc.collect()
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
