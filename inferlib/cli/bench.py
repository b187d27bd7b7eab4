"""`inferlib bench`: how fast a server with OpenAI's interface answers."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from inferlib.cli.arguments import Json, grouped
from inferlib.cli.output import check_output_file, fail, json_line, user_errors, write

if TYPE_CHECKING:
    from inferlib.bench.report import Report


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    panel: ClassVar = "Server"

    model: Annotated[str | None, typer.Option(help="Name of the model; by default the first of the server.")] = None
    api_key: Annotated[str | None, typer.Option(help="Key of the server.")] = None
    api_key_file: Annotated[Path | None, typer.Option(help="File whose first line is the key.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Ask by chats; by default by completions.")] = False
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Answers have all their tokens: needs a server with vLLM's option ignore_eos."
        ),
    ] = False
    timeout: Annotated[float, typer.Option(help="Longest wait between two events of an answer, in seconds.")] = 600.0


@dataclass(frozen=True, kw_only=True)
class LoadArguments:
    panel: ClassVar = "Load"

    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="Requests to send; a trace has its own.")] = 100
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random times; by default there is no wait.")
    ] = None
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Largest number of requests at a time; by default any number.")
    ] = None
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10_000_000, help="Mean words of a prompt.")] = 256
    output_tokens: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Mean of the most tokens that an answer may have.")
    ] = 128
    spread: Annotated[
        float, typer.Option(min=0, max=5, help="Standard deviation of the logarithm of both lengths; 0: all are equal.")
    ] = 0.0
    prefixes: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Number of shared texts that prompts begin with.")
    ] = 0
    prefix_tokens: Annotated[int, typer.Option(min=0, max=10_000_000, help="Words of each of these texts.")] = 0
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines in place of random requests: prompt, messages or prompt_tokens; max_tokens; and perhaps "
            "at, the second in which to send it."
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, words and times.")] = 0


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    panel: ClassVar = "Report"

    slo: Annotated[
        str, typer.Option(help="Limits in seconds for goodput, such as ttft=0.5,itl=0.05,e2e=10; itl is a mean.")
    ] = ""
    plot: Annotated[Path | None, typer.Option(help="Write distributions as a picture (.png, .svg, .pdf).")] = None
    json: Json = False


@grouped
def bench(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    *,
    server: ServerArguments,
    load: LoadArguments,
    report: ReportArguments,
) -> None:
    """Measure a server with OpenAI's interface: time to the first token, between tokens and to the end, rates, goodput.

    Exits with 1 if a request failed.
    """
    try:
        from inferlib.bench.client import Endpoint
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed: pip install 'inferlib[serve]'")
    check_output_file("--plot", report.plot)
    with user_errors():
        if not 0 < server.timeout < math.inf:
            raise ValueError("--timeout must be seconds above 0")
        from inferlib.bench.report import Limits

        limits, asked, sent = Limits.parse(report.slo), _asked(load), _load(load)
        endpoint = Endpoint(url, server.model, _key(server), server.chat, server.ignore_eos, server.timeout)
        result = _run(endpoint, asked, sent, limits, load.seed)
        if report.plot is not None:
            result.plot().savefig(report.plot)
    if report.json:
        write(json_line(result.facts()).decode())
    else:
        write(result.text(terminal=sys.stdout.isatty()))
    raise typer.Exit(0 if len(result.answered) == len(result.measured) else 1)


def _run(endpoint: Any, asked: Any, load: Any, limits: Any, seed: int) -> Report:
    """Ask for everything. Raises ValueError if there is no server."""
    import asyncio
    from dataclasses import replace

    from inferlib.bench.client import find_model, measure
    from inferlib.bench.report import Report
    from inferlib.progress import CountProgress, on_terminal

    model = asyncio.run(find_model(endpoint)) if endpoint.model is None else endpoint.model
    how = f"{load.rate} requests/s" if load.rate else "no wait"
    how += f", at most {load.concurrency} at a time" if load.concurrency else ""
    how = "times of the trace" if asked[0].at is not None else how
    with CountProgress("asking", len(asked), show=on_terminal()) as bar:
        named = replace(endpoint, model=model)
        results = asyncio.run(measure(named, asked, load, seed=seed, done=lambda measured: bar.advance(1)))
    return Report(f"{model} at {endpoint.base}, {how}", results, limits)


def _asked(load: LoadArguments) -> Any:
    """Raises ValueError and OSError."""
    from inferlib.bench.workload import Lengths, Prefixes, random_workload, read_trace

    if load.trace is not None:
        return read_trace(load.trace, load.seed)
    if (load.prefixes == 0) != (load.prefix_tokens == 0):
        raise ValueError("--prefixes and --prefix-tokens go together: give both or neither")
    if not math.isfinite(load.spread):
        raise ValueError("--spread must be a number from 0 to 5")
    if load.requests * (load.prompt_tokens + load.prefix_tokens) > 1 << 30:
        raise ValueError("the prompts have more than 2**30 words together: ask for less")
    prompts, outputs = Lengths(load.prompt_tokens, load.spread), Lengths(load.output_tokens, load.spread)
    return random_workload(load.requests, prompts, outputs, Prefixes(load.prefixes, load.prefix_tokens), load.seed)


def _load(load: LoadArguments) -> Any:
    """Raises ValueError."""
    from inferlib.bench.workload import Load

    if load.rate is not None and not 0 < load.rate < math.inf:
        raise ValueError("--rate must be requests a second, above 0")
    return Load(load.rate, load.concurrency)


def _key(server: ServerArguments) -> str | None:
    """Raises ValueError and OSError."""
    from inferlib.serving.auth import read_keys

    return next(iter(read_keys(server.api_key, server.api_key_file)), None)
