"""Which products of a layer take place together with their collective, where tokens are split over devices."""

from __future__ import annotations

import math

import jax

from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.ops.backend import Backend
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards

# Of a device, from which on a product that is made in as many steps as there are devices takes little longer than one
# in a single step, by the TPU compiler's account: with fewer the matrix unit waits for its weights in each.
LEAST_ROWS = 128
# The same where the weight does not stay on chip: with fewer, reading it in each step takes longer than its products.
LEAST_STREAMED_ROWS = 512


def ring_axis(shards: Shards) -> str | None:
    """The mesh axis that tokens are split over, if it is one."""
    over = shards.mesh_axes(axes.MLP, axes.KV_HEADS) if shards.splits_tokens else ()
    return over[0] if len(over) == 1 and over == shards.mesh_axes(axes.MLP) == shards.mesh_axes(axes.KV_HEADS) else None


def in_ring(config: ModelConfig, spec: LayerSpec) -> frozenset[str]:
    """The weights of a layer, by their names there, each of which is all that is multiplied with what an all-gather
    brings, or what a reduce-scatter sums."""
    attention, mlp, found = spec.attention, spec.mlp, set()
    if spec.parallel:
        return frozenset()
    if isinstance(attention, AttentionSpec):
        found |= {"attn.o"} | ({"attn.qkv"} if attention.gate is None and not attention.own_values else set())
    held = any(isinstance(layer.mlp, MoeSpec) and layer.mlp.deferred for layer in config.layers)
    if isinstance(mlp, MlpSpec):
        found |= {"mlp.gate_up"} | (set() if held else {"mlp.down"})
    return frozenset(found)


def rows_of(tokens: int, shards: Shards) -> int | None:
    """How many of a step's tokens a device has, if that is enough for the kernels."""
    axis = ring_axis(shards)
    rows = shards.padded(tokens) // shards.mesh.shape[axis] if axis else 0
    return rows if rows >= LEAST_ROWS else None


def lacks(name: str, shape: tuple[int, ...], dtype, rows: int) -> str | None:
    """Why the kernels do not multiply so many rows of a device by its part of one of `in_ring`, without layers; None if
    they do."""
    from inferlib.pallas_kernels.collective_matmul_tpu import stays, unsupported

    scatters = name in ("attn.o", "mlp.down")
    *lead, outer = shape
    parts, inner = (1, math.prod(lead)) if scatters else (math.prod(lead[1:]), lead[0])
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, inner), (1, parts, inner, outer)))
    if rows < LEAST_STREAMED_ROWS and not stays(rows, parts, inner, outer, w.dtype.itemsize, scatters):
        return f"{parts * inner} x {outer} do not stay on chip, and {rows} rows take less time than reading them anew"
    return unsupported(rows, x, w, scatters=scatters)


def rings(
    config: ModelConfig,
    spec: LayerSpec,
    shapes: dict[str, tuple[int, ...]],
    dtype,
    tokens: int,
    shards: Shards,
    backend: Backend,
) -> frozenset[str]:
    """Those of `in_ring` whose product the kernels make in a step of so many tokens. shapes: of a device's part of
    the weights, without layers; of those that are quantised none."""
    rows = rows_of(tokens, shards) if backend.collective_matmul == "pallas_tpu" else None
    names = in_ring(config, spec) & shapes.keys() if rows else ()
    return frozenset(name for name in names if lacks(name, shapes[name], dtype, rows) is None)
