"""`inferlib generate`: complete prompts from arguments, stdin or a file of JSON lines."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from inferlib.cli.batch import RequestOptions, run_batch
from inferlib.cli.output import Summary, fail, json_line, result_fields, user_errors, write

if TYPE_CHECKING:
    from inferlib.llm import LLM, Request
    from inferlib.sampling.params import SamplingParams

_HEADING = 60  # characters of a prompt that are shown above its text


def _batch(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Files of JSON lines")


def _hosts(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Several hosts: the same command on each")


def _sampling(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling")


def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to complete; without any, all of stdin is one.", show_default=False),
    ] = None,
    *,
    model: Annotated[
        str, typer.Option(help="Hugging Face or converted directory, .gguf file or known name.")
    ] = "smollm2",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default float32 on CPU, else bfloat16."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Of the weights as they are loaded: int8, int4, fp8, fp8_block, mxfp8(_a8) or mxfp4(_a8)."),
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Of the cache: int8 or fp8; by default dtype.")] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded together; by default 8, or as compiled.")
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(min=2, help="Longest prompt plus output, in tokens; by default context or 2048."),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(help="Devices to split the model over, such as tp=4,dp=2 or cp=2,tp=4; by default one."),
    ] = None,
    artifacts: Annotated[
        Path | None, typer.Option(help="Directory of inferlib compile: run its programs and compile none.")
    ] = None,
    expert_placement: Annotated[
        Path | None, typer.Option(help="File that says which expert lies where, as inferlib place writes it.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="auto: kernels wherever they run; xla: none; decode_attention=xla,matmul=xla: none for these "
            "operations (also prefill_attention, qkv_attention, grouped_matmul, expert_mlp, choose_experts, add_norm, "
            "all_reduce, collective_matmul). By default auto, or as --artifacts were compiled."
        ),
    ] = None,
    expert_load: Annotated[
        Path | None, typer.Option(help="Write here how many tokens chose each expert, for inferlib place.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Each prompt draws its own random numbers from this seed.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages of a user, put in the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show text as it appears; by default for one prompt on a terminal."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    input_file: Annotated[
        Path | None,
        _batch(
            'JSON lines to complete: objects with "prompt", "prompt_token_ids" or "messages" and, if wanted, '
            '"id" (else the line number) and "sampling_params", which override the options below.',
            "--input",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        _batch("JSON lines of results or errors, in order of completion; needed with --input.", "--output"),
    ] = None,
    resume: Annotated[bool, _batch("Skip the lines that --output has results for, and append.", "--resume")] = False,
    overwrite: Annotated[bool, _batch("Replace --output if it exists.", "--overwrite")] = False,
    distributed: Annotated[
        bool, _hosts("Join the processes that Cloud TPU, SLURM, Open MPI or Kubernetes started.", "--distributed")
    ] = False,
    coordinator: Annotated[
        str | None, _hosts("Where none of them did: HOST:PORT on which process 0 listens, the same for all.")
    ] = None,
    processes: Annotated[int | None, _hosts("With --coordinator: how many processes there are.")] = None,
    process: Annotated[
        int | None, _hosts("With --coordinator: number of this one; 0 reads the prompts and writes the results.")
    ] = None,
    max_tokens: Annotated[int, _sampling("Most tokens to generate.")] = 128,
    min_tokens: Annotated[int, _sampling("Tokens to generate before a stop token may be chosen.")] = 0,
    temperature: Annotated[float, _sampling("0, the default here, picks the most likely token.")] = 0.0,
    top_k: Annotated[int, _sampling("Sample among the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, _sampling("Sample among the likeliest tokens of this total probability.")] = 1.0,
    min_p: Annotated[float, _sampling("Drop tokens less likely than this times the most likely.")] = 0.0,
    repetition_penalty: Annotated[float, _sampling("Above 1: against tokens of prompt and output.")] = 1.0,
    presence_penalty: Annotated[float, _sampling("Above 0: against tokens in the output.")] = 0.0,
    frequency_penalty: Annotated[float, _sampling("The same, for each time they are in it.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, _sampling("ID=VALUE: add VALUE to the logit of a token; repeatable.")
    ] = None,
    stop: Annotated[list[str] | None, _sampling("A string that ends the output; repeatable.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, _sampling("A token that ends the output; repeatable.", "--stop-token-id")
    ] = None,
    ignore_eos: Annotated[bool, _sampling("Generate past the end-of-sequence tokens.", "--ignore-eos")] = False,
    include_stop_str_in_output: Annotated[
        bool, _sampling("Keep the stop string in the text.", "--include-stop-str-in-output")
    ] = False,
    skip_special_tokens: Annotated[bool, _sampling("Leave special tokens out of the text.")] = True,
    n: Annotated[int, _sampling("Independent outputs per prompt.", "--n")] = 1,
    logprobs: Annotated[
        int | None, _sampling("Report log-probabilities, and those of this many likeliest tokens.")
    ] = None,
    prompt_logprobs: Annotated[int | None, _sampling("The same for the tokens of the prompt.")] = None,
) -> None:
    """Generate text.

    Text goes to stdout, or with --input to the --output file; all else to stderr.
    """
    from_file = input_file is not None
    if from_file != (output_file is not None):
        fail("--input and --output go together: give both or neither")
    if from_file and (prompts or json or stream):
        fail("--input takes its prompts from a file and writes JSON: give no prompts, --json or --stream")
    if not from_file and (resume or overwrite):
        fail("--resume and --overwrite are about the file of --output: give --input and --output")
    if resume and overwrite:
        fail("--resume keeps what --overwrite removes: give one of them")
    if system is not None and not chat:
        fail("--system needs --chat")
    if not from_file and not json and (logprobs is not None or prompt_logprobs is not None):
        fail("log-probabilities are reported as JSON: add --json")

    place = (coordinator, processes, process)
    given = [value for value in place if value is not None]
    if given and (distributed or len(given) < len(place)):
        fail("give --coordinator, --processes and --process together, or --distributed alone")

    with user_errors():
        options = RequestOptions(_sampling_params(context.params), seed=seed, chat=chat, system=system)

    @cache
    def load() -> LLM:
        from inferlib.llm import LLM
        from inferlib.programs.compilation_cache import keep_compilations

        with user_errors():
            keep_compilations()
            sizes = dict(max_batch=max_batch, max_len=max_len)
            kept = dict(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
            kept |= dict(expert_placement=expert_placement, backend=backend)
            options = dict(parallel=parallel, artifacts=artifacts, expert_load=expert_load is not None, seed=seed)
            return LLM(model, **kept, **sizes, **options)

    def save_load() -> None:
        if expert_load is not None and load.cache_info().currsize:
            from inferlib.placement import write_load

            with user_errors():
                write_load(expert_load, load().expert_load())

    if (distributed or given) and _join(*place) > 0:
        load().follow()
        return
    if from_file:
        failed = run_batch(load, input_file, output_file, options, resume=resume, overwrite=overwrite)
        save_load()
        raise typer.Exit(1 if failed else 0)

    texts = prompts or [_read_stdin()]
    single = len(texts) == n == 1 and not json
    if stream and not single:
        fail("--stream shows the text of one prompt: give one, and neither --n nor --json")
    if stream is None:
        stream = single and sys.stdout.isatty()
    llm = load()
    compiled, summary = llm.compilations, Summary()
    requests = _prepare(llm, texts, options)
    if stream:
        _stream(llm, requests[0], summary)
    else:
        results = sorted(llm.run(requests), key=lambda result: result.request_id)
        for text, result in zip(texts, results, strict=True):
            summary.add(result)
            if json:
                write(json_line({"prompt": text, **result_fields(result)}).decode())
            else:
                _show(text, [output.text for output in result.outputs], headings=len(texts) * n > 1)
    save_load()
    summary.show(llm.compilations - compiled)


def _join(coordinator: str | None, processes: int | None, process: int | None) -> int:
    from inferlib.distributed import initialize

    with user_errors():
        return initialize(coordinator, processes, process)


def _sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """From the options, which have the names of its fields."""
    from inferlib.sampling.params import SamplingParams

    fields = {field.name: options[field.name] for field in dataclasses.fields(SamplingParams)}
    # --seed is the engine's: with one for each request, equal prompts would get equal texts.
    return SamplingParams(**fields | {"seed": None, "logit_bias": _bias(options["logit_bias"] or ())})


def _bias(entries: Sequence[str]) -> dict[int, float]:
    bias = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--logit-bias must be ID=VALUE, such as 42=-5, got {entry!r}") from None
    return bias


def _read_stdin() -> str:
    if sys.stdin.isatty():
        fail("give prompts as arguments or on stdin, or a file of them with --input and --output")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        fail(f"stdin must be UTF-8 text: {error}")


def _prepare(llm: LLM, texts: Sequence[str], options: RequestOptions) -> list[Request]:
    requests = []
    for i, text in enumerate(texts, start=1):
        try:
            requests.append(llm.prepare(options.prompt(llm, text), options.params))
        except ValueError as error:
            fail(f"prompt {i}: {error}" if len(texts) > 1 else error)
    return requests


def _stream(llm: LLM, request: Request, summary: Summary) -> None:
    from inferlib.llm import Stream

    stream = Stream(llm, request)
    pieces = iter(stream)
    with Console(stderr=True).status("compiling and reading the prompt"):
        first = next(pieces, "")
    write(first)
    for piece in pieces:
        write(piece)
    write("\n")
    summary.add(stream.output)


def _show(prompt: str, texts: Sequence[str], *, headings: bool) -> None:
    """headings: on a terminal, the prompt is shown above."""
    for text in texts:
        if headings and sys.stdout.isatty():
            line = " ".join(prompt.split())
            title = line if len(line) <= _HEADING else line[: _HEADING - 1] + "…"
            Console(stderr=True).print(title, style="bold dim", markup=False, highlight=False, soft_wrap=True)
        write(text + "\n")
