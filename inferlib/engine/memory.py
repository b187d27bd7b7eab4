"""Chooses the memory of the cache and the number of rows, where a user leaves them open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax

from inferlib.cache.plan import CachePlan, plan_cache
from inferlib.config import EngineConfig, EngineOptions
from inferlib.models.abstract import AbstractModel
from inferlib.models.config import AttentionSpec, MlaSpec
from inferlib.option_checks import ConfigurationError
from inferlib.programs.choices import Choices
from inferlib.programs.memory import Demand
from inferlib.sharding import axes

# The share of a device's memory for everything beside weights, cache and temporaries: code, the compiler's workspaces,
# gaps between arrays, pages on their way to and from other memories. The code of unrolled layers on TPUs is 35 to
# 170 MB a program (Llama-3-8B on v5e).
_MARGIN, _MARGIN_UNROLLED = 0.05, 0.15
# By default, rings and states, which a row keeps whatever its length, take at most this share of the cache's memory.
_OF_ROWS = 0.5


def device_memory(device: Any, *, alone: bool = True) -> int | None:
    """Bytes of a device that this process may still take; None if the device does not tell. alone: no other process has
    to choose the same sizes, so memory in use now is subtracted."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit if limit is None or not alone else limit - stats.get("bytes_in_use", 0)


def with_memory(
    options: EngineOptions,
    resolve: Callable[[EngineOptions], EngineConfig],
    model: AbstractModel,
    memory: Callable[[EngineConfig], int | None],
    drafting: AbstractModel | None = None,
) -> EngineConfig:
    """Resolve the options and size the cache: as `cache_memory` says, or to what a device's `memory` leaves.
    `max_batch` and `max_len` are lowered to fit, where the options leave them open. drafting: a model that drafts.

    Raises ConfigurationError for a share of a memory that is not known, and where nothing is left.
    """
    wanted, config = options.cache_memory, resolve(options)
    if isinstance(wanted, int) or (wanted is None and config.platform == "cpu"):
        return config
    if (whole := memory(config)) is None:
        if wanted is None:
            return config
        raise ConfigurationError(
            f"this device does not tell its memory: give cache_memory in bytes, not {wanted} of it"
        )
    while True:
        left = int(whole * wanted) if wanted else _left(config, model, whole, drafting)
        half = config.max_batch // 2
        fixed = options.max_batch is not None or options.buckets is not None
        if fixed or half < 8 or half % config.shards.replicas or _of_rows(config, model) <= _OF_ROWS * left:
            break
        config = resolve(replace(options, max_batch=half))
    if left <= 0:
        raise ConfigurationError(
            f"the weights and a step of {config.max_batch} rows leave nothing of the {whole / 2**30:.1f} GiB that JAX "
            "may take of a device "
            "for the cache: split the model over more devices with parallel, quantize it, or lower max_batch or the "
            "prefill buckets"
        )
    longest = _plan(config, model, drafting).tokens_in(left, config.shards) // config.shards.replicas
    if options.max_len is None and options.buckets is None and 2 <= longest < config.max_len:
        config = resolve(replace(options, max_batch=config.max_batch, max_len=longest))
    return replace(config, cache_memory=left)


def _left(config: EngineConfig, model: AbstractModel, memory: int, drafting: AbstractModel | None) -> int:
    """Bytes of a device that are left for its cache."""
    demand = Demand(model, config, cache=0, temporaries=_temporaries(config, model), drafting=drafting)
    margin = _MARGIN_UNROLLED if config.platform == "tpu" and not config.scan else _MARGIN
    return int(memory * (1 - margin)) - demand.weights - demand.state - demand.temporaries


def _temporaries(config: EngineConfig, model: AbstractModel) -> int:
    """An estimate of what the largest step keeps beside weights and cache: two layers' activations, logits of every
    row and draft, which sampling reads several times, and what attention by XLA writes to memory."""
    shards, size = config.shards, model.dtype.itemsize
    tokens = config.buckets.prefill[-1] // shards.size(axes.TOKENS) + config.rows
    dense = [w for w in model.weights if w.contracting and not {axes.EXPERTS, axes.VOCAB} & set(w.axes)]
    widest = max(prod(shards.local_shape(w.axes, w.shape)) for w in dense) // model.config.dim
    positions = config.rows * (1 if config.speculation is None else 1 + config.speculation.tokens)
    sampled = (positions + max(p for p, _ in config.prefill_shapes())) * model.layout.vocab // shards.size(axes.VOCAB)
    details = max(p * c for p, c in config.detail_shapes()) * model.layout.vocab // shards.size(axes.VOCAB)
    dim, chosen = model.config.dim, [x.router.chosen * (2 * x.hidden + model.config.dim) for x in model.config.mixtures]
    activations = tokens * (4 * widest + 16 * dim + 2 * max(chosen, default=0)) * size
    return activations + max(6 * sampled, 3 * details) * 4 + _by_xla(config, model)


def _by_xla(config: EngineConfig, model: AbstractModel) -> int:
    """Bytes that XLA's attention writes: the rows' cells, the logits of a step's prompt tokens, and the keys of their
    rows where it lists blocks."""
    layers, most = Choices.of(config, model, _plan(config, model)).layers, 0
    for layers_of_one, choice in layers["prefill_attention"].items():
        spec = model.config.layers[layers_of_one[0]].attention
        if choice.name == "xla":
            heads = model.layout.heads(spec)
            logits = heads.groups * heads.queries // config.shards.size(axes.KV_HEADS) * config.max_len * 4
            most = max(most, 2 * config.buckets.prefill[-1] // config.shards.size(axes.TOKENS) * logits)
        scores = layers["block_scores"].get(layers_of_one)
        if scores is not None and scores.name == "xla" and isinstance(spec, AttentionSpec):
            heads, chunks = model.layout.heads(spec), max(p for p, _ in config.prefill_shapes())
            keys = heads.groups // config.shards.size(axes.KV_HEADS) * config.max_len * spec.head_dim
            # As they are, and with zeros behind the row's end.
            most = max(most, 2 * chunks * keys * model.dtype.itemsize)
    for layers_of_one, choice in layers["decode_attention"].items():
        spec = model.config.layers[layers_of_one[0]].attention
        if choice.name == "xla" and isinstance(spec, AttentionSpec | MlaSpec):
            cells = sum(spec.cache_sizes) * (spec.kv_heads if isinstance(spec, AttentionSpec) else 1)
            most = max(most, 2 * config.rows * config.max_len * cells * model.dtype.itemsize)
    return most


def _of_rows(config: EngineConfig, model: AbstractModel) -> int:
    """Bytes of rings and states on a device."""
    plan = _plan(config, model)
    pairs = zip(plan.arrays, plan.of_rows, strict=True)
    return sum(array.nbytes(config.shards) for array, of_rows in pairs if of_rows)


def _plan(config: EngineConfig, model: AbstractModel, drafting: AbstractModel | None = None) -> CachePlan:
    """The cache with room for all rows."""
    sizes = dict(rows=config.max_batch, max_len=config.max_len, chunk=config.row_tokens)
    dtype = config.kv_cache_dtype or model.dtype
    # By default snapshots take what is left.
    pool = config.pool._replace(memory=None, snapshots=config.pool.snapshots or 0)
    return plan_cache(model, **sizes, dtype=dtype, platform=config.platform, pool=pool, drafting=drafting)


def this_memory(config: EngineConfig) -> int | None:
    """`device_memory` of the first of this process's devices."""
    return device_memory(jax.local_devices()[0], alone=not config.shards.several_processes)
