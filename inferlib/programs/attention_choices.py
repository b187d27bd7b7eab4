"""Which implementations of attention a model's programs take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from inferlib.cache.plan import BlockCache, CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.models.attention_choices import Operation, choose_attention
from inferlib.models.config import AttentionSpec, MlaSpec
from inferlib.ops import (
    decode_attention,
    mla_decode_attention,
    mla_prefill_attention,
    prefill_attention,
    selected_pages,
    sparse_prefill,
)
from inferlib.ops.cache_write import folded_rows
from inferlib.ops.choice import Choice
from inferlib.ops.kv_cache import KvCache, LatentCache
from inferlib.ops.mla_prefill_attention import Expansion
from inferlib.sharding import axes

OPERATIONS: tuple[Operation, ...] = ("decode_attention", "prefill_attention")


def attention_choices(
    config: EngineConfig, model: AbstractModel, plan: CachePlan, operation: Operation
) -> tuple[dict[range, Choice], Choice | None]:
    """The choice for each block of attention layers. Also the one choice for all layers, if there is a layer that the
    preferred kernel should run and cannot."""
    choices: dict[range, Choice] = {}
    fallback, choose = None, _choose_decode if operation == "decode_attention" else _choose_prefill
    for block, layers in zip(plan.blocks, model.blocks(), strict=True):
        spec = model.config.layers[layers[0]].attention
        if not isinstance(block, BlockCache) or not isinstance(spec, AttentionSpec | MlaSpec):
            continue
        choice = choose_attention(spec, operation, config.backend, scaled=block.scaled, packed=block.packed)
        if choice.name != "xla":
            table = _array((config.rows, plan.columns_of(block.level)), "int32") if block.paged else None
            refusals = (sized for sized in choose(config, model, spec, block, table) if sized.reason)
            choice = next(refusals, choice)
            fallback = fallback or (choice if choice.reason else None)
        choices[layers] = choice
    return choices, fallback


def score_choices(
    config: EngineConfig, model: AbstractModel, plan: CachePlan, attention: Mapping[range, Choice]
) -> dict[range, Choice]:
    """What scores the blocks of prompts, for the layers that list some: of a step's longest chunk, on one device.
    attention: what their prefill attention runs in."""
    choices: dict[range, Choice] = {}
    if (sparse := config.block_lists) is None:
        return choices
    chunks, chunk = max(config.prefill_shapes(), key=lambda shape: shape[1])
    for block, layers in zip(plan.blocks, model.blocks(), strict=True):
        spec = model.config.layers[layers[0]].attention
        if isinstance(block, BlockCache) and isinstance(spec, AttentionSpec) and spec.reach is None:
            arrays, table = _arrays(config, block), _array((chunks, plan.columns_of(block.level)), "int32")
            q = _queries((chunks, chunk), model, spec, arrays)
            cache = _kv_cache(arrays, table, scaled=block.scaled)
            choices[layers] = sparse_prefill.choose_scores(q, cache, sparse, attention[layers].name)
    return choices


def _choose_decode(
    config: EngineConfig, model: AbstractModel, spec: AttentionSpec | MlaSpec, block: BlockCache, table: Any
) -> Iterator[Choice]:
    """The choice for a step of all rows, on one device."""
    arrays, heads, backend = _arrays(config, block), model.layout.heads(spec), config.backend.decode_attention
    if isinstance(spec, MlaSpec):
        groups = heads.groups // config.shards.size(axes.KV_HEADS)
        q = _array((config.rows, 1, groups, spec.kv_rank + spec.rope.dim), model.dtype)
        yield mla_decode_attention.choose_for(q, LatentCache(*arrays, pages=table), backend)
    else:
        q = _queries((config.rows, 1), model, spec, arrays)
        cache, selection = _kv_cache(arrays, table, scaled=block.scaled), config.attention_pages
        if block.block is not None and selection is not None:
            yield selected_pages.choose(q, cache, block.block, selection.count, backend, new=not block.shared)
        yield decode_attention.choose(cache, spec.window, backend, q, new=not block.shared)


def _choose_prefill(
    config: EngineConfig, model: AbstractModel, spec: AttentionSpec | MlaSpec, block: BlockCache, table: Any
) -> Iterator[Choice]:
    """The choice for each shape of chunks, on one device. Where tokens are split, devices pass on a row's cells up to
    the cache bucket."""
    devices, backend = config.shards.size(axes.TOKENS), config.backend.prefill_attention
    arrays, heads = _arrays(config, block), model.layout.heads(spec)
    slots = arrays[0].shape[-2]
    passed = slots * (1 if table is None else table.shape[1])
    counts = {slots} if devices == 1 else {min(passed, -(-limit // devices)) for limit in config.limits}
    table = table if devices == 1 else None
    shapes = config.prefill_shapes()
    if (how := config.propagation) is not None:
        shapes += tuple((chunks, how.count(chunk)) for chunks, chunk in shapes)
    for (chunks, chunk), count in itertools.product(shapes, counts):
        read = [
            _array((*x.shape[:-2], folded_rows(count, fold), x.shape[-1]), x.dtype)
            for x, fold in zip(arrays, block.folds, strict=True)
        ]
        if isinstance(spec, MlaSpec):
            groups = heads.groups // config.shards.size(axes.KV_HEADS)
            q = _array((chunks, chunk // devices, groups, spec.nope_dim + spec.rope.dim), model.dtype)
            keys = _array((groups, spec.nope_dim, spec.kv_rank), model.dtype)
            values = _array((groups, spec.kv_rank, spec.value_dim), model.dtype)
            cache = LatentCache(*read, pages=table)
            yield mla_prefill_attention.choose_for(q, Expansion(keys, values), cache, backend)
        else:
            q = _queries((chunks, chunk // devices), model, spec, arrays)
            cache, sparse, listed = _kv_cache(read, table, scaled=block.scaled), config.block_lists, None
            if sparse is not None and spec.reach is None:
                listed = sparse_prefill.shape_of_list(q, sparse.max_blocks(config.max_len, cache.slots))
            capped = spec.softcap is not None or spec.sinks
            joint = q.shape[-2] // heads.queries
            key_size = joint * spec.cache_sizes[0] if len(arrays) == 1 else None
            yield prefill_attention.choose(
                cache, spec.window, backend, q, listed=listed, capped=capped, key_size=key_size
            )


def _queries(lead: tuple[int, int], model: AbstractModel, spec: AttentionSpec, arrays: Sequence[Any]) -> Any:
    """The queries of one device, as wide as the cells of its cache."""
    heads, (*_, cells, _, size) = model.layout.heads(spec), arrays[0].shape
    queries = heads.groups * heads.queries // model.layout.shards.size(axes.KV_HEADS)
    return _array((*lead, cells, queries // cells, size), model.dtype)


def _arrays(config: EngineConfig, block: BlockCache) -> list[Any]:
    """A block's cache on one device, without scales."""
    return [_array(config.shards.local_shape(block.axes, shape), block.dtype) for shape in block.shapes]


def _kv_cache(arrays: list[Any], table: Any, *, scaled: bool) -> KvCache:
    scales = [_array(x.shape[:-1], "float32") for x in arrays] if scaled else []
    return KvCache(*arrays, *[None] * (2 - len(arrays)), *scales, pages=table)


def _array(shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
