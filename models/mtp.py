"""The layer that predicts a further token (multi-token prediction, MTP; DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", section 2.2), as DeepSeek-V3, GLM-4.5 and Qwen3-Next ship it beside their own layers. It drafts that model's
tokens.

Position t takes the target's hidden state of token t and the embedding of token t + 1, and predicts token t + 2; to
draft a further token it takes its own hidden state. Embedding and head are the target's. Qwen3-Next's is "normed": its
own hidden state is taken behind its norm, and position 0 has an embedding like all others.

Shapes: T tokens; D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.abstract import AbstractModel, abstract_module
from inferlib.models.batch import StepContext
from inferlib.models.blocks import kind_of_block
from inferlib.models.config import ConfigError, LayerSpec, ModelConfig
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layout import Layout
from inferlib.models.quantization import Quantization
from inferlib.models.recurrent import Recurrent
from inferlib.models.segments import Segment
from inferlib.models.stream import Residual
from inferlib.ops.matmul import matmul
from inferlib.sharding import axes
from inferlib.sharding.mesh import ShardingError
from inferlib.sharding.shards import Shards


class MtpLayer(nnx.Module):
    """A layer of attention like the target's behind a projection of two normed vectors. Build it under
    `nnx.eval_shape` (see `abstract_mtp`). Raises ShardingError for a mesh that splits the width, or tokens between
    products."""

    def __init__(self, layout: Layout, dtype, *, is_normed: bool):
        config, shards = layout.config, layout.shards
        self.is_normed = is_normed
        if shards.size(axes.EMBED) > 1 or shards.splits_tokens:
            raise ShardingError(
                f"rules {shards.preset!r} split the model's width or tokens between products, which an MTP layer "
                "cannot: use tp, cp, helix or dp_attention"
            )
        (spec,) = config.layers
        self.config = config
        self.enorm, self.hnorm = (Norm(config.norm, config.dim, dtype) for _ in range(2))
        # Checkpoints that are quantised store it as it is.
        self.eh_proj = param((2 * config.dim, config.dim), (axes.STREAMS, axes.EMBED), dtype)
        self.blocks = nnx.List([kind_of_block(spec, config)(spec, layout, dtype)])
        self.final_norm = Norm(config.norm, config.dim, dtype)

    def __call__(
        self, embeddings: jax.Array, hidden: jax.Array, ctx: StepContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """The hidden states [T, D] after the layer, and its cache with the cells of these tokens.

        embeddings [T, D]: of the tokens after those that hidden is of; if it is not normed, nothing is read where the
        position is 0. hidden [T, D]: of the target, after its final norm; or `passed_on`. ctx: of the layer's
        `ModelConfig`; its batch has the positions of `hidden`.
        """
        (block,), shards = self.blocks, ctx.shards
        if not self.is_normed:
            embeddings = jnp.where((ctx.positions == 0)[:, None], 0, embeddings)
        both = jnp.concatenate([self.enorm(embeddings, shards), self.hnorm(hidden, shards)], axis=-1)
        with jax.named_scope("eh_proj"):
            x = matmul(both, self.eh_proj[...], backend=ctx.backend.matmul)
        residual, cache, _ = block(Residual(x), ctx, cache)
        return residual.x, cache

    def normed(self, hidden: jax.Array, shards: Shards) -> jax.Array:
        """Hidden states [T, D] as the target's head takes them, without the target's own norm."""
        return self.final_norm(hidden, shards)

    def passed_on(self, hidden: jax.Array, shards: Shards) -> jax.Array:
        """What the next token takes of the layer's hidden states [T, D] in place of the target's."""
        return self.normed(hidden, shards) if self.is_normed else hidden


@dataclass(frozen=True)
class AbstractMtp:
    """The structure of a layer. Programs take the arrays of its weights in the order of `model.specs`; its cache is
    planned as that of any model. target_layers: how many layers the target has."""

    model: AbstractModel
    target_layers: int

    def merge(self, weights: Sequence[jax.Array]) -> MtpLayer:
        """The layer over these weights; call it inside a traced function."""
        return self.model.module(weights)


def layer_like(target: ModelConfig) -> LayerSpec:
    """The target's layer that its MTP layer is like. Raises ConfigError if no layer attends."""
    attending = [layer for layer in target.layers if not isinstance(layer.attention, Recurrent)]
    if not attending:
        raise ConfigError(f"{target.family} has no layer of attention, which an MTP layer would be like")
    return attending[-1]


def abstract_mtp(
    target: ModelConfig,
    dtype,
    *,
    normed: bool = False,
    quantization: Quantization | None = None,
    shards: Shards = Shards(),  # noqa: B008
) -> AbstractMtp:
    """The structure of a layer like the target's last one of attention; see `abstract_model`. Raises ConfigError for a
    target with several residuals, or whose layer borrows a cache."""
    last = layer_like(target)
    if target.streams > 1 or target.per_layer is not None or last.attention.cache_of is not None:
        raise ConfigError(f"the last layer of {target.family} takes more than a residual, and so predicts no tokens")
    config = replace(target, layers=(last,))
    layout = Layout(config, shards)
    build = lambda: MtpLayer(layout, jnp.dtype(dtype), is_normed=normed)  # noqa: E731
    segments = (Segment(0, config.layers),)
    return AbstractMtp(abstract_module(build, layout, segments, dtype, quantization=quantization), len(target.layers))
