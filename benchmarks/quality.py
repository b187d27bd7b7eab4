"""The quality of quantized weights and caches: perplexity of a model on a text for each format, and the bytes it takes.

    python benchmarks/quality.py --model smollm2 --tokens 1024
    python benchmarks/quality.py --calibrated OUT ...     # directories that `inferlib quantize` wrote, too

A row is what `inferlib eval` says of a format against float32, on the first --tokens tokens of a text (by default
LICENSE, which nobody edits) in windows of --window. "KL" is the mean Kullback-Leibler divergence of the format's
next-token distribution from that of float32, in nats: it shows differences that are lost in the noise of a perplexity
on a short text. Formats "kv int8", "kv fp8" and "kv int4" are of the
cache alone; "kv int4_calibrated" needs what `inferlib calibrate-cache` writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from inferlib import Evaluation, TextSample, evaluate
from inferlib.model_files import ModelFiles
from inferlib.models.quantization import QUANTIZATIONS
from inferlib.option_checks import CALIBRATED_CACHE, KV_CACHE_DTYPES


def first_tokens(model: str, text: str, count: int, window: int) -> TextSample:
    """The first tokens of a text, in whole windows."""
    tokenizer = ModelFiles.open(model).tokenizer
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer")
    tokens = tokenizer.encode(text)[: count // window * window]
    if len(tokens) < window:
        raise SystemExit(f"the text has {len(tokens)} tokens, and a window {window}: give a smaller --window")
    count = len(tokens) // window * window
    return TextSample([tokenizer.decode(tokens[:count], skip_special_tokens=False)], count, window)


def measure(model: str, sample: TextSample, dtype: str, formats: list[str], calibrated: list[str]) -> Iterator[Any]:
    """The name and the evaluation of each format, "none" first."""
    for name in ["none", *(f for f in formats if f != "none")]:
        option = "kv_cache_dtype" if name.startswith("kv ") else "quantization"
        options: dict[str, Any] = {} if name == "none" else {option: name.removeprefix("kv ")}
        yield name if options else dtype, evaluate(model, sample, against=model, dtype=dtype, **options)
    for path in calibrated:
        yield path, evaluate(path, sample, against=model, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    caches = [f"kv {name}" for name in KV_CACHE_DTYPES if name != CALIBRATED_CACHE]
    parser.add_argument("--formats", default=",".join([*QUANTIZATIONS, *caches]))
    parser.add_argument("--calibrated", nargs="*", default=[], help="directories of calibrated models")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sample = first_tokens(args.model, args.text.read_text(encoding="utf-8"), args.tokens, args.window)
    rows = measure(args.model, sample, args.dtype, [f for f in args.formats.split(",") if f], args.calibrated)
    if args.json:
        print(json.dumps([{"format": name} | row.to_json() for name, row in rows], indent=1))
        return
    table = Table(title=f"{args.model} on {sample.tokens} tokens of {args.text.name}", title_justify="left")
    for column in ("format", "bits of a matrix", "bytes of weights", "cache of a token", "perplexity", "KL"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name, row in rows:
        table.add_row(name, *cells(row))
    Console(width=120).print(table)


def cells(row: Evaluation) -> list[str]:
    assert row.divergence is not None  # all are measured against the original
    sizes = [f"{row.bits:.2f}", decimal(row.nbytes), decimal(row.token_bytes)]
    return [*sizes, f"{row.perplexity:.2f}", row.divergence.text(4)]


if __name__ == "__main__":
    main()
