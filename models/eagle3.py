"""EAGLE-3 heads: one layer that drafts a model's next tokens from hidden states of that model, the target (Li et al.,
NeurIPS 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
arXiv:2503.01840).

The hidden states of a token after three of the target's layers become one vector by `fuse`. Position t of the head
takes the vector of the target's position t and the embedding of token t + 1, and chooses token t + 2. To draft a
further token, it takes its own hidden state for the vector that the target does not have yet, and its choice as token.

Shapes: T tokens; N hidden states of the target, of size W; D width of the head; U tokens that it can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from inferlib.models.abstract import AbstractModel, abstract_module
from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block
from inferlib.models.config import AttentionSpec, ConfigError, LayerSpec, MlpSpec, ModelConfig
from inferlib.models.layers.attention import Attention
from inferlib.models.layers.embedding import look_up
from inferlib.models.layers.kv_cache import LayerCache
from inferlib.models.layers.norm import Norm
from inferlib.models.layers.param import param
from inferlib.models.layout import Layout
from inferlib.models.segments import Segment
from inferlib.models.stream import Branch
from inferlib.ops.matmul import matmul
from inferlib.sharding import axes
from inferlib.sharding.mesh import ShardingError
from inferlib.sharding.shards import Shards

C = TypeVar("C")


@dataclass(frozen=True)
class Eagle3Config:
    """What a head is.

    model: its width, norm and only layer; its vocabulary is what the head can choose, U tokens. target_vocab: tokens of
    the target; target_dim: W. feature_layers: after how many of the target's layers it takes hidden states. embeds:
    it embeds tokens itself; otherwise by the target's table, and D is W.

    Raises ConfigError if these contradict each other.
    """

    model: ModelConfig
    target_vocab: int
    target_dim: int
    feature_layers: tuple[int, ...]
    embeds: bool = False

    def __post_init__(self):
        layers = self.model.layers
        supported = (
            len(layers) == 1 and isinstance(layers[0].attention, AttentionSpec) and isinstance(layers[0].mlp, MlpSpec)
        )
        if not supported:
            raise ConfigError("an EAGLE-3 head has one layer, of attention and a dense feed-forward")
        if not self.feature_layers:
            raise ConfigError("an EAGLE-3 head takes hidden states after one layer of its model at least")
        if self.model.vocab > self.target_vocab:
            raise ConfigError(
                f"an EAGLE-3 head cannot choose among {self.model.vocab} tokens of a model of {self.target_vocab}"
            )
        if not self.embeds and self.model.dim != self.target_dim:
            raise ConfigError(
                f"an EAGLE-3 head of width {self.model.dim} cannot take the embeddings of a model of width "
                f"{self.target_dim}, and has none"
            )

    @property
    def layer(self) -> LayerSpec:
        return self.model.layers[0]

    @property
    def attention(self) -> AttentionSpec:
        spec = self.layer.attention
        assert isinstance(spec, AttentionSpec)
        return spec


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """After how many of a model's layers its hidden states are taken, unless a head says otherwise: low, middle and
    high, as published; evenly spread in models of less than 7 layers, where these would meet."""
    if layers < 7:
        return round(layers / 4), round(layers / 2), round(layers * 3 / 4)
    return 2, layers // 2, layers - 3


class Eagle3Block(Block):
    """The layer: attention reads the normed embedding beside the normed hidden state, which is the residual.

    x = hidden + attention([norm(embedding), norm(hidden)]); x + mlp(norm(x)).
    """

    def __init__(self, spec: LayerSpec, layout: Layout, dtype):
        super().__init__(spec, layout, dtype)
        config = layout.config
        assert isinstance(spec.attention, AttentionSpec)  # as `Eagle3Config` says
        heads = layout.heads(spec.attention)
        self.attn = Attention(spec.attention, heads, config.norm, config.dim, dtype, inputs=2 * config.dim)
        self.hidden_norm = Norm(config.norm, config.dim, dtype)

    def run(
        self,
        embeddings: jax.Array,
        hidden: jax.Array,
        ctx: StepContext,
        attend: Callable[[jax.Array], tuple[Branch, C]],
    ) -> tuple[jax.Array, C]:
        """The hidden states after the layer, [T, D], and cells. attend: the mixer, of inputs [T, 2 D]."""
        shards = ctx.shards
        normed = self.pre_attn_norm(embeddings, shards), self.hidden_norm(hidden, shards)
        with jax.named_scope("attention"):
            branch, cells = attend(jnp.concatenate(normed, axis=-1))
            x = hidden + branch.total(shards)
        with jax.named_scope("mlp"):
            branch, _ = self.feed(self.pre_mlp_norm(x, shards), ctx, None)
            return x + branch.total(shards), cells


class Eagle3Head(nnx.Module):
    """Fused features, embeddings of tokens and a cache in; hidden states, and logits of drafts, out. Build it under
    `nnx.eval_shape` (see `abstract_head`).

    Where heads, feed-forward and vocabulary are split, it is split alike. Raises ShardingError for a mesh that splits
    the width, or tokens between products.
    """

    def __init__(self, layout: Layout, config: Eagle3Config, dtype):
        shards, dim = layout.shards, config.model.dim
        if shards.size(axes.EMBED) > 1 or shards.splits_tokens:
            raise ShardingError(
                f"rules {shards.preset!r} split the model's width or tokens between products, which an EAGLE-3 head "
                "cannot: use tp, cp, helix or dp_attention"
            )
        self.config = config
        self.fc = param(
            (len(config.feature_layers) * config.target_dim, dim), (axes.STREAMS, axes.EMBED), dtype, contracting=(0,)
        )
        self.blocks = nnx.List([Eagle3Block(config.layer, layout, dtype)])
        self.final_norm = Norm(config.model.norm, dim, dtype)
        self.head = param((dim, layout.vocab), (axes.EMBED, axes.VOCAB), dtype, contracting=(0,))
        # As published: the id of what the head chooses, less its number.
        self.d2t = param((config.model.vocab,), (axes.DRAFTS,), jnp.int32, "zeros")
        if config.embeds:
            count = shards.size(axes.VOCAB)
            rows = -(-config.target_vocab // count) * count
            self.embed = param((rows, dim), (axes.VOCAB, axes.EMBED), dtype)

    def fuse(self, features: jax.Array, backend: str | None = None) -> jax.Array:
        """The target's hidden states [T, N, W] -> [T, D]. backend: see `matmul`."""
        with jax.named_scope("fc"):
            dtype = self.final_norm.weight.dtype
            return matmul(features.reshape(features.shape[0], -1).astype(dtype), self.fc[...], backend=backend)

    def embedding(self, tokens: jax.Array, table: jax.Array, shards: Shards) -> jax.Array:
        """The embeddings [T, D] of the target's tokens [T]. table: the target's `embed`, unless the head has its own.

        Factors of the target are left out: the layer norms embeddings.
        """
        table = self.embed[...] if self.config.embeds else table
        x = look_up(table, tokens, shards).astype(self.final_norm.weight.dtype)
        return shards.sum(x, axes.VOCAB) if shards.size(axes.VOCAB) > 1 else x

    def __call__(
        self, embeddings: jax.Array, hidden: jax.Array, ctx: StepContext, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """The hidden states [T, D] of the head, and its cache with the cells of these tokens.

        embeddings [T, D]: of the tokens after those that hidden is of. hidden [T, D]: fused features, or what the head
        gave for the token before. ctx: of the head's `ModelConfig`; its batch has the positions of `hidden`.
        """
        (block,) = self.blocks
        return block.run(embeddings, hidden, ctx, lambda y: block.attend(y, ctx, cache))

    def logits(self, hidden: jax.Array, shards: Shards, backend: str | None = None) -> jax.Array:
        """Hidden states [T, D] -> logits [T, U] float32 of drafts, of this device's part of U. backend: see `matmul`.

        `target_ids` says which tokens the columns are.
        """
        with jax.named_scope("head"):
            y = self.final_norm(hidden, shards)
            logits = matmul(y, self.head[...], out_dtype=jnp.float32, backend=backend)
            if logits.shape[1] * shards.size(axes.VOCAB) > self.config.model.vocab:
                ids = jnp.arange(logits.shape[1]) + shards.index(axes.VOCAB) * logits.shape[1]
                logits = jnp.where(ids < self.config.model.vocab, logits, -jnp.inf)
            return logits

    def target_ids(self, drafts: jax.Array) -> jax.Array:
        """The target's ids of drafts, numbers of columns of `logits`."""
        return drafts + jnp.take(self.d2t[...], drafts, mode="clip")


@dataclass(frozen=True)
class AbstractHead:
    """A head's structure. Programs take the arrays of its weights in the order of `model.specs`; its cache is planned
    as that of any model, by `cache.plan.plan_cache(head.model, ...)`."""

    config: Eagle3Config
    model: AbstractModel

    def merge(self, weights: Sequence[jax.Array]) -> Eagle3Head:
        """The head over these weights; call it inside a traced function."""
        return self.model.module(weights)


def abstract_head(config: Eagle3Config, dtype, *, shards: Shards = Shards()) -> AbstractHead:  # noqa: B008
    """The structure of a head with weights of `dtype`; see `abstract_model`."""
    layout, segments = Layout(config.model, shards), (Segment(0, config.model.layers),)
    build = lambda: Eagle3Head(layout, config, jnp.dtype(dtype))  # noqa: E731
    return AbstractHead(config, abstract_module(build, layout, segments, dtype))
