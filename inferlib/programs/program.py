"""The compiled programs: a step over prefill chunks and decode rows, and several decode steps.

A program is a pure function of flat tuples (weights, cache), the row state and a few small host arrays.
Cache and state are donated. Sampling is inside; only tokens and asked-for log-probabilities come back.

Where the host has a part in the choice of tokens, a step is two programs: `forward`, of the mode "processed", returns
the logits, and `choose`, of another mode, samples from logits that the host may have changed, among the tokens that its
masks leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from inferlib.attention_values import SharedPrefixes
from inferlib.cache.plan import CachePlan
from inferlib.config import EngineConfig
from inferlib.models.abstract import AbstractModel
from inferlib.models.batch import StepBatch, StepContext, last_of_chunks
from inferlib.models.blocks import sums_feed_norms
from inferlib.models.config import ModelConfig
from inferlib.models.decoder import Decoder
from inferlib.models.depth import Depths
from inferlib.models.depthwise import Stages
from inferlib.models.replay import replay
from inferlib.ops.backend import Backend
from inferlib.ops.residual_norm import Mailboxes, choose_all_reduce, open_mailboxes
from inferlib.programs.depthwise import TRIPS_WITHOUT_HOST, DepthwiseDecoding, Quorum
from inferlib.programs.row_state import NUMBERS, RowState, map_state, of_loop, state_axes
from inferlib.programs.unsettled import Inputs, has_states, of_device, on_device, spec_of
from inferlib.programs.verification import (
    Advance,
    Tally,
    accepted,
    gathered,
    hidden_of_tokens,
    verification_batch,
)
from inferlib.sampling.drafted import sample_drafted
from inferlib.sampling.sampler import (
    Sampled,
    Vocabulary,
    count_tokens,
    follow_bad_words,
    is_stop,
    mark_prompt,
    sample,
    score,
    unpack,
)
from inferlib.sharding import axes
from inferlib.speculation.drafter import Caches, DraftRows, DraftTools, Followed, ModelDrafter, Pending
from inferlib.speculation.settings import Speculation

Mode = Literal["greedy", "sample", "logprobs", "processed", "embed"]
MODES: tuple[Mode, ...] = get_args(Mode)  # of those that sample, the programs of each do all that those before do
DEVICE_MODES = MODES[:3]  # in which tokens are chosen on the device: what is compiled unless another is asked for
_TILE_ROWS = 16  # rows of a tile of those that share a prefix
BRANCHES_ARE_CHEAP = ("cpu", "tpu")  # platforms; GPUs wait for the host at each, Trainium has none
LEAST_SHARING = 8  # rows of the smallest programs that read a shared prefix once


@dataclass(frozen=True, order=True)
class ProgramKey:
    """What a program is specialised for.

    rows: decode rows (B) of each replica; limit: no position reaches it; mode: what sampling must do, "processed" of a
    part before it, or "embed", which does without; steps: decode steps. chunks, chunk: P chunks of C prefill tokens of
    each replica (then steps is 1).
    detail: what else a prefill returns for every prompt position, log-probabilities of the next token or the logits; or
    "embed": its hidden states, pooled over each chunk. cascade: decode steps read a prefix that rows share once for all
    of them. part: of a step, if that is two programs: up to the logits, or from them on, where limit is 0. drafts:
    tokens of each row that a decode step verifies beside the last one; of a step of two programs, the host gives them.
    """

    mode: Mode
    rows: int
    limit: int
    steps: int = 1
    chunks: int = 0
    chunk: int = 0
    detail: Literal["", "logprobs", "logits", "embed"] = ""
    cascade: bool = False
    part: Literal["", "forward", "choose"] = ""
    drafts: int = 0

    @property
    def most(self) -> int:
        """Most tokens of a row that a call generates; the least, of a row that goes on, are `steps`."""
        return self.steps * (1 + self.drafts)

    @property
    def decoded(self) -> int:
        """Tokens of decode rows in one step."""
        return self.rows * (1 + self.drafts)

    @property
    def tokens(self) -> int:
        """Tokens of a step: of decode rows, and of chunks of prompts."""
        return self.decoded + self.chunks * self.chunk

    def following(self, mode: Mode) -> ProgramKey:
        """The key of the program that chooses tokens from the logits of this one."""
        return replace(self, mode=mode, limit=0, detail="", part="choose")

    def __str__(self) -> str:
        detail = f" {self.detail}" if self.detail not in ("", self.mode) else ""
        prefill = f"prefill {self.chunks}x{self.chunk}{detail} " if self.chunks else ""
        drafts = f"x{1 + self.drafts}" if self.drafts else ""
        cascade = " cascade" if self.cascade else ""
        decode = f"decode {self.rows}x{self.steps}{drafts}{cascade} " if self.rows else ""
        part = f" {self.part}" if self.part else ""
        return f"{prefill}{decode}{self.mode}{part} cache {self.limit}"


class Control(NamedTuple):
    """What the host tells every program; packed in one array `[1, R + 1]` int32 for each replica.

    cancel [R] bool: rows to stop now; yield_early bool: return as soon as a row finishes, so that a waiting prompt can
    have it; where steps are counted, after the last.
    """

    cancel: jax.Array
    yield_early: jax.Array

    @staticmethod
    def unpack(packed: jax.Array) -> Control:
        return Control(packed[0, :-1] != 0, packed[0, -1] != 0)


# Columns of the chunk table [P, 8] int32: row (R or more: absent), position of the first token, tokens, whether the
# prompt starts and ends here, tokens to generate, the token after the chunk (-1: none), and the position of the first
# token that was generated: a sequence that was preempted is prefilled with its tokens. Where caches are compacted,
# positions are numbers of cells, see `RowState.dropped`.
CHUNK_COLUMNS = ("row", "start", "length", "first", "last", "budget", "next", "generated")


class ChunkInput(NamedTuple):
    """P prefill chunks. tokens [P, C] int32; table [P, 8] int32, see CHUNK_COLUMNS; ints, floats: packed sampling
    parameters, read when the prompt ends here."""

    tokens: jax.Array
    table: jax.Array
    ints: jax.Array
    floats: jax.Array


def prefix_shape(rows: int) -> tuple[int, int]:
    """The shape [T, 1 + m] of packed prefixes: T tiles of `m` rows each, for a program of so many rows on a replica."""
    return max(2, rows // 8), 1 + min(rows, _TILE_ROWS)


def unpack_prefixes(packed: jax.Array) -> SharedPrefixes:
    """packed [T, 1 + m] int32: how many pages the rows of a tile have in common, then these rows."""
    return SharedPrefixes(packed[:, 1:], packed[:, 0])


class Logits(NamedTuple):
    """float32, before any processing: of the last tokens of P chunks [P, V], and of decode rows [B, V], if any; of a
    step with drafts [B, C, V], behind a row's last token and each of its drafts."""

    chunks: jax.Array | None
    rows: jax.Array | None


class Masks(NamedTuple):
    """Which tokens may be chosen: of P chunks [P, W], and of decode rows [B, W], if any; W int32 words of 32 bits, see
    `sampler.permitted`. Of a step with drafts: rows [B, C, W], and which of the drafts [B, C - 1] may stand; -1 never
    does."""

    chunks: Any
    rows: Any
    drafts: Any = None


class StepOutput(NamedTuple):
    """tokens [K, B]: -1 where a row was inactive; or with drafts [K * C, B], and -1 behind those that a row generated;
    chunk_tokens [P]: first token of prompts that ended; each `Sampled` beside it holds log-probabilities, its leading
    dimensions alike. detail: `Sampled` [P, C / n, n, ...] of the prompt's own tokens, or logits [P, C / n, n, V], with
    n the devices that a chunk's tokens are dealt out to; or pooled hidden states [P, 2, D], see `_Maker.pooled`.
    load [1, 1, L, E] int32: of the layers with experts, how many tokens chose each, in all steps, drafts included; if
    that is counted, and for each replica and each of the n. logits: in place of tokens, if they are chosen by another
    program. core [1, 1, 4] int32: of models whose tokens may leave a loop, `depth.Taken.counts` likewise. depths
    [K, B], chunk_depths [P]: of these, how many steps of the core were taken to choose the tokens and chunk_tokens of
    the same places. tally [B] each: of decode steps with speculation, see `Tally`. inputs: of a step whose drafts that
    program verifies, what recurrent layers have yet to run, see `inferlib.programs.unsettled`."""

    tokens: jax.Array
    sampled: Sampled | None = None
    chunk_tokens: jax.Array | None = None
    chunk_sampled: Sampled | None = None
    detail: Sampled | jax.Array | None = None
    load: jax.Array | None = None
    logits: Logits | None = None
    tally: Tally | None = None
    inputs: Inputs | None = None
    core: jax.Array | None = None
    depths: jax.Array | None = None
    chunk_depths: jax.Array | None = None

    def behind(self, first: StepOutput) -> StepOutput:
        """This output of what chooses tokens, with what the part before it knows."""
        names = ("detail", "load", "core", "depths", "chunk_depths")
        return self._replace(**{name: getattr(first, name) for name in names})


def settles_states(model: AbstractModel, key: ProgramKey) -> bool:
    """True if the second program of a step advances states, by what the first one read: it then takes the weights and
    the cache too."""
    return bool(key.part and key.drafts) and has_states(model.config)


def build(
    model: AbstractModel,
    plan: CachePlan,
    config: EngineConfig,
    key: ProgramKey,
    drafter: ModelDrafter | None = None,
) -> Callable:
    """The function `(weights, cache, state, control[, chunk, prefixes or drafts]) -> (cache, state, StepOutput)` of a
    key; of one that chooses tokens, `(state, logits, masks[, chunk]) -> (state, StepOutput)`, or if it settles states,
    `(weights, cache, state, logits, masks, inputs) -> (cache, state, StepOutput)`.

    prefixes: see `unpack_prefixes`, of a program with `cascade`. drafts [B, C - 1]: of the first of two programs.
    drafter: a model that drafts, whose weights and cache lie behind the model's.

    On a mesh it takes whole arrays and runs one device's part of it on each.
    """
    maker = _Maker(model, plan, config, key, drafter)
    step = maker.forward if key.mode == "embed" else maker.step
    whole = step if key.chunks else maker.decode
    forward = maker.forward_drafts if key.drafts else maker.forward
    settles = settles_states(model, key)
    function = {"forward": forward, "choose": maker.choose_settling if settles else maker.choose}.get(key.part, whole)
    if config.shards.mesh is None or config.shards.rules is None:
        return function
    spec = config.shards.rules.spec
    state = map_state(spec, config_axes(model, config, drafter))
    more = (ChunkInput._make(spec((axes.ROWS, None)) for _ in ChunkInput._fields),) if key.chunks else ()
    more = (spec((axes.ROWS, None)),) if key.cascade or (key.drafts and key.part == "forward") else more
    tally = config.speculation is not None and not key.chunks and not key.part
    output = _output_specs(spec, key, load=config.expert_load, tally=tally, core=model.config.exits_early)
    returned = (tuple(spec(array.axes) for array in plan.arrays), state)
    weights = model.specs + (() if drafter is None else drafter.model.specs)
    taken = (tuple(spec(w.axes) for w in weights), *returned, spec((axes.ROWS, None)))
    if key.part == "choose":
        to_choose = _logits_specs(spec, key), _masks_specs(spec, key)
        taken, returned = ((state, *to_choose), (state,)) if not settles else ((*taken[:3], *to_choose), returned)
    if settles:
        inputs = spec_of(config.shards)
        taken, output = (*taken, inputs) if key.part == "choose" else taken, output._replace(inputs=inputs)
    if config.shards.several_processes:
        function, output = _gathered(function, output, config.shards.mesh), PartitionSpec()
    return jax.shard_map(
        function,
        mesh=config.shards.mesh,
        in_specs=(*taken, *more),
        out_specs=(*returned, output),
        check_vma=False,
    )


def config_axes(model: AbstractModel, config: EngineConfig, drafter: ModelDrafter | None = None) -> Any:
    """The logical axes of the rows' state that programs of a model and a config take."""
    return state_axes(
        history=config.speculation is not None,
        adapter=config.adapters is not None,
        features=drafter is not None and bool(drafter.feature_layers),
        first=drafter is not None and drafter.defers,
        dropped=config.compacted is not None,
        **of_loop(model.config.loop),
        **dict.fromkeys(("taken", "core"), bool(config.depthwise_batching)),
    )


def _gathered(function: Callable, specs: StepOutput, mesh: Mesh | AbstractMesh) -> Callable:
    """The same program with its output whole on every device, as process 0 can read only its own devices."""

    def gather(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, over in enumerate(spec):
            split = [axis for axis in ((over,) if isinstance(over, str) else over or ()) if mesh.shape[axis] > 1]
            if split and x.size:
                x = lax.all_gather(x, tuple(split), axis=dim, tiled=True)
        return x

    def gathered(*inputs):
        cache, state, output = function(*inputs)
        return cache, state, jax.tree.map(gather, output, specs)

    return gathered


def _output_specs(spec: Callable, key: ProgramKey, *, load: bool, tally: bool, core: bool) -> StepOutput:
    """How a program's output is put together from the devices' parts."""
    chosen, scored = key.part != "forward", key.mode == "logprobs"
    dealt = (axes.ROWS, None, axes.TOKENS)
    return StepOutput(
        tokens=spec((None, axes.ROWS)),
        sampled=Sampled(*[spec((None, axes.ROWS))] * 5) if scored and key.rows else None,
        chunk_tokens=spec((axes.ROWS,)) if chosen and key.chunks and key.mode != "embed" else None,
        chunk_sampled=Sampled(*[spec((axes.ROWS,))] * 5) if scored and key.chunks else None,
        detail={
            "logprobs": Sampled(*[spec(dealt)] * 5),
            "logits": spec((*dealt, axes.VOCAB)),
            "embed": spec((axes.ROWS, None, axes.EMBED)),
        }.get(key.detail),
        load=spec((axes.ROWS, axes.TOKENS)) if load and key.part != "choose" else None,
        logits=_logits_specs(spec, key) if key.part == "forward" else None,
        tally=Tally(*[spec((axes.ROWS,))] * 2) if tally else None,
        core=spec((axes.ROWS, axes.TOKENS)) if core and key.part != "choose" else None,
        depths=spec((None, axes.ROWS)) if core and key.rows and key.part != "choose" else None,
        chunk_depths=spec((axes.ROWS,))
        if core and key.chunks and key.part != "choose" and key.mode != "embed"
        else None,
    )


def _logits_specs(spec: Callable, key: ProgramKey) -> Logits:
    one = spec((axes.ROWS, axes.VOCAB))
    return Logits(
        one if key.chunks else None,
        (spec((axes.ROWS, None, axes.VOCAB)) if key.drafts else one) if key.rows else None,
    )


def _masks_specs(spec: Callable, key: ProgramKey) -> Masks:
    one = spec((axes.ROWS, None))
    return Masks(one if key.chunks else None, one if key.rows else None, one if key.drafts else None)


def fuses_all_reduce(model: AbstractModel, config: EngineConfig, key: ProgramKey) -> bool:
    """True if one kernel sums a layer's branches over devices and computes the norms that follow."""
    if config.scan or key.chunks or not sums_feed_norms(model.config, sharded=True):
        return False
    return (
        choose_all_reduce(key.decoded, model.config.dim, model.dtype, backend=config.backend.all_reduce).name != "xla"
    )


class _Step(NamedTuple):
    """What one decode step yields: tokens [B], or [C, B] with a tally; the load of experts, if that is counted; with
    speculation what became of drafts; and steps of a loop's core, if tokens may leave it."""

    sampled: Any
    load: jax.Array | None
    tally: Tally | None = None
    core: jax.Array | None = None


class _Pass(NamedTuple):
    """A pass of the model. hidden [T, D]; decoder: for its head; load: of experts, if that is counted; features
    [T, N, D]: if a model that drafts reads some. inputs: of each block, what its layers have yet to replay. core: steps
    of a loop's core, if tokens may leave it; taken [T]: how many of them each token took."""

    hidden: jax.Array
    decoder: Decoder
    cache: tuple[jax.Array, ...]
    mailboxes: Mailboxes | None
    load: jax.Array | None
    features: jax.Array | None
    inputs: Inputs
    core: jax.Array | None
    taken: jax.Array | None


@dataclass(frozen=True)
class _Maker:
    model: AbstractModel
    plan: CachePlan
    config: EngineConfig
    key: ProgramKey
    drafter: ModelDrafter | None

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.config.shards)

    def any_row(self, x: jax.Array) -> jax.Array:
        """Whether any row of any replica, [..., R] -> [...]; the replicas stay in step."""
        return self.config.shards.max(jnp.any(x, axis=-1).astype(jnp.int32), axes.ROWS) > 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.feature_layers

    def mailboxes(self) -> Mailboxes | None:
        """State of the fused all-reduce, if decode steps take it. It is opened once; each step passes it on."""
        if self.feature_layers or not fuses_all_reduce(self.model, self.config, self.key):
            return None
        axis = self.config.shards.only_axis
        assert axis is not None  # `fuses_all_reduce` needs one
        return open_mailboxes(self.key.decoded, self.model.config.dim, axis)

    def run(self, weights, cache, batch: StepBatch, rows: RowState, counted, mailboxes=None, prefixes=None):
        """A pass of the model over a batch. rows: those of the batch, with the pages of all. counted [T]: tokens whose
        choices of experts are counted, if any are."""
        decoder, config = self.model.merge(weights[: len(self.model.specs)]), self.config
        counted = counted if config.expert_load else None
        ctx = replace(self.context_of_rows(rows, batch), counted=counted, prefixes=prefixes)
        caches, of_drafts = self.split(cache)
        hidden, caches, mailboxes, load, features, core = decoder(ctx, caches, mailboxes)
        inputs, caches = tuple(cache.inputs for cache in caches), tuple(replace(cache, inputs=()) for cache in caches)
        cache, load = self.plan.flatten(caches + of_drafts), None if load is None else load[None, None]
        counts, taken = (None, None) if core is None else (core.counts[None, None], core.steps)
        return _Pass(hidden, decoder, cache, mailboxes, load, features, inputs, counts, taken)

    def context_of_rows(self, rows: RowState, batch: StepBatch) -> StepContext:
        """A step of the model for a batch of these rows, with the pages of all."""
        config = self.config
        ctx = self.context(self.model.config, config.backend, rows.pages, batch)
        ctx = replace(ctx, adapters=rows.adapter, feature_layers=self.feature_layers)
        ctx = replace(ctx, sparse=config.sparse_prefill, dropped=rows.dropped)
        if rows.depth is not None:
            ctx = replace(ctx, depths=Depths(rows.depth, rows.threshold, whole=config.counted))
        if config.attention_pages is not None:
            ctx = replace(ctx, selected=config.attention_pages.count)
        return ctx

    def context(self, model: ModelConfig, backend: Backend, table: jax.Array, batch: StepBatch) -> StepContext:
        """A step of a model whose rows have these pages."""
        config, limits = self.config, (self.plan.max_len, self.key.limit)
        return StepContext(batch, model, *limits, backend, config.shards, table=table, run=config.prefill_unit)

    def split(self, cache: tuple[jax.Array, ...]) -> tuple[Caches, Caches]:
        """The caches of the model, and of one that drafts."""
        caches, count = self.plan.view(cache), len(self.plan.blocks)
        return caches[:count], caches[count:]

    def tools(self, drafter: ModelDrafter, weights, rows: RowState) -> DraftTools:
        """What a model that drafts needs, for rows of this state."""
        model, count = drafter.model, len(self.model.specs)
        context = partial(self.context, model.config, drafter.backend, rows.pages)
        modules = model.module(weights[count:]), self.model.merge(weights[:count])
        speculation, columns = self.config.speculation, rows.counts.shape[1]
        most = 1 if speculation is None else 1 + speculation.tokens
        return DraftTools(*modules, context, partial(self.drafted, rows), columns, most, self.config.shards)

    def drafted(self, rows: RowState, logits: jax.Array, ahead: jax.Array | int) -> jax.Array:
        """The token that each row would choose by these logits, so many tokens behind its next one."""
        if self.key.mode == "greedy":
            return sample(logits, None, None, None, mode="greedy", vocabulary=self.vocabulary).token
        params, number = unpack(rows.ints, rows.floats), rows.generated + ahead
        return sample(logits, params, rows.counts, number, mode="sample", vocabulary=self.vocabulary).token

    def followed(self, weights, ran: _Pass, state: RowState, batch: StepBatch, chunk: ChunkInput | None):
        """The cache and the state after a step that drafts nothing, as a model that drafts leaves them."""
        if self.drafter is None:
            return ran.cache, state
        rows, following = state.head(self.key.rows), jnp.zeros((0, 0), jnp.int32)
        info = {} if chunk is None else dict(zip(CHUNK_COLUMNS, chunk.table.T, strict=True))
        if chunk is not None:
            following = self.config.shards.stripe(axes.TOKENS).take(following_tokens(chunk, info), dim=1)
        caches, of_drafts = self.split(ran.cache)
        step = Followed(batch, following, self.draft_rows(rows), ran.features)
        after = self.drafter.follow(self.tools(self.drafter, weights, state), of_drafts, step)
        if after.rows is not None:
            state = state.with_head(rows._replace(**after.rows._asdict()))
        if chunk is not None and after.ends is not None:
            at = jnp.where(info["last"] != 0, info["row"], state.token.size)
            state = state.with_pending(at, *after.ends)
        return self.plan.flatten(caches + after.caches), state

    def draft_rows(self, rows: RowState) -> DraftRows:
        """Rows as a model that drafts takes them."""
        assert rows.history is not None
        pending = None if rows.first is None else Pending(rows.features, rows.first)
        return DraftRows(rows.history, rows.length, jnp.where(rows.active, rows.budget, 0), pending)

    def proposed(self, speculation: Speculation, weights, cache, rows: RowState):
        """The cache, and the drafts of each row: as many as the key has, or one to see whether it would stand."""
        assert rows.history is not None
        count = max(self.key.drafts, 1)
        if self.drafter is None:
            return cache, speculation.drafter.propose(rows.history, rows.length + 1, count)
        caches, of_drafts = self.split(cache)
        tools = self.tools(self.drafter, weights, rows)
        of_drafts, drafts = self.drafter.propose(tools, of_drafts, self.draft_rows(rows), count)
        return self.plan.flatten(caches + of_drafts), drafts

    def stored(self, weights, ran: _Pass, rows: RowState, counts: jax.Array) -> RowState:
        """The rows with what is pending after a decode step that verified `counts` [B] tokens of each."""
        if (drafter := self.drafter) is None:
            return rows
        tools = self.tools(drafter, weights, rows)
        pending = drafter.pending(tools, self.draft_rows(rows), ran.features, counts)
        return rows if pending is None else rows._replace(**pending._asdict())

    def replayed(self, decoder: Decoder, cache, inputs: Inputs, counts: jax.Array) -> tuple[jax.Array, ...]:
        """The cache after a decode step in which `counts` [B] tokens of each row stand: states of recurrent layers have
        these alone. inputs: of each block, what the step read."""
        if not any(inputs):
            return cache
        caches, of_drafts = self.split(cache)
        caches = tuple(replace(cache, inputs=of_block) for cache, of_block in zip(caches, inputs, strict=True))
        return self.plan.flatten(replay(decoder, caches, counts) + of_drafts)

    def logits(self, decoder: Decoder, hidden: jax.Array) -> jax.Array:
        return decoder.logits(hidden, self.config.shards, self.config.backend.matmul)

    def counted_rows(self, rows: RowState) -> jax.Array:
        """The rows [B] whose choices of experts this device counts. Devices that prompts are dealt out to have the same
        rows."""
        return rows.active & (self.config.shards.index(axes.TOKENS) == 0)

    def advance(self, rows: RowState, logits: jax.Array, mask: jax.Array | None = None) -> tuple[RowState, Sampled]:
        """Sample the next token of every row, of those in its mask, and account for it; inactive rows yield -1."""
        params, mode = unpack(rows.ints, rows.floats), self.sampling_mode
        sampled = sample(logits, params, rows.counts, rows.generated, mode=mode, vocabulary=self.vocabulary, mask=mask)
        return self.account(rows, sampled)

    @property
    def sampling_mode(self) -> Literal["greedy", "sample", "logprobs"]:
        mode = self.key.mode
        assert mode in ("greedy", "sample", "logprobs")
        return mode

    def account(self, rows: RowState, sampled: Sampled) -> tuple[RowState, Sampled]:
        """The rows with their next token; inactive rows stay as they are and yield -1."""
        params = unpack(rows.ints, rows.floats)
        token, counts, floats = sampled.token, rows.counts, rows.floats
        if self.key.mode != "greedy":
            counts = count_tokens(counts, token, rows.active, self.vocabulary)
            floats = follow_bad_words(params, floats, token)
        live = rows.active.astype(jnp.int32)
        budget = rows.budget - live
        at = jnp.where(rows.active, rows.length + 1, self.plan.max_len)
        rows = rows.with_tokens(jnp.arange(token.size), at, token)
        rows = rows._replace(
            token=jnp.where(rows.active, token, rows.token),
            length=rows.length + live,
            budget=budget,
            generated=rows.generated + live,
            floats=floats,
            counts=counts,
            active=rows.active & ~is_stop(params, token) & (budget > 0),
            taken=None if rows.taken is None else jnp.where(rows.active, -1, rows.taken),
        )
        return rows, sampled._replace(token=jnp.where(live > 0, token, -1))

    def advance_any(self, rows: RowState, logits: jax.Array) -> tuple[RowState, Sampled]:
        """`advance`, which is left out if no row is active."""
        advance = self._traced_advance
        _, shapes = jax.eval_shape(advance, rows, logits)
        nothing = jax.tree.map(lambda s: jnp.full(s.shape, -1, s.dtype), shapes)
        return lax.cond(self.any_row(rows.active), advance, lambda rows, _: (rows, nothing), rows, logits)

    @cached_property
    def _traced_advance(self) -> Callable:
        """`advance`, which is traced once for all positions."""
        return jax.jit(self.advance)

    def advance_at(self, rows: RowState, logits: jax.Array, drafts: jax.Array) -> Advance:
        """How `accepted` advances the rows at each position of logits [B, C, V]."""
        if self.key.mode != "greedy" and self.config.platform in BRANCHES_ARE_CHEAP:
            return lambda rows, i: self.advance_any(rows, logits[:, i])
        params = unpack(rows.ints, rows.floats)
        more: Any = dict(mode=self.sampling_mode, vocabulary=self.vocabulary)
        sampled = sample_drafted(logits, params, rows.counts, rows.generated, drafts, **more)
        return lambda rows, i: self.account(rows, jax.tree.map(lambda x: x[i], sampled))

    def with_room(self, rows: RowState) -> RowState:
        """The rows, of which those are inactive that wait for their cache to be compacted."""
        if (policy := self.config.compacted) is None:
            return rows
        return rows._replace(active=rows.active & (rows.length < policy.most))

    def advance_with_room(
        self, rows: RowState, logits: jax.Array, mask: jax.Array | None = None
    ) -> tuple[RowState, Sampled]:
        """`advance`; rows that wait for their cache to be compacted stay as they are, and yield -1."""
        able = self.with_room(rows)
        new, sampled = self.advance(able, logits, mask)
        if able is rows:
            return new, sampled
        waits = rows.active & ~able.active
        floats = jnp.where(waits[:, None], rows.floats, new.floats)
        return new._replace(active=new.active | waits, floats=floats), sampled

    def row_logits(self, weights, cache, rows: RowState, mailboxes: Mailboxes | None, shared=None):
        """A pass over each row's last token, and logits [B, V] of the next one."""
        rows = self.with_room(rows)
        more = rows, self.counted_rows(rows), mailboxes, shared
        ran = self.run(weights, cache, rows_batch(rows), *more)
        return ran, self.logits(ran.decoder, ran.hidden)

    def draft_logits(self, weights, cache, rows: RowState, drafts: jax.Array, mailboxes: Mailboxes | None):
        """A pass over each row's last token and its drafts [B, C - 1], as many as [B] count, and logits [B, C, V]
        behind them; and their number."""
        batch, counts = verification_batch(rows, drafts, self.model.config.vocab)
        counted = (batch.decode_positions >= 0) & self.counted_rows(rows)[:, None]
        ran = self.run(weights, cache, batch, rows, counted.reshape(-1), mailboxes)
        hidden = hidden_of_tokens(ran.hidden, counts)
        logits = self.logits(ran.decoder, hidden.reshape(-1, hidden.shape[-1]))
        return ran, logits.reshape(*hidden.shape[:2], -1), counts

    def depths_of_rows(self, ran: _Pass, counts: jax.Array | None = None) -> jax.Array | None:
        """How many steps of a loop's core the tokens of a pass over decode rows took, [C, B], if they may leave it.
        counts [B]: of a pass that verifies drafts, how many tokens of each row it has."""
        if ran.taken is None:
            return None
        if counts is None or not self.key.drafts:
            return ran.taken[None]
        return hidden_of_tokens(ran.taken[:, None], counts)[..., 0].T

    def depths(self, ran: _Pass, chunks: tuple[int, ...], lengths: jax.Array) -> dict[str, jax.Array | None]:
        """Those fields of the output of a step over chunks [P, C] with `lengths` [P] tokens, if tokens may leave."""
        if ran.taken is None:
            return {}
        split = prod(chunks)
        ends = last_of_chunks(ran.taken[:split].reshape(*chunks, 1), lengths, self.config.shards)[:, 0]
        return {"depths": ran.taken[None, split:] if self.key.rows else None, "chunk_depths": ends}

    def decode_step(self, weights, cache, rows: RowState, mailboxes: Mailboxes | None, shared=None):
        """The cache, the rows after a step, the mailboxes, and what the step adds to the output."""
        if self.config.speculation is not None:
            return self.verified(self.config.speculation, weights, cache, rows, mailboxes, shared)
        ran, logits = self.row_logits(weights, cache, rows, mailboxes, shared)
        rows, sampled = self.advance_with_room(rows, logits)
        return ran.cache, rows, ran.mailboxes, _Step(sampled._replace(depth=ran.taken), ran.load, core=ran.core)

    def verified(self, speculation: Speculation, weights, cache, rows: RowState, mailboxes, shared):
        """`decode_step` with drafts. Without, a draft is made to see whether it would stand."""
        cache, drafts = self.proposed(speculation, weights, cache, rows)
        if self.key.drafts:
            ran, logits, counts = self.draft_logits(weights, cache, rows, drafts, mailboxes)
        else:
            ran, logits = self.row_logits(weights, cache, rows, mailboxes, shared)
            logits, counts = logits[:, None], rows.active.astype(jnp.int32)
        rows = self.stored(weights, ran, rows, counts)
        before = rows.length
        platform = self.config.platform
        # XLA:CPU compiles a sampler as long as a layer; on accelerators each round of a loop would take time.
        loop = platform == "cpu" and platform in BRANCHES_ARE_CHEAP
        advance = self.advance_at(rows, logits, drafts)
        rows, sampled, tally = accepted(advance, rows, drafts, logits.shape[1], loop=loop)
        cache = self.replayed(ran.decoder, ran.cache, ran.inputs, rows.length - before)
        sampled = sampled._replace(depth=self.depths_of_rows(ran, counts))
        return cache, rows, ran.mailboxes, _Step(sampled, ran.load, tally, ran.core)

    def decode(self, weights, cache, state: RowState, packed: jax.Array, prefixes: jax.Array | None = None):
        """`key.steps` decode steps of the first `key.rows` rows; unless `config.counted`, it stops when no row needs
        more."""
        key, control = self.key, Control.unpack(packed)
        shared = None if prefixes is None else unpack_prefixes(prefixes)
        state = state._replace(active=state.active & ~control.cancel)
        rows, mailboxes = state.head(key.rows), self.mailboxes()
        if self.config.depthwise_batching and key.steps > 1 and key.rows > 1:
            return self.decode_depthwise(weights, cache, state, control)
        if key.steps == 1:
            cache, rows, _, one = self.decode_step(weights, cache, rows, mailboxes, shared)
            outs = one.sampled if one.tally else jax.tree.map(lambda x: x[None], one.sampled)
            total = one._replace(sampled=outs)
        else:
            step = partial(self.decode_step, weights, shared=shared)
            cache, rows, total = self.decode_steps(step, cache, rows, mailboxes, control)
        return cache, state.with_head(rows), self.output_of(total)

    def output_of(self, total: _Step) -> StepOutput:
        """Of a program that decodes, by what all its steps yield."""
        outs = total.sampled
        scored = outs._replace(depth=None) if self.key.mode == "logprobs" else None
        return StepOutput(outs.token, scored, load=total.load, tally=total.tally, core=total.core, depths=outs.depth)

    def decode_depthwise(self, weights, cache, state: RowState, control: Control):
        """`decode` of rows at different steps of a loop's core."""
        (caches, _), rows = self.split(cache), state.head(self.key.rows)
        context = lambda rows: self.context_of_rows(rows, rows_batch(rows))  # noqa: E731
        decoding = DepthwiseDecoding(
            Stages(self.model.merge(weights)).with_core(context(rows)),
            context,
            self.advance,
            Quorum.of(self.model, self.config.depthwise_batching),
            self.key.most,
            TRIPS_WITHOUT_HOST if self.config.counted else 1,
        )
        caches, rows, outs, counts = decoding(caches, rows, control.yield_early)
        output = self.output_of(_Step(outs, None, core=counts[None, None]))
        return self.plan.flatten(caches), state.with_head(rows), output

    def decode_steps(
        self, step: Callable, cache, rows: RowState, mailboxes: Mailboxes | None, control: Control
    ) -> tuple[tuple, RowState, _Step]:
        """The cache, the rows and the output after several steps."""
        key, begun = self.key, rows
        step = jax.jit(step)  # traced once, for the shapes and for the loop
        *_, shapes = jax.eval_shape(step, cache, rows, mailboxes)
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(sampled=None))
        lead, skipped = (key.most, key.rows), 1 if shapes.tally is None else 2
        outs = jax.tree.map(lambda s: jnp.full((*lead, *s.shape[skipped:]), -1, s.dtype), shapes.sampled)

        def more(i, rows):
            able = self.with_room(rows).active
            running, finished = self.any_row(jnp.stack([able, begun.active & ~rows.active]))
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
        if self.config.counted:
            cache, rows, _, outs, total = lax.fori_loop(0, key.steps, body, carry)
        else:
            _, (cache, rows, _, outs, total) = lax.while_loop(
                lambda carry: more(carry[0], carry[1][1]),
                lambda carry: (carry[0] + 1, body(*carry)),
                (jnp.int32(0), carry),
            )
        return cache, rows, total._replace(sampled=outs)

    def step(self, weights, cache, state: RowState, packed: jax.Array, chunk: ChunkInput):
        """One pass over P chunks and B decode rows: chunks whose prompt ends yield their first token."""
        cache, state, output = self.forward(weights, cache, state, packed, chunk)
        assert output.logits is not None
        state, chosen = self.choose(state, output.logits, Masks(None, None), chunk)
        return cache, state, chosen.behind(output)

    def forward(self, weights, cache, state: RowState, packed: jax.Array, chunk: ChunkInput | None = None):
        """A step until its logits, over P chunks, if there are any, and B decode rows."""
        key = self.key
        state = state._replace(active=state.active & ~Control.unpack(packed).cancel)
        rows = self.with_room(state.head(key.rows))
        output = StepOutput(tokens=jnp.zeros((1, 0), jnp.int32))
        if chunk is None:
            ran, logits = self.row_logits(weights, cache, rows, self.mailboxes())
            cache, state = self.followed(weights, ran, state, rows_batch(rows), None)
            output = output._replace(load=ran.load, core=ran.core, depths=self.depths_of_rows(ran))
            return cache, state, output._replace(logits=Logits(None, logits))
        info = dict(zip(CHUNK_COLUMNS, chunk.table.T, strict=True))
        state = state.started(info["row"], info["first"] != 0)
        stripe = self.config.shards.stripe(axes.TOKENS)
        tokens = stripe.take(chunk.tokens, dim=1)
        live = jnp.where(rows.active, rows.length + 1, 0)
        batch = StepBatch(tokens, info["row"], info["start"], info["length"], rows.token[:, None], live)
        prompts = stripe.take(jnp.arange(key.chunk)[None], dim=1) < info["length"][:, None]
        counted = jnp.concatenate([prompts.reshape(-1), self.counted_rows(rows)])
        ran = self.run(weights, cache, batch, state, counted)
        cache, state = self.followed(weights, ran, state, batch, chunk)
        hidden, decoder, load, split = ran.hidden, ran.decoder, ran.load, tokens.size
        if key.mode == "embed":
            pooled = self.pooled(decoder, hidden.reshape(*tokens.shape, -1), prompts, info["length"])
            return cache, state, StepOutput(jnp.zeros((1, 0), jnp.int32), detail=pooled, load=load, core=ran.core)
        ends = last_of_chunks(hidden[:split].reshape(*tokens.shape, -1), info["length"], self.config.shards)
        logits = self.logits(decoder, jnp.concatenate([ends, hidden[split:]]))
        parts = Logits(logits[: key.chunks], logits[key.chunks :] if key.rows else None)
        output = output._replace(
            load=load, core=ran.core, logits=parts, **self.depths(ran, tokens.shape, info["length"])
        )
        if key.detail:
            every = self.logits(decoder, hidden[:split])
            if key.detail == "logprobs":
                following = stripe.take(following_tokens(chunk, info), dim=1)
                every = score(every, jnp.maximum(following, 0).reshape(-1), self.vocabulary)
            shape = (*tokens.shape, 1)
            output = output._replace(detail=jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), every))
        return cache, state, output

    def forward_drafts(self, weights, cache, state: RowState, packed: jax.Array, drafts: jax.Array):
        """A decode step until its logits, over each row's last token and the host's drafts [B, C - 1], -1 where it has
        none."""
        state = state._replace(active=state.active & ~Control.unpack(packed).cancel)
        rows = state.head(self.key.rows)
        ran, logits, counts = self.draft_logits(weights, cache, rows, drafts, self.mailboxes())
        batch, _ = verification_batch(rows, drafts, self.model.config.vocab)
        cache, state = self.followed(weights, ran, state, batch, None)
        output = StepOutput(jnp.zeros((1, 0), jnp.int32), load=ran.load, core=ran.core, logits=Logits(None, logits))
        output = output._replace(depths=self.depths_of_rows(ran, counts))
        return cache, state, output._replace(inputs=of_device(ran.inputs) if any(ran.inputs) else None)

    def choose(
        self, state: RowState, logits: Logits, masks: Masks, chunk: ChunkInput | None = None
    ) -> tuple[RowState, StepOutput]:
        """A step from its logits on: decode rows get their next token, and prompts that end their first."""
        scored = self.key.mode == "logprobs"
        output = StepOutput(tokens=jnp.zeros((1, 0), jnp.int32))
        if logits.rows is not None:
            rows, whole = self.choose_rows(state.head(self.key.rows), logits.rows, masks)
            output = output._replace(tokens=whole.token, sampled=whole if scored else None)
            state = state.with_head(rows)
        if chunk is not None and logits.chunks is not None:
            info = dict(zip(CHUNK_COLUMNS, chunk.table.T, strict=True))
            state, first = self.admit(state, logits.chunks, masks.chunks, chunk, info)
            output = output._replace(chunk_tokens=first.token, chunk_sampled=first if scored else None)
        return state, output

    def choose_settling(self, weights, cache, state: RowState, logits: Logits, masks: Masks, inputs: Inputs):
        """`choose`, and the cache whose states have the tokens that stand. inputs: of the step's first program."""
        before = state.head(self.key.rows).length
        state, output = self.choose(state, logits, masks)
        decoder = self.model.merge(weights[: len(self.model.specs)])
        counts = state.head(self.key.rows).length - before
        return self.replayed(decoder, cache, on_device(inputs), counts), state, output

    def choose_rows(self, rows: RowState, logits: jax.Array, masks: Masks) -> tuple[RowState, Sampled]:
        """The rows behind their next token, and this, [1, B]; or with drafts [C, B]."""
        if not self.key.drafts:
            rows, sampled = self.advance_with_room(rows, logits, masks.rows)
            return rows, jax.tree.map(lambda x: x[None], sampled)

        def advance(rows: RowState, i: int) -> tuple[RowState, Sampled]:
            return self.advance(rows, logits[:, i], masks.rows[:, i])

        rows, sampled, _ = accepted(advance, rows, masks.drafts, logits.shape[1])
        return rows, sampled

    def pooled(self, decoder: Decoder, chunks: jax.Array, valid: jax.Array, lengths: jax.Array) -> jax.Array:
        """Of hidden states [P, C, D] after the final norm, the sum over each chunk's tokens and the last one's:
        float32 [P, 2, D]. valid [P, C] bool: what is no padding."""
        shards = self.config.shards
        every = decoder.normed(chunks, shards).astype(jnp.float32)
        total = shards.sum(jnp.where(valid[..., None], every, 0).sum(axis=1), axes.TOKENS)
        last = decoder.normed(last_of_chunks(chunks, lengths, shards), shards).astype(jnp.float32)
        return jnp.stack([total, last], axis=1)

    def admit(
        self, state: RowState, logits: jax.Array, mask: jax.Array | None, chunk: ChunkInput, info: dict
    ) -> tuple[RowState, Sampled]:
        """Start decoding the rows whose prompt ends in this step."""
        total = state.token.shape[0]
        last = info["last"] != 0
        zeros = jnp.zeros_like(info["row"])
        counts = state.counts
        if self.key.mode != "greedy":
            counts = mark_prompt(counts, info["row"], chunk.tokens, _kinds(chunk, info), info["first"], self.vocabulary)
        fresh = RowState(
            token=zeros,
            length=info["start"] + info["length"] - 1,
            active=last,
            budget=info["budget"],
            generated=jnp.maximum(info["start"] + info["length"] - info["generated"], 0),
            ints=chunk.ints,
            floats=chunk.floats,
            counts=counts[jnp.minimum(info["row"], total - 1)] if self.key.mode != "greedy" else zeros[:, None],
            pages=state.pages,
        )
        fresh, sampled = self.advance(fresh, logits, mask)
        rows = jnp.where(last, info["row"], total)
        if self.key.mode != "greedy":
            # Prompts stay marked if they go on in the next step.
            counts = counts.at[rows].set(fresh.counts, mode="drop")
        shared = dict.fromkeys(("counts", "pages", "history", "features", "core", *NUMBERS))
        old, new = state._replace(**shared), fresh._replace(**shared)
        new = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), old, new)
        new = new._replace(**{name: getattr(state, name) for name in shared} | {"counts": counts}).not_begun(rows)
        at = jnp.arange(chunk.tokens.shape[1])
        positions = jnp.where(at < info["length"][:, None], info["start"][:, None] + at, self.plan.max_len)
        new = new.with_tokens(info["row"][:, None], positions, chunk.tokens)
        return new.with_tokens(rows, info["start"] + info["length"], sampled.token), sampled


def following_tokens(chunk: ChunkInput, info: dict) -> jax.Array:
    """[P, C] the token behind each token of the chunks, -1 behind a prompt."""
    last = jnp.arange(chunk.tokens.shape[1]) == info["length"][:, None] - 1
    return jnp.where(last, info["next"][:, None], jnp.roll(chunk.tokens, -1, axis=1))


def rows_batch(rows: RowState) -> StepBatch:
    """A step of each row's last token."""
    return StepBatch.of_rows(rows.token, jnp.where(rows.active, rows.length + 1, 0))


def _kinds(chunk: ChunkInput, info: dict) -> jax.Array:
    """[P, C] what each token of the chunks is: 0 padding, 1 of the prompt, 2 generated."""
    at = jnp.arange(chunk.tokens.shape[1])
    generated = info["start"][:, None] + at >= info["generated"][:, None]
    return jnp.where(at < info["length"][:, None], 1 + generated, 0)
