"""What commands write: text and JSON to stdout, errors and the summary to stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from inferlib.llm import LLM
    from inferlib.outputs import Logprob, RequestOutput


_MOST_SHOWN = 200  # characters of a path


def fail(message: str | Exception) -> NoReturn:
    """End the command with one line on stderr and exit code 2."""
    if isinstance(message, OSError) and message.strerror:
        name = "" if message.filename is None else f"{str(message.filename)[:_MOST_SHOWN]}: "
        message = f"{name}{message.strerror}"
    typer.echo(f"error: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def user_errors() -> Iterator[None]:
    """For code that reads a user's input: its ValueErrors and OSErrors end the command with one line, no traceback. So
    does exhausted memory."""
    try:
        with memory_errors():
            yield
    except (ValueError, OSError) as error:
        fail(error)


@contextmanager
def memory_errors(hint: str = "") -> Iterator[None]:
    """For code that uses much memory: if that does not suffice, the command ends with one line. hint: follows it."""
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except (MemoryError, RuntimeError) as error:
        from inferlib.programs.memory import OutOfMemoryError, is_out_of_memory

        if isinstance(error, OutOfMemoryError):
            fail(f"{error}{hint}")
        if is_out_of_memory(error):
            fail(f"out of memory: {str(error) or 'the host has no more'}{hint}")
        raise


def check_output_file(option: str, path: Path | None) -> None:
    """End the command if a file that it is to write at its end cannot be written. path: None is nothing to write."""
    if path is None:
        return
    from inferlib.option_checks import checked_output

    with user_errors():
        path = checked_output(option, path)
        if path.is_dir():
            raise ValueError(f"{option} {path} is a directory: give a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{option} {path} may not be written to")


def write(text: str) -> None:
    """Write to stdout and flush; in UTF-8, whatever the locale."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise  # the reader left, which ends the command without a word
    except OSError as error:
        fail(f"cannot write to stdout: {error.strerror}")


def json_line(value: Mapping[str, Any]) -> bytes:
    """`value` as one line of JSON in UTF-8."""
    # A lone surrogate (echoed from the input) has no UTF-8, but its backslash form is what JSON calls it.
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def result_fields(result: RequestOutput) -> dict[str, Any]:
    """A result as JSON values; logarithms are natural, times are seconds."""
    outputs = []
    for output in result.outputs:
        fields = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if output.logprobs is not None:
            fields["cumulative_logprob"] = _number(output.cumulative_logprob)
            fields["logprobs"] = [_alternatives(entry) for entry in output.logprobs]
        outputs.append(fields)
    metrics = result.metrics
    fields = {
        "outputs": outputs,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "generated_tokens": metrics.generated,
        "ttft": metrics.ttft,
        "itl": metrics.itl,
        "tokens_per_second": metrics.tokens_per_second,
    }
    if result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [_alternatives(entry) for entry in result.prompt_logprobs]
    return fields


def _alternatives(entry: Mapping[int, Logprob] | None) -> list[dict[str, Any]] | None:
    """The tokens reported for one position: first the token that stands there, then the most likely ones."""
    if entry is None:
        return None
    return [
        {"token_id": token, "token": p.decoded_token, "logprob": _number(p.logprob), "rank": p.rank}
        for token, p in entry.items()
    ]


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value  # JSON has no infinity


class Summary:
    """Totals over results from now on; `show` prints them as one line on stderr. Times are without compilation, which
    is told apart."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._before = llm, dataclasses.replace(llm.stats)
        self.prompt_tokens = self.generated = 0
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._start, self._end = math.inf, -math.inf

    def add(self, result: RequestOutput) -> None:
        metrics = result.metrics
        self.prompt_tokens += len(result.prompt_token_ids)
        self.generated += metrics.generated
        self._ttft += [] if metrics.ttft is None else [metrics.ttft]
        self._itl += [] if metrics.itl is None else [metrics.itl]
        self._start = min(self._start, metrics.arrival_time)
        self._end = max(self._end, metrics.finished_time or -math.inf)

    def _of_tiers(self) -> str:
        """How many of the tokens from the cache came from a tier, or were prefilled by other devices, in brackets."""
        stats, before = self._llm.stats, self._before
        counts = {"the host": stats.host_tokens - before.host_tokens, "disk": stats.disk_tokens - before.disk_tokens}
        counts["the devices that prefill"] = stats.handed_tokens - before.handed_tokens
        parts = [f"{count} by way of {name}" for name, count in counts.items() if count]
        return f" ({', '.join(parts)})" if parts else ""

    def show(self) -> None:
        """Print nothing if there are no results."""
        if not self._ttft:
            return
        several = len(self._ttft) > 1
        mean = "mean " if several else ""
        parts = [f"{len(self._ttft)} prompts"] if several else []
        stats, before = self._llm.stats, self._before
        parts += [f"{self.prompt_tokens} prompt tokens", f"{self.generated} generated"]
        if cached := stats.cached_tokens - before.cached_tokens:
            parts += [f"{cached} from the cache of {stats.cached_pages} pages{self._of_tiers()}"]
        if evicted := stats.evicted_pages - before.evicted_pages:
            parts += [f"{evicted} pages evicted"]
        parts += [f"{mean}TTFT {fmean(self._ttft):.2f} s"]
        parts += [f"{mean}ITL {1e3 * fmean(self._itl):.1f} ms"] if self._itl else []
        parts += [f"{self.generated / max(self._end - self._start, 1e-9):.1f} tokens/s"]
        if compiled := stats.program_misses - before.program_misses:
            what = f"{compiled} program{'s' if compiled > 1 else ''}"
            parts += [f"without {stats.compile_seconds - before.compile_seconds:.1f} s to compile {what}"]
        Console(stderr=True).print(", ".join(parts), style="dim", highlight=False, soft_wrap=True)
