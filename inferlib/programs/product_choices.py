"""Which implementations the products of a model take, decided once for all programs, and warnings where the preferred
one cannot run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.config import MoeSpec
from inferlib.models.layers.ring import ring_choices, ring_weights
from inferlib.ops import choose_experts, expert_mlp, grouped_matmul
from inferlib.ops.choice import Choice
from inferlib.ops.expert_mlp import ExpertWeights
from inferlib.pallas_kernels.generations_tpu import planning_for
from inferlib.sharding import axes

log = logging.getLogger(__name__)

# By operation, a field of `Backend`, and by what it applies to: the name of a weight, or "layers 0 to 3".
Choices = Mapping[str, Mapping[str, Choice]]

_CHIPS = {"pallas_tpu": "TPU", "pallas_gpu": "GPU"}


def product_choices(config: EngineConfig, model: AbstractModel) -> Choices:
    """The choices of products with weights and of the layers with experts."""
    with planning_for(config.backend.generation):
        return {
            "matmul": _packed_products(config, model),
            "collective_matmul": _fused_products(config, model),
            **_expert_layers(config, model),
        }


def with_runnable_products(config: EngineConfig, model: AbstractModel, choices: Choices) -> EngineConfig:
    """The config without the kernels of experts that cannot run every layer; warns of each kernel passed over."""
    for op in ("grouped_matmul", "expert_mlp"):
        if reason := next((choice.reason for choice in choices[op].values() if choice.reason), None):
            chip = _CHIPS[getattr(config.backend, op)]
            log.warning("%s runs in XLA, not in the %s kernel: %s", op.replace("_", " "), chip, reason)
            config = replace(config, backend=replace(config.backend, **{op: "xla"}))
    parts = {weight.name: weight.part for weight in model.weights}
    for op, beside in (("matmul", ""), ("collective_matmul", " and their collective")):
        reasons = ((parts[name], choice.reason) for name, choice in choices[op].items() if choice.reason)
        if refused := next(reasons, None):
            log.warning("products with %s%s run in XLA, not in the TPU kernel: %s", refused[0], beside, refused[1])
    return config


def _packed_products(config: EngineConfig, model: AbstractModel) -> dict[str, Choice]:
    """By weight, whether the TPU kernel of products reads it packed."""
    if config.backend.matmul != "pallas_tpu":
        return {}
    weights = (w for w in model.weights if w.contracting and axes.EXPERTS not in w.axes)
    return {w.name: Choice("pallas_tpu") if w.packed else w.pack_choice(model.dtype, config.shards) for w in weights}


def _fused_products(config: EngineConfig, model: AbstractModel) -> dict[str, Choice]:
    """By weight, whether its product is fused with its collective in any step, and if not, why not in the largest."""
    choices, shards, backend = {}, config.shards, config.backend
    steps = sorted({p * c + n for p, c in config.prefill_shapes() for n in (0, config.rows)})
    if backend.collective_matmul == "xla":
        return {}
    for weight in model.weights:
        if weight.block is None or weight.scheme is not None:
            continue
        names = ring_weights(model.config, model.config.layers[model.layers_of(weight.block)[0]])
        if weight.part in names:
            one = weight.of_layer
            shapes = {weight.part: shards.local_shape(one.axes, one.shape)}
            every = [ring_choices(names, shapes, model.dtype, n, shards, backend)[weight.part] for n in steps]
            choices[weight.name] = next((choice for choice in every if choice.name != "xla"), every[-1])
    return choices


def _expert_layers(config: EngineConfig, model: AbstractModel) -> Choices:
    """The choices of each block of layers with experts."""
    choices: dict[str, dict[str, Choice]] = {"grouped_matmul": {}, "expert_mlp": {}, "choose_experts": {}}
    weights = [w for w in model.weights if axes.EXPERTS in w.axes and w.contracting]
    for block, of_block in itertools.groupby(weights, key=lambda weight: weight.block):
        if block is None:
            continue
        layers = model.layers_of(block)
        spec = model.config.layers[layers[0]].mlp
        for op, choice in _experts(config, model, spec, list(of_block)).items():
            choices[op][_name_of(layers)] = choice
    return choices


def _experts(
    config: EngineConfig, model: AbstractModel, spec: MoeSpec, weights: Sequence[WeightSpec]
) -> dict[str, Choice]:
    """The choices of one layer: of its grouped products in the largest step, of `expert_mlp` for as many tokens as it
    is for, and of its router when decoding."""
    backend, shards, dtype = config.backend, config.shards, model.dtype
    rows = (config.rows + max(p * c for p, c in config.prefill_shapes())) * spec.router.chosen
    local = {w.part.rpartition(".")[2]: w.local(shards) for w in weights}
    layer = jax.ShapeDtypeStruct((), jnp.int32) if weights[0].axes[0] == axes.LAYERS else None
    options = dict(backend=backend.grouped_matmul, stacked=layer is not None)
    products = [grouped_matmul.choose(rows, w, dtype, **options) for w in local.values()]
    both = ExpertWeights(local["gate_up"], local["down"], layer=layer)
    split = shards.size(axes.EMBED) > 1
    choices = {
        "grouped_matmul": next((choice for choice in products if choice.reason), products[0]),
        "expert_mlp": expert_mlp.choose(None, both, dtype, backend.expert_mlp, split_inputs=split),
    }
    # Why weights could not be packed says more than that a kernel takes packed ones only.
    unpacked = [w.pack_choice(dtype, shards) for w in weights if w.in_groups and not w.packed]
    if reason := next((choice.reason for choice in unpacked if choice.reason), None):
        preferred = {op for op in choices if getattr(backend, op) == "pallas_tpu"}
        choices |= {op: replace(choices[op], reason=reason) for op in preferred if choices[op].reason}
    routed = choose_experts.choose(config.rows, backend.choose_experts, grouped=spec.router.groups > 1)
    return choices | {"choose_experts": routed}


def _name_of(layers: range) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    every = f", every {layers.step}th" if layers.step > 1 else ""
    return f"layers {layers[0]} to {layers[-1]}{every}"
