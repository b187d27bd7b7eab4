"""What a step reads of its experts' weights."""

from __future__ import annotations

from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.config import MoeSpec
from inferlib.ops.quantized import nbytes
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def mixture_of(model: AbstractModel, weight: WeightSpec) -> MoeSpec | None:
    """The mixture whose experts a weight belongs to, None for other weights."""
    if axes.EXPERTS not in weight.axes or weight.block is None:
        return None
    spec = model.config.layers[model.layers_of(weight.block)[0]].mlp
    return spec if isinstance(spec, MoeSpec) else None


def expert_bytes(model: AbstractModel, shards: Shards, tokens: int) -> int:
    """Bytes of expert weights that a step reads on a device if all experts are equally likely.

    tokens: number of tokens on each device; devices that share experts bring theirs together.
    """
    total, tokens = 0.0, tokens * shards.mlp_row_shards * shards.size(axes.EXPERTS)
    for weight in model.weights:
        if mixture := mixture_of(model, weight):
            stored = sum(nbytes(shards.local_shape(a.axes, a.shape), a.dtype) for a in weight.arrays)
            total += stored * mixture.read_share(tokens)
    return round(total)
