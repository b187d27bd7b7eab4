"""The training step of an EAGLE-3 head: training-time test (Li et al., NeurIPS 2025, arXiv:2503.01840, section 3.2).

The head drafts from every position of a row at once. Its first pass is over the target's features, causally. Each
further pass takes its own hidden states of the pass before, one token further, and sees of a position's earlier tokens
the first pass's cells, and of those since then its own cells of each pass: what it will see when it drafts.

Shapes: B rows of T tokens; N features of size W; D width of the head; U tokens that can be drafted; K, G, h heads; J
passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.cache.plan import plan_cache
from inferlib.config import PoolSize
from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext
from inferlib.models.eagle3 import AbstractHead
from inferlib.models.stream import Branch
from inferlib.sharding.shards import Shards

CHAIN = 4  # drafts that are counted as one chain
_ALONE = Shards()
_SAVED = jax.checkpoint_policies.dots_with_no_batch_dims_saveable  # scores of attention are computed again

Cells = tuple[jax.Array, jax.Array]  # keys and values [B, T, K, h] of one pass


class TargetOutput(NamedTuple):
    """What the target says of rows: features [B, T, N, W], logits [B, T, U] of the tokens that can be drafted, and the
    numbers [B, T] of its most likely tokens among these, or -1 if they cannot be drafted."""

    features: jax.Array
    logits: jax.Array
    best: jax.Array


@dataclass(frozen=True)
class Target:
    """The model that is learned from, run over whole rows."""

    model: AbstractModel
    feature_layers: tuple[int, ...]

    def states(self, weights: Sequence[jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Features [B, T, N, W] and last hidden states [B, T, W] of rows of tokens [B, T]. Traceable."""
        rows, length = tokens.shape
        page = PoolSize(page=1 << (length - 1).bit_length())  # each row is one page
        plan = plan_cache(self.model, rows=rows, max_len=length, chunk=length, dtype=self.model.dtype, pool=page)
        cache = plan.view([jnp.zeros(array.shape, array.dtype) for array in plan.arrays])
        batch = StepBatch.of_chunks(tokens, jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, jnp.int32))
        ctx = StepContext(batch, self.model.config, plan.max_len, feature_layers=self.feature_layers)
        ran = self.model.merge(weights)(ctx, cache)
        assert ran.features is not None
        return ran.features.reshape(rows, length, *ran.features.shape[1:]), ran.hidden.reshape(rows, length, -1)

    def outputs(self, weights: Sequence[jax.Array], tokens: jax.Array, ids: jax.Array) -> TargetOutput:
        """ids [U]: the tokens that can be drafted, ascending. Traceable."""
        features, hidden = self.states(weights, tokens)
        decoder = self.model.merge(weights)

        def of_row(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # logits of all rows at once would take much memory
            logits = decoder.logits(x, _ALONE)
            best = logits.argmax(-1)
            place = jnp.clip(jnp.searchsorted(ids, best), 0, ids.size - 1)
            return logits[:, ids].astype(x.dtype), jnp.where(ids[place] == best, place, -1)

        return TargetOutput(features, *lax.map(of_row, hidden))

    def embeddings(self, weights: Sequence[jax.Array], tokens: jax.Array) -> jax.Array:
        """The rows of the embedding [..., D] of tokens, without factors. Traceable."""
        return jnp.take(self.model.merge(weights).embed[...], tokens, axis=0)


def cast(weights: Sequence[jax.Array], dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """The weights, those that are no integers in another dtype."""
    return tuple(w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w for w in weights)


def pass_attention(q: jax.Array, passes: Sequence[Cells], scale: float) -> jax.Array:
    """Attention of the last of J passes: q [B, T, K, G, h] -> [B, T, K, G, h], weights in float32.

    Position t sees the first pass's cells up to t, and of each later pass, the last included, its own cell.
    """
    (first, values), *later = passes
    scores = jnp.einsum("btkgh,bskh->bkgts", q, first, preferred_element_type=jnp.float32)
    length = q.shape[1]
    scores = jnp.where(jnp.arange(length) <= jnp.arange(length)[:, None], scores, -jnp.inf)
    apart = [jnp.einsum("btkgh,btkh->bkgt", q, k, preferred_element_type=jnp.float32)[..., None] for k, _ in later]
    weights = jax.nn.softmax(jnp.concatenate([scores, *apart], axis=-1) * scale, axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :length], values)
    for number, (_, v) in enumerate(later, length):
        out += jnp.moveaxis(weights[..., number], -1, 1)[..., None] * v[:, :, :, None]
    return out


class HeadState(NamedTuple):
    """The head during its passes over rows: hidden [B, T, D], and the cells of the passes so far."""

    hidden: jax.Array
    passes: tuple[Cells, ...] = ()


@dataclass(frozen=True)
class Passes:
    """The passes of a head over rows. head: its weights are those of `abstract_head`, as a tuple."""

    head: AbstractHead

    def begin(self, weights: Sequence[jax.Array], features: jax.Array) -> HeadState:
        """Before the first pass, over features [B, T, N, W]."""
        rows, length = features.shape[:2]
        fused = self.head.merge(weights).fuse(features.reshape(rows * length, *features.shape[2:]))
        return HeadState(fused.reshape(rows, length, -1))

    def advance(
        self, weights: Sequence[jax.Array], state: HeadState, embeddings: jax.Array
    ) -> tuple[HeadState, jax.Array]:
        """One pass, and its logits [B, T, U] float32. embeddings [B, T, D]: of the token that each position takes."""
        module, config = self.head.merge(weights), self.head.config.model
        (block,), (rows, length, _) = module.blocks, state.hidden.shape
        scale = self.head.config.attention.scale
        starts = jnp.full(rows, len(state.passes), jnp.int32)
        batch = StepBatch.of_chunks(jnp.zeros((rows, length), jnp.int32), starts, starts)
        ctx = StepContext(batch, config, config.context)

        def attend(y: jax.Array) -> tuple[Branch, tuple[Cells, ...]]:
            q, new = block.attn.project(y, ctx)
            q, key, value = (x.reshape(rows, length, *x.shape[1:]) for x in (q, *new))
            passes = (*state.passes, (key, value))
            out = pass_attention(q, passes, scale)
            out = ctx.matmul(out.reshape(-1, *out.shape[2:]), block.attn.o[...], contract=3)
            return Branch(out, (), block.attn_biases), passes

        taken, before = (x.reshape(rows * length, -1) for x in (embeddings.astype(state.hidden.dtype), state.hidden))
        hidden, passes = block.run(taken, before, ctx, attend)
        logits = module.logits(hidden, _ALONE).reshape(rows, length, -1)
        return HeadState(hidden.reshape(state.hidden.shape), passes), logits

    def over(
        self, weights: Sequence[jax.Array], features: jax.Array, embeddings: jax.Array, count: int
    ) -> Iterator[jax.Array]:
        """The logits [B, T, U] of `count` passes: that of position t and pass j, from 0, drafts token t + 2 + j, with
        the row's tokens for those before it. embeddings [B, T, D]: of the row's tokens."""
        state = self.begin(weights, features)
        for number in range(count):
            state, logits = self.advance(weights, state, jnp.roll(embeddings, -(1 + number), axis=1))
            yield logits


class Metrics(NamedTuple):
    """How well the head did: the loss, and of each of J passes the share of drafts that are what the target finds most
    likely; standing: how many of a chain's first `CHAIN` drafts are, before the first that is not, on average."""

    loss: jax.Array
    agreeing: jax.Array
    standing: jax.Array


@dataclass(frozen=True)
class TrainingTimeTest:
    """The loss of a head: of each pass the cross entropy with what the target says of the tokens that can be drafted,
    times `decay` to the number of the pass. What the target finds most likely but cannot be drafted teaches nothing.

    dtype: of the head's products; its weights are float32.
    """

    passes: Passes
    unroll: int
    decay: float

    def loss(
        self, weights: Sequence[jax.Array], outputs: TargetOutput, embeddings: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """The loss, a scalar, and the metrics. embeddings [B, T, D]: of the rows' tokens. Traceable."""
        length, weights = embeddings.shape[1], cast(weights, self.passes.head.model.dtype)
        state, losses, agreeing, standing = self.passes.begin(weights, outputs.features), [], [], jnp.float32(0)
        stands = jnp.ones(embeddings.shape[:2], bool)
        for number in range(self.unroll):
            ahead = 1 + number
            taken, said, best = (jnp.roll(x, -ahead, axis=1) for x in (embeddings, outputs.logits, outputs.best))
            counted = jnp.broadcast_to(jnp.arange(length) < length - ahead, best.shape)
            state, loss, agrees = jax.checkpoint(self.one, policy=_SAVED)(weights, state, taken, said, best)
            losses.append(jnp.where(counted & (best >= 0), loss, 0).sum() / counted.sum())
            agreeing.append((agrees & counted).sum() / counted.sum())
            stands &= agrees
            if number < CHAIN:
                standing += (stands & counted).sum() / counted.sum()
        total = jnp.stack(losses) @ self.decay ** jnp.arange(self.unroll)
        return total, Metrics(total, jnp.stack(agreeing), standing)

    def one(
        self, weights: Sequence[jax.Array], state: HeadState, taken: jax.Array, said: jax.Array, best: jax.Array
    ) -> tuple[HeadState, jax.Array, jax.Array]:
        """One pass, its loss at each position [B, T], and whether its draft is the target's choice."""
        state, logits = self.passes.advance(weights, state, taken)
        likely = jax.nn.softmax(said.astype(jnp.float32), axis=-1)
        loss = -(likely * jax.nn.log_softmax(logits, axis=-1)).sum(-1)
        return state, loss, logits.argmax(-1) == best
