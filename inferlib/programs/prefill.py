"""Programs of one step over prefill chunks and decode rows, whole or in two: up to the logits, and from them on.

Shapes: P chunks of C tokens; B decode rows, each of C tokens if it has drafts; D width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from inferlib.models.batch import StepBatch, last_of_chunks
from inferlib.programs.arguments import ChunkInput, ChunkTable, Control, Logits, Masks, StepOutput
from inferlib.programs.forward_pass import Arrays, Pass, rows_batch
from inferlib.programs.row_state import RowState
from inferlib.programs.step_parts import StepParts
from inferlib.programs.unsettled import Inputs, of_device, on_device
from inferlib.programs.verification import verification_batch
from inferlib.sampling.sampler import Sampled, score
from inferlib.sharding import axes
from inferlib.sharding.stripe import Stripe

Outcome = tuple[Arrays, RowState, StepOutput]  # the cache, the state and the output of a program


def no_tokens() -> jax.Array:
    return jnp.zeros((1, 0), jnp.int32)


class Prefill(StepParts):
    """`step` is a whole program. Its two parts are `forward` or `forward_drafts`, and `choose` or `choose_settling`."""

    def step(self, weights: Arrays, cache: Arrays, state: RowState, packed: jax.Array, chunk: ChunkInput) -> Outcome:
        """One pass over P chunks and B decode rows: chunks whose prompt ends yield their first token."""
        cache, state, output = self.forward(weights, cache, state, packed, chunk)
        assert output.logits is not None
        state, chosen = self.choose(state, output.logits, Masks(None, None), chunk)
        return cache, state, chosen.with_forward(output)

    def forward(
        self, weights: Arrays, cache: Arrays, state: RowState, packed: jax.Array, chunk: ChunkInput | None = None
    ) -> Outcome:
        """A step up to its logits, over P chunks, if there are any, and B decode rows. packed: a `Control`."""
        state = state._replace(active=state.active & ~Control.unpack(packed).cancel)
        rows = self.program.with_room(state.head(self.program.key.rows))
        if chunk is None:
            return self.forward_rows(weights, cache, state, rows)
        return self.forward_chunks(weights, cache, state, rows, chunk)

    def forward_rows(self, weights: Arrays, cache: Arrays, state: RowState, rows: RowState) -> Outcome:
        """`forward` of decode rows alone."""
        output = StepOutput(no_tokens())
        ran, logits = self.forward_pass.row_logits(weights, cache, rows, self.forward_pass.mailboxes())
        cache, state = self.drafting.follow(weights, ran, state, rows_batch(rows), None)
        output = output._replace(load=ran.load, core=ran.core, depths=self.forward_pass.depths_of_rows(ran))
        return cache, state, output._replace(logits=Logits(None, logits), wanted=ran.wanted)

    def forward_chunks(
        self, weights: Arrays, cache: Arrays, state: RowState, rows: RowState, chunk: ChunkInput
    ) -> Outcome:
        """`forward` of chunks and rows. A program that embeds ends with hidden states instead of logits."""
        key, shards, output = self.program.key, self.program.config.shards, StepOutput(no_tokens())
        table = chunk.unpack()
        state = state.started(table.row, table.first != 0)
        if (how := self.program.config.propagation) is not None:
            skipped = how.skipped(table.start + table.length)
            state = state.with_skipped(table.row, table.first != 0, skipped)
        stripe = shards.stripe(axes.TOKENS)
        tokens = stripe.take(chunk.tokens, dim=1)
        live = jnp.where(rows.active, rows.length + 1, 0)
        batch = StepBatch(tokens, table.row, table.start, table.length, rows.token[:, None], live)
        prompts = stripe.take(jnp.arange(key.chunk)[None], dim=1) < table.length[:, None]
        counted = jnp.concatenate([prompts.reshape(-1), self.forward_pass.counted_rows(rows)])
        ran = self.forward_pass(weights, cache, batch, state, counted)
        cache, state = self.drafting.follow(weights, ran, state, batch, chunk)
        of_chunks = ran.hidden[: tokens.size].reshape(*tokens.shape, -1)
        if key.mode == "embed":
            pooled = self.forward_pass.pooled(ran.decoder, of_chunks, prompts, table.length)
            return cache, state, StepOutput(no_tokens(), detail=pooled, load=ran.load, core=ran.core)
        ends = last_of_chunks(of_chunks, table.length, shards)
        logits = self.forward_pass.logits(ran.decoder, jnp.concatenate([ends, ran.hidden[tokens.size :]]))
        parts = Logits(logits[: key.chunks], logits[key.chunks :] if key.rows else None)
        depths = self.forward_pass.depths(ran, tokens.shape, table.length)
        output = output._replace(load=ran.load, core=ran.core, logits=parts, wanted=ran.wanted, **depths)
        return cache, state, output._replace(detail=self.detail(ran, chunk, table, stripe))

    def detail(self, ran: Pass, chunk: ChunkInput, table: ChunkTable, stripe: Stripe) -> Sampled | jax.Array | None:
        """What is asked for of every token of the chunks, if anything is; `StepOutput.detail`. stripe: this device's
        part of a chunk's tokens."""
        key, width = self.program.key, self.program.key.chunk // self.program.config.shards.size(axes.TOKENS)
        if not key.detail:
            return None
        every = self.forward_pass.logits(ran.decoder, ran.hidden[: key.chunks * width])
        if key.detail == "logprobs":
            following = stripe.take(chunk.following(table), dim=1)
            every = score(every, jnp.maximum(following, 0).reshape(-1), self.program.vocabulary)
        return jax.tree.map(lambda x: x.reshape(key.chunks, width, 1, *x.shape[1:]), every)

    def forward_drafts(
        self, weights: Arrays, cache: Arrays, state: RowState, packed: jax.Array, drafts: jax.Array
    ) -> Outcome:
        """A decode step up to its logits, over each row's last token and the host's drafts [B, C - 1], -1 where it has
        none."""
        state = state._replace(active=state.active & ~Control.unpack(packed).cancel)
        rows, mailboxes = state.head(self.program.key.rows), self.forward_pass.mailboxes()
        ran, logits, counts = self.forward_pass.draft_logits(weights, cache, rows, drafts, mailboxes)
        batch, _ = verification_batch(rows, drafts, self.program.model.config.vocab)
        cache, state = self.drafting.follow(weights, ran, state, batch, None)
        output = StepOutput(no_tokens(), load=ran.load, core=ran.core, logits=Logits(None, logits))
        output = output._replace(depths=self.forward_pass.depths_of_rows(ran, counts))
        return cache, state, output._replace(inputs=of_device(ran.inputs) if any(ran.inputs) else None)

    def choose(
        self, state: RowState, logits: Logits, masks: Masks, chunk: ChunkInput | None = None
    ) -> tuple[RowState, StepOutput]:
        """A step from its logits on: decode rows get their next token, and prompts that end their first."""
        scored, output = self.program.key.mode == "logprobs", StepOutput(no_tokens())
        if logits.rows is not None:
            rows, whole = self.next_tokens.choose_rows(state.head(self.program.key.rows), logits.rows, masks)
            output = output._replace(tokens=whole.token, sampled=whole if scored else None)
            state = state.with_head(rows)
        if chunk is not None and logits.chunks is not None:
            state, first = self.next_tokens.admit(state, logits.chunks, masks.chunks, chunk, chunk.unpack())
            output = output._replace(chunk_tokens=first.token, chunk_sampled=first if scored else None)
        return state, output

    def choose_settling(
        self, weights: Arrays, cache: Arrays, state: RowState, logits: Logits, masks: Masks, inputs: Inputs
    ) -> Outcome:
        """`choose`, and the cache whose states have the tokens that stand. inputs: of the step's first program."""
        before = state.head(self.program.key.rows).length
        state, output = self.choose(state, logits, masks)
        decoder = self.program.model.merge(weights[: len(self.program.model.specs)])
        counts = state.head(self.program.key.rows).length - before
        return self.forward_pass.replay(decoder, cache, on_device(inputs), counts), state, output
