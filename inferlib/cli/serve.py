"""`inferlib serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from inferlib.cli.arguments import DtypeArguments, GenerationConfig, ModelName, Revision, grouped
from inferlib.cli.generate import EngineArguments, ModelArguments, load_llm
from inferlib.cli.output import fail, memory_errors, user_errors


@dataclass(frozen=True, kw_only=True)
class AddressArguments:
    panel: ClassVar = "Address"

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM file of a certificate, for HTTPS.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients send; other users of this machine see it in the list of processes."),
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys, one a line; clients send any of them.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ServingArguments:
    panel: ClassVar = "Serving"

    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests; repeatable; by default MODEL.")
    ] = None
    warmup: Annotated[
        bool | None,
        typer.Option(
            "--warmup/--no-warmup",
            help="Compile all programs first, so that no request waits for one; by default on accelerators.",
        ),
    ] = None
    max_body: Annotated[int, typer.Option(min=1, help="Largest size of a request, in bytes.")] = 16 << 20
    max_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of tokens of a prompt; by default what --max-len has room for."),
    ] = None
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Largest number of open requests; further ones get status 429. By default any number."
        ),
    ] = None
    drain: Annotated[
        int, typer.Option(min=1, max=86400, help="Seconds that running requests have to end after SIGTERM.")
    ] = 60
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes calls of tools: auto (by its chat template), none, or a name.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, typer.Option(help="How the model marks its thoughts: auto (by its chat template), none, or a name.")
    ] = "auto"
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template, in place of the model's.")
    ] = None
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Let requests bring a chat template of their own.")
    ] = False


@grouped
def serve(
    model: ModelName = "smollm2",
    *,
    revision: Revision = None,
    generation_config: GenerationConfig = "auto",
    address: AddressArguments,
    serving: ServingArguments,
    formats: DtypeArguments,
    engine: EngineArguments,
) -> None:
    """Serve a model by OpenAI's HTTP interface, with a page to try it at /. Ctrl-C ends it."""
    try:
        from inferlib.serving.server import Address, Server
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed: pip install 'inferlib[serve]'")
    with user_errors():
        if engine.expert_load is not None:
            raise ValueError("--expert-load is of batches: leave it out")
        where = Address(address.host, address.port, address.ssl_certfile, address.ssl_keyfile)
        where.check()
        options = _options(model, address, serving)
        options.check_adapters(engine.named_adapters() or ())
        bound = where.bind()
    llm = load_llm(ModelArguments(model=model, revision=revision, generation_config=generation_config), formats, engine)
    with memory_errors():
        warmup = llm.config.platform != "cpu" if serving.warmup is None else serving.warmup
        if warmup and engine.artifacts is None:
            from inferlib.serving.structured import warmup_modes

            llm.warmup(warmup_modes())
        from inferlib.async_llm import AsyncLLM

        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        bound.listen()  # who connects because of the next line waits for the server, and is not refused
        typer.echo(f"{options.names[0]} is served at {where.scheme}://{shown}:{port}/v1", err=True)
        Server(AsyncLLM(llm), options, where, drain=serving.drain).serve_on(bound)


def _options(model: str, address: AddressArguments, serving: ServingArguments) -> Any:
    """Raises ValueError or OSError."""
    from inferlib.serving.auth import read_keys
    from inferlib.serving.parsers import check_parsers
    from inferlib.serving.service import Limits, ServerOptions

    check_parsers(serving.tool_parser, serving.reasoning_parser)
    template = None if serving.chat_template is None else serving.chat_template.read_text(encoding="utf-8")
    names = tuple(serving.served_model_name or [model])
    if any(not name.strip() for name in names):
        raise ValueError("--served-model-name is blank: give a name")
    return ServerOptions(
        names=names,
        keys=read_keys(address.api_key, address.api_key_file),
        limits=Limits(serving.max_body, serving.max_prompt, serving.max_requests),
        tool_parser=serving.tool_parser,
        reasoning_parser=serving.reasoning_parser,
        chat_template=template,
        trust_templates=serving.trust_request_chat_template,
    )
