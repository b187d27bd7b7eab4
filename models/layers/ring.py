"""Which products of a layer are fused with their collective, where tokens are split over devices."""

from __future__ import annotations

from collections.abc import Mapping

from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.collective_matmul import choose
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def ring_axis(shards: Shards) -> str | None:
    """The mesh axis that tokens are split over; None if there is none, or several."""
    over = shards.mesh_axes(axes.MLP, axes.KV_HEADS) if shards.splits_tokens else ()
    return over[0] if len(over) == 1 and over == shards.mesh_axes(axes.MLP) == shards.mesh_axes(axes.KV_HEADS) else None


def ring_weights(config: ModelConfig, spec: LayerSpec) -> frozenset[str]:
    """The names of a layer's weights whose product could be fused with a collective. Such a weight is the only one that
    multiplies the result of an all-gather, or the only one whose product a reduce-scatter sums."""
    attention, mlp, names = spec.attention, spec.mlp, set()
    if spec.parallel:
        return frozenset()
    if isinstance(attention, AttentionSpec):
        names |= {"attn.o"} | ({"attn.qkv"} if attention.gate is None and not attention.separate_values else set())
    if isinstance(mlp, MlpSpec):
        deferred = any(isinstance(layer.mlp, MoeSpec) and layer.mlp.deferred for layer in config.layers)
        names |= {"mlp.gate_up"} | (set() if deferred else {"mlp.down"})
    return frozenset(names)


def ring_choices(
    names: frozenset[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtype,
    tokens: int,
    shards: Shards,
    backend: Backend,
) -> dict[str, Choice]:
    """The implementation of each product of `ring_weights` in a step of `tokens` tokens.

    shapes: the shape of a device's shard, without a dimension of layers, of each weight that is not quantised.
    """
    rows = shards.padded(tokens) // shards.size(axes.MLP) if ring_axis(shards) else 0
    return {
        name: choose(rows, shapes[name], dtype, backend.collective_matmul, scatters=name in ("attn.o", "mlp.down"))
        for name in names & shapes.keys()
    }


def ring_fused(choices: Mapping[str, Choice]) -> frozenset[str]:
    """The names of the weights whose product the kernel computes."""
    return frozenset(name for name, choice in choices.items() if choice.name != "xla")
