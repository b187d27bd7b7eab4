"""The quality of quantized weights and caches: perplexity of a model on a text for each format, and the bytes it takes.

    python benchmarks/quality.py --model smollm2 --tokens 1024

The text (by default LICENSE, which nobody edits) is cut into windows of --window tokens. Perplexity is exp of the mean
negative log-probability of every token but the first of each window. "KL" is the mean Kullback-Leibler divergence of
the format's next-token distribution from that of float32, in nats: it shows differences that are lost in the noise of a
perplexity on a short text. Formats "kv int8" and "kv fp8" are of the cache alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from inferlib import LLM, Buckets
from inferlib.config import KV_CACHE_DTYPES
from inferlib.models.quantization import QUANTIZATIONS


def log_probabilities(llm: LLM, windows: list[list[int]]) -> np.ndarray:
    """[tokens, V] float64 at every position of every window."""
    logits = np.concatenate([llm.logits(window) for window in windows]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def measure(model: str, text: str, count: int, window: int, dtype: str, formats: list[str]) -> list[dict]:
    """A row for each format, "none" first."""
    rows, reference = [], None
    for name in ["none", *(f for f in formats if f != "none")]:
        option = "kv_cache_dtype" if name.startswith("kv ") else "quantization"
        options: dict[str, Any] = {} if name == "none" else {option: name.removeprefix("kv ")}
        buckets = Buckets(prefill=(window,), batch=(1,), cache=(window,))
        llm = LLM(model, dtype=dtype, **options, max_batch=1, max_len=window, buckets=buckets, progress=False)
        if llm.tokenizer is None:
            raise SystemExit(f"{model} has no tokenizer")
        tokens = llm.tokenizer.encode(text)[:count]
        windows = [tokens[i : i + window] for i in range(0, len(tokens), window)]
        windows = [w for w in windows if len(w) > 1]
        logprobs = log_probabilities(llm, windows)
        reference = logprobs if reference is None else reference
        ends = np.cumsum([len(w) for w in windows])
        scored = np.setdiff1d(np.arange(ends[-1]), ends - 1)  # the last token of a window has no successor
        following = np.concatenate([w[1:] for w in windows])
        weights = llm.engine.model
        matrices = [w for w in weights.weights if w.contracting]
        rows.append(
            {
                "format": name if options else dtype,
                "bytes": weights.nbytes,
                "token_bytes": llm.engine.plan.nbytes // window,
                "bits": 8
                * sum(a.nbytes for w in matrices for a in w.arrays)
                / sum(int(np.prod(w.shape)) for w in matrices),
                "perplexity": float(np.exp(-logprobs[scored, following].mean())),
                "kl": float((np.exp(reference) * (reference - logprobs)).sum(axis=1).mean()),
                "tokens": len(scored),
            }
        )
        del llm
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--formats", default=",".join([*QUANTIZATIONS, *(f"kv {name}" for name in KV_CACHE_DTYPES)]))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    rows = measure(args.model, text, args.tokens, args.window, args.dtype, args.formats.split(","))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"{args.model} on {rows[0]['tokens']} tokens of {args.text.name}", title_justify="left")
    for column in ("format", "bits of a matrix", "bytes of weights", "cache of a token", "perplexity", "KL"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in rows:
        table.add_row(
            row["format"],
            f"{row['bits']:.2f}",
            decimal(row["bytes"]),
            decimal(row["token_bytes"]),
            f"{row['perplexity']:.2f}",
            f"{row['kl']:.4f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
