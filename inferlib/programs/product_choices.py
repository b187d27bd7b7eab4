"""Which implementations a model's products with weights and its layers with experts take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.config import MoeSpec
from inferlib.models.fetched_weights import fetched_weights
from inferlib.models.layers.ring import ring_choices, ring_weights
from inferlib.ops import choose_experts, expert_mlp, grouped_matmul, on_chip
from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.ops.expert_mlp import ExpertWeights
from inferlib.ops.low_rank import LowRankWeight
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


def packed_products(config: EngineConfig, model: AbstractModel) -> dict[str, Choice]:
    """For each weight, whether the TPU kernel of products reads it packed."""
    if config.backend.matmul != "pallas_tpu":
        return {}
    weights = (w for w in model.weights if w.contracting and axes.EXPERTS not in w.axes)
    return {w.name: Choice("pallas_tpu") if w.packed else w.pack_choice(model.dtype, config.shards) for w in weights}


def fetched_products(config: EngineConfig, model: AbstractModel) -> dict[str, Choice]:
    """The weights that a decode step of few rows fetches ahead; see `inferlib.models.fetched_weights`."""
    chosen, start = {}, 0
    for segment in model.segments:
        blocks = range(start, start + len(segment.pattern))
        start = blocks.stop
        if segment.count == 1 or segment.looped:
            continue
        weights = [[w for w in model.weights if w.block == block] for block in blocks]
        local = [{w.part: w.local(config.shards) for w in of_block} for of_block in weights]
        pattern = list(zip(segment.pattern, local, strict=True))
        ahead = fetched_weights(pattern, min(config.row_buckets), model.config, config.shards, config.backend)
        for of_block, names in zip(weights, ahead, strict=True):
            chosen |= {w.name: Choice("pallas_tpu") for w in of_block if w.part in names.mixer | names.mlp}
    return chosen


def loop_choices(config: EngineConfig, model: AbstractModel) -> dict[range, Choice]:
    """Whether the weights of a loop's layers, if there is one, stay on chip over its steps."""
    if (loop := model.config.loop) is None:
        return {}
    return {range(loop.start, loop.stop): on_chip.choose(loop_products(model, config.shards), config.backend)}


def loop_products(model: AbstractModel, shards: Shards) -> list[Any]:
    """A device's part of the weights that the layers of a loop multiply by, with shapes for arrays."""
    layers = [w for w in model.weights if w.contracting and w.block is not None and model.passes(w) > 1]
    bases = (w.local(shards) for w in layers)
    return [base.base if isinstance(base, LowRankWeight) else base for base in bases]


def fused_products(config: EngineConfig, model: AbstractModel) -> dict[str, Choice]:
    """For each weight, whether its product is fused with its collective in any step; if not, why not in the largest."""
    choices: dict[str, Choice] = {}
    if config.backend.collective_matmul == "xla":
        return choices
    steps = sorted({p * c + n for p, c in config.prefill_shapes() for n in (0, config.rows)})
    for block, _ in enumerate(model.blocks()):
        for step in (ring_products(model, block, tokens, config.shards, config.backend) for tokens in steps):
            for product in step:
                old = choices.get(product.weight)
                choices[product.weight] = product.choice if old is None or old.name == "xla" else old
    return choices


@dataclass(frozen=True)
class RingProduct:
    """A product with a weight, by name, which a kernel can fuse with its collective. part: the weight's name in its
    block. shape: of a device's shard for one layer."""

    weight: str
    part: str
    shape: tuple[int, ...]
    choice: Choice


def ring_products(
    model: AbstractModel, block: int, tokens: int, shards: Shards, backend: Backend
) -> tuple[RingProduct, ...]:
    """The products of one layer of a block that a kernel can fuse, in a step of `tokens` tokens."""
    names = ring_weights(model.config, model.config.layers[model.layers_of(block)[0]])
    adapted = {weight.name for weight, _ in model.adapted}
    weights = [w for w in model.weights if w.block == block and w.part in names and w.scheme is None]
    weights = [w for w in weights if w.name not in adapted]
    shapes = {w.part: shards.local_shape(w.of_layer.axes, w.of_layer.shape) for w in weights}
    choices = ring_choices(names, shapes, model.dtype, tokens, shards, backend)
    return tuple(RingProduct(w.name, w.part, shapes[w.part], choices[w.part]) for w in weights)


def expert_choices(config: EngineConfig, model: AbstractModel) -> dict[str, dict[range, Choice]]:
    """For each operation, the choice of each block of layers with experts."""
    choices: dict[str, dict[range, Choice]] = {"grouped_matmul": {}, "expert_mlp": {}, "choose_experts": {}}
    weights = [w for w in model.weights if axes.EXPERTS in w.axes and w.contracting]
    for block, of_block in itertools.groupby(weights, key=lambda weight: weight.block):
        if block is None:
            continue
        layers = model.layers_of(block)
        spec = model.config.layers[layers[0]].mlp
        assert isinstance(spec, MoeSpec)  # the only feed-forward whose weights have experts
        for op, choice in _experts(config, model, spec, list(of_block)).items():
            choices[op][layers] = choice
    return choices


def _experts(
    config: EngineConfig, model: AbstractModel, spec: MoeSpec, weights: Sequence[WeightSpec]
) -> dict[str, Choice]:
    """The choices of one layer: of grouped products in the largest step, of `expert_mlp` whatever the number of tokens,
    and of the router in a decode step."""
    backend, shards, dtype = config.backend, config.shards, model.dtype
    rows = (config.rows + max(p * c for p, c in config.prefill_shapes())) * spec.router.chosen
    local: dict[str, Any] = {w.part.rpartition(".")[2]: w.local(shards) for w in weights}
    layer: Any = jax.ShapeDtypeStruct((), jnp.int32) if weights[0].axes[0] == axes.LAYERS else None
    options: dict[str, Any] = dict(backend=backend.grouped_matmul, stacked=layer is not None)
    products = [grouped_matmul.choose(rows, w, dtype, **options) for w in local.values()]
    bias: Any = jax.ShapeDtypeStruct((), dtype) if spec.bias else None
    both = ExpertWeights(local["gate_up"], local["down"], bias, layer, spec.activation)
    split = shards.size(axes.EMBED) > 1
    choices = {
        "grouped_matmul": next((choice for choice in products if choice.reason), products[0]),
        "expert_mlp": expert_mlp.choose(None, both, dtype, backend.expert_mlp, split_inputs=split),
    }
    # Why weights are not packed says more than that a kernel needs packed ones.
    unpacked = [w.pack_choice(dtype, shards) for w in weights if w.in_groups and not w.packed]
    if reason := next((choice.reason for choice in unpacked if choice.reason), None):
        preferred = {op for op in choices if getattr(backend, op) == "pallas_tpu"}
        choices |= {op: replace(choices[op], reason=reason) for op in preferred if choices[op].reason}
    routed = choose_experts.choose(backend.choose_experts, grouped=spec.router.groups > 1)
    return choices | {"choose_experts": routed}
