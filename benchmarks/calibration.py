"""Calibrate layers of a shape with random weights: seconds a layer, by method.

    python benchmarks/calibration.py --config llama3-8b --method gptq --scheme int4

The model has --layers layers of the shape from configs/ and the vocabulary of SmolLM2, whose tokenizer it takes, and is
written to a temporary folder first. One layer is calibrated to compile the programs, and then one and all of them: the
difference is the others' time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from inferlib import TextSample, calibrate, configs
from inferlib.checkpoint.save import save_model
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import abstract_model
from inferlib.models.families import config_from_hf
from inferlib.platforms import prepare_jax

TEXT = Path(__file__).parents[1] / "LICENSE"


def write_model(folder: Path, name: str, layers: int, tokenizer: Any) -> Path:
    """A model of so many layers of a shape, its weights random, with a tokenizer."""
    hf = {**configs.load(name), "num_hidden_layers": layers, "vocab_size": tokenizer.vocab_size}
    model = abstract_model(config_from_hf(hf), "float32")
    folder.mkdir()
    save_model(folder, hf, model, model.random_weights(0))
    tokenizer.save(folder)
    return folder


def seconds_for(model: Path, out: Path, sample: TextSample, method: str, scheme: str) -> float:
    started = time.perf_counter()
    calibrate(model, out, data=sample, method=method, scheme=scheme, progress=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=configs.names(), default="llama3-8b")
    parser.add_argument("--tokenizer", default="smollm2", help="a model with the tokenizer to take")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prepare_jax()
    tokenizer = ModelFiles.open(args.tokenizer).tokenizer
    assert tokenizer is not None
    text = TEXT.read_text(encoding="utf-8")
    repeats = 1 + args.tokens // len(tokenizer.encode(text))
    sample = TextSample([text] * repeats, args.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = write_model(folder / "one", args.config, 1, tokenizer)
        all_of = write_model(folder / "all", args.config, args.layers, tokenizer)
        seconds = [
            seconds_for(model, folder / out, sample, args.method, args.scheme)
            for model, out in ((one, "first"), (one, "second"), (all_of, "third"))
        ]
    layer = (seconds[2] - seconds[1]) / (args.layers - 1)
    facts = {
        "device": jax.devices()[0].device_kind,
        "config": args.config,
        "method": args.method,
        "scheme": args.scheme,
        "tokens": args.tokens,
        "with_compiling": seconds[0],
        "one_layer": seconds[1],
        "layers": args.layers,
        "all_layers": seconds[2],
        "seconds_a_layer": layer,
    }
    if args.json:
        print(json.dumps(facts))
        return
    table = Table(title=f"{args.config}, {args.method}, {args.scheme}, {facts['device']}", title_justify="left")
    for column in ("calibrated", "seconds"):
        table.add_column(column, justify="left" if column == "calibrated" else "right")
    rows = ("one layer, with compiling", "one layer", f"{args.layers} layers", "a layer")
    for what, value in zip(rows, (*seconds, layer), strict=True):
        table.add_row(what, f"{value:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
