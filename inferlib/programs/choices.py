"""Which implementation every operation of a model takes, decided once for all programs, and warnings where the
preferred one cannot run."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.ops.backend import Backend
from inferlib.ops.choice import Choice
from inferlib.pallas_kernels.generations_tpu import planning_for
from inferlib.programs.attention_choices import OPERATIONS, attention_choices, score_choices
from inferlib.programs.product_choices import (
    expert_choices,
    fetched_products,
    fused_products,
    loop_choices,
    packed_products,
)

log = logging.getLogger(__name__)

_KERNELS = {"pallas_tpu": "TPU", "pallas_gpu": "GPU", "nki": "NKI"}


@dataclass(frozen=True)
class Choices:
    """The implementations that the operations of a model take.

    layers: by operation, a field of `Backend` or "block_scores", and by the indices of equal layers. weights: by
    operation and by weight. fallbacks: operations that take another implementation in all layers, because the preferred
    one cannot run some layer that it should.
    """

    layers: Mapping[str, Mapping[range, Choice]]
    weights: Mapping[str, Mapping[str, Choice]]
    fallbacks: Mapping[str, Choice]

    @staticmethod
    def of(config: EngineConfig, model: AbstractModel, plan: CachePlan) -> Choices:
        """The choices of a model's programs, whose cache is `plan`."""
        layers: dict[str, Mapping[range, Choice]] = {}
        fallbacks: dict[str, Choice] = {}
        with planning_for(config.backend.generation):
            for attention in OPERATIONS:
                layers[attention], refusal = attention_choices(config, model, plan, attention)
                fallbacks |= {attention: refusal} if refusal else {}
            layers |= expert_choices(config, model) | {"loop_weights": loop_choices(config, model)}
            weights = {
                "matmul": packed_products(config, model),
                "collective_matmul": fused_products(config, model),
                "fetch_ahead": fetched_products(config, model),
            }
        for op in ("grouped_matmul", "expert_mlp", "loop_weights"):
            refusal = next((choice for choice in layers[op].values() if choice.reason), None)
            fallbacks |= {op: refusal} if refusal else {}
        for op, fallback in fallbacks.items():
            layers[op] = {at: choice if choice.reason else fallback for at, choice in layers[op].items()}
        with planning_for(config.backend.generation):
            layers["block_scores"] = score_choices(config, model, plan, layers["prefill_attention"])
        return Choices(layers, weights, fallbacks)

    def runnable(self, backend: Backend) -> Backend:
        """The backend without the implementations that cannot run every layer that they should."""
        return replace(backend, **{op: choice.name for op, choice in self.fallbacks.items()})

    def warn(self, backend: Backend, model: AbstractModel) -> None:
        """Log each operation whose implementation is not the one that `backend` prefers, and why."""
        for op in (*self.layers, *self.weights):
            for where, reason in self._refusals(op, model):
                kernel = _KERNELS[getattr(backend, "prefill_attention" if op == "block_scores" else op)]
                log.warning("%s%s runs in XLA, not in the %s kernel: %s", _title(op), where, kernel, reason)

    def _refusals(self, op: str, model: AbstractModel) -> Iterator[tuple[str, str]]:
        """The shapes for which an operation does not take its preferred implementation, and why. One weight stands for
        all."""
        if op in self.weights:
            parts = {weight.name: weight.part for weight in model.weights}
            refused = ((parts[name], choice.reason) for name, choice in self.weights[op].items() if choice.reason)
            yield from ((f" with {part}", reason) for part, reason in itertools.islice(refused, 1))
            return
        fallback, counts = self.fallbacks.get(op), Counter()
        for layers, choice in self.layers[op].items():
            if choice != fallback and op in (*OPERATIONS, "block_scores"):
                counts[choice.reason] += len(layers)
        total = len(model.config.layers)
        yield from ((f" in {counts[reason]} of {total} layers", reason) for reason in sorted(filter(None, counts)))
        if fallback:
            yield "", fallback.reason

    def facts(self, model: AbstractModel) -> list[dict[str, str]]:
        """A JSON object for each implementation of an operation: "op", "implementation", "layers" (how many, or the
        weights), and the "reason" if it is not the preferred one."""
        rows: dict[tuple[str, Choice], list[Any]] = {}
        parts = {weight.name: weight.part for weight in model.weights}
        for op, by_layers in self.layers.items():
            for layers, choice in by_layers.items():
                rows.setdefault((op, choice), []).extend(layers)
        counts = {row: f"{len(layers)} of {len(model.config.layers)}" for row, layers in rows.items()}
        rows = {}
        for op, by_weight in self.weights.items():
            for name, choice in by_weight.items():
                rows.setdefault((op, choice), []).append(parts[name])
        counts |= {row: ", ".join(dict.fromkeys(names)) for row, names in rows.items()}
        return [
            {"op": op, "implementation": choice.name, "layers": where, "reason": choice.reason}
            for (op, choice), where in counts.items()
        ]


def _title(op: str) -> str:
    return op.replace("_", " ")
