"""The weights of one layer by their parts, and what reads and writes its residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from inferlib.models.abstract import AbstractModel, WeightSpec
from inferlib.models.blocks import GeneralBlock, ParallelBlock, SandwichBlock, kind_of_block
from inferlib.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec
from inferlib.sharding import axes

Weights = dict[str, jax.Array]
# Parts with the model's width that are added to the residual, though no product makes them.
_ADDED = ("o_bias", "down_bias")


@dataclass(frozen=True)
class LayerParts:
    """A layer of a model: its number, its spec, and its weights' specs by their parts."""

    config: ModelConfig
    number: int
    specs: Mapping[str, WeightSpec]

    @property
    def spec(self) -> LayerSpec:
        return self.config.layers[self.number]

    @property
    def block(self) -> type:
        return kind_of_block(self.spec, self.config)

    def width_dim(self, part: str) -> int:
        """The dimension of a part that is the model's width."""
        return self.specs[part].axes.index(axes.EMBED)

    @property
    def norms(self) -> tuple[str, ...]:
        """The parts of norms over the model's width, their biases included."""
        return tuple(part for part in self.specs if "norm" in part and self.specs[part].axes == (axes.EMBED,))

    @property
    def writers(self) -> tuple[str, ...]:
        """The parts whose outputs are added to the residual."""
        return tuple(part for part in self._of_width if self._writes(part))

    def readers(self, norm: str) -> tuple[str, ...]:
        """The parts that multiply the output of "pre_attn_norm" or "pre_mlp_norm"."""
        roots = {"pre_attn_norm": ("attn.",), "pre_mlp_norm": ("mlp.",)}[norm]
        roots = ("attn.", "mlp.") if self.block is ParallelBlock else roots
        return tuple(part for part in self._of_width if part.startswith(roots) and not self._writes(part))

    @property
    def _of_width(self) -> tuple[str, ...]:
        return tuple(part for part, spec in self.specs.items() if axes.EMBED in spec.axes and part not in self.norms)

    def _writes(self, part: str) -> bool:
        spec = self.specs[part]
        return part.endswith(_ADDED) or bool(spec.contracting and self.width_dim(part) not in spec.contracting)

    @property
    def smoothed_norms(self) -> tuple[str, ...]:
        """The norms whose outputs only products read."""
        if self.block is GeneralBlock:
            return ()
        return tuple(part for part in ("pre_attn_norm", "pre_mlp_norm") if part in self.specs)

    @property
    def rotates(self) -> bool:
        """True if the residual is a sum of branches that only RMS norms without biases read."""
        norm = self.config.norm
        return self.block not in (GeneralBlock, SandwichBlock) and norm.kind == "rms" and not norm.bias

    @property
    def scales_values(self) -> bool:
        """True if values may be scaled by channel, which the output projection undoes."""
        spec = self.spec.attention
        if not isinstance(spec, AttentionSpec) or spec.value_norm or spec.key_is_value or spec.cache_of is not None:
            return False
        return all(layer.attention.cache_of != self.number for layer in self.config.layers)

    @property
    def rotates_values(self) -> bool:
        """True if value heads may be rotated, which the output projection undoes."""
        gate = self.spec.attention.gate if isinstance(self.spec.attention, AttentionSpec) else None
        return self.scales_values and (gate is None or gate.per_head)

    @property
    def scaled_mlp(self) -> str | None:
        """The feed-forward whose up-projection may be scaled by channel: "mlp", "mlp.shared", or none."""
        mlp = self.spec.mlp
        place, mlp = ("mlp.shared", mlp.shared) if isinstance(mlp, MoeSpec) else ("mlp", mlp)
        linear = isinstance(mlp, MlpSpec) and mlp.gated and isinstance(mlp.activation, str)
        return place if linear else None


def values_of(layer: LayerParts, weights: Weights) -> tuple[tuple[str, tuple], ...]:
    """The parts that make values, with the index at which each has them, values' channels last."""
    spec = layer.spec.attention
    assert isinstance(spec, AttentionSpec)
    if spec.separate_values:
        places = (("attn.v", ()), ("attn.v_bias", ()))
    else:
        last = (Ellipsis, weights["attn.qkv"].shape[2] - 1, slice(None))
        places = (("attn.qkv", last), ("attn.qkv_bias", last))
    return tuple(place for place in places if place[0] in weights)


def specs_of(model: AbstractModel, layer: int | None) -> list[WeightSpec]:
    """The specs of a layer's weights; None: of those outside the layers."""
    return [weight for weight in model.weights if weight.block == layer]


def layer_parts(model: AbstractModel, layer: int) -> LayerParts:
    return LayerParts(model.config, layer, {spec.part: spec for spec in specs_of(model, layer)})
