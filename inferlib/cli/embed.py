"""`inferlib embed`: a vector for each prompt of a file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from inferlib.cli.arguments import AdapterName, DtypeArguments, ModelName, Revision, grouped
from inferlib.cli.batch import Batch, run_batch
from inferlib.cli.generate import EngineArguments, ModelArguments, load_llm
from inferlib.cli.output import check_output_file, user_errors

if TYPE_CHECKING:
    from inferlib.llm import LLM, Prompt

_FIELDS = ("id", "prompt", "prompt_token_ids")
_AT_A_TIME = 128  # lines


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    panel: ClassVar = "Files"

    input_file: Annotated[
        Path, typer.Option("--input", help="JSON lines with prompt or prompt_token_ids, and maybe id.")
    ]
    output_file: Annotated[Path, typer.Option("--output", help="The vectors, a JSON line each.")]
    resume: Annotated[bool, typer.Option("--resume", help="Skip lines that --output has vectors for.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output if it exists.")] = False


@dataclass(frozen=True, kw_only=True)
class VectorArguments:
    """Arguments of `LLM.embed`."""

    panel: ClassVar = "Vectors"

    pooling: Annotated[
        str, typer.Option(help="last: the hidden state of a prompt's last token; mean: the mean over all of them.")
    ] = "last"
    normalize: Annotated[bool, typer.Option(help="Divide each vector by its length.")] = True
    adapter: AdapterName = None


@grouped
def embed(
    model: ModelName,
    *,
    revision: Revision = None,
    files: FileArguments,
    vectors: VectorArguments,
    formats: DtypeArguments,
    engine: EngineArguments,
) -> None:
    """Write a vector of hidden states for each prompt of a file."""
    with user_errors():
        from inferlib.engine.pooling import check_pooling

        check_pooling(vectors.pooling)
        engine.check_adapter(vectors.adapter)
    check_output_file("--expert-load", engine.expert_load)
    load = cache(partial(load_llm, ModelArguments(model=model, revision=revision), formats, engine))
    append = dict(resume=files.resume, overwrite=files.overwrite)
    failed = run_batch(load, files.input_file, files.output_file, partial(EmbedBatch, vectors), **append)
    if engine.expert_load is not None:
        from inferlib.placement import write_load

        with user_errors():
            write_load(engine.expert_load, load().expert_load())
    raise typer.Exit(1 if failed else 0)


class EmbedBatch(Batch):
    """Embeds the prompts of a file."""

    def __init__(self, options: VectorArguments, llm: LLM, *rest: Any):
        super().__init__(llm, *rest)
        self._options, self._start, self._embedded = options, time.perf_counter(), 0

    def run(self, lines: Iterable[bytes]) -> None:
        prompts = self.read(lines, self._checked)
        while some := list(islice(prompts, _AT_A_TIME)):
            vectors = self._vectors([prompt for _, _, prompt in some])
            for (number, name, _), vector in zip(some, vectors, strict=True):
                self.finish({"id": name, "line": number, "embedding": vector.tolist()})
                self._embedded += 1

    def report(self) -> None:
        super().report()
        seconds = time.perf_counter() - self._start
        typer.echo(f"{self._embedded} prompts embedded in {seconds:.1f} s, compilation included", err=True)

    def _vectors(self, prompts: list[Prompt]) -> Any:
        pooling: Any = self._options.pooling  # it is checked
        options: dict[str, Any] = dict(normalize=self._options.normalize, adapter=self._options.adapter)
        return self._llm.embed(prompts, pooling, **options, progress=False)

    def _checked(self, fields: dict[str, Any], number: int) -> Prompt:
        """The prompt of a line. Raises ValueError if it cannot be embedded."""
        if unknown := [name for name in fields if name not in _FIELDS]:
            raise ValueError(f"unknown fields: {', '.join(map(repr, unknown))}; known: {', '.join(_FIELDS)}")
        prompt: dict[str, Any] = {name: fields[name] for name in _FIELDS[1:] if name in fields}
        if len(prompt) != 1:
            raise ValueError(f"give one of prompt, prompt_token_ids; there is {' and '.join(prompt) or 'none'}")
        self._llm._embedding_request(prompt)  # which checks it
        return prompt
