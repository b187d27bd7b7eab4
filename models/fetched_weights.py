"""Which weights of scanned layers are fetched to on-chip memory ahead, so that they arrive while collectives run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inferlib.models.blocks import PreNormBlock, kind_of_block
from inferlib.models.config import LayerSpec, MlaSpec, ModelConfig, MoeSpec
from inferlib.ops import expert_mlp, fetch_ahead
from inferlib.ops.backend import Backend
from inferlib.ops.expert_mlp import ExpertWeights
from inferlib.ops.packed import PackedTensor
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

Weights = Mapping[str, Any]  # a device's part of a block's stacked weights by name, arrays or shapes
# Of a dense feed-forward, and of shared experts. Products start with gate and up: if these had not arrived yet, nothing
# would be gained by them, so that down comes first.
_MLP = ("mlp.down", "mlp.gate_up", "mlp.shared.down", "mlp.shared.gate_up")


class Ahead(NamedTuple):
    """Names of a block's weights that are fetched ahead. mixer: beside the feed-forward of the layer before. mlp:
    beside the mixer."""

    mixer: frozenset[str]
    mlp: frozenset[str]


NOTHING = Ahead(frozenset(), frozenset())


def fetched_weights(
    pattern: Sequence[tuple[LayerSpec, Weights]], tokens: int, config: ModelConfig, shards: Shards, backend: Backend
) -> list[Ahead]:
    """For each layer of a scanned pattern, as many weights as have room on chip together, in a step of `tokens` tokens
    on a device.

    A layer that norms the sums of its branches, or has no feed-forward, has none. Nor has a step without collectives:
    it only waits for weights.
    """
    fit = all(kind_of_block(spec, config) is PreNormBlock and spec.mlp is not None for spec, _ in pattern)
    waits = any(shards.size(name) > 1 for name in (axes.MLP, axes.KV_HEADS, axes.EXPERTS))
    if backend.fetch_ahead == "xla" or not fit or not waits or shards.splits_tokens:
        return [NOTHING] * len(pattern)
    everyone = tokens * shards.size(axes.EXPERTS)
    free, mixers = min(_free_bytes(spec, weights, everyone, backend) for spec, weights in pattern), []
    for _, weights in pattern:  # those of all layers of the pattern, as one's are part of the scan's carry
        names, free = _with_room(weights, [n for n in weights if n.startswith("attn.")], tokens, backend, free)
        mixers.append(names)
    mlps = (_with_room(weights, _MLP, tokens, backend, free)[0] for _, weights in pattern)
    return [Ahead(*names) for names in zip(mixers, mlps, strict=True)]


def _with_room(
    weights: Weights, names: Sequence[str], tokens: int, backend: Backend, free: int
) -> tuple[frozenset[str], int]:
    """The packed weights of these names that have room on chip, where `free` bytes are free; and how many are left."""
    chosen = set()
    for name in names:
        weight = weights.get(name)
        if isinstance(weight, PackedTensor) and fetch_ahead.fits(weight, tokens, backend, free):
            chosen.add(name)
            free -= fetch_ahead.bytes_of(weight)
    return frozenset(chosen), free


def _free_bytes(spec: LayerSpec, weights: Weights, tokens: int, backend: Backend) -> int:
    """Bytes of on-chip memory that a layer's kernels leave to copies. tokens: those that experts take."""
    experts = 0
    if isinstance(spec.mlp, MoeSpec):
        gate_up, down = (weights[f"mlp.experts.{name}"] for name in ("gate_up", "down"))
        bias: Any = jax.ShapeDtypeStruct((), jnp.bfloat16) if spec.mlp.bias else None
        layer: Any = jax.ShapeDtypeStruct((), jnp.int32)
        stacks = ExpertWeights(gate_up, down, bias, layer, spec.mlp.activation)
        experts = expert_mlp.kernel_bytes(tokens, stacks, backend)
    return fetch_ahead.free_bytes(backend, latent=isinstance(spec.attention, MlaSpec), experts=experts)
