"""Speculative decoding beside decoding without it: tokens/s, and tokens of a row that a step gives.

    python benchmarks/speculation.py --batch 1,2 --temperature 0,0.8

The model edits and summarises a text (by default SmolLM2-135M with its real weights): much of what it writes is in the
prompt. In "edit again" and "summarise again" a chat goes on: the prompt has answers that were changed on request, and
another change is asked for. All engines serve the same requests, in turns, and must return the same tokens; each row of
the table is the best of --runs. A model's own chat template makes the prompts. With --texts, a file as `inferlib
distill` takes it, it also continues the beginnings of texts that are held out, as a base model would. "CPU ms" is the
time of all cores for a token, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from inferlib import LLM, SamplingParams
from inferlib.distillation.texts import read_texts

_TEXT = """The harbour office closes at six in the evening, and ships that arrive later have to wait outside until the
next morning. Captains who know the coast well prefer to anchor behind the northern island, because the water there
is calm even in winter. Last year, more than forty ships spent at least one night in that bay. The office charges
nothing for it, but it asks every captain to report the name of the ship, the number of people on board, and the
goods that it carries. Fishing boats are an exception. They may enter at any hour, as long as they keep to the
eastern channel and show a green light. The old lighthouse was repaired in spring. Its lamp now turns once in ten
seconds and can be seen from a distance of eighteen miles. The keeper, who had lived in the tower for thirty years,
moved to a small house near the market. He still climbs the stairs twice a week to clean the glass. Visitors can
join him on Saturdays if they send a letter to the office at least three days before.""".replace("\n", " ")
_ERRORS = {"evening": "evning", "because": "becaus", "people": "peple", "distance": "distence", "Visitors": "Vistors"}
_MISSPELT = functools.reduce(lambda text, error: text.replace(*error), _ERRORS.items(), _TEXT)
_SENTENCES = [f"{sentence}." for sentence in _TEXT.rstrip(".").split(". ")]
_SUMMARY = " ".join(_SENTENCES[at] for at in (0, 1, 3, 5, 6, 8, 9, 10))
_SHORTER = " ".join(_SENTENCES[at] for at in (0, 1, 3, 5, 6, 8, 9))
_QUOTE = f"Summarise this text by quoting its most important sentences:\n\n{_TEXT}"
_CORRECT = f"Correct the spelling of this text:\n\n{_MISSPELT}"
# Chats, each of what the user and the model say in turn.
TASKS = {
    "edit": [
        [_CORRECT],
        [f"Write a list of all sentences of this text:\n\n{_TEXT}"],
    ],
    "summarise": [
        [f"{_TEXT}\n\nSummarise the text above by quoting its most important sentences."],
        [f"Summarise this text in three sentences:\n\n{_TEXT}"],
    ],
    "edit again": [
        [
            _CORRECT,
            _TEXT,
            "Write it again, with 'forty' changed to 'fifty'.",
            _TEXT.replace("forty", "fifty"),
            "Write it again, with 'Saturdays' changed to 'Sundays'.",
        ],
        [
            _CORRECT,
            _TEXT.replace("spring", "sprng").replace("twice", "twise"),
            "You missed an error: 'twise'. Correct that too, and write the whole text again.",
            _TEXT.replace("spring", "sprng"),
            "You missed another: 'sprng'. Correct that too, and write the whole text again.",
        ],
    ],
    "summarise again": [
        [
            _QUOTE,
            _SUMMARY,
            "Write the summary again, with 'Fishing boats' changed to 'Small boats'.",
            _SUMMARY.replace("Fishing", "Small"),
            "Write the summary again, with 'spring' changed to 'autumn'.",
        ],
        [_QUOTE, _SUMMARY, "Leave out its last sentence.", _SHORTER, "Leave out its first sentence."],
    ],
}

CONTINUE = "continue"


class Run(NamedTuple):
    """rate: tokens/s. cpu: milliseconds of all cores a token. per_step: tokens that a row got of a step on average."""

    rate: float
    cpu: float
    per_step: float
    tokens: list[list[int]]


def beginnings(file: Path, count: int = 6, characters: int = 700) -> list[str]:
    """The first characters of held-out texts, from all parts of the file."""
    texts = [text for text in read_texts(file).testing if len(text) > characters]
    return [text[:characters] for text in texts[:: max(len(texts) // count, 1)][:count]]


def messages(chat: list[str]) -> list[dict[str, str]]:
    """A chat as `LLM.chat_prompt` takes it."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, chat, strict=False)]


def run(llm: LLM, prompts: Sequence[str | list[int]], params: SamplingParams, batch: int) -> Run:
    """Continue the prompts; the cache is empty before."""
    llm.engine.forget_prefixes()
    outputs, stats = [], llm.engine.stats
    saved, cpu, start = stats.accepted_drafts, time.process_time(), time.perf_counter()
    for first in range(0, len(prompts), batch):
        outputs += llm.generate(prompts[first : first + batch], params)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = [output.outputs[0].token_ids for output in outputs]
    count = sum(map(len, tokens))
    return Run(count / seconds, 1e3 * cpu / count, count / (count - stats.accepted_drafts + saved), tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--speculation", default=["ngram:7"], nargs="+", help="such as ngram:7 or eagle3:DIR:4; several are compared"
    )
    parser.add_argument("--batch", default="1,2", help="requests at a time")
    parser.add_argument("--temperature", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--dtype")
    parser.add_argument("--texts", type=Path, help="JSON lines, whose held-out texts are continued too")
    args = parser.parse_args()
    batches, temperatures = ([float(x) for x in text.split(",")] for text in (args.batch, args.temperature))
    # Several engines share the device: none takes all of its memory.
    memory = None if jax.default_backend() == "cpu" else "2GiB"
    sizes = dict(
        max_batch=int(max(batches)), max_len=args.max_len, dtype=args.dtype, cache_memory=memory, progress=False
    )
    engines = {name: LLM(args.model, speculation=name, **sizes) for name in (None, *args.speculation)}
    table = Table(
        "task", "temperature", "batch", "speculation", "tokens/s", "ratio", "CPU ms", "tokens a step", "equal"
    )
    tasks: dict[str, Sequence[str | list[int]]] = {
        task: [engines[None].chat_prompt(messages(chat)) for chat in chats] for task, chats in TASKS.items()
    }
    if args.texts is not None:
        tasks[CONTINUE] = beginnings(args.texts)
    for (task, prompts), temperature, batch in itertools.product(tasks.items(), temperatures, map(int, batches)):
        params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=1)
        results: dict[str | None, list[Run]] = {name: [] for name in engines}
        for _ in range(1 + args.runs):  # the first compiles what is missing, and does not count
            for name, llm in engines.items():
                results[name].append(run(llm, prompts, params, batch))
        best = {name: max(of_one[1:]) for name, of_one in results.items()}
        for name, one in best.items():
            equal = sum(a == b for a, b in zip(one.tokens, best[None].tokens, strict=True))
            cells = f"{one.rate:.1f}", f"{one.rate / best[None].rate:.2f}", f"{one.cpu:.1f}", f"{one.per_step:.2f}"
            table.add_row(task, f"{temperature:g}", str(batch), name or "none", *cells, f"{equal} of {len(prompts)}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
