"""Batches: JSON lines in, JSON lines out, written as results complete; can be interrupted and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from inferlib.cli.output import Summary, fail, json_line, memory_errors, result_fields, user_errors

T = TypeVar("T")
Name = int | str

if TYPE_CHECKING:
    from inferlib.llm import LLM, Prompt, Request
    from inferlib.sampling.params import SamplingParams

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_TEMPLATE = ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")  # beside messages
_FIELDS = ("id", *_PROMPTS, "sampling_params", "cache_salt", "adapter", *_TEMPLATE)
_HEAD = b'{"id": '  # every line of results begins so


@dataclass(frozen=True)
class RequestOptions:
    """Options of the command line for every prompt.

    sampling: fields of `SamplingParams` that are given; the model's defaults fill the rest. seed: for prompts whose
    params have no seed. chat: texts are messages of a user. system: message before them. template: arguments of
    `LLM.chat_prompt`. adapter: its name, for lines that name none.
    """

    sampling: Mapping[str, Any]
    seed: int
    chat: bool = False
    system: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for values that are wrong for every model."""
        from inferlib.sampling.params import SamplingParams

        SamplingParams(**{"max_tokens": None, **self.sampling})

    def params(self, llm: LLM) -> SamplingParams:
        return dataclasses.replace(llm.get_default_sampling_params(), **self.sampling)

    def prepare(self, llm: LLM, text: str) -> Request:
        """Raises ValueError, also if a chat template is needed and the model has none."""
        fit = "max_tokens" not in self.sampling
        return llm.prepare(self.prompt(llm, text), self.params(llm), fit=fit, adapter=self.adapter)

    def prompt(self, llm: LLM, text: str) -> Prompt:
        """The model's prompt for a text."""
        if not self.chat:
            return text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return llm.chat_prompt([*system, {"role": "user", "content": text}], **self.template)

    def conversation(self, llm: LLM, fields: Mapping[str, Any]) -> Prompt:
        """The model's prompt for the messages of a line, and the line's arguments of `LLM.chat_prompt`."""
        mine = {name: fields[name] for name in _TEMPLATE if name in fields}
        if isinstance(mine.get("chat_template_kwargs"), dict):
            mine["chat_template_kwargs"] = {
                **(self.template["chat_template_kwargs"] or {}),
                **mine["chat_template_kwargs"],
            }
        return llm.chat_prompt(fields["messages"], **{**self.template, **mine})

    def request_of(self, llm: LLM, prompt: Prompt, fields: Mapping[str, Any], line: int) -> Request:
        """The request of one line's fields. Raises ValueError for unknown names and invalid values."""
        import numpy as np

        overrides, adapter = fields.get("sampling_params", {}), fields.get("adapter", self.adapter)
        if not isinstance(overrides, dict):
            raise ValueError(f"sampling_params must be an object, got {overrides!r}")
        base = self.params(llm)
        _check_known("sampling_params", overrides, [f.name for f in dataclasses.fields(base)])
        if isinstance(overrides.get("logit_bias"), dict):
            overrides = overrides | {"logit_bias": _integer_keys(overrides["logit_bias"])}
        params = dataclasses.replace(base, **overrides)
        if params.seed is None:
            # From the line's number, so that a resumed run draws what an uninterrupted run would.
            seed = int(np.random.SeedSequence((self.seed, line)).generate_state(1)[0])
            params = dataclasses.replace(params, seed=seed)
        fit = "max_tokens" not in {**self.sampling, **overrides}
        return llm.prepare(prompt, params, fit=fit, adapter=adapter)


def run_batch(
    load: Callable[[], LLM],
    source: Path,
    target: Path,
    make: Callable[..., Batch],
    *,
    resume: bool,
    overwrite: bool,
) -> int:
    """Run the prompts of `source`, a file of JSON lines, and write results to `target`. Returns the number of failed
    lines.

    The result of an invalid line is an error. If the run ends early (a signal, a full disk), the finished lines stay,
    and the command exits and names the command that continues. load: loads the model; called after the files have been
    checked. make: makes a `Batch` of what this calls it with.
    """
    with user_errors():
        _check_files(source, target, resume=resume, overwrite=overwrite)
        done = finished_lines(target) if resume and target.exists() else {}
    if done:
        typer.echo(f"{len(done)} lines are done already", err=True)
    llm = load()
    stays = "; the finished lines are kept, when this is solved "
    try:
        with (
            memory_errors(f"{stays}{_continue_with()}"),
            _termination_as_interrupt(),
            source.open("rb") as lines,
            closing(_ResultFile(target, "ab" if resume else "wb")) as results,
            _progress(source, len(done)) as progress,
        ):
            batch = make(llm, results, progress, done)
            batch.run(lines)
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        typer.echo(f"interrupted; the finished lines are kept, {_continue_with()}", err=True)
        raise typer.Exit(128 + number) from None
    except OSError as error:
        fail(f"{error}{stays}{_continue_with()}")
    batch.report()
    return batch.failed


def finished_lines(path: Path) -> dict[int, int | str]:
    """The numbers of lines that `path` has results for, with their ids.

    Removes everything else from the file: errors, and a last line that is incomplete. Raises ValueError if the file is
    not an output of this command.
    """
    done, errors, end = {}, False, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.startswith(_HEAD[: len(raw)]):
                _not_results(path, number)
            if not raw.endswith(b"\n"):
                break
            end += len(raw)
            record = _read_result(path, number, raw)
            if "error" in record:
                errors = True
            else:
                done[record["line"]] = record["id"]
    os.truncate(path, end)
    if errors:
        _remove_errors(path)
    return done


def _remove_errors(path: Path) -> None:
    """Remove the errors from a file. It is replaced as a whole, so that a crash loses no result."""
    path = path.resolve()
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
    try:
        with path.open("rb") as old, open(handle, "wb") as new:
            new.writelines(raw for raw in old if "error" not in json.loads(raw))
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read_result(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except ValueError:
        record = {}
    if not isinstance(record.get("line"), int) or not isinstance(record.get("id"), int | str):
        _not_results(path, number)
    return record


def _not_results(path: Path, number: int) -> NoReturn:
    raise ValueError(
        f"line {number} of {path} is not a result of this command, so it cannot be resumed; "
        "give another --output, or --overwrite"
    )


class _ResultFile:
    """The output. Lines are written at once and unbuffered, so a crash can only cut the last line."""

    def __init__(self, path: Path, mode: str):
        self._path = path
        self._file = path.open(mode, buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Raises OSError naming the file."""
        rest = memoryview(json_line(record))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


class Batch:
    """One run over the lines of a file. failed: number of lines that got an error."""

    def __init__(self, llm: LLM, results: _ResultFile, progress: Progress, done: dict[int, int | str]):
        self.failed = 0
        self._llm, self._results, self._done = llm, results, done
        self._progress, self._task = progress, progress.task_ids[0]

    def run(self, lines: Iterable[bytes]) -> None:
        """Write a result for each line."""
        raise NotImplementedError

    def report(self) -> None:
        if self.failed:
            lines = "line" if self.failed == 1 else "lines"
            typer.echo(f"{self.failed} {lines} failed: the output says why, --resume tries them again", err=True)

    def read(self, lines: Iterable[bytes], make: Callable[[dict[str, Any], int], T]) -> Iterator[tuple[int, Name, T]]:
        """The number and id of each line that is to be run, and what `make` makes of its fields and number. Invalid
        lines get errors as results."""
        from inferlib.programs.program_set import UnplannedProgramError

        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            name: Name = number
            try:
                fields = _parse(raw)
                name = _name(fields, number)
                if number in self._done:
                    self._check_same(number, name)
                    continue
                made = make(fields, number)
            # JSON can be nested too deeply, and artifacts may lack a line's sampling mode.
            except (ValueError, RecursionError, UnplannedProgramError) as error:
                self.fail(number, name, error)
            else:
                yield number, name, made

    def fail(self, number: int, name: Name, error: Exception) -> None:
        self.failed += 1
        self.finish({"id": name, "line": number, "error": str(error)})

    def finish(self, record: dict[str, Any]) -> None:
        self._results.write(record)
        self._progress.update(self._task, advance=1, failed=self.failed)

    def _check_same(self, number: int, name: Name) -> None:
        if name != self._done[number]:
            fail(
                f"line {number} of the input has the id {name!r}, but the output's result of that line has "
                f"{self._done[number]!r}: the input has changed; give another --output, or --overwrite"
            )


class GenerateBatch(Batch):
    """Completes the prompts of a file."""

    def __init__(self, options: RequestOptions, llm: LLM, *rest: Any):
        super().__init__(llm, *rest)
        self._options = options
        self._lines: dict[int | str, tuple[int, int | str]] = {}  # by request: line number and id
        self._summary = Summary(llm)

    def run(self, lines: Iterable[bytes]) -> None:
        for result in self._llm.run(self._requests(lines), progress=False, failed=self._failed):
            number, name = self._lines.pop(result.request_id)
            self._summary.add(result)
            self.finish({"id": name, "line": number, **result_fields(result)})

    def report(self) -> None:
        super().report()
        self._summary.show()

    def _failed(self, request: Request, error: Exception) -> None:
        self.fail(*self._lines.pop(request.id), error)

    def _requests(self, lines: Iterable[bytes]) -> Iterator[Request]:
        """Make requests of the lines, one by one as the engine takes them."""
        for number, name, request in self.read(lines, self._request):
            self._lines[request.id] = number, name
            yield request

    def _request(self, fields: dict[str, Any], number: int) -> Request:
        _check_known("fields", fields, _FIELDS)
        forms = [field for field in _PROMPTS if field in fields]
        if len(forms) != 1:
            raise ValueError(f"give one of {', '.join(_PROMPTS)}; there is {' and '.join(forms) or 'none'}")
        if forms == ["messages"]:
            prompt = self._options.conversation(self._llm, fields)
        elif strange := [name for name in _TEMPLATE if name in fields]:
            raise ValueError(f"{strange[0]} goes with messages")
        elif forms == ["prompt"]:
            if not isinstance(fields["prompt"], str):
                raise ValueError(f"prompt must be a string, got {fields['prompt']!r}")
            prompt = self._options.prompt(self._llm, fields["prompt"])
        else:
            prompt = fields["prompt_token_ids"]
            if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
                raise ValueError("prompt_token_ids must be a list of integers")
        if "cache_salt" in fields:
            prompt = {
                "prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt,
                "cache_salt": fields["cache_salt"],
            }
        return self._options.request_of(self._llm, prompt, fields, number)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: {error}") from None
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"the line must be a JSON object, it is {type(fields).__name__}")
    return fields


def _name(fields: dict[str, Any], number: int) -> int | str:
    name = fields.get("id", number)
    if not isinstance(name, int | str) or isinstance(name, bool):
        raise ValueError(f"id must be a string or an integer, got {name!r}")
    return name


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {what}: {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def _integer_keys(bias: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r}") from None


def _check_files(source: Path, target: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise ValueError now for what would fail, or overwrite something, only after the model is loaded."""
    if not source.exists():
        raise ValueError(f"the input {source} does not exist")
    if source.is_dir() or target.is_dir():
        raise ValueError(f"{source if source.is_dir() else target} is a directory; give a file")
    if not os.access(source, os.R_OK):
        raise ValueError(f"the input {source} may not be read")
    if not target.exists():
        if not os.access(target.parent, os.W_OK):
            raise ValueError(f"the output {target} cannot be created: is its directory there and writable?")
        return
    if target.samefile(source):
        raise ValueError(f"input and output are the same file, {source}")
    if not os.access(target, os.W_OK):
        raise ValueError(f"the output {target} may not be written to")
    if not target.is_file():  # a pipe or a device
        if resume:
            raise ValueError(f"the output {target} is not a regular file, so it cannot be resumed")
    elif target.stat().st_size > 0 and not resume and not overwrite:
        raise ValueError(f"the output {target} exists; give --resume to continue it or --overwrite")


def _continue_with() -> str:
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    return f"continue with: {shlex.join(['inferlib', *words, '--resume'])}"


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Within, SIGTERM raises KeyboardInterrupt with the signal's number, as Ctrl-C does without."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:.1f} lines/s")


def _progress(source: Path, done: int) -> Progress:
    """A bar with the numbers of lines done and failed and their rate, on stderr if that is a terminal."""
    columns = (
        TextColumn("lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        _Rate(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    total = None
    if console.is_terminal and source.is_file():
        with source.open("rb") as lines:
            total = sum(bool(line.strip()) for line in lines)
    progress.add_task("lines", total=total, completed=done, failed=0)
    return progress
