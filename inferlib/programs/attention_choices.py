"""Which implementations of attention a model's programs take, and warnings where they are not the preferred ones."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax

from inferlib.cache.plan import BlockCache, CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.models.attention_choices import Operation, choose_attention
from inferlib.models.config import AttentionSpec, MlaSpec
from inferlib.ops import decode_attention, mla_decode_attention, mla_prefill_attention, prefill_attention
from inferlib.ops.cache_write import folded_rows
from inferlib.ops.choice import Choice
from inferlib.ops.kv_cache import KvCache, LatentCache
from inferlib.ops.mla_prefill_attention import Expansion
from inferlib.sharding import axes

log = logging.getLogger(__name__)


def with_runnable_attention(config: EngineConfig, model: AbstractModel, plan: CachePlan) -> EngineConfig:
    """The config, with XLA's attention where the preferred kernel cannot run every layer that it should.

    Warns of this, and of layers whose kind of attention the kernel does not have.
    """
    layers, scaled = model.config.layers, config.kv_cache_dtype is not None
    operations: dict[Operation, str] = {"decode_attention": "decodes", "prefill_attention": "prefills"}
    for operation, does in operations.items():
        choices = [choose_attention(layer.attention, operation, config.backend, scaled=scaled) for layer in layers]
        reasons = [choice.reason for choice in choices]
        for reason in sorted(set(filter(None, reasons))):
            log.warning("%s: XLA %s %d of %d layers, not the kernel", reason, does, reasons.count(reason), len(layers))
    for operation in operations:
        choose = _choose_decode if operation == "decode_attention" else _choose_prefill
        blocks = _attention_blocks(config, model, plan, operation)
        choices = itertools.chain.from_iterable(choose(config, model, *block) for block in blocks)
        if choice := next((choice for choice in choices if choice.reason), None):
            log.warning("%s is XLA's, not the TPU kernel: %s", operation.replace("_", " "), choice.reason)
            config = replace(config, backend=replace(config.backend, **{operation: choice.name}))
    return config


def _attention_blocks(
    config: EngineConfig, model: AbstractModel, plan: CachePlan, operation: Operation
) -> Iterator[tuple[AttentionSpec | MlaSpec, BlockCache]]:
    """The spec and the cache of every block of attention layers whose kind the preferred kernel has."""
    for block, layers in zip(plan.blocks, model.blocks(), strict=True):
        spec = model.config.layers[layers[0]].attention
        if not isinstance(block, BlockCache) or not isinstance(spec, AttentionSpec | MlaSpec):
            continue
        if getattr(config.backend, operation) == "xla":
            continue
        if not choose_attention(spec, operation, config.backend, scaled=block.scaled).reason:
            yield spec, block


def _choose_decode(
    config: EngineConfig, model: AbstractModel, spec: AttentionSpec | MlaSpec, block: BlockCache
) -> Iterator[Choice]:
    """The choice for a step of all rows, on one device."""
    arrays, heads, backend = _arrays(config, block), model.layout.heads(spec), config.backend.decode_attention
    if isinstance(spec, MlaSpec):
        groups = heads.groups // config.shards.size(axes.KV_HEADS)
        q = _array((config.rows, 1, groups, spec.kv_rank + spec.rope.dim), model.dtype)
        yield mla_decode_attention.choose_for(q, LatentCache(*arrays), backend)
    else:
        q = _array((config.rows, 1, arrays[0].shape[-3], heads.queries, arrays[0].shape[-1]), model.dtype)
        cache = _kv_cache(arrays, scaled=block.scaled)
        yield decode_attention.choose(cache, spec.window, backend, q, new=not block.shared)


def _choose_prefill(
    config: EngineConfig, model: AbstractModel, spec: AttentionSpec | MlaSpec, block: BlockCache
) -> Iterator[Choice]:
    """The choice for each shape of chunks, on one device. Where tokens are split, what the devices pass on of a row
    ends at the cache bucket."""
    devices, backend = config.shards.size(axes.TOKENS), config.backend.prefill_attention
    arrays, heads = _arrays(config, block), model.layout.heads(spec)
    slots = arrays[0].shape[-2]
    counts = {slots} if devices == 1 else {min(slots, -(-limit // devices)) for limit in config.buckets.cache}
    for (chunks, chunk), count in itertools.product(config.prefill_shapes(), counts):
        read = [
            _array((*x.shape[:-2], folded_rows(count, fold), x.shape[-1]), x.dtype)
            for x, fold in zip(arrays, block.folds, strict=True)
        ]
        if isinstance(spec, MlaSpec):
            groups = heads.groups // config.shards.size(axes.KV_HEADS)
            q = _array((chunks, chunk // devices, groups, spec.nope_dim + spec.rope.dim), model.dtype)
            keys = _array((groups, spec.nope_dim, spec.kv_rank), model.dtype)
            values = _array((groups, spec.kv_rank, spec.value_dim), model.dtype)
            yield mla_prefill_attention.choose_for(q, Expansion(keys, values), LatentCache(*read), backend)
        else:
            kv_heads, size = arrays[0].shape[-3], arrays[0].shape[-1]
            q = _array((chunks, chunk // devices, kv_heads, heads.queries, size), model.dtype)
            yield prefill_attention.choose(_kv_cache(read, scaled=block.scaled), spec.window, backend, q)


def _arrays(config: EngineConfig, block: BlockCache) -> list[Any]:
    """A block's cache on one device, without scales."""
    return [_array(config.shards.local_shape(block.axes, shape), block.dtype) for shape in block.shapes]


def _kv_cache(arrays: list[Any], *, scaled: bool) -> KvCache:
    scales = [_array(x.shape[:-1], "float32") for x in arrays] if scaled else []
    return KvCache(*arrays, *[None] * (2 - len(arrays)), *scales)


def _array(shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
