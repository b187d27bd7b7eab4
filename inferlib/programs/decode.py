"""Programs of decode steps: one token of each row a step, or with speculation up to C.

Shapes: B rows; K tokens that a row may generate; C tokens of a row in a step, 1 and its drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import SharedPrefixes
from inferlib.models.depthwise import Stages
from inferlib.ops.residual_norm import Mailboxes
from inferlib.programs.arguments import Control, StepOutput, unpack_prefixes
from inferlib.programs.depthwise import TRIPS_WITHOUT_HOST, DepthwiseDecoding, Quorum
from inferlib.programs.forward_pass import Arrays, rows_batch
from inferlib.programs.row_state import RowState
from inferlib.programs.step_parts import StepParts
from inferlib.programs.verification import Tally, accepted, gathered
from inferlib.speculation.settings import Speculation


class Step(NamedTuple):
    """What a decode step yields: tokens [B], or [C, B] with a tally; the load of experts, if that is counted; with
    speculation what became of drafts; steps of a loop's core, if tokens may leave it; and the pages that rows want, see
    `StepOutput`."""

    sampled: Any
    load: jax.Array | None
    tally: Tally | None = None
    core: jax.Array | None = None
    wanted: jax.Array | None = None


Stepped = tuple[Arrays, RowState, Mailboxes | None, Step]  # the cache, the rows, the mailboxes, and what a step yields


class Decode(StepParts):
    """`decode` is a whole program; the other methods are parts of it."""

    def decode(
        self,
        weights: Arrays,
        cache: Arrays,
        state: RowState,
        packed: jax.Array,
        prefixes: jax.Array | None = None,
    ) -> tuple[Arrays, RowState, StepOutput]:
        """`key.steps` decode steps of the first `key.rows` rows. Unless `config.counted`, it stops when no row needs
        more. packed: a `Control`; prefixes: see `unpack_prefixes`."""
        key, config, control = self.program.key, self.program.config, Control.unpack(packed)
        shared = None if prefixes is None else unpack_prefixes(prefixes)
        state = state._replace(active=state.active & ~control.cancel)
        rows, mailboxes = state.head(key.rows), self.forward_pass.mailboxes()
        if config.depthwise_batching and key.steps > 1 and key.rows > 1:
            return self.decode_depthwise(weights, cache, state, control)
        if key.steps == 1:
            cache, rows, _, one = self.decode_step(weights, cache, rows, mailboxes, shared)
            outs = one.sampled if one.tally else jax.tree.map(lambda x: x[None], one.sampled)
            total = one._replace(sampled=outs)
        else:
            step = partial(self.decode_step, weights, shared=shared)
            cache, rows, total = self.decode_steps(step, cache, rows, mailboxes, control)
        return cache, state.with_head(rows), self.output_of(total)

    def decode_step(
        self,
        weights: Arrays,
        cache: Arrays,
        rows: RowState,
        mailboxes: Mailboxes | None,
        shared: SharedPrefixes | None = None,
    ) -> Stepped:
        """One step. With speculation a row gets up to C tokens, else one."""
        if self.program.config.speculation is not None:
            return self.verify(self.program.config.speculation, weights, cache, rows, mailboxes, shared)
        ran, logits = self.forward_pass.row_logits(weights, cache, rows, mailboxes, shared)
        rows, sampled = self.next_tokens.advance_with_room(rows, logits)
        step = Step(sampled._replace(depth=ran.taken), ran.load, core=ran.core, wanted=ran.wanted)
        return ran.cache, rows, ran.mailboxes, step

    def verify(
        self,
        speculation: Speculation,
        weights: Arrays,
        cache: Arrays,
        rows: RowState,
        mailboxes: Mailboxes | None,
        shared: SharedPrefixes | None,
    ) -> Stepped:
        """`decode_step` with drafts. Of a key without, one draft is made to see whether it would stand."""
        cache, drafts = self.drafting.propose(speculation, weights, cache, rows)
        if self.program.key.drafts:
            ran, logits, counts = self.forward_pass.draft_logits(weights, cache, rows, drafts, mailboxes)
        else:
            ran, logits = self.forward_pass.row_logits(weights, cache, rows, mailboxes, shared)
            logits, counts = logits[:, None], rows.active.astype(jnp.int32)
        rows = self.drafting.with_pending(weights, ran, rows, counts)
        before = rows.length
        # XLA:CPU compiles a sampler as long as a layer; on accelerators each round of a loop would take time.
        loop = self.program.config.platform == "cpu" and self.program.branches_are_cheap
        advance = self.next_tokens.advance_at(rows, logits, drafts)
        rows, sampled, tally = accepted(advance, rows, drafts, logits.shape[1], loop=loop)
        cache = self.forward_pass.replay(ran.decoder, ran.cache, ran.inputs, rows.length - before)
        sampled = sampled._replace(depth=self.forward_pass.depths_of_rows(ran, counts))
        return cache, rows, ran.mailboxes, Step(sampled, ran.load, tally, ran.core)

    def decode_steps(
        self, step: Callable, cache: Arrays, rows: RowState, mailboxes: Mailboxes | None, control: Control
    ) -> tuple[Arrays, RowState, Step]:
        """The cache, the rows and the output after several steps."""
        program, begun = self.program, rows
        key, step = program.key, jax.jit(step)  # traced once, for the shapes and for the loop
        *_, shapes = jax.eval_shape(step, cache, rows, mailboxes)
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(sampled=None))
        lead, skipped = (key.most_tokens, key.rows), 1 if shapes.tally is None else 2
        outs = jax.tree.map(lambda s: jnp.full((*lead, *s.shape[skipped:]), -1, s.dtype), shapes.sampled)

        def more(i, rows):
            able = program.with_room(rows).active
            running, finished = program.any_row(jnp.stack([able, begun.active & ~rows.active]))
            return (i < key.steps) & running & ~(control.yield_early & finished)

        def body(i, carry):
            cache, rows, mailboxes, outs, total = carry
            done = rows.generated - begun.generated
            cache, rows, mailboxes, new = step(cache, rows, mailboxes)
            if new.tally is None:
                outs = jax.tree.map(lambda out, x: out.at[i].set(x), outs, new.sampled)
            else:
                outs = gathered(outs, done, new.sampled)
            return cache, rows, mailboxes, outs, jax.tree.map(jnp.add, total, new._replace(sampled=None))

        carry = cache, rows, mailboxes, outs, total
        if program.config.counted:
            cache, rows, _, outs, total = lax.fori_loop(0, key.steps, body, carry)
        else:
            _, (cache, rows, _, outs, total) = lax.while_loop(
                lambda carry: more(carry[0], carry[1][1]),
                lambda carry: (carry[0] + 1, body(*carry)),
                (jnp.int32(0), carry),
            )
        return cache, rows, total._replace(sampled=outs)

    def decode_depthwise(
        self, weights: Arrays, cache: Arrays, state: RowState, control: Control
    ) -> tuple[Arrays, RowState, StepOutput]:
        """`decode` of rows at different steps of a loop's core."""
        model, config, key = self.program.model, self.program.config, self.program.key
        (caches, _), rows = self.forward_pass.split(cache), state.head(key.rows)
        context = lambda rows: self.forward_pass.context_of_rows(rows, rows_batch(rows))  # noqa: E731
        decoding = DepthwiseDecoding(
            Stages(model.merge(weights)).with_core(context(rows)),
            context,
            self.next_tokens.advance,
            Quorum.of(model, config.depthwise_batching),
            key.most_tokens,
            TRIPS_WITHOUT_HOST if config.counted else 1,
        )
        caches, rows, outs, counts = decoding(caches, rows, control.yield_early)
        output = self.output_of(Step(outs, None, core=counts[None, None]))
        return self.program.plan.flatten(caches), state.with_head(rows), output

    def output_of(self, total: Step) -> StepOutput:
        """The output of a program, from what all its steps yield."""
        outs = total.sampled
        scored = outs._replace(depth=None) if self.program.key.mode == "logprobs" else None
        output = StepOutput(outs.token, scored, load=total.load, tally=total.tally, core=total.core)
        return output._replace(depths=outs.depth, wanted=total.wanted)
