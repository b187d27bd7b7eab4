"""Tables of what a model is and what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from inferlib.models.cache_levels import budgets_text
from inferlib.models.config import LaneSpec, LayerSpec, MlaSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.models.recurrent import Recurrent, keeps_state
from inferlib.models.segments import Segment
from inferlib.ops.selected_pages import PageSelection


def recipe(facts: Mapping[str, Any], config: ModelConfig, segments: Sequence[Segment]) -> Table:
    """The model's layers and sizes. facts: see `ModelExplanation.facts`."""
    kinds = list(dict.fromkeys(config.layers))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_row("model", escape(facts["model"]))
    table.add_row("family", config.family)
    active = facts["active_parameters"]
    per_token = f", {active / 1e6:,.1f} million for a token" if active < facts["parameters"] else ""
    table.add_row("parameters", f"{facts['parameters'] / 1e6:,.1f} million{per_token}")
    if len(kinds) == 1:
        table.add_row("layers", f"{len(config.layers)}, all alike: {layer_text(kinds[0])}")
    else:
        table.add_row("layers", f"{len(config.layers)}: {', '.join(_runs(s, kinds) for s in segments)}")
        for number, kind in enumerate(kinds, 1):
            table.add_row(f"  kind {number}", layer_text(kind))
    if (loop := config.loop) is not None:
        each = f"layers {loop.start} to {loop.stop - 1}, {loop.steps} times, with cells of each step"
        table.add_row("loop", f"{each}; {loop.injection} injection{', normed states' if loop.state_norm else ''}")
    if (lanes := config.lanes) is not None:
        table.add_row("lanes", lanes_text(lanes))
    table.add_row("width", str(config.dim))
    table.add_row("norm", f"{config.norm.kind}, eps {config.norm.eps:g}")
    if config.per_layer is not None:
        table.add_row("per-layer", f"embeddings of {config.per_layer.dim}")
    if config.streams > 1:
        table.add_row("residuals", f"{config.streams}, by AltUp")
    table.add_row("vocabulary", f"{config.vocab}, output projection {'tied' if config.tied else 'its own'}")
    table.add_row("context", f"{config.context} tokens")
    if "adapters" in facts:
        sizes = (f"{decimal(size)} in {dtype}" for dtype, size in facts["adapters"]["bytes"].items())
        count, rank = facts["adapters"]["count"], facts["adapters"]["rank"]
        parts = ", ".join(facts["adapters"]["parts"]) or "the weights"
        table.add_row("adapters", f"{count} of rank {rank} beside {parts}: {', '.join(sizes)}")
    snapshots = any(cache["snapshot"] for cache in facts["cache_bytes"].values())
    policy, selection = facts["cache_policy"], PageSelection.read(facts["attention_pages"])
    resident = None if selection is None else selection.resident
    shared = f"share pages{' and snapshots of the rest' if snapshots else ''}"
    table.add_row("prompts that begin alike", shared if policy is None and resident is None else "share nothing")
    if policy is not None:
        budgets = budgets_text(facts["layer_budgets"])
        table.add_row("positions in the cache", f"{budgets or 'a budget'} for each row, by {policy}")
    if facts["attention_pages"]:
        table.add_row("decode steps read", f"pages by {facts['attention_pages']}, whose summaries are in the cache")
    if resident is not None:
        table.add_row("pages on the device", f"{resident} of a row that decodes, the others in the host's memory")
    if facts["rotation"]:
        table.add_row("rotated while it runs", f"inputs of down projections, {facts['rotation']} at a time")
    if facts["rank"]:
        parts = f" beside {', '.join(facts['branches'])}" if facts["branches"] else ""
        table.add_row("beside quantised weights", f"a branch of rank {facts['rank']} in bfloat16{parts}")
    if facts["stored_bytes"] is not None:
        bits = 8 * facts["stored_bytes"] / facts["parameters"]
        table.add_row("in files", f"{decimal(facts['stored_bytes'])}, {bits:.1f} bits per parameter")
    return table


def memory(facts: Mapping[str, Any], config: ModelConfig) -> Table:
    """The bytes of weights and cache by dtype."""
    windows = any(layer.attention.reach for layer in config.layers)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("loaded as")
    recurrent = any(keeps_state(layer.attention) for layer in config.layers)
    shown = {"per_token": "cache per token"} | ({"beyond_windows": "beyond windows"} if windows else {})
    shown |= {"states": "states of a row"} if recurrent else {}
    snapshots = any(cache["snapshot"] for cache in facts["cache_bytes"].values())
    shown |= {"snapshot": "a snapshot"} if snapshots else {}
    kind = f"{facts['kv_cache_dtype']} cache" if facts["kv_cache_dtype"] else "cache"
    weights = f"{facts['quantization']} weights" if facts["quantization"] else "weights"
    pool = facts["pool_tokens"] or {}
    titles = [weights, *shown.values(), f"{kind} of {facts['max_len']} tokens"]
    for title in [*titles, "tokens in the pool"] if pool else titles:
        table.add_column(title, justify="right")
    parts = {"": facts} | ({" of the draft model": facts["draft"]} if "draft" in facts else {})
    for dtype in facts["cache_bytes"]:
        for what, part in parts.items():
            cache = part["cache_bytes"][dtype]
            sizes = [part["weight_bytes"][dtype], *map(cache.get, shown), cache["per_sequence"]]
            tokens = [f"{pool[dtype]:,}"] if pool and not what else []
            table.add_row(f"{dtype}{what}", *map(decimal, sizes), *tokens)
    return table


def implementations(rows: Sequence[Mapping[str, str]]) -> Table:
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


def lanes_text(spec: LaneSpec) -> str:
    """The lanes of a model and their exchange."""
    late = f"sums of the others {spec.delay} layer{'s' * (spec.delay > 1)} late" if spec.comm else "without exchange"
    early = f", the first {spec.delay} at once" if spec.early_comm else ""
    return f"{spec.lanes}, {late}{early}; {spec.head} head"


_ADDED = {"now": "the sums of all lanes", "late": "late sums of other lanes", "none": "no sums of other lanes"}


def layer_text(layer: LayerSpec) -> str:
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
        parts += [f"level {attention.cache_level} of the cache"] if attention.cache_level else []
        parts += [f"chunks of {attention.chunk}"] if attention.chunk else []
        parts += [f"QK-norm by {attention.qk_norm}"] if attention.qk_norm else []
        parts += [f"softcap {attention.softcap:g}"] if attention.softcap else []
        parts += ["sinks"] if attention.sinks else []
        parts += [f"{attention.gate.activation} gates"] if attention.gate else []
        parts += ["value embeddings"] if attention.value_embedding else []
    parts += ["query temperature"] if attention.temperature else []
    if rope is None or (isinstance(attention, MlaSpec) and not attention.rotates):
        parts += ["no RoPE"]
    else:
        scaling = f" scaled by {rope.scaling.kind}" if rope.scaling else ""
        parts += [f"RoPE of {rope.dim} with base {rope.base:g}{scaling}"]
    parts += _feed_forward(layer.mlp)
    parts += ["post-norm" + " of sums" * layer.norms_sums] if layer.post_norm else []
    parts += [f"LAuReL {layer.laurel}"] if layer.laurel else []
    parts += ["parallel"] if layer.parallel else []
    if (exchange := layer.exchange) is not None:
        parts += [f"adds {_ADDED[exchange.adds]}"]
        parts += [] if exchange.sends else ["sends none"]
    return ", ".join(parts)


def _feed_forward(spec: MlpSpec | MoeSpec | None) -> list[str]:
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
