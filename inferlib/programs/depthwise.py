"""Decoding in which rows of one batch are at different steps of a loop's core, for models whose tokens leave it early:
continuous depth-wise batching (see `inferlib.models.depthwise`).

A pass over all rows runs as many steps as the deepest of their tokens takes. Here a trip runs one step of the core for
every row that is in it. A row whose token has left waits, until enough do or none is in the core. Then one pass of
coda, head, sampler and, for the tokens that were sampled, prelude serves all that wait, and they go on in the core. A
token's number decides its noise, so tokens are those of passes, whatever the others do.

A row is left where it is when a program ends, and goes on from there in the next one. So the program ends as soon as a
row has as many tokens as it may generate, and no step is lost. Where a step for prompts comes between, which runs a
whole pass, rows begin their tokens anew. So they do behind programs of one step, which are passes too: streams that get
each token by itself would wait for two phases each time. A program of one row is a pass as well, as it waits for none.

What it costs. A step of the core reads weights and so takes a time S, the rest of the model R, for however few rows. B
rows of mean depth d and most depth m take (m S + R) / B for each token in passes. If E rows must wait, that rest is R /
E for each token, and one that leaves waits for the (E - 1) / 2 others in the mean, so that so many of the B rows are
idle in each trip:

    S d / (B - (E - 1) / 2) + R / E

which is least at E = q (B + 1/2) / (1 + q / 2) with q = sqrt(2 R / (S d)). It wins where the core is most of the model
and depths differ: for S d = 19 S, m = 31 and R = 1.3 S of 16 rows, 1.6 S for each token instead of 2.0. It loses where
R is as large as the steps that are saved.

Shapes: B rows; K tokens that a row may generate; D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepContext
from inferlib.models.depth import Depths
from inferlib.models.depthwise import Caches, Inside, StageCaches, Stages
from inferlib.programs.row_state import RowState
from inferlib.programs.verification import gathered
from inferlib.sampling.sampler import Sampled

# Trips between two looks at who waits, where a loop that ends by a condition waits for the host at each look: GPUs.
TRIPS_WITHOUT_HOST = 4


@dataclass(frozen=True)
class Quorum:
    """How many rows wait before they are served.

    rows: this number, or all rows if there are fewer; None: as many as cost least. ratio: q of the module's rule.
    """

    rows: int | None
    ratio: float

    @staticmethod
    def of(model: AbstractModel, option: bool | int) -> Quorum:
        """The quorum that costs least. option: `EngineConfig.depthwise_batching`.

        It follows from the bytes of weights that a step of the core and the rest of the model read, for tokens that
        take half of the steps. Around the best quorum the cost hardly changes.
        """
        config, core, rest = model.config, 0, 0
        assert config.loop is not None
        for weight in model.weights:
            size = 0 if model.looks_up(weight.name) else sum(array.nbytes for array in weight.arrays)
            if model.passes(weight) == config.loop.steps:
                core += size
            else:
                rest += size
                # By this rule each step has the head's distribution.
                core += size if config.loop.early_exit == "kl" and weight.block is None else 0
        ratio = math.sqrt(2 * rest / (core * config.loop.steps / 2))
        return Quorum(None if option is True else int(option), ratio)

    def __call__(self, going: jax.Array) -> jax.Array:
        """How many rows wait before the rest of the model runs for them. going: a scalar, how many rows go on."""
        if self.rows is not None:
            return jnp.minimum(self.rows, going)
        best = jnp.round(self.ratio * (going + 0.5) / (1 + self.ratio / 2)).astype(jnp.int32)
        return jnp.clip(best, 1, jnp.maximum(going, 1))


class Limits(NamedTuple):
    """steps [B] int32: how many each row's tokens take at most; thresholds [B] float32: by which they leave earlier."""

    steps: jax.Array
    thresholds: jax.Array


class Carry(NamedTuple):
    """rows: without `core`, which is in `inside`. left [B] bool: rows that wait, as their token has left the core. outs
    [K, B]: what was sampled, each row's tokens in order, and -1 behind them. trips [B]: how many were run, the same of
    each row; others [3] int32: the other counts of `Taken`."""

    caches: StageCaches
    rows: RowState
    inside: Inside
    left: jax.Array
    outs: Sampled
    trips: jax.Array
    others: jax.Array

    @property
    def running(self) -> jax.Array:
        """The rows [B] whose tokens are in the core."""
        assert self.rows.taken is not None
        return self.rows.active & (self.rows.taken >= 0) & ~self.left


@dataclass(frozen=True)
class DepthwiseDecoding:
    """context: of the last tokens of these rows, if they are active. advance: see `NextTokens.advance`. most: K.
    together: trips between two looks at who waits."""

    stages: Stages
    context: Callable[[RowState], StepContext]
    advance: Callable[[RowState, jax.Array], tuple[RowState, Sampled]]
    quorum: Quorum
    most: int
    together: int

    def __call__(
        self, caches: Caches, rows: RowState, yield_early: jax.Array
    ) -> tuple[Caches, RowState, Sampled, jax.Array]:
        """The caches and the rows in the end, what was sampled [K, B], and the counts of `Taken`. yield_early: end once
        a row has finished."""
        begun, limits = rows, self.limits(rows)

        def more(carry: Carry) -> jax.Array:
            able, count = carry.rows.active, carry.rows.generated - begun.generated
            stops = jnp.any(able & (count >= self.most)) | (yield_early & jnp.any(begun.active & ~able))
            return jnp.any(able) & ~stops

        def trips(carry: Carry) -> Carry:
            return lax.fori_loop(0, self.together, lambda i, carry: self.trip(carry, limits), carry)

        def served(carry: Carry) -> Carry:
            return self.served(lax.while_loop(self.goes_on, trips, carry), begun, limits)

        ended = lax.while_loop(more, served, self.first(caches, rows, limits))
        passes, *others = ended.others
        counts = jnp.stack([passes, ended.trips[0], *others])
        rows = ended.rows._replace(core=jnp.stack(ended.inside, axis=1))
        return self.stages.joined(ended.caches), rows, ended.outs, counts

    def limits(self, rows: RowState) -> Limits:
        assert rows.depth is not None
        depths, every = Depths(rows.depth, rows.threshold), jnp.arange(rows.active.size, dtype=jnp.int32)
        return Limits(depths.of(every, self.stages.steps), depths.thresholds_of(every))

    def first(self, caches: Caches, rows: RowState, limits: Limits) -> Carry:
        assert rows.core is not None
        inside, parts, zeros = Inside(rows.core[:, 0], rows.core[:, 1]), self.stages.split(caches), rows.length * 0
        rows = rows._replace(core=None)
        carry = Carry(parts, rows, inside, zeros > 0, Sampled(zeros), zeros, jnp.zeros(3, jnp.int32))
        sampled = jax.eval_shape(lambda: self.sampled(carry, rows.active, limits)[2])
        return carry._replace(outs=jax.tree.map(lambda s: jnp.full((self.most, *s.shape), -1, s.dtype), sampled))

    def goes_on(self, carry: Carry) -> jax.Array:
        """Whether a row is in the core, and too few wait."""
        going, count = carry.rows.active.sum(dtype=jnp.int32), carry.running.sum(dtype=jnp.int32)
        return (count > 0) & (going - count < self.quorum(going))

    def trip(self, carry: Carry, limits: Limits) -> Carry:
        """A step of the core for the rows in it."""
        running, rows, old = carry.running, carry.rows, carry.inside.state
        assert rows.taken is not None
        ctx = self.context(rows._replace(active=running))
        new, caches = self.stages.step(ctx, carry.caches, carry.inside, jnp.where(running, rows.taken, 0))
        taken = rows.taken + running
        small = self.stages.rule(ctx)(old, new) < limits.thresholds
        left = carry.left | (running & (small | (taken >= limits.steps)))
        inside = carry.inside._replace(state=jnp.where(running[:, None], new, old))
        rows = rows._replace(taken=taken)
        return carry._replace(caches=caches, rows=rows, inside=inside, left=left, trips=carry.trips + 1)

    def served(self, carry: Carry, begun: RowState, limits: Limits) -> Carry:
        """Sample the next token of the rows that wait, and run the prelude for those that go on here."""
        ends, done = carry.rows.active & carry.left, carry.rows.generated - begun.generated
        assert carry.rows.taken is not None
        steps = jnp.where(ends, carry.rows.taken, 0)
        others = carry.others + jnp.stack([jnp.int32(1), ends.sum(dtype=jnp.int32), steps.sum(dtype=jnp.int32)])
        caches, rows, sampled = self.sampled(carry, ends, limits)
        assert rows.taken is not None
        outs = gathered(carry.outs, done, jax.tree.map(lambda x: x[None], sampled))
        # One that has all its tokens begins in the next program: it may lack the page of the next one.
        starts = rows.active & (rows.taken < 0) & (rows.generated - begun.generated < self.most)
        first, caches = self.stages.prelude(self.context(rows._replace(active=starts)), caches)
        inside = Inside(*(jnp.where(starts[:, None], *pair) for pair in zip(first, carry.inside, strict=True)))
        rows = rows._replace(taken=jnp.where(starts, 0, rows.taken))
        return Carry(caches, rows, inside, jnp.zeros_like(carry.left), outs, carry.trips, others)

    def sampled(self, carry: Carry, ends: jax.Array, limits: Limits) -> tuple[StageCaches, RowState, Sampled]:
        """The caches, the rows with the next token of those in `ends` [B], and these, -1 of the others."""
        rows = carry.rows
        assert rows.taken is not None
        ctx = self.context(rows._replace(active=ends))
        caches = self.stages.filled(ctx, carry.caches, jnp.where(ends, rows.taken, 1), limits.steps)
        hidden, caches = self.stages.coda(ctx, caches, carry.inside.state)
        logits = self.stages.decoder.logits_in(ctx)(hidden)
        new, sampled = self.advance(rows._replace(active=ends), logits)
        floats = jnp.where(ends[:, None], new.floats, rows.floats)
        new = new._replace(active=jnp.where(ends, new.active, rows.active), floats=floats)
        return caches, new, sampled._replace(depth=rows.taken)
