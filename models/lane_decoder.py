"""The decoder of a model in lanes (see `inferlib.models.lanes`): how tokens enter them, and logits follow from them.

Shapes: T tokens; N lanes of a device; D width; V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepContext
from inferlib.models.blocks import Block
from inferlib.models.config import ConfigError, LaneSpec, LayerSpec
from inferlib.models.decoder import Decoder
from inferlib.models.lanes import LaneBlock, LaneNorm, LateSums, into_lanes
from inferlib.models.layers.norm import Norm
from inferlib.models.stream import Residual
from inferlib.ops.matmul import matmul
from inferlib.ops.residual_norm import Mailboxes
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class LaneDecoder(Decoder):
    """Hidden states are those of a device's lanes in turn, [T, N D], which the final norm follows."""

    @property
    def lanes(self) -> LaneSpec:
        """The lanes of its config."""
        assert self.config.lanes is not None
        return self.config.lanes

    def kind_of_block(self, spec: LayerSpec) -> type[Block]:
        return LaneBlock

    def build_final_norm(self, dtype) -> Norm:
        if self.lanes.lane_norms and not self.lanes.sum_before_norm:
            return LaneNorm(self.config.norm, self.lanes.lanes, self.config.dim, dtype)
        return super().build_final_norm(dtype)

    @property
    def head_inputs(self) -> int:
        return self.config.dim * (self.lanes.lanes if self.lanes.head == "lane" else 1)

    def must_have(self, feature_layers: tuple[int, ...], mailboxes: Mailboxes | None) -> None:
        if feature_layers:
            raise ConfigError(f"{self.config.family} has lanes, and features are of one residual")

    def first_residual(self, x: jax.Array, ctx: StepContext, mailboxes: Mailboxes | None) -> Residual:
        """The residuals before the first layer, of embeddings x [T, D]."""
        spec, count = self.lanes, self.lanes.lanes // ctx.shards.size(axes.LANES)
        lanes = jnp.broadcast_to(x[:, None], (x.shape[0], count, x.shape[1]))
        return Residual(lanes, late=(LateSums.none(lanes),) * spec.delay if spec.comm else ())

    def outputs(self, residual: Residual, ctx: StepContext) -> jax.Array:
        """The hidden states [T, N D] after the last layer."""
        return residual.x.reshape(ctx.tokens, -1)

    def normed(self, hidden: jax.Array, shards: Shards) -> jax.Array:
        return self.state(hidden, self.final_norm, shards)

    def state(self, hidden: jax.Array, norm: Norm, shards: Shards) -> jax.Array:
        """One normed state of all lanes [..., D], of [..., N D]: the norm of their sum, or the mean of their norms."""
        x = hidden.reshape(*hidden.shape[:-1], -1, self.config.dim)
        if self.lanes.sum_before_norm:
            return norm(shards.sum(x.sum(axis=-2), axes.LANES), shards)
        total = shards.sum(norm(x, shards).sum(axis=-2), axes.LANES)
        return total * jnp.asarray(1 / self.lanes.lanes, total.dtype)

    def head_logits(self, x: jax.Array, norm: Norm, shards: Shards, backend: str | None) -> jax.Array:
        product = partial(matmul, out_dtype=jnp.float32, backend=backend)
        if self.lanes.head == "replicate":
            return product(self.state(x, norm, shards), self.head[...])
        y = norm(x.reshape(x.shape[0], -1, self.config.dim), shards)
        if self.lanes.head == "lane":
            return product(shards.gather(y.reshape(x.shape), axes.LANES, dim=1), self.head[...])
        if y.shape[1] == 1:
            return product(y[:, 0], self.head[...])
        return into_lanes(y, self.head[...], dtype=jnp.float32).reshape(x.shape[0], -1)
