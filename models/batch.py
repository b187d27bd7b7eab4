"""One step's tokens: prefill chunks and decode rows that share a pass over the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from inferlib.attention_values import SharedPrefixes
from inferlib.models.config import ModelConfig, RopeSpec
from inferlib.models.depth import Depths
from inferlib.models.layers.rope import rope_angles
from inferlib.ops.adapted_matmul import AdaptedWeight, adapted_matmul
from inferlib.ops.backend import Backend
from inferlib.ops.matmul import Activations, Weight, matmul
from inferlib.ops.sparse_prefill import SparsePrefill
from inferlib.ops.token_propagation import TokenPropagation
from inferlib.sharding import axes
from inferlib.sharding.shards import Shards


class StepBatch(NamedTuple):
    """P chunks of C tokens and B decode rows of N tokens; either may be 0.

    chunk_tokens [P, C]: padded at the end with anything; where tokens are dealt out, this device's. chunk_rows [P]:
    cache row of each chunk, rows or more if the slot is absent; chunk_starts [P]: position of the first token;
    chunk_lengths [P]: tokens that are not padding, 0 if the slot is absent;
    decode_tokens [B, N]: row b's last tokens; decode_lengths [B]: positions of row b including these, 0 if it is
    inactive; decode_counts [B]: how many of the tokens count, the last ones, behind padding; None: all, and N is 1.
    All int32.
    """

    chunk_tokens: jax.Array
    chunk_rows: jax.Array
    chunk_starts: jax.Array
    chunk_lengths: jax.Array
    decode_tokens: jax.Array
    decode_lengths: jax.Array
    decode_counts: jax.Array | None = None

    @property
    def tokens(self) -> jax.Array:
        """[T] with T = P * C + B * N."""
        return jnp.concatenate([self.chunk_tokens.reshape(-1), self.decode_tokens.reshape(-1)])

    @property
    def decode_positions(self) -> jax.Array:
        """[B, N] position of each token of the decode rows; -1 for an inactive row and for padding."""
        count = self.decode_tokens.shape[1]
        positions = self.decode_lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)
        if self.decode_counts is None:
            return positions
        return jnp.where(jnp.arange(count) >= count - self.decode_counts[:, None], positions, -1)

    @staticmethod
    def of_chunks(tokens: jax.Array, rows: jax.Array, starts: jax.Array) -> StepBatch:
        """A batch of chunks without padding."""
        # jnp, not np: XLA of jax 0.11 crashes on a captured constant without elements inside shard_map.
        none = jnp.zeros((0,), jnp.int32)
        return StepBatch(tokens, rows, starts, jnp.full_like(starts, tokens.shape[1]), none[:, None], none)

    @staticmethod
    def of_rows(tokens: jax.Array, lengths: jax.Array, counts: jax.Array | None = None) -> StepBatch:
        """A batch of decode rows, tokens [B] or [B, N]."""
        none, tokens = jnp.zeros((0,), jnp.int32), tokens[:, None] if tokens.ndim == 1 else tokens
        return StepBatch(none.reshape(0, 0), none, none, none, tokens, lengths, counts)


class CacheLevel(NamedTuple):
    """The cache of layers that keep more than those of level 0, see `inferlib.models.cache_levels`.

    table [R, M] int32: of these layers' pages. ahead [R] int32: how many cells more a row has there. limit (static): no
    cell of this step reaches it.
    """

    table: jax.Array
    ahead: jax.Array
    limit: int | None

    def of(self, batch: StepBatch) -> StepBatch:
        """A batch whose cells are numbered as level 0 has them, as this level has them."""
        starts = batch.chunk_starts + jnp.take(self.ahead, batch.chunk_rows, mode="clip")
        lengths = batch.decode_lengths
        lengths = jnp.where(lengths > 0, lengths + self.ahead[: lengths.size], lengths)
        return batch._replace(chunk_starts=starts, decode_lengths=lengths)


@dataclass(frozen=True)
class StepContext:
    """What every layer of a step shares, computed once.

    table [R, M] int32: position p of row r is in page table[r, p // S], for the S positions of a page; None: row r's
    cache is page r. run (static): no such run of a chunk's tokens from its first on spans two pages; None: no chunk
    does. limit (static): no position of this step reaches it. max_len: the longest sequence, which fixes
    length-dependent rotary frequencies. counted [T] bool: tokens whose choices of experts are counted; None: none
    are. prefixes: what decode rows share, if that is to be read once. feature_layers (static): numbers of layers behind
    which the hidden states are returned too, see `Decoder`. adapters [R] int32: the slot of each row's adapter; None:
    weights have no adapters. selected (static): how many blocks of a row decode attention reads where the cache has
    summaries of them; None: all. sparse (static): how chunks list the blocks that they attend to; None: they attend to
    all. depths: how many steps of a loop's core each row takes; None: all. dropped [R] int32: how many positions before
    a row's tokens its cache no longer has; None: it has all. The batch, table and limit number a row's cells without
    them, and `positions` count them. levels: of layers that keep more than this says, those of level 1 first.
    propagation (static): which tokens of chunks the later layers see; None: all. skipped [R] int32: how many cells
    fewer a row has in these layers, if they see fewer.
    """

    batch: StepBatch
    config: ModelConfig
    max_len: int
    limit: int | None = None
    backend: Backend = field(default_factory=Backend)
    shards: Shards = field(default_factory=Shards)
    counted: jax.Array | None = None
    table: jax.Array | None = None
    run: int | None = None
    prefixes: SharedPrefixes | None = None
    feature_layers: tuple[int, ...] = ()
    adapters: jax.Array | None = None
    selected: int | None = None
    sparse: SparsePrefill | None = None
    dropped: jax.Array | None = None
    depths: Depths | None = None
    levels: tuple[CacheLevel, ...] = ()
    propagation: TokenPropagation | None = None
    skipped: jax.Array | None = None

    def of_level(self, level: int) -> StepContext:
        """The step as layers of a level of the cache see it."""
        return self._of_levels[level - 1] if level and self.levels else self

    @cached_property
    def _of_levels(self) -> tuple[StepContext, ...]:
        made = []
        for level in self.levels:
            batch, places = level.of(self.batch), {"table": level.table, "limit": level.limit}
            ctx = replace(self, batch=batch, **places, levels=())
            vars(ctx).update({name: getattr(self, name) for name in ("positions", "rows", "rope")})  # the same in all
            made.append(ctx)
        return tuple(made)

    @property
    def tokens(self) -> int:
        """T."""
        return self.batch.chunk_tokens.size + self.batch.decode_tokens.size

    def matmul(self, x: Activations, w: Weight | AdaptedWeight, **options) -> jax.Array:
        """`ops.matmul.matmul` by this step's backend; where adapters change the weight, with each token's own."""
        options["backend"] = self.backend.matmul
        if not isinstance(w, AdaptedWeight):
            return matmul(x, w, **options)
        return adapted_matmul(x, w, self.slots if x.shape[0] == self.tokens else self.mlp_slots, **options)

    @cached_property
    def slots(self) -> jax.Array:
        """[T] the slot of each token's adapter. Absent chunks have any."""
        assert self.adapters is not None
        return jnp.take(self.adapters, self.rows, mode="clip")

    @cached_property
    def mlp_slots(self) -> jax.Array:
        """The slots of the tokens that the feed-forward takes."""
        return self.shards.gather_for_mlp(self.slots)

    @cached_property
    def chunk_positions(self) -> jax.Array:
        """[P, C] position of each token of the chunks, as its row's cells are numbered."""
        stripe, (_, width) = self.shards.stripe(axes.TOKENS), self.batch.chunk_tokens.shape
        offsets = jnp.arange(0, width * stripe.count, stripe.count, dtype=jnp.int32) + stripe.index
        return self.batch.chunk_starts[:, None] + offsets

    @cached_property
    def positions(self) -> jax.Array:
        """[T] position of each token; -1 for an inactive decode row and for padding before its tokens."""
        cells = jnp.concatenate([self.chunk_positions.reshape(-1), self.batch.decode_positions.reshape(-1)])
        if self.dropped is None:
            return cells
        return jnp.where(cells < 0, cells, cells + jnp.take(self.dropped, self.rows, mode="clip"))

    @cached_property
    def mlp_active(self) -> jax.Array:
        """Whether the row of each token is active: [T] of the tokens that the feed-forward takes."""
        return self.shards.gather_for_mlp(self.positions) >= 0

    @cached_property
    def experts_active(self) -> jax.Array:
        """`mlp_active` of all devices that experts are split over."""
        return self.shards.gather(self.shards.gather_for_mlp(self.positions), axes.EXPERTS, dim=0) >= 0

    @cached_property
    def rows(self) -> jax.Array:
        """[T] the row of each token."""
        rows, (_, width) = self.batch.chunk_rows, self.batch.chunk_tokens.shape
        count, each = self.batch.decode_tokens.shape
        return jnp.concatenate([jnp.repeat(rows, width), jnp.repeat(jnp.arange(count, dtype=jnp.int32), each)])

    @cached_property
    def written(self) -> jax.Array:
        """[T] position of each token whose cell is written; -1 for an inactive decode row and for padding, whose place
        may lie in another row's page."""
        batch, positions = self.batch, self.chunk_positions
        valid = positions < (batch.chunk_starts + batch.chunk_lengths)[:, None]
        return jnp.concatenate([jnp.where(valid, positions, -1).reshape(-1), batch.decode_positions.reshape(-1)])

    @cached_property
    def rope(self) -> dict[RopeSpec, tuple[jax.Array, jax.Array]]:
        """cos and sin [T, dim / 2] for each kind of rotary embedding in the model."""
        specs = dict.fromkeys(layer.attention.rope for layer in self.config.layers)  # in an order that no hash decides
        return {spec: rope_angles(spec, self.max_len, self.positions) for spec in specs if spec is not None}


def last_of_chunks(x: jax.Array, lengths: jax.Array, shards: Shards) -> jax.Array:
    """[P, D] of the last of `lengths` [P] tokens of each chunk, of x [P, C, D]. Where tokens are dealt out, x is of
    this device's, and the device that has the last one tells the others."""
    stripe, last = shards.stripe(axes.TOKENS), jnp.maximum(lengths - 1, 0)
    slots = stripe.slots(last, x.shape[1], ring=False)
    hidden = jnp.take_along_axis(x, slots[:, None, None], axis=1, mode="fill", fill_value=0)[:, 0]
    return shards.sum(hidden, axes.TOKENS)


def rolled(x: jax.Array, counts: jax.Array) -> jax.Array:
    """x [B, N, ...], each row rolled so that its first `counts` entries are the last ones, as decode rows have their
    tokens; or, negative, back."""
    width = x.shape[1]
    at = (jnp.arange(width) + counts[:, None]) % width
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
