"""The weights of experts that a step reads."""

from __future__ import annotations

from inferlib.models.abstract import AbstractModel
from inferlib.ops.quantized import nbytes
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def expert_bytes(model: AbstractModel, shards: Shards, tokens: int) -> int:
    """Bytes of expert weights that a step reads on a device if all experts are equally likely.

    tokens: number of tokens on each device; devices that share experts bring theirs together.
    """
    total, tokens = 0.0, tokens * shards.mlp_row_shards * shards.size(axes.EXPERTS)
    for weight in model.weights:
        if mixture := model.mixture_of(weight):
            stored = sum(nbytes(shards.local_shape(a.axes, a.shape), a.dtype) for a in weight.arrays)
            total += stored * mixture.read_share(tokens)
    return round(total)
