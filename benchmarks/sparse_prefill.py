"""What is lost where prompts attend to listed blocks: the attention that the lists keep, and the likelihood of a text.

    python benchmarks/sparse_prefill.py --model smollm2 --tokens 2048 --lists xattention:0.9,mean:0.9

"listed" is the share of the blocks that tiles see which they list, and "mass" the share of the attention that falls on
these, as a mean over layers, heads and tokens: all of them, and those of the second half of the text, where little of
what is seen can be listed. The queries are those of a model that attends to lists in all layers before. "nats" is the
mean negative log-likelihood of a token of the second half. The first row attends to all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from inferlib import LLM, Buckets, SamplingParams
from inferlib.ops import prefill_attention
from inferlib.ops.sparse_prefill import blocks_in, tile_of

TEXT = Path(__file__).parents[1] / "LICENSE"
CHUNK = 512
LISTS = "xattention:1,xattention:0.9,xattention:0.9:0.5,sample:1,sample:0.9,sample:0.9:0.5,mean:1,mean:0.9"


class Row(NamedTuple):
    """Shares of blocks and of attention, and nats of a token; see the module."""

    lists: str
    listed: float
    mass: float
    mass_later: float
    nats: float


class Attention(NamedTuple):
    """What lists do to the attention of one layer's chunks.

    positions [P, C]; mass [P, C, K, G]: the share of each head's attention that lists keep; listed [P, K, T]: the share
    of the blocks that each tile lists.
    """

    positions: np.ndarray
    mass: np.ndarray
    listed: np.ndarray


@contextmanager
def recorded(seen: list[Attention]) -> Iterator[None]:
    """Within, programs are made that record what lists keep: by how much the log-sum-exps of listed blocks are below
    those of all."""
    attend = prefill_attention.prefill_attention

    def record(positions, listed, full, numbers):
        tile = tile_of(positions.shape[1])
        blocks = blocks_in(np.asarray(positions)[:, ::tile] + tile)
        share = (numbers >= 0).sum(axis=-1) / blocks[:, None]
        seen.append(Attention(positions, np.exp(listed - full), share))

    def both(q, cache, rows, positions, options, *, listed=None, backend="xla"):
        out, lse = attend(q, cache, rows, positions, options, listed=listed, backend=backend)
        if listed is not None:
            full = attend(q, cache, rows, positions, options, backend=backend)[1]
            jax.debug.callback(record, positions, lse, full, listed.numbers)
        return out, lse

    prefill_attention.prefill_attention = both
    try:
        yield
    finally:
        prefill_attention.prefill_attention = attend


def measure(model: str, text: str, tokens: int, lists: Sequence[str], **options: Any) -> Iterator[Row]:
    """A row of each option, after one that attends to all. tokens: a multiple of 512. options: of `LLM`."""
    sizes: dict[str, Any] = dict(max_batch=1, max_len=tokens + 128, progress=False, prefix_caching=False)
    sizes["buckets"] = Buckets((CHUNK,), (1,), (tokens + 128,))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for name in (None, *lists):
        seen: list[Attention] = []
        with recorded(seen):
            llm = LLM(model, sparse_prefill=name, **sizes | options)
            prompt = llm.tokenizer.encode(text)[:tokens]
            if len(prompt) < tokens or tokens % CHUNK:
                raise SystemExit(f"the text has {len(prompt)} tokens: give a multiple of {CHUNK} that it has")
            llm.warmup()
            jax.effects_barrier()
            seen.clear()
            (output,) = llm.generate([prompt], params, progress=False)
            jax.effects_barrier()
        pairs = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        nats = -np.array([step[token].logprob for step, token in pairs])[tokens // 2 :].mean()
        everywhere = [x.mass.mean(axis=(2, 3))[x.positions < tokens] for x in seen]
        later = [x.mass.mean(axis=(2, 3))[(x.positions >= tokens // 2) & (x.positions < tokens)] for x in seen]
        whole = Row(name or "all", 1.0, 1.0, 1.0, float(nats))
        if seen:
            shares = (
                float(np.mean([x.listed.mean() for x in seen])),
                *(float(np.concatenate(x).mean()) for x in (everywhere, later)),
            )
            whole = Row(name or "all", *shares, float(nats))
        yield whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--lists", default=LISTS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    text, lists = args.text.read_text(encoding="utf-8"), [name for name in args.lists.split(",") if name]
    rows = list(measure(args.model, text, args.tokens, lists, dtype=args.dtype))
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    table = Table(title=f"{args.model}, {args.tokens} tokens of {args.text.name}", title_justify="left")
    for column in ("sparse_prefill", "listed", "mass", "mass, second half", "nats"):
        table.add_column(column, justify="left" if column == "sparse_prefill" else "right")
    for row in rows:
        table.add_row(row.lists, *(f"{x:.1%}" for x in (row.listed, row.mass, row.mass_later)), f"{row.nats:.3f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
