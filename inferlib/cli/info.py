"""`inferlib info`: describe a model and the memory it takes, from its configuration and file headers."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from inferlib.cli.arguments import FormatArguments, Json, ShapeArguments, grouped
from inferlib.cli.output import fail, json_line, user_errors, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferlib.model_files import ModelFiles
    from inferlib.models.abstract import AbstractModel
    from inferlib.models.config import LayerSpec, MlpSpec, ModelConfig, MoeSpec
    from inferlib.models.quantization import Quantization
    from inferlib.models.segments import Segment
    from inferlib.planning.explain import Explanation


@grouped
def info(
    *,
    shape: ShapeArguments,
    max_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence in the cache; by default the context, at most 2048."),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(help="Also show what each device of this mesh stores and exchanges, such as tp=4,dp=2."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="With --parallel: sequences decoded together.")] = 8,
    formats: FormatArguments,
    json: Json = False,
) -> None:
    """Show a model's recipe, its parameters and the bytes of weights and cache.

    Loads no weights and needs no devices.
    """
    shape.check()
    from inferlib.config import DTYPES, check_kv_cache_dtype
    from inferlib.models.abstract import abstract_model
    from inferlib.models.families import config_from_hf

    cache_dtype = formats.kv_cache_dtype
    with user_errors():
        check_kv_cache_dtype(cache_dtype)
        hf, files = described(shape)
        recipe, stored = config_from_hf(dict(hf)), files and files.nbytes
        quantization = quantization_of(files, formats.quantization)
    length = max_len or min(recipe.context, 2048)
    if length > recipe.context:
        fail(f"--max-len {length} exceeds the model's context of {recipe.context} tokens")
    # Stacked layers are quicker to trace and take the same bytes.
    with user_errors():
        models = {dtype: abstract_model(recipe, dtype, scan=True, quantization=quantization) for dtype in DTYPES}
        explanation = None
        facts = {"model": shape.name, **_describe(models, length, cache_dtype, stored)}
        facts["quantization"] = quantization and quantization.name
        if parallel is not None:
            explanation, facts["implementations"] = _explain(
                recipe, parallel, max_batch, length, quantization, cache_dtype
            )
            facts["parallel"] = explanation.facts()
    write(json_line(facts).decode() if json else _render(facts, models["float32"], explanation))


def described(shape: ShapeArguments) -> tuple[Mapping[str, Any], ModelFiles | None]:
    """The Hugging Face config and the files of a model, or of a shape by name, which has no files."""
    from inferlib.model_files import ModelFiles

    if shape.model is not None:
        files = ModelFiles.open(shape.model, shape.revision, progress=True)
        return files.hf, files
    return shape_config(shape.config), None


def shape_config(shape: str | None) -> Mapping[str, Any]:
    """The Hugging Face config of a shape by name."""
    from inferlib.configs import load, names

    if shape is None:
        raise ValueError("neither a model nor a shape is given")
    if shape not in names():
        raise ValueError(f"no model shape is called {shape!r}; known: {', '.join(names())}")
    return load(shape)


def quantization_of(files: ModelFiles | None, wanted: str | None) -> Quantization | None:
    """The format of a model's weights: as wanted, or as the files store them."""
    from inferlib.models.quantization import Quantization

    if files is not None:
        return files.quantization(wanted)
    return None if wanted is None else Quantization.named(wanted)


def _describe(
    models: dict[str, AbstractModel], max_len: int, kv_cache_dtype: str | None, stored: int | None
) -> dict[str, Any]:
    """The facts as JSON values, by dtype where they depend on it; sizes in bytes, lengths in tokens.

    Bytes of the cache: "per_token" that all layers store; "beyond_windows" per token that only layers without a window
    store; "states" of a row in recurrent layers, whatever its length; "per_sequence" of a row for `max_len` tokens, in
    which layers with a window store a ring.
    """
    model = models["float32"]
    config = model.config
    return {
        "family": config.family,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layer_count": len(config.layers),
        "layers": [
            {"repeat": segment.count, "pattern": [asdict(layer) for layer in segment.pattern]}
            for segment in model.segments
        ],
        "width": config.dim,
        "norm": asdict(config.norm),
        "vocab": config.vocab,
        "tied": config.tied,
        "context": config.context,
        "stored_bytes": stored,
        "weight_bytes": {dtype: m.nbytes for dtype, m in models.items()},
        "max_len": max_len,
        "kv_cache_dtype": kv_cache_dtype,
        "cache_bytes": {dtype: _cache_bytes(m, kv_cache_dtype or dtype, max_len) for dtype, m in models.items()},
    }


def _cache_bytes(model: AbstractModel, dtype: str, max_len: int) -> dict[str, int]:
    from inferlib.cache.plan import BlockState, plan_cache
    from inferlib.config import Buckets

    chunk = Buckets.default(1, max_len).prefill[-1]
    plan = plan_cache(model, rows=1, max_len=max_len, chunk=chunk, dtype=dtype)
    tokens = beyond = states = 0
    for block, layers in zip(plan.blocks, model.blocks(), strict=True):
        size = len(layers) * sum(array.position_bytes() for array in block.owned)
        tokens += size
        states += len(layers) * block.row_bytes() if isinstance(block, BlockState) else 0
        beyond += size if model.config.layers[layers[0]].attention.reach is None else 0
    return {"per_token": tokens, "beyond_windows": beyond, "states": states, "per_sequence": plan.nbytes}


def _explain(
    recipe: ModelConfig,
    parallel: str,
    max_batch: int,
    max_len: int,
    quantization: Quantization | None,
    kv_cache_dtype: str | None,
) -> tuple[Explanation, list[dict[str, str]]]:
    """The arrays on each device, a greedy decode step of all rows and the longest prefill chunk, in bfloat16 or as
    quantized; and the implementations that TPUs take, see `Choices.facts`."""
    from inferlib.cache.plan import plan_cache
    from inferlib.config import EngineConfig
    from inferlib.models.abstract import abstract_model
    from inferlib.planning.explain import explain
    from inferlib.programs.choices import Choices
    from inferlib.programs.program import ProgramKey
    from inferlib.sharding.mesh import Parallelism
    from inferlib.sharding.shards import planned_shards

    shards = planned_shards(Parallelism.parse(parallel))
    config = EngineConfig.make("tpu", max_batch, max_len, shards=shards)
    describe = partial(abstract_model, recipe, "bfloat16", quantization=quantization, scan=True, shards=shards)
    model = describe()
    chunk = config.row_tokens
    dtype = kv_cache_dtype or "bfloat16"
    plan = plan_cache(model, rows=max_batch, max_len=max_len, chunk=chunk, dtype=dtype, platform=config.platform)
    keys = [
        ProgramKey("greedy", config.rows, max_len, steps=config.decode_steps),
        ProgramKey("greedy", 0, max_len, chunks=1, chunk=chunk),
    ]
    packed = describe(backend=config.backend)  # weights as TPUs store them
    return explain(model, plan, config, keys), Choices.of(config, packed, plan).facts(packed)


def _render(facts: dict[str, Any], model: AbstractModel, explanation: Explanation | None) -> str:
    """Two tables: the recipe, and the memory by dtype; then the explanation of a mesh and the implementations."""
    config = model.config
    kinds = list(dict.fromkeys(config.layers))
    recipe = Table.grid(padding=(0, 2))
    recipe.add_column(style="bold")
    recipe.add_row("model", facts["model"])
    recipe.add_row("family", config.family)
    active = facts["active_parameters"]
    per_token = f", {active / 1e6:,.1f} million for a token" if active < facts["parameters"] else ""
    recipe.add_row("parameters", f"{facts['parameters'] / 1e6:,.1f} million{per_token}")
    if len(kinds) == 1:
        recipe.add_row("layers", f"{len(config.layers)}, all alike: {_layer(kinds[0])}")
    else:
        recipe.add_row("layers", f"{len(config.layers)}: {', '.join(_runs(s, kinds) for s in model.segments)}")
        for number, kind in enumerate(kinds, 1):
            recipe.add_row(f"  kind {number}", _layer(kind))
    recipe.add_row("width", str(config.dim))
    recipe.add_row("norm", f"{config.norm.kind}, eps {config.norm.eps:g}")
    if config.per_layer is not None:
        recipe.add_row("per-layer", f"embeddings of {config.per_layer.dim}")
    if config.streams > 1:
        recipe.add_row("residuals", f"{config.streams}, by AltUp")
    recipe.add_row("vocabulary", f"{config.vocab}, output projection {'tied' if config.tied else 'its own'}")
    recipe.add_row("context", f"{config.context} tokens")
    if facts["stored_bytes"] is not None:
        bits = 8 * facts["stored_bytes"] / facts["parameters"]
        recipe.add_row("in files", f"{decimal(facts['stored_bytes'])}, {bits:.1f} bits per parameter")

    from inferlib.models.recurrent import Recurrent

    windows = any(layer.attention.reach for layer in config.layers)
    memory = Table(box=SIMPLE_HEAD)
    memory.add_column("loaded as")
    recurrent = any(isinstance(layer.attention, Recurrent) for layer in config.layers)
    shown = {"per_token": "cache per token"} | ({"beyond_windows": "beyond windows"} if windows else {})
    shown |= {"states": "states of a row"} if recurrent else {}
    kind = f"{facts['kv_cache_dtype']} cache" if facts["kv_cache_dtype"] else "cache"
    weights = f"{facts['quantization']} weights" if facts["quantization"] else "weights"
    for title in (weights, *shown.values(), f"{kind} of {facts['max_len']} tokens"):
        memory.add_column(title, justify="right")
    for dtype, cache in facts["cache_bytes"].items():
        sizes = [*map(cache.get, shown), cache["per_sequence"]]
        memory.add_row(dtype, *map(decimal, [facts["weight_bytes"][dtype], *sizes]))

    text, terminal = io.StringIO(), sys.stdout.isatty()
    console = Console(file=text, force_terminal=terminal)
    console.print(recipe, memory, highlight=False)
    if explanation is not None and terminal:
        console.print(explanation, highlight=False)
    elif explanation is not None:
        text.write(str(explanation))  # not cut to the width of a terminal that is not there
    if explanation is not None:
        console.print(_implementations(facts["implementations"]), highlight=False)
    return text.getvalue()


def _implementations(rows: list[dict[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Implementations on a TPU", title_justify="left")
    table.add_column("operation", no_wrap=True)
    table.add_column("implementation", no_wrap=True)
    table.add_column("layers or weights")
    table.add_column("reason, if not the preferred one")
    for row in rows:
        table.add_row(row["op"], row["implementation"], row["layers"], row["reason"])
    return table


def _runs(segment: Segment, kinds: list[LayerSpec]) -> str:
    """A segment's pattern in runs of equal layers, such as "4 x (5 of kind 1, 1 of kind 2)"."""
    runs = [(len(list(run)), kinds.index(kind) + 1) for kind, run in groupby(segment.pattern)]
    if len(runs) == 1:
        return f"{segment.count * runs[0][0]} of kind {runs[0][1]}"
    text = ", ".join(f"{count} of kind {kind}" for count, kind in runs)
    return f"{segment.count} x ({text})" if segment.count > 1 else text


def _layer(layer: LayerSpec) -> str:
    from inferlib.models.config import MlaSpec
    from inferlib.models.recurrent import Recurrent

    attention = layer.attention
    if isinstance(attention, Recurrent):
        return ", ".join([attention.summary(), *_feed_forward(layer.mlp)])
    rope = attention.rope
    parts = [f"{attention.heads} heads of {attention.head_dim}"]
    if isinstance(attention, MlaSpec):
        rotary = attention.rope.dim if attention.rope else 0
        parts += [f"latents of {attention.kv_rank} + {rotary} for keys and values of {attention.value_dim}"]
        parts += [f"queries' latents of {attention.q_rank}"] if attention.q_rank else []
    else:
        parts[0] += f", {attention.kv_heads} for keys and values"
        parts[0] += "" if attention.cache_of is None else f" of layer {attention.cache_of}"
        parts += [f"values of {attention.value_dim}"] if attention.value_dim != attention.head_dim else []
        parts += [f"window {attention.window}"] if attention.window else []
        parts += [f"chunks of {attention.chunk}"] if attention.chunk else []
        parts += [f"QK-norm by {attention.qk_norm}"] if attention.qk_norm else []
        parts += [f"softcap {attention.softcap:g}"] if attention.softcap else []
        parts += ["sinks"] if attention.sinks else []
        parts += [f"{attention.gate.activation} gates"] if attention.gate else []
    parts += ["query temperature"] if attention.temperature else []
    if rope is None or (isinstance(attention, MlaSpec) and not attention.rotates):
        parts += ["no RoPE"]
    else:
        scaling = f" scaled by {rope.scaling.kind}" if rope.scaling else ""
        parts += [f"RoPE of {rope.dim} with base {rope.base:g}{scaling}"]
    parts += _feed_forward(layer.mlp)
    parts += ["post-norm"] if layer.post_norm else []
    parts += [f"LAuReL {layer.laurel}"] if layer.laurel else []
    parts += ["parallel"] if layer.parallel else []
    return ", ".join(parts)


def _feed_forward(spec: MlpSpec | MoeSpec | None) -> list[str]:
    from inferlib.models.config import MlpSpec

    if spec is None:
        return ["no feed-forward"]
    if isinstance(spec, MlpSpec):
        return [f"MLP {spec.activation} {spec.hidden}" + (f", {spec.sparsity:.0%} sparse" if spec.sparsity else "")]
    activation = spec.activation if isinstance(spec.activation, str) else "clamped SwiGLU"
    router = spec.router
    groups = f" in {router.chosen_groups} of {router.groups} groups" if router.groups > 1 else ""
    parts = [f"{router.chosen} of {spec.experts} experts{groups}, {activation} {spec.hidden}, by {router.score}"]
    parts += [f"{spec.identity} experts that return their input"] if spec.identity else []
    return [*parts, f"shared {spec.shared.hidden}"] if spec.shared else parts
