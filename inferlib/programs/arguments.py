"""What programs take from the host and return to it.

Shapes: B decode rows of R; P prefill chunks of C tokens; K decode steps; V vocabulary; L layers; E experts; D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inferlib.attention_values import SharedPrefixes
from inferlib.programs.unsettled import Inputs
from inferlib.programs.verification import Tally
from inferlib.sampling.sampler import Sampled

# Rows of a tile of those that share a prefix. 32 rows of four heads for each KV head fill a program on Hopper GPUs.
_TILE_ROWS = {"gpu": 32}
_OTHER_TILE_ROWS = 16
LEAST_SHARING = 8  # rows of the smallest programs that read a shared prefix once


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


class ChunkTable(NamedTuple):
    """The facts about P chunks, each field [P] int32.

    row: the prompt's row, R or more if there is no chunk. start: position of the chunk's first token; length: how many
    tokens it has. first, last: whether the prompt starts and ends here. budget: tokens to generate. next: the token
    after the chunk, -1 if there is none. generated: position of the first token that was generated, as a preempted
    sequence is prefilled with its tokens. Where caches are compacted, positions are numbers of cells, see
    `RowState.dropped`.
    """

    row: jax.Array
    start: jax.Array
    length: jax.Array
    first: jax.Array
    last: jax.Array
    budget: jax.Array
    next: jax.Array
    generated: jax.Array


CHUNK_COLUMNS = ChunkTable._fields  # of the packed table [P, 8]


class ChunkInput(NamedTuple):
    """P prefill chunks. tokens [P, C] int32; table [P, 8] int32: a packed `ChunkTable`; ints, floats: packed sampling
    parameters, read when the prompt ends here."""

    tokens: jax.Array
    table: jax.Array
    ints: jax.Array
    floats: jax.Array

    def unpack(self) -> ChunkTable:
        return ChunkTable(*self.table.T)

    def following(self, table: ChunkTable) -> jax.Array:
        """[P, C] the token behind each token of the chunks, -1 behind a prompt."""
        last = jnp.arange(self.tokens.shape[1]) == table.length[:, None] - 1
        return jnp.where(last, table.next[:, None], jnp.roll(self.tokens, -1, axis=1))

    def kinds(self, table: ChunkTable) -> jax.Array:
        """[P, C] what each token of the chunks is: 0 padding, 1 of the prompt, 2 generated."""
        at = jnp.arange(self.tokens.shape[1])
        generated = table.start[:, None] + at >= table.generated[:, None]
        return jnp.where(at < table.length[:, None], 1 + generated, 0)


def prefix_shape(rows: int, platform: str) -> tuple[int, int]:
    """The shape [T, 1 + m] of packed prefixes: T tiles of m rows each, for a program of `rows` rows on a replica."""
    return max(2, rows // 8), 1 + min(1 << (rows - 1).bit_length(), _TILE_ROWS.get(platform, _OTHER_TILE_ROWS))


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
    n the devices that a chunk's tokens are dealt out to; or pooled hidden states [P, 2, D], see `ForwardPass.pooled`.
    load [1, 1, L, E] int32: of the layers with experts, how many tokens chose each, in all steps, drafts included; if
    that is counted, and for each replica and each of the n. logits: in place of tokens, if they are chosen by another
    program. core [1, 1, 4] int32: of models whose tokens may leave a loop, `depth.Taken.counts` likewise. depths
    [K, B], chunk_depths [P]: of these, how many steps of the core were taken to choose the tokens and chunk_tokens of
    the same places. tally [B] each: of decode steps with speculation, see `Tally`. inputs: of a step whose drafts that
    program verifies, what recurrent layers have yet to run, see `inferlib.programs.unsettled`. wanted [B, M + 1]: if
    pages of rows may be in the host's memory, how often the rows' queries would have read each of their pages, summed
    over steps and layers; behind that, how often pages that were not on the device."""

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
    wanted: jax.Array | None = None

    def with_forward(self, output: StepOutput) -> StepOutput:
        """This output of a program that chooses tokens, with what the program of the logits returned beside them."""
        names = ("detail", "load", "core", "depths", "chunk_depths", "wanted")
        return self._replace(**{name: getattr(output, name) for name in names})
