"""Options of commands, in groups that commands share: each option is declared once, as a field of a dataclass."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from inferlib.cli.output import fail

if TYPE_CHECKING:
    from inferlib.buckets import Buckets
    from inferlib.deploy.source import ModelSource


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups: a parameter that is annotated with a dataclass stands for an option per field.

    The fields are annotated as typer's parameters are. `panel`, a class variable, is the heading of a group's options
    in the help; options of groups without one stand under "Options".
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints, panel = get_type_hints(group, include_extras=True), getattr(group, "panel", None)
    for field in fields(group):
        hint = hints[field.name]
        option = copy.copy(hint.__metadata__[0])
        option.rich_help_panel = panel
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=Annotated[hint.__origin__, option],
        )


# ---- options that stand alone in several commands

Quantization = Annotated[
    str | None,
    typer.Option(
        help="Format of the weights: int8(_a8), int4, fp8(_a8), fp8_block, mxfp8(_a8) or mxfp4(_a8); by default as "
        "they are stored. With _a8, what they multiply has eight bits too."
    ),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the cache on each device: bytes, 16GiB, or a share such as 0.5; by default what weights and "
        "steps leave, on CPUs what --max-batch sequences of --max-len take, or as compiled."
    ),
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help="Format of keys and values in the cache: int8, fp8, int4, or int4_calibrated after `inferlib "
        "calibrate-cache`; by default that of activations."
    ),
]
_BACKENDS = (
    "auto: kernels wherever they run; xla: none; decode_attention=xla,matmul=xla: none for these operations (also "
    "prefill_attention, qkv_attention, grouped_matmul, expert_mlp, loop_weights, fetch_ahead, choose_experts, "
    "add_norm, all_reduce, collective_matmul)."
)
Backend = Annotated[str, typer.Option(help=_BACKENDS)]
OptionalBackend = Annotated[
    str | None, typer.Option(help=f"{_BACKENDS} By default auto, or as --artifacts were compiled.")
]
Speculation = Annotated[
    str | None,
    typer.Option(
        help="Draft tokens, and verify them together: ngram:3 drafts up to 3 by the text so far, draft:NAME:3 by a "
        "smaller model of the same vocabulary, eagle3:DIRECTORY:3 by an EAGLE-3 head, mtp:3 by the model's own layer "
        "for further tokens. It changes no result."
    ),
]
AttentionPages = Annotated[
    str | None,
    typer.Option(
        help="Decode steps read only the pages of a row that may matter most: quest:64 reads 64 pages, quest:64:16 as "
        "many blocks of 16 positions; loki too, see inferlib key-bases. quest:64:resident=96 keeps 96 pages of a row "
        "that decodes on the device, the others in the host's memory. It changes results; by default all are read."
    ),
]
CachePolicy = Annotated[
    str | None,
    typer.Option(
        help="A row's cache keeps a budget of positions: keydiff:2048 keeps 2048 by scores of their keys; knorm too, "
        "h2o, snapkv, morphkv, sagekv and tova by attention, streaming by age; pyramidkv like snapkv, more in lower "
        "layers; cake by attention that is high or changes, more in layers that prefer it, see inferlib "
        "layer-preferences. It changes results; by default all are kept."
    ),
]
SparsePrefill = Annotated[
    str | None,
    typer.Option(
        help="Prompts attend only to the blocks that an estimate lists: xattention:0.9 lists them until they have 90 % "
        "of the attention, at most a quarter of the context's; xattention:0.9:0.5 at most half. sample:0.9 "
        "and mean:0.9 estimate in other ways. fastkv:20:0.3 is another way: layers from number 20 on see 30 % of the "
        "tokens. It changes results; by default prompts attend to all, in all layers."
    ),
]
MaxAdapters = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many adapters are on the devices at a time; others take turns. By default all that are named."
    ),
]
MaxAdapterRank = Annotated[
    int | None,
    typer.Option(
        min=1, help="Highest rank that an adapter may have; by default the highest of the named adapters', or 16."
    ),
]
AdapterParts = Annotated[
    str | None,
    typer.Option(
        help="Weights of a layer that adapters change, or how their names begin: attn.qkv, or attn,mlp.down. Fewer "
        "take less memory and time; by default all that adapters can."
    ),
]
AdapterName = Annotated[
    str | None, typer.Option(help="Name of one of --adapters, which changes the model; by default none does.")
]
ModelName = Annotated[
    str,
    typer.Argument(
        help="Hugging Face or converted directory, .gguf file, known name, or name of the Hugging Face Hub."
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a model of the Hugging Face Hub; by default its main branch."),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="auto: sampling options that are not given are those that the model suggests (generation_config.json); "
        "none: those of inferlib."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


# ---- groups


@dataclass(frozen=True, kw_only=True)
class ShapeArguments:
    """A model: a checkpoint, or a shape without weights. Exactly one of the two is given."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Hugging Face or converted directory, .gguf file, known name, or name of the Hugging Face Hub such as "
            "Qwen/Qwen3-0.6B.",
            show_default=False,
        ),
    ] = None
    revision: Revision = None
    config: Annotated[
        str | None, typer.Option(help="Instead of a model: the name of a shape that comes with inferlib.")
    ] = None

    @property
    def name(self) -> str:
        return self.model or self.config or ""

    def check(self) -> None:
        if (self.model is None) == (self.config is None):
            fail("give either a model or the name of a shape with --config")
        if self.revision is not None and self.model is None:
            fail("--revision is of a model of the hub: give one")

    def source(self, *, files: bool = True) -> ModelSource:
        """The model or the shape. files: open the checkpoint, instead of only its config. Raises ValueError."""
        from inferlib.deploy.source import model_source, shape_source

        if self.model is None:
            return shape_source(self.config or "")
        # A command says with --config that it names a shape.
        return model_source(self.model, self.revision, files=files, shapes=False)


@dataclass(frozen=True, kw_only=True)
class FormatArguments:
    """What numbers the weights and the cache hold."""

    panel: ClassVar = "Number formats"

    quantization: Quantization = None
    kv_cache_dtype: CacheDtype = None


@dataclass(frozen=True, kw_only=True)
class DtypeArguments(FormatArguments):
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16, of weights, activations and cache; by default float32 on CPU, else "
            "bfloat16."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TextArguments:
    """Text to calibrate or measure on."""

    panel: ClassVar = "Text"

    data: Annotated[
        Path,
        typer.Option(help='JSONL file of text: lines are "..." or {"text": "..."}.', show_default=False),
    ]
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text to use, spread evenly.")] = 16384
    window: Annotated[int, typer.Option(min=2, help="Tokens of a sequence; at most the model's context.")] = 512


@dataclass(frozen=True, kw_only=True)
class TemplateArguments:
    """How a chat becomes a prompt. Groups of other commands inherit these options."""

    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja chat template, in place of the model's.")
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="The chat template's own options as a JSON object, such as '{\"enable_thinking\": false}'."),
    ] = None

    def template(self) -> dict[str, Any]:
        """The arguments as `LLM.chat_prompt` takes them. Raises ValueError, or OSError."""
        kwargs = None
        if self.chat_template_kwargs is not None:
            try:
                kwargs = json.loads(self.chat_template_kwargs)
            except (ValueError, RecursionError):
                kwargs = None
            if not isinstance(kwargs, dict):
                raise ValueError(
                    "--chat-template-kwargs is a JSON object such as '{\"enable_thinking\": false}', not "
                    f"{self.chat_template_kwargs[:100]!r}"
                )
        text = None if self.chat_template is None else self.chat_template.read_text(encoding="utf-8")
        return {"chat_template": text, "chat_template_kwargs": kwargs}


@dataclass(frozen=True, kw_only=True)
class BucketArguments:
    """The static sizes to compile programs for, as text."""

    panel: ClassVar = "Buckets"

    prefill_buckets: Annotated[
        str | None,
        typer.Option(help="Prompt tokens of a step, ascending; by default 32,128,512, and none beyond the cache."),
    ] = None
    tile: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a tile: a step's prompt tokens are tiles of this size, each of one prompt; by default they "
            "are chunks."
        ),
    ] = None
    batch_buckets: Annotated[
        str | None, typer.Option(help="Rows decoded together; the last is the largest batch; by default 1,8.")
    ] = None
    cache_buckets: Annotated[
        str | None,
        typer.Option(
            help="Positions that attention reads; the last is the longest sequence; by default the model's context, at "
            "most 2048."
        ),
    ] = None

    def parsed(self, context: int) -> Buckets:
        """context: of the model, in tokens. Raises ValueError."""
        from inferlib.deploy.compile import buckets_for

        prefill, batch, cache = map(_sizes, (self.prefill_buckets, self.batch_buckets, self.cache_buckets))
        return buckets_for(context, prefill, batch, cache, self.tile)


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(f"buckets are numbers with commas between them, such as 1,8,64, not {text!r}") from None
