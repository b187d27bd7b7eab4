"""XAttention's scores of blocks on NVIDIA GPUs (Xu et al. 2025, https://arxiv.org/abs/2503.16428), pages read in place.

A line is 16 queries of a head, a stride 16 keys; the last query meets the first key, and so on, in one product. A
program multiplies the lines of several tiles with the strides of several blocks. Tiles of one row, which follow one
another in a step, share the keys that it reads. Of each line and block only the log of the sum of weights leaves the
program: the softmax over all blocks follows from these.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from inferlib.attention_values import AttentionOptions, KvCache, Shaped
from inferlib.pallas_kernels.decode_attention_gpu import capped, power_of_two
from inferlib.pallas_kernels.prefill_attention_gpu import pages_of

BLOCK, STRIDE = 128, 16
LINES, STRIDES = 128, 128  # of a program; both powers of two
WARPS, STAGES = 8, 3


class Tiles(NamedTuple):
    """queries [P, T, w, K, G, h]: T tiles of a chunk, of w tokens. rows [P]: the chunks' rows. first, last [P, T]
    int32: positions of a tile's first and last token; last -1: it has none."""

    queries: jax.Array
    rows: jax.Array
    first: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class _Sizes:
    """T tiles a chunk, of w tokens and `group` query heads of a KV head; pages of `page_slots` slots."""

    tiles: int
    width: int
    group: int
    page_slots: int

    @property
    def members(self) -> int:
        return power_of_two(self.group, 1)

    @property
    def of_tile(self) -> int:
        """Lines of a tile and KV head, some of which may be none."""
        return power_of_two(pl.cdiv(self.width, STRIDE), 1) * self.members

    @property
    def together(self) -> int:
        """Tiles of a program."""
        return max(LINES // self.of_tile, 1)

    @property
    def lines(self) -> int:
        return self.together * self.of_tile


def unsupported(q: Shaped, cache: KvCache, tile: int) -> str | None:
    """Why the kernel does not score blocks for queries [P, C, K, G, h] in tiles of `tile` tokens; None: it does. Arrays
    may be shapes."""
    if cache.scaled or cache.packed or cache.ring:
        return "rings and quantised caches"
    if any(x.dtype not in (jnp.bfloat16, jnp.float16) for x in (q, cache.k)) or q.dtype != cache.k.dtype:
        return f"queries of {q.dtype.name} and cells of {cache.k.dtype.name}"
    if cache.k.shape[-2] % STRIDE:
        return f"pages of {cache.k.shape[-2]} positions"
    return None if fits(tile, q.shape[3]) else f"tiles of {tile} tokens with {q.shape[3]} query heads of a KV head"


def fits(tile: int, group: int) -> bool:
    """Whether a program has room for the lines of a tile of `tile` tokens and `group` query heads."""
    return _Sizes(1, tile, group, BLOCK).of_tile <= LINES


def block_scores(tiles: Tiles, cache: KvCache, options: AttentionOptions, *, interpret: bool = False) -> jax.Array:
    """The scores [P, K, T, n] float32 of a cache's n blocks, as `inferlib.ops.sparse_prefill.antidiagonals` has them.

    Keys behind a chunk's last token may be anything, as may queries behind it. interpret: run on any device, in any
    float type. See `unsupported`.
    """
    chunks, count, width, kv_heads, group, _ = tiles.queries.shape
    sums = _sums(tiles, cache, options, _Sizes(count, width, group, cache.k.shape[-2]), interpret)
    sums = sums[..., : pl.cdiv(cache.slots, BLOCK)]
    top = jnp.max(sums, axis=-1, keepdims=True)
    weights = jnp.exp(sums - jnp.where(top > -jnp.inf, top, 0.0))
    weights /= jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-37)
    scores = jnp.sum(weights, axis=2).reshape(chunks, count, kv_heads, -1)
    return jnp.moveaxis(scores, 2, 1)


def _sums(tiles: Tiles, cache: KvCache, options: AttentionOptions, sizes: _Sizes, interpret: bool) -> jax.Array:
    """The log of the sum of weights of each tile's line and each block, [P * T, K, lines of a tile, blocks]; -inf where
    a line sees none."""
    chunks, count, width, kv_heads, group, size = tiles.queries.shape
    total, together = chunks * count, sizes.together
    groups = pl.cdiv(total, together)
    k, _, table = pages_of(cache, tiles.rows)
    runs, ends = _runs(jnp.repeat(tiles.rows, count), tiles.last.reshape(-1), groups, together)
    parts = pl.cdiv(pl.cdiv(cache.slots, STRIDE), STRIDES)
    shape = groups * together, kv_heads, sizes.of_tile, parts * STRIDES * STRIDE // BLOCK
    kernel = functools.partial(_kernel, factor=options.scale / STRIDE, softcap=options.softcap, sizes=sizes)
    sums = pl.pallas_call(
        kernel,
        grid=(parts, kv_heads, groups),
        in_specs=[pl.BlockSpec()] * 7,
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="antidiagonals",
    )(
        tiles.first.reshape(-1),
        tiles.last.reshape(-1),
        runs,
        ends,
        table,
        tiles.queries.reshape(total, width, kv_heads, group, size),
        k,
    )
    return sums[:total]


def _runs(rows: jax.Array, last: jax.Array, groups: int, together: int) -> tuple[jax.Array, jax.Array]:
    """Which tiles of a program are of one row, one after another: the first of these, for each tile, and where their
    positions end, for the first; 0 for others. rows, last [tiles]; both [groups * together] int32."""
    missing = (0, groups * together - len(rows))
    rows = jnp.pad(rows, missing, constant_values=-1).reshape(groups, together)
    last = jnp.pad(last, missing, constant_values=-1).reshape(groups, together)
    number = jnp.arange(together)
    begins = (number == 0) | (rows != jnp.roll(rows, 1, axis=1))
    runs = lax.cummax(jnp.where(begins, number, 0), axis=1)
    ends = jnp.max(jnp.where(runs[:, None] == number[:, None], last[:, None] + 1, 0), axis=2)
    return runs.astype(jnp.int32).reshape(-1), ends.astype(jnp.int32).reshape(-1)


def _kernel(first_ref, last_ref, runs_ref, ends_ref, table_ref, q_ref, k_ref, out_ref, *, factor, softcap, sizes):
    """first_ref, last_ref [tiles]; runs_ref, ends_ref [groups * together]; table_ref [P, M]; q_ref [tiles, w, K, G, h];
    k_ref [N, K, S, h]; out_ref [groups * together, K, lines of a tile, blocks]."""
    part, head, group = (pl.program_id(i) for i in range(3))
    count, width, size = q_ref.shape[0], q_ref.shape[1], q_ref.shape[-1]
    row, columns = jnp.arange(sizes.lines), jnp.arange(power_of_two(size))
    place, inside = group * sizes.together + row // sizes.of_tile, row % sizes.of_tile
    line, member, tile = inside // sizes.members, inside % sizes.members, jnp.minimum(place, count - 1)
    first, last = plgpu.load(first_ref.at[tile]), plgpu.load(last_ref.at[tile])
    begin = first + line * STRIDE
    end = jnp.minimum(begin + STRIDE - 1, last)  # the last position of the line
    there = (member < sizes.group) & (begin <= end)
    key = (part * STRIDES + jnp.arange(STRIDES)) * STRIDE
    runs = plgpu.load(runs_ref.at[place])
    q_at = tile[:, None], head, jnp.minimum(member, sizes.group - 1)[:, None]
    blocks = part * (STRIDES * STRIDE // BLOCK) + jnp.arange(STRIDES * STRIDE // BLOCK)

    def of_run(chunk, number, stop) -> None:
        """The tiles of one row, whose keys end at `stop`; the first of them is `number`, of this chunk."""
        page = plgpu.load(table_ref.at[chunk, jnp.minimum(key // sizes.page_slots, table_ref.shape[1] - 1)])

        def add(r, logits):
            token = line * STRIDE + STRIDE - 1 - r
            q_mask = there & (first + token <= last)
            q = _load(q_ref, (q_at[0], jnp.minimum(token, width - 1)[:, None], *q_at[1:]), columns, q_mask)
            k = _load(k_ref, (page[:, None], head, (key % sizes.page_slots + r)[:, None]), columns, key + r < stop)
            return logits + plgpu.dot(q, k, trans_b=True, precision=lax.Precision.HIGHEST)

        rounds = (stop > part * (STRIDES * STRIDE)).astype(jnp.int32) * STRIDE
        logits = lax.fori_loop(0, rounds, add, jnp.zeros((sizes.lines, STRIDES), jnp.float32)) * factor
        logits = capped(logits, softcap)
        logits = jnp.where((key[None] <= end[:, None]) & there[:, None], logits, -jnp.inf)
        mask = (runs == number)[:, None]
        plgpu.store(out_ref.at[place[:, None], head, inside[:, None], blocks[None]], _log_sums(logits), mask=mask)

    def of_tile(i, _) -> None:
        at = group * sizes.together + i
        begins = plgpu.load(runs_ref.at[at]) == i
        chunk, stop = jnp.minimum(at, count - 1) // sizes.tiles, plgpu.load(ends_ref.at[at])
        pl.when(begins)(functools.partial(of_run, chunk, i, stop))

    lax.fori_loop(0, sizes.together, of_tile, None)


def _log_sums(logits: jax.Array) -> jax.Array:
    """The logs of the sums of exp(logits) over each block's strides: [lines, blocks] of [lines, strides]."""
    of_blocks = logits.reshape(logits.shape[0], -1, BLOCK // STRIDE)
    top = of_blocks.max(axis=2)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    total = jnp.exp(of_blocks - top[:, :, None]).sum(axis=2)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def _load(ref, at: tuple, columns: jax.Array, mask: jax.Array) -> jax.Array:
    """The rows `at` of an array, zeros where the mask is false."""
    mask = mask[:, None] & (columns < ref.shape[-1])[None]
    return plgpu.load(ref.at[*at, columns[None]], mask=mask, other=0)
