"""What structured outputs cost: tokens/s of prompts that follow a grammar, beside the same prompts without.

    python benchmarks/structured.py --model smollm2 --batch 1,16,64
    python benchmarks/structured.py --model smollm2 --config llama3-8b --batch 64

With --config the model has that shape and random weights; the tokenizer, and so the vocabulary, stay --model's.

Each prompt generates --tokens tokens, greedily: a list of JSON objects that does not end before. Columns: no prompt
follows a grammar, every second one does, all do; and of the last how long the host takes for the masks of a step, the
median and the lowest. It makes them while the device works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import jax
from rich.console import Console
from rich.table import Table

from inferlib import LLM, Buckets, SamplingParams, StructuredOutputs, configs
from inferlib.engine import engine as engines
from inferlib.model_files import ModelFiles
from inferlib.models.abstract import AbstractModel
from inferlib.models.families import config_from_hf
from inferlib.outputs import RequestOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
        "kind": {"enum": ["friend", "colleague", "customer"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "kind", "tags"],
    "additionalProperties": False,
}
PEOPLE = StructuredOutputs(json={"type": "array", "items": PERSON, "minItems": 10_000})
PROMPT = "A list of people as JSON, each with name, age, email, kind and tags:\n"


class MaskTimer:
    """Takes the time of making the masks of each step."""

    def __init__(self):
        self.seconds, self.make = [], engines.masks_of

    def __call__(self, *args):
        start = time.perf_counter()
        made = self.make(*args)
        self.seconds.append(time.perf_counter() - start)
        return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--config", choices=configs.names(), help="a shape from configs/, random weights")
    parser.add_argument("--layers", type=int, help="only so many layers of it")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--batch", default="1,16,64", help="prompts at once, with commas between them")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.batch = [int(batch) for batch in args.batch.split(",")]
    return args


class RandomFiles(ModelFiles):
    """A checkpoint of another shape than its weights, which are random."""

    @staticmethod
    def shaped(args: argparse.Namespace) -> RandomFiles:
        """--model's tokenizer, and the shape that --config names."""
        files = ModelFiles.open(args.model)
        hf = configs.load(args.config) | {"vocab_size": files.config.vocab}
        hf["num_hidden_layers"] = args.layers or hf["num_hidden_layers"]
        return RandomFiles(files.path, hf, config_from_hf(hf), files.source, files.tokenizer)

    def load(self, model: AbstractModel, **_) -> tuple[jax.Array, ...]:
        return model.random_weights()


def generate(llm: LLM, batch: int, constrained: int, tokens: int) -> tuple[float, list[RequestOutput]]:
    """Seconds of a batch of which so many follow the grammar, and its outputs."""
    free = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    follows = SamplingParams(temperature=0.0, max_tokens=tokens, structured_outputs=PEOPLE)
    # The first ones last, so that the rows of both kinds alternate.
    params = [follows if i * constrained // batch != (i + 1) * constrained // batch else free for i in range(batch)]
    start = time.perf_counter()
    outputs = llm.generate([PROMPT] * batch, params)
    return time.perf_counter() - start, outputs


def row(llm: LLM, batch: int, args: argparse.Namespace) -> list[str]:
    """A row of the table; the best of several runs."""
    rates, timer = [], MaskTimer()
    for constrained in (0, batch // 2, batch):
        if constrained == 0 and rates:
            rates.append("")
            continue
        generate(llm, batch, constrained, 8)  # compiles what is missing
        timer = MaskTimer()
        engines.masks_of = timer
        best = min(generate(llm, batch, constrained, args.tokens)[0] for _ in range(args.repeats))
        engines.masks_of = timer.make
        rates.append(f"{batch * args.tokens / best:,.0f}")
    masks = (f"{f(timer.seconds) * 1e3:.2f}" for f in (statistics.median, min))
    return [str(batch), *rates, *masks]


def main() -> None:
    args = arguments()
    length = 32 + args.tokens
    length += -length % 32
    names = "prompts", "none constrained", "half", "all", "masks, ms a step", "lowest"
    table = Table(*names, title=f"{args.config or args.model} on {jax.devices()[0].device_kind}, tokens/s")
    shaped = RandomFiles.shaped(args) if args.config else ModelFiles.open(args.model)
    with patch("inferlib.llm.ModelFiles.open", lambda *_, **__: shaped):
        for batch in args.batch:
            buckets = Buckets((32,), (batch,), (length,))
            llm = LLM(args.model, dtype=args.dtype, max_batch=batch, max_len=length, buckets=buckets, progress=False)
            table.add_row(*row(llm, batch, args))
    Console().print(table)


if __name__ == "__main__":
    main()
