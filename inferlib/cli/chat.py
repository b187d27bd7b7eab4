"""`inferlib chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from inferlib.cli.arguments import (
    AdapterName,
    DtypeArguments,
    GenerationConfig,
    ModelName,
    Revision,
    TemplateArguments,
    grouped,
)
from inferlib.cli.batch import RequestOptions
from inferlib.cli.generate import OF_MODEL, EngineArguments, ModelArguments, load_llm
from inferlib.cli.output import fail, memory_errors, user_errors, write

if TYPE_CHECKING:
    from inferlib.llm import LLM
    from inferlib.sampling.params import SamplingParams

_HELP = (
    "/reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D ends. Ctrl-C stops an "
    "answer."
)


@dataclass(frozen=True, kw_only=True)
class AnswerArguments(TemplateArguments):
    panel: ClassVar = "Answers"

    system: Annotated[str | None, typer.Option(help="System message.")] = None
    adapter: AdapterName = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest number of tokens of an answer; by default as many as the context has room for."
        ),
    ] = None
    temperature: Annotated[float | None, typer.Option(help=f"0 picks the most likely token; {OF_MODEL} 1.")] = None
    top_k: Annotated[int | None, typer.Option(help=f"Sample among the k most likely tokens; {OF_MODEL} all.")] = None
    top_p: Annotated[
        float | None, typer.Option(help=f"Sample among the likeliest tokens of this total probability; {OF_MODEL} 1.")
    ] = None

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`: max_tokens, even if it is None, and the other options that are given."""
        values = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {"max_tokens": self.max_tokens} | {name: x for name, x in values.items() if x is not None}


@grouped
def chat(
    model: ModelName = "smollm2",
    *,
    revision: Revision = None,
    generation_config: GenerationConfig = "auto",
    answers: AnswerArguments,
    formats: DtypeArguments,
    engine: EngineArguments,
) -> None:
    """Talk with a model in the terminal, in its chat template.

    Commands: /reset, /system TEXT, /help, /exit. Ctrl-C stops an answer, Ctrl-D ends.
    """
    with user_errors():
        options = RequestOptions(answers.sampling(), engine.seed, template=answers.template())
        engine.check_adapter(answers.adapter)
    named = ModelArguments(model=model, revision=revision, generation_config=generation_config)
    llm = load_llm(named, formats, engine)
    if answers.chat_template is None and (llm.tokenizer is None or llm.tokenizer.chat_template is None):
        fail(f"{model} has no chat template: give one with --chat-template, or use inferlib generate")
    with user_errors():
        conversation = Conversation(llm, options.params(llm), answers.system, options.template, answers.adapter)
    console = Console(stderr=True)
    console.print(_HELP, style="dim", highlight=False)
    for line in _lines():
        command, _, rest = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            break
        if command == "/reset":
            conversation.reset(conversation.system)
        elif command == "/system":
            conversation.reset(rest.strip() or None)
        elif command.startswith("/"):
            console.print(_HELP, style="dim", highlight=False)
        elif line.strip():
            conversation.answer(line, console)


class Conversation:
    """The messages so far, and how they are answered. system: the system message, or None. template: arguments of
    `LLM.chat_prompt`."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        template: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ):
        self.llm, self.params, self.template, self.adapter = llm, params, template or {}, adapter
        self.reset(system)

    def reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str, console: Console) -> None:
        """Write the answer to a user's message as it appears. Ctrl-C ends it, and what was written stays in the
        conversation. A message that cannot be answered is left out of it, and the reason is shown."""
        messages, parts = [*self.messages, {"role": "user", "content": text}], []
        try:
            prompt = self.llm.chat_prompt(messages, **self.template)
            pieces = iter(self.llm.stream(prompt, self.params, adapter=self.adapter))
            with memory_errors():
                for piece in pieces:
                    parts.append(piece)
                    write(piece)
        except ValueError as error:
            console.print(f"{error} (/reset forgets the conversation)", style="red", highlight=False, markup=False)
            return
        except KeyboardInterrupt:
            console.print(" [stopped]", style="dim", markup=False)
        write("\n")
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def _lines() -> Iterator[str]:
    """What the user types, line by line; on a terminal with a prompt and a history of lines."""
    if not sys.stdin.isatty():
        yield from (line.removesuffix("\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401  (gives input() its history)
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")
