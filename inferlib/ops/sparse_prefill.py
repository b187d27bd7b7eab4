"""Which blocks of a context the tiles of a prompt's chunk attend to, by a cheap estimate of where its attention goes.

A tile is up to 256 tokens of a chunk, and a block 128 positions of its row's cache. Each KV head of each tile gets a
list of blocks, which `prefill_attention` takes: the first block, those that the tile itself lies in, and then those of
the highest scores, until they have a share of all scores or the list is full. What a tile lists depends on its own
tokens and on the keys up to them, so chunks that begin at multiples of 256 list what one long chunk would, and chunks
of 128 tokens what other chunks of 128 would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from inferlib.attention_values import AttentionOptions, KvCache, Shaped
from inferlib.ops.choice import Choice
from inferlib.ops.int4_cells import decoded_keys
from inferlib.ops.interpreted import run_kernel
from inferlib.ops.kv_cache import cells_of_rows
from inferlib.ops.option_text import read_option
from inferlib.ops.precision import precision_of
from inferlib.ops.prefill_attention import BlockList

TILE, BLOCK, STRIDE = 256, 128, 16
SAMPLED = 32  # one token is a sample among this many
LEAST = 2 + TILE // BLOCK  # the first block, and those that a tile may lie in
SHARE = 0.25
_TEXT = re.compile(r"([a-z]+):(\d*\.?\d+)(?::(\d*\.?\d+))?")


@dataclass(frozen=True)
class SparsePrefill:
    """How prompts list the blocks that they attend to.

    method: of METHODS. threshold: blocks are listed until they have this share of a tile's scores; 1: as many as there
    is room for. share: the most blocks of a list, as a share of those of the longest sequence. Both above 0 and up to
    1. Raises ValueError for others.
    """

    method: str
    threshold: float
    share: float = SHARE

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(
                f"sparse_prefill has the methods {', '.join(METHODS)} and fastkv, got {self.method!r:.100}"
            )
        for name, value in (("threshold", self.threshold), ("share of the blocks", self.share)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"the {name} of sparse_prefill is above 0 and at most 1, got {value!r:.100}")

    @staticmethod
    def read(value: Any) -> SparsePrefill | None:
        """The estimate that an option stands for: a `SparsePrefill`, text such as "xattention:0.9" or
        "xattention:0.9:0.25", or None. Raises ValueError for anything else."""
        usage = (
            "sparse_prefill is text such as 'xattention:0.9', the share of attention that blocks are listed for, or "
            "'xattention:0.9:0.25', with the most blocks as a share of the context's"
        )
        make = lambda x: SparsePrefill(x[1], float(x[2]), float(x[3]) if x[3] else SHARE)  # noqa: E731
        return read_option(value, SparsePrefill, _TEXT, make, usage)

    def __str__(self) -> str:
        return f"{self.method}:{self.threshold:g}:{self.share:g}"

    def max_blocks(self, max_len: int, slots: int) -> int:
        """The most blocks of a list, for sequences of up to max_len tokens and a cache of `slots` slots a row. It is
        the same for all lengths of the cache, so that a row's lists do not depend on the rows beside it."""
        return min(max(math.ceil(self.share * blocks_in(max_len)), LEAST), blocks_in(slots))


class Listing(NamedTuple):
    """How chunks list blocks: an estimate, the most blocks of a list, and the backend of `prefill_attention` that takes
    the lists. With "pallas_gpu" and "pallas_tpu" a kernel makes XAttention's scores where it can."""

    sparse: SparsePrefill
    most: int
    backend: str = "xla"


class Tiles(NamedTuple):
    """Queries [P, T, w, K, G, h], T tiles of w tokens, w a multiple of 16; keys [P, K, n * 128, h]. Zeros where there
    is no token. first, last [P, T]: positions of a tile's first and last token; last -1: it has none."""

    queries: jax.Array
    keys: jax.Array
    first: jax.Array
    last: jax.Array


def blocks_in(positions: int) -> int:
    return -(-positions // BLOCK)


def antidiagonals(tiles: Tiles, options: AttentionOptions) -> jax.Array:
    """The scores [P, K, T, n] of XAttention (Xu et al. 2025, https://arxiv.org/abs/2503.16428): 16 queries meet 16 keys
    in one product, the last query the first key; the softmax of these, summed over a block and the query group."""
    p, t, width, heads, group, size = tiles.queries.shape
    lines, each = width // STRIDE, BLOCK // STRIDE
    q = tiles.queries.reshape(p, t, lines, STRIDE, heads, group, size)[:, :, :, ::-1]
    k = tiles.keys.reshape(p, heads, -1, STRIDE, size)
    logits = _products("ptlrkgh,pkurh->pkgtlu", q, k) * (options.scale / STRIDE)
    first = tiles.first[..., None] + STRIDE * jnp.arange(lines)
    last = jnp.minimum(first + STRIDE - 1, tiles.last[..., None])
    seen = (STRIDE * jnp.arange(k.shape[2]) <= last[..., None]) & (first <= last)[..., None]
    weights = _softmax(logits, seen[:, None, None], options)
    return jnp.sum(weights.reshape(*weights.shape[:-1], -1, each), axis=(2, 4, 6))


def means(tiles: Tiles, options: AttentionOptions) -> jax.Array:
    """The scores [P, K, T, n] by the mean query of a tile and the mean key of a block: their softmax over the blocks,
    summed over the query group."""
    p, heads, _, size = tiles.keys.shape
    k = tiles.keys.reshape(p, heads, -1, BLOCK, size).astype(jnp.float32)
    begins = BLOCK * jnp.arange(k.shape[2])
    last = tiles.last[..., None]
    count = jnp.clip(jnp.max(last, axis=1) + 1 - begins, 1, BLOCK)  # keys of a block
    k = jnp.sum(k, axis=3) / count[:, None, :, None]
    tokens = jnp.maximum(tiles.last - tiles.first + 1, 1)[..., None, None, None]
    q = jnp.sum(tiles.queries.astype(jnp.float32), axis=2) / tokens
    logits = _products("ptkgh,pkuh->pkgtu", q, k) * options.scale
    return jnp.sum(_softmax(logits, (begins <= last)[:, None, None], options), axis=2)


def samples(tiles: Tiles, options: AttentionOptions) -> jax.Array:
    """The scores [P, K, T, n] by samples of the queries, as SampleAttention has them (Zhu et al. 2024,
    https://arxiv.org/abs/2406.15486): the attention of the last of each 32 tokens to all keys, summed over a block, the
    samples and the query group. The KV heads take turns, since the weights of all of them would fill the memory."""
    width = tiles.queries.shape[2]
    runs = tiles.first[..., None] + jnp.arange(0, width, SAMPLED)
    at = jnp.minimum(runs + SAMPLED - 1, tiles.last[..., None])  # [P, T, s], the positions of s samples
    places = jnp.clip(at - tiles.first[..., None], 0, width - 1)
    q = jnp.take_along_axis(tiles.queries, places[..., None, None, None], axis=2)
    keys = jnp.arange(tiles.keys.shape[2])
    seen = (keys <= at[..., None]) & (runs <= tiles.last[..., None])[..., None]

    def of_head(head: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = _products("ptsgh,puh->pgtsu", *head) * options.scale
        weights = _softmax(logits, seen[:, None], options)
        return jnp.sum(weights.reshape(*weights.shape[:-1], -1, BLOCK), axis=(1, 3, 5))

    scores = lax.map(of_head, (jnp.moveaxis(q, 3, 0), jnp.moveaxis(tiles.keys, 1, 0)))
    return jnp.moveaxis(scores, 0, 1)


METHODS: dict[str, Callable[[Tiles, AttentionOptions], jax.Array]] = {
    "xattention": antidiagonals,
    "sample": samples,
    "mean": means,
}


def listed_blocks(scores: jax.Array, first: jax.Array, last: jax.Array, threshold: float, most: int) -> jax.Array:
    """The blocks [P, K, T, most] int32 that tiles list by scores [P, K, T, n], the highest first; -1 is none.

    first, last [P, T]: as in `Tiles`. Block 0 and those that the tile lies in come first. Others follow while those
    before them have less than `threshold` of the scores of all blocks that the tile sees.
    """
    block, first, last = jnp.arange(scores.shape[-1]), first[:, None, :, None], last[:, None, :, None]
    seen = block * BLOCK <= last
    scores = jnp.where(seen, scores, 0.0)
    always = seen & ((block == 0) | (block >= first // BLOCK))
    ranked, numbers = lax.top_k(jnp.where(always, jnp.inf, jnp.where(seen, scores, -1.0)), most)
    mass = jnp.take_along_axis(scores, numbers, axis=-1)
    missing = jnp.cumsum(mass, axis=-1) - mass < threshold * jnp.sum(scores, axis=-1, keepdims=True)
    taken = jnp.isinf(ranked) | ((ranked >= 0) & (missing if threshold < 1 else True))
    return jnp.where(taken, numbers, -1).astype(jnp.int32)


def block_list(
    q: jax.Array,
    cache: KvCache,
    rows: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    listing: Listing,
) -> BlockList:
    """The lists of chunks: queries q [P, C, K, G, h], whose keys are in the cache already.

    rows [P], positions [P, C]: as `prefill_attention` takes them, consecutive. lengths [P] int32: tokens of a chunk;
    what is behind them may be anything, and so may cells behind their positions.
    """
    sparse, tile = listing.sparse, tile_of(q.shape[1])
    first, last = _ends(positions, lengths, tile)
    if kernel := _KERNELS.get(choose_scores(q, cache, sparse, listing.backend).name):
        scores = _joined(kernel(q, cache, rows, *_ends(positions, lengths, BLOCK), options), blocks_in(tile))
    else:
        scores = METHODS[sparse.method](_tiles(q, cache, rows, positions, lengths), options)
    numbers = listed_blocks(scores, first, last, sparse.threshold, listing.most)
    return BlockList(numbers, tile, BLOCK)


def choose_scores(q: Shaped, cache: KvCache, sparse: SparsePrefill, backend: str) -> Choice:
    """Which implementation scores blocks for queries [P, C, K, G, h] and lists that this backend of
    `prefill_attention` takes. Kernels read keys where they lie; XLA gathers the keys of each chunk's row first. Arrays
    may be shapes."""
    if backend not in ("pallas_gpu", "pallas_tpu"):
        return Choice("xla")
    if sparse.method != "xattention":
        return Choice("xla", f"{sparse.method!r} has none; 'xattention' does, and takes less time")
    if backend == "pallas_tpu":
        from inferlib.pallas_kernels import antidiagonals_tpu

        reason = antidiagonals_tpu.unsupported(q, cache)
    else:
        from inferlib.pallas_kernels import antidiagonals_gpu

        reason = antidiagonals_gpu.unsupported(q, cache, min(BLOCK, q.shape[1]))
    return Choice("xla", reason) if reason else Choice(backend)


def _joined(scores: jax.Array, each: int) -> jax.Array:
    """The scores of tiles that have `each` tiles of 128 tokens, from those of the latter: sums."""
    p, heads, count, blocks = scores.shape
    scores = _padded(scores, 2, -(-count // each) * each)
    return jnp.sum(scores.reshape(p, heads, -1, each, blocks), axis=3)


def _by_tpu_kernel(q, cache: KvCache, rows, first, last, options: AttentionOptions) -> jax.Array:
    """The scores of `antidiagonals`, of tiles of 128 tokens, by the kernel for TPUs, which CPUs interpret."""
    from inferlib.pallas_kernels import antidiagonals_tpu

    def run(q, k, rows, first, last, *, interpret: bool):
        of_call = replace(cache, k=k, v=None)
        return antidiagonals_tpu.block_scores(q, of_call, rows, first, last, options, interpret=interpret)

    return run_kernel(run, q, cache.k, rows, first, last)


def _by_gpu_kernel(q, cache: KvCache, rows, first, last, options: AttentionOptions) -> jax.Array:
    """The scores of `antidiagonals`, of tiles of 128 tokens, by the kernel for GPUs, which CPUs interpret."""
    from inferlib.pallas_kernels import antidiagonals_gpu

    (chunks, count), tile = first.shape, min(BLOCK, q.shape[1])
    q = _padded(q, 1, count * tile).reshape(chunks, count, tile, *q.shape[2:])

    def run(q, k, rows, first, last, *, interpret: bool):
        tiles, of_call = antidiagonals_gpu.Tiles(q, rows, first, last), replace(cache, k=k, v=None)
        return antidiagonals_gpu.block_scores(tiles, of_call, options, interpret=interpret)

    return run_kernel(run, q, cache.k, rows, first, last)


_KERNELS = {"pallas_gpu": _by_gpu_kernel, "pallas_tpu": _by_tpu_kernel}


def shape_of_list(q: Shaped, most: int) -> BlockList:
    """The shape of a list of `most` blocks for queries [P, C, K, G, h]."""
    tile = tile_of(q.shape[1])
    numbers = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], -(-q.shape[1] // tile), most), jnp.int32)
    return BlockList(cast("jax.Array", numbers), tile, BLOCK)


def tile_of(width: int) -> int:
    """Tokens of a tile, for chunks of `width` tokens."""
    return min(TILE, width)


def _ends(positions: jax.Array, lengths: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """`first` and `last` of `Tiles` of `tile` tokens, for chunks at positions [P, C] of which `lengths` [P] tokens
    count."""
    first = positions[:, ::tile]
    last = jnp.minimum(first + tile, (positions[:, 0] + lengths)[:, None]) - 1
    return first, jnp.where(last >= first, last, -1)


def _tiles(q: jax.Array, cache: KvCache, rows: jax.Array, positions: jax.Array, lengths: jax.Array) -> Tiles:
    (chunks, width), tile = positions.shape, tile_of(q.shape[1])
    count = -(-width // tile)
    ends = positions[:, 0] + lengths  # of the chunks
    q = jnp.where((positions < ends[:, None])[..., None, None, None], q, 0)
    q = _padded(q, 1, count * tile).reshape(chunks, count, tile, *q.shape[2:])
    keys = decoded_keys(cells_of_rows(cache, cache.k, rows), q.dtype)
    if cache.k_scales is not None:
        keys = keys.astype(jnp.float32) * cells_of_rows(cache, cache.k_scales, rows)[..., None]
    there = jnp.arange(keys.shape[2]) < ends[:, None]
    keys = jnp.where(there[:, None, :, None], keys, 0).astype(q.dtype)
    keys = _padded(keys, 2, blocks_in(keys.shape[2]) * BLOCK)
    return Tiles(_padded(q, 2, -(-tile // STRIDE) * STRIDE), keys, *_ends(positions, lengths, tile))


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with zeros behind it along an axis, up to `size`."""
    missing = size - x.shape[axis]
    return x if not missing else jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _products(form: str, q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum(form, q, k, precision=precision_of(q.dtype), preferred_element_type=jnp.float32)


def _softmax(logits: jax.Array, seen: jax.Array, options: AttentionOptions) -> jax.Array:
    """Over the last dimension; zeros where nothing is seen."""
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-37)
