"""`inferlib generate`: complete prompts from arguments, stdin or a file of JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from inferlib.cli.arguments import (
    AdapterName,
    AdapterParts,
    AttentionPages,
    CacheMemory,
    CachePolicy,
    DtypeArguments,
    GenerationConfig,
    MaxAdapterRank,
    MaxAdapters,
    OptionalBackend,
    Revision,
    SparsePrefill,
    Speculation,
    TemplateArguments,
    grouped,
)
from inferlib.cli.batch import GenerateBatch, RequestOptions, run_batch
from inferlib.cli.output import (
    Summary,
    check_output_file,
    fail,
    json_line,
    memory_errors,
    result_fields,
    user_errors,
    write,
)

if TYPE_CHECKING:
    from inferlib.llm import LLM, Request
    from inferlib.sampling.structured import StructuredOutputs

# For options that a model's generation_config.json may suggest.
OF_MODEL = "by default what the model suggests, else"
_HEADING = 60  # characters of a prompt that are shown above its text


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face or converted directory, .gguf file, known name, or name of the Hugging Face Hub such as "
            "Qwen/Qwen3-0.6B."
        ),
    ] = "smollm2"
    revision: Revision = None
    generation_config: GenerationConfig = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    panel: ClassVar = "Engine"

    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences decoded together; by default 512 on GPUs, 64 on TPUs, else 8; or as compiled."
        ),
    ] = None
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Longest prompt plus output, in tokens; by default the context, at most 2048 on CPUs, 8192 on TPUs.",
        ),
    ] = None
    cache_memory: CacheMemory = None
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching", help="Reuse the cache of earlier prompts that begin alike."
        ),
    ] = True
    host_cache: Annotated[
        str | None,
        typer.Option(help="Host memory for prompts that leave the cache, such as 16GiB; by default none."),
    ] = None
    disk_cache: Annotated[
        Path | None,
        typer.Option(help="Folder for prompts that leave the cache, where later runs find them; by default none."),
    ] = None
    disk_cache_size: Annotated[
        str | None, typer.Option(help="Largest size of --disk-cache, such as 100GiB; by default half of what is free.")
    ] = None
    parallel: Annotated[
        str | None,
        typer.Option(help="Devices to split the model over, such as tp=4,dp=2 or cp=2,tp=4; by default one."),
    ] = None
    prefill_devices: Annotated[
        str | None,
        typer.Option(help="Numbers of as many other devices, which prefill prompts, such as 4,5,6,7; by default none."),
    ] = None
    artifacts: Annotated[
        Path | None, typer.Option(help="Directory that inferlib compile wrote: run its programs, compile none.")
    ] = None
    expert_placement: Annotated[
        Path | None, typer.Option(help="File that says where each expert is stored, as inferlib place writes it.")
    ] = None
    expert_load: Annotated[
        Path | None, typer.Option(help="Write to this file how many tokens chose each expert, for inferlib place.")
    ] = None
    backend: OptionalBackend = None
    itl: Annotated[
        float | None,
        typer.Option(
            help="Longest time between tokens while prompts are read, in seconds; by default prompts come first."
        ),
    ] = None
    speculation: Speculation = None
    attention_pages: AttentionPages = None
    sparse_prefill: SparsePrefill = None
    cache_policy: CachePolicy = None
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            help="LoRA adapters by name, directories that PEFT wrote: sql=DIR,chat=DIR; repeatable, by default none."
        ),
    ] = None
    max_adapters: MaxAdapters = None
    max_adapter_rank: MaxAdapterRank = None
    adapter_parts: AdapterParts = None
    depthwise_batching: Annotated[
        bool,
        typer.Option(
            "--depthwise-batching/--no-depthwise-batching",
            help="For models whose tokens leave a loop early: rows of one batch may be at different steps of the loop.",
        ),
    ] = False
    depthwise_quorum: Annotated[
        int | None,
        typer.Option(
            help="With --depthwise-batching: how many rows wait before the rest of the model runs for them; by default "
            "the number that should cost least."
        ),
    ] = None
    compile_cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of compiled programs, which later runs take; by default one in the user's cache folder, "
            "none: compile anew."
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Each prompt draws its own random numbers from this seed.")] = 0

    def named_adapters(self) -> dict[str, str] | None:
        """The directories of `adapters` by their names. Raises ValueError."""
        if not self.adapters:
            return None
        text = ",".join(self.adapters)
        pairs = [part.partition("=") for part in text.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if not all(name and path.strip() for name, (_, _, path) in zip(names, pairs, strict=True)):
            raise ValueError(f"--adapters must be NAME=DIR,NAME=DIR, got {text[:100]!r}")
        if len(set(names)) < len(names):
            raise ValueError(f"--adapters has a name twice: {', '.join(names)[:100]}")
        return {name: path.strip() for name, (_, _, path) in zip(names, pairs, strict=True)}

    def depthwise(self) -> bool | int:
        """The option `depthwise_batching` of `LLM`. Raises ValueError."""
        if self.depthwise_quorum is None:
            return self.depthwise_batching
        if not self.depthwise_batching:
            raise ValueError("--depthwise-quorum is for --depthwise-batching: give both")
        return self.depthwise_quorum

    def prefilling(self) -> list[int] | None:
        """The numbers of `prefill_devices`. Raises ValueError."""
        if self.prefill_devices is None:
            return None
        parts = self.prefill_devices.split(",")
        if not all(part.strip().isdecimal() and len(part) < 8 for part in parts):
            raise ValueError(f"--prefill-devices are numbers, such as 4,5,6,7, got {self.prefill_devices[:100]!r}")
        return [int(part) for part in parts]

    def check_adapter(self, name: str | None) -> None:
        """Raise ValueError unless the name is of one of `adapters`, or None."""
        if name is not None and name not in (known := self.named_adapters() or {}):
            raise ValueError(f"--adapter {name!r} is none of --adapters, which are {', '.join(known) or 'not given'}")


@dataclass(frozen=True, kw_only=True)
class PromptArguments(TemplateArguments):
    panel: ClassVar = "Prompts and output"

    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages of a user, put in the model's chat template.")
    ] = False
    system: Annotated[str | None, typer.Option(help="System message; needs --chat.")] = None
    adapter: AdapterName = None
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Show text as it appears; by default for one prompt on a terminal."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False


@dataclass(frozen=True, kw_only=True)
class FileArguments:
    panel: ClassVar = "Files of JSON lines"

    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='JSON lines to complete: objects with "prompt", "prompt_token_ids" or "messages". "id" (by default '
            'the line number), "sampling_params", which override the options below, "cache_salt" and "adapter" are '
            "optional.",
        ),
    ] = None
    output_file: Annotated[
        Path | None,
        typer.Option("--output", help="JSON lines of results or errors, in order of completion; needed with --input."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip the lines that --output has results for, and append.")
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output if it exists.")] = False


@dataclass(frozen=True, kw_only=True)
class HostArguments:
    panel: ClassVar = "Several hosts: the same command on each"

    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Join the processes that Cloud TPU, SLURM, Open MPI or Kubernetes started."),
    ] = False
    coordinator: Annotated[
        str | None,
        typer.Option(help="Without any of them: HOST:PORT on which process 0 listens, the same for all processes."),
    ] = None
    processes: Annotated[int | None, typer.Option(help="With --coordinator: number of processes.")] = None
    process: Annotated[
        int | None,
        typer.Option(
            help="With --coordinator: number of this process; process 0 reads the prompts and writes the results."
        ),
    ] = None
    secret: Annotated[
        Path | None,
        typer.Option(
            help="File that all processes share and others cannot read; by default ~/.config/inferlib/secret, made if "
            "it is missing."
        ),
    ] = None

    def check(self) -> None:
        missing = [self.coordinator, self.processes, self.process].count(None)
        if missing < 3 and (missing or self.distributed):
            fail("give --coordinator, --processes and --process together, or --distributed alone")
        if self.secret is not None and missing and not self.distributed:
            fail("--secret is for several processes: give --coordinator, --processes and --process, or --distributed")

    def join(self) -> int:
        """Join the other processes, if the options say so. Returns the number of this process."""
        if not self.distributed and self.coordinator is None:
            return 0
        from inferlib.distributed import initialize

        with user_errors():
            return initialize(self.coordinator, self.processes, self.process, secret=self.secret)


@dataclass(frozen=True, kw_only=True)
class SamplingArguments:
    """The fields of `SamplingParams` but for the seed, which is the engine's, and functions."""

    panel: ClassVar = "Sampling"

    max_tokens: Annotated[int | None, typer.Option(help=f"Most tokens to generate; {OF_MODEL} 16.")] = None
    min_tokens: Annotated[int, typer.Option(help="Tokens to generate before a stop token may be chosen.")] = 0
    temperature: Annotated[float | None, typer.Option(help=f"0 picks the most likely token; {OF_MODEL} 1.")] = None
    top_k: Annotated[int | None, typer.Option(help=f"Sample among the k most likely tokens; {OF_MODEL} all.")] = None
    top_p: Annotated[
        float | None,
        typer.Option(help=f"Sample among the likeliest tokens of this total probability; {OF_MODEL} 1."),
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help=f"Drop tokens less likely than this times the most likely; {OF_MODEL} 0.")
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help=f"Above 1: against tokens of prompt and output; {OF_MODEL} 1.")
    ] = None
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: makes tokens that are in the output less likely.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Above 0: makes tokens less likely, for each time that they are in the output.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=VALUE: add VALUE to the logit of a token; repeatable.")
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        typer.Option("--allowed-token-id", help="A token that may be chosen, and no others; repeatable."),
    ] = None
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="A word that never appears in the output; repeatable.")
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the output; repeatable.")] = None
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="A token that ends the output; repeatable.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past the end-of-sequence tokens.")] = False
    include_stop_str_in_output: Annotated[
        bool, typer.Option("--include-stop-str-in-output", help="Keep the stop string in the text.")
    ] = False
    skip_special_tokens: Annotated[bool, typer.Option(help="Leave special tokens out of the text.")] = True
    n: Annotated[int, typer.Option("--n", help="Independent outputs per prompt.")] = 1
    logprobs: Annotated[
        int | None, typer.Option(help="Report log-probabilities, and those of this many most likely tokens.")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(help="Report them for the tokens of the prompt too, and those of this many most likely tokens."),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Use only this many of a prompt's last tokens; -1: as many as leave room for --max-tokens."),
    ] = None

    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds after which a prompt's output ends, with the finish reason deadline."),
    ] = None
    depth: Annotated[
        int | None, typer.Option(help="How many steps of a looped model's core each token takes; by default all.")
    ] = None
    exit_threshold: Annotated[
        float | None,
        typer.Option(
            help="Take fewer steps: stop once a step changes a token by less than this (see LLM's early_exit)."
        ),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(help="File of a JSON schema that the output fits. Or give --regex, --choice, --grammar."),
    ] = None
    regex: Annotated[str | None, typer.Option(help="A regular expression that the output matches.")] = None
    choice: Annotated[list[str] | None, typer.Option(help="A text that the output may be; repeatable.")] = None
    grammar: Annotated[
        Path | None, typer.Option(help="File of a grammar, in Lark's form or GBNF, that the output follows.")
    ] = None
    after: Annotated[
        str | None,
        typer.Option(help="A text, such as </think>, up to which the output is free, before it fits the schema."),
    ] = None

    def values(self) -> dict[str, Any]:
        """The fields that are given. Raises ValueError."""
        values: dict[str, Any] = asdict(self) | {"logit_bias": _bias(self.logit_bias or ()) or None}
        values["structured_outputs"] = _structured(**{name: values.pop(name) for name in _STRUCTURED})
        return {name: value for name, value in values.items() if value is not None}


@grouped
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to complete; by default stdin is one text.", show_default=False),
    ] = None,
    *,
    model: ModelArguments,
    prompting: PromptArguments,
    files: FileArguments,
    formats: DtypeArguments,
    engine: EngineArguments,
    hosts: HostArguments,
    sampling: SamplingArguments,
) -> None:
    """Generate text.

    Text goes to stdout, or with --input to the --output file; everything else goes to stderr.
    """
    _check(prompts, prompting, files, sampling)
    hosts.check()
    check_output_file("--expert-load", engine.expert_load)
    with user_errors():
        chat: dict[str, Any] = dict(chat=prompting.chat, system=prompting.system, template=prompting.template())
        options = RequestOptions(sampling.values(), engine.seed, adapter=prompting.adapter, **chat)
        engine.check_adapter(prompting.adapter)

    @cache
    def load() -> LLM:
        return load_llm(model, formats, engine)

    if hosts.join() > 0:
        load().follow()
        return
    if files.input_file is not None and files.output_file is not None:
        append = dict(resume=files.resume, overwrite=files.overwrite)
        failed = run_batch(load, files.input_file, files.output_file, partial(GenerateBatch, options), **append)
        exit_code = 1 if failed else 0
    else:
        texts = prompts or [_read_stdin()]
        _complete(load, texts, options, prompting)
        exit_code = 0
    if engine.expert_load is not None and load.cache_info().currsize:
        from inferlib.placement import write_load

        with user_errors():
            write_load(engine.expert_load, load().expert_load())
    raise typer.Exit(exit_code)


def _check(
    prompts: Sequence[str] | None, prompting: PromptArguments, files: FileArguments, sampling: SamplingArguments
) -> None:
    """End the command if its options do not go together."""
    from_file = files.input_file is not None
    if from_file != (files.output_file is not None):
        fail("--input and --output go together: give both or neither")
    if from_file and (prompts or prompting.json or prompting.stream):
        fail("--input takes its prompts from a file and writes JSON: give no prompts, --json or --stream")
    if not from_file and (files.resume or files.overwrite):
        fail("--resume and --overwrite are about the file of --output: give --input and --output")
    if files.resume and files.overwrite:
        fail("--resume keeps what --overwrite removes: give one of them")
    if prompting.system is not None and not prompting.chat:
        fail("--system needs --chat")
    of_chats = prompting.chat_template is not None or prompting.chat_template_kwargs is not None
    if of_chats and not prompting.chat and not from_file:
        fail("--chat-template and --chat-template-kwargs are for chats: give --chat")
    if not from_file and not prompting.json and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        fail("log-probabilities are reported as JSON: add --json")


def load_llm(model: ModelArguments, formats: DtypeArguments, engine: EngineArguments) -> LLM:
    """The model that the options name; the command ends with their error if they cannot work."""
    from inferlib.llm import LLM

    with user_errors():
        options: dict[str, Any] = asdict(formats) | asdict(engine) | {"expert_load": engine.expert_load is not None}
        options |= {"adapters": engine.named_adapters(), "prefill_devices": engine.prefilling()}
        options["depthwise_batching"] = engine.depthwise()
        del options["depthwise_quorum"]
        return LLM(model.model, revision=model.revision, generation_config=model.generation_config, **options)


def _complete(load: Callable[[], LLM], texts: Sequence[str], options: RequestOptions, how: PromptArguments) -> None:
    """Complete texts, to stdout."""
    single = len(texts) == options.sampling.get("n", 1) == 1 and not how.json
    if how.stream and not single:
        fail("--stream shows the text of one prompt: give one, and neither --n nor --json")
    llm = load()
    requests = _prepare(llm, texts, options)
    summary = Summary(llm)
    with memory_errors():
        _write_results(llm, texts, requests, summary, single=single, how=how)
    summary.show()


def _write_results(
    llm: LLM, texts: Sequence[str], requests: list[Request], summary: Summary, *, single: bool, how: PromptArguments
) -> None:
    """single: there is one text to show."""
    if how.stream or (how.stream is None and single and sys.stdout.isatty()):
        _stream(llm, requests[0], summary)
    else:
        results = sorted(llm.run(requests), key=lambda result: result.request_id)
        for text, result in zip(texts, results, strict=True):
            summary.add(result)
            if how.json:
                write(json_line({"prompt": text, **result_fields(result)}).decode())
            else:
                _show(text, [output.text for output in result.outputs], headings=not single)


_STRUCTURED = ("json_schema", "regex", "choice", "grammar", "after")


def _structured(json_schema: Path | None, grammar: Path | None, **others: Any) -> StructuredOutputs | None:
    """What these options say of the output, if they say anything. Raises ValueError, or OSError."""
    from inferlib.sampling.structured import StructuredOutputs

    texts = {
        "json": json_schema and _text("--json-schema", json_schema),
        "grammar": grammar and _text("--grammar", grammar),
    }
    values = {name: value for name, value in (texts | others).items() if value is not None}
    return StructuredOutputs(**values) if values else None


def _text(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} must be a file of UTF-8 text: {error}") from None


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
    from inferlib.programs.program_set import UnplannedProgramError

    requests = []
    for i, text in enumerate(texts, start=1):
        try:
            requests.append(options.prepare(llm, text))
        except (ValueError, UnplannedProgramError) as error:
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
    if stream.output is not None:
        summary.add(stream.output)


def _show(prompt: str, texts: Sequence[str], *, headings: bool) -> None:
    """headings: show the prompt above each text, on a terminal."""
    for text in texts:
        if headings and sys.stdout.isatty():
            line = " ".join(prompt.split())
            title = line if len(line) <= _HEADING else line[: _HEADING - 1] + "…"
            Console(stderr=True).print(title, style="bold dim", markup=False, highlight=False, soft_wrap=True)
        write(text + "\n")
