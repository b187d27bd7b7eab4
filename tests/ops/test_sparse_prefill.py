"""The blocks that prompts list equal a plain reading of the paper, and attention sees these alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from inferlib.attention_values import AttentionOptions, KvCache
from inferlib.ops import sparse_prefill
from inferlib.ops.by_platform import traced_for
from inferlib.ops.choice import Choice
from inferlib.ops.prefill_attention import choose, prefill_attention
from inferlib.ops.sparse_prefill import (
    BLOCK,
    LEAST,
    METHODS,
    SAMPLED,
    STRIDE,
    TILE,
    Listing,
    SparsePrefill,
    block_list,
    choose_scores,
    listed_blocks,
)
from inferlib.pallas_kernels import antidiagonals_gpu, antidiagonals_tpu, prefill_attention_hopper_gpu

PAGE, HEADS, GROUP, SIZE, SCALE = 64, 2, 2, 8, 0.5
SLOTS, WIDTH = 1000, 300  # neither is a multiple of a block, or of a tile
BLOCKS = -(-SLOTS // BLOCK)
CHUNKS = [(640, 300), (0, 300), (384, 141), (128, 1), (512, 0)]  # where chunks start, and their tokens

# Of what GPUs alone run: the compiled kernel. Elsewhere the same case is interpreted, or lowered.
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


class Inputs(NamedTuple):
    """q [P, C, K, G, h] and keys [P, K, S, h] as they are; the other arrays have NaN where nothing may be read."""

    q: np.ndarray
    k: np.ndarray
    queries: jax.Array
    cache: KvCache
    rows: jax.Array
    positions: jax.Array
    lengths: jax.Array


def inputs(kind: str) -> Inputs:
    rng, count, columns = np.random.default_rng(len(kind)), len(CHUNKS), -(-SLOTS // PAGE)
    draw = {
        "normal": lambda *shape: rng.normal(size=shape),
        # Few tokens have most of the attention, which lies in few blocks.
        "outliers": lambda *shape: rng.normal(size=shape) * np.where(rng.random(shape[:-1]) < 0.02, 20, 0.3)[..., None],
        "zeros": lambda *shape: np.zeros(shape),
    }[kind]
    q, k = (draw(*s).astype(np.float32) for s in ((count, WIDTH, HEADS, GROUP, SIZE), (count, HEADS, SLOTS, SIZE)))
    table = rng.permutation(count * columns).reshape(count, columns).astype(np.int32)
    pool, queries = np.full((count * columns, HEADS, PAGE, SIZE), np.nan, np.float32), q.copy()
    for row, (start, length) in enumerate(CHUNKS):
        queries[row, length:] = np.nan
        for p in range(start + length if length else 0):
            pool[table[row, p // PAGE], :, p % PAGE] = k[row, :, p]
    starts = np.array([start for start, _ in CHUNKS])
    cache = KvCache(jnp.asarray(pool), jnp.asarray(pool), pages=jnp.asarray(table), limit=SLOTS)
    integers = np.arange(count), starts[:, None] + np.arange(WIDTH), np.array([length for _, length in CHUNKS])
    return Inputs(q, k, jnp.asarray(queries), cache, *(jnp.asarray(x, jnp.int32) for x in integers))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def by_antidiagonals(q: np.ndarray, keys: np.ndarray, first: int) -> np.ndarray:
    """The scores [n] of a tile's queries [t, G, h] at positions from `first` on, by keys [S, h] up to the last."""
    end, scores = first + len(q), np.zeros(BLOCKS)
    for head in range(GROUP):
        for line in range(0, len(q), STRIDE):
            logits = []
            for column in range(0, min(first + line + STRIDE, end), STRIDE):
                pairs = [(line + STRIDE - 1 - r, column + r) for r in range(STRIDE)]
                logits.append(sum(q[i, head] @ keys[j] for i, j in pairs if i < len(q) and j < end))
            for u, weight in enumerate(softmax(np.array(logits) * SCALE / STRIDE)):
                scores[u * STRIDE // BLOCK] += weight
    return scores


def by_means(q: np.ndarray, keys: np.ndarray, first: int) -> np.ndarray:
    scores, end = np.zeros(BLOCKS), first + len(q)
    for head in range(GROUP):
        means = [keys[at : min(at + BLOCK, end)].mean(axis=0) for at in range(0, end, BLOCK)]
        scores[: len(means)] += softmax(SCALE * np.array(means) @ q[:, head].mean(axis=0))
    return scores


def by_samples(q: np.ndarray, keys: np.ndarray, first: int) -> np.ndarray:
    scores = np.zeros(BLOCKS)
    for head in range(GROUP):
        for sample in sorted({*range(SAMPLED - 1, len(q), SAMPLED), len(q) - 1}):
            for position, weight in enumerate(softmax(SCALE * keys[: first + sample + 1] @ q[sample, head])):
                scores[position // BLOCK] += weight
    return scores


def by_the_paper(scores: np.ndarray, first: int, last: int, threshold: float, most: int) -> list[int]:
    """The first block and the diagonal, then the heaviest ones until they have enough."""
    listed = sorted({0, *range(first // BLOCK, last // BLOCK + 1)})
    rest = sorted(set(range(last // BLOCK + 1)) - set(listed), key=lambda block: (-scores[block], block))
    for block in rest:
        if len(listed) < most and scores[listed].sum() < threshold * scores.sum():
            listed.append(block)
    return sorted(listed)


SCORES = {"xattention": by_antidiagonals, "mean": by_means, "sample": by_samples}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *[("normal", "xattention"), ("outliers", "xattention"), ("zeros", "xattention"), ("normal", "mean")],
        *[("normal", "sample"), ("outliers", "sample")],
    ],
)
@pytest.mark.fast_cases(2)
def test_lists_what_the_paper_lists(kind, method):
    it, scores_of = inputs(kind), SCORES[method]
    options = AttentionOptions(SCALE)
    tiles = jax.jit(sparse_prefill._tiles)(it.queries, it.cache, it.rows, it.positions, it.lengths)
    scores = np.asarray(jax.jit(partial(METHODS[method], options=options))(tiles))
    sparse, most = SparsePrefill(method, 0.7), 5
    make = partial(block_list, options=options, listing=Listing(sparse, most))
    listed = jax.jit(make)(it.queries, it.cache, it.rows, it.positions, it.lengths)
    numbers, sizes = np.asarray(listed.numbers), set()
    for row, head, tile in np.ndindex(numbers.shape[:3]):
        start, length = CHUNKS[row]
        q = it.q[row, tile * TILE : min((tile + 1) * TILE, length), head].astype(np.float64)
        numbers_of_it = sorted(x for x in numbers[row, head, tile] if x >= 0)
        if not len(q):
            assert numbers_of_it == []
            continue
        first = start + tile * TILE
        np.testing.assert_allclose(
            scores[row, head, tile], scores_of(q, it.k[row, head].astype(np.float64), first), atol=2e-4
        )
        # Ties and sums are those of float32.
        expected = by_the_paper(scores[row, head, tile], first, first + len(q) - 1, 0.7, most)
        assert numbers_of_it == expected, (row, head, tile)
        sizes.add(len(numbers_of_it))
    assert len(sizes) > 2


@pytest.mark.parametrize(
    ("softcap", "interpret"),
    [(None, True), pytest.param(5.0, True, marks=pytest.mark.slow), pytest.param(None, False, marks=needs_gpu)],
)
def test_the_kernel_scores_as_xla_does(softcap, interpret):
    """Tiles of one row, of one chunk or of two, share the keys; a program has tiles of several rows."""
    it, options = inputs("outliers"), AttentionOptions(SCALE, softcap=softcap)
    starts = np.array([384, 640, 0, 128, 512])
    positions = jnp.asarray(starts[:, None] + np.arange(WIDTH), jnp.int32)
    lengths = np.array([256, 300, 300, 1, 0])
    q = jnp.asarray(np.where((np.arange(WIDTH) < lengths[:, None])[..., None, None, None], it.q, np.nan), jnp.float32)
    places = jnp.array([0, 0, 1, 3, 4]), positions, jnp.asarray(lengths)
    cells = it.cache.k if interpret else it.cache.k.astype(jnp.bfloat16)
    q, cache = q.astype(cells.dtype), replace(it.cache, k=cells, v=None)

    @jax.jit
    def both(q, cache, rows, positions, lengths):
        tiles = sparse_prefill._tiles(q, cache, rows, positions, lengths)
        xla = METHODS["xattention"](tiles, options)
        queries = jnp.pad(q, [(0, 0), (0, 84), *[(0, 0)] * 3]).reshape(len(starts), 3, BLOCK, HEADS, GROUP, SIZE)
        kernel = antidiagonals_gpu.Tiles(queries, rows, *sparse_prefill._ends(positions, lengths, BLOCK))
        scores = antidiagonals_gpu.block_scores(kernel, cache, options, interpret=interpret)
        return sparse_prefill._joined(scores, TILE // BLOCK), xla, tiles.last

    got, want, last = both(q, cache, *places)
    np.testing.assert_allclose(got, want, rtol=1e-4 if interpret else 1e-2, atol=1e-6 if interpret else 1e-3)
    assert np.isfinite(got).all()
    assert (np.sum(got, axis=(1, 3)) > 0).tolist() == (last >= 0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "softcap", "width", "chunks"),
    [
        ("bfloat16", 5.0, 304, [(640, 300), (0, 304), (128, 1), (512, 0)]),
        pytest.param("float32", None, 64, [(0, 64), (333, 50)], marks=pytest.mark.release),
    ],
)
def test_the_tpu_kernel_scores_as_xla_does(dtype, softcap, width, chunks):
    """A prompt's last blocks, a first chunk, one token and none; cells that nobody may read are NaN."""
    rng, page, columns, options = np.random.default_rng(0), 128, 10, AttentionOptions(0.1, softcap=softcap)
    table = rng.permutation(len(chunks) * columns).reshape(-1, columns).astype(np.int32)
    pool = np.full((table.size, HEADS, page, 128), np.nan, np.float32)
    q = rng.normal(size=(len(chunks), width, HEADS, GROUP, 128))
    for row, (start, length) in enumerate(chunks):
        q[row, length:] = np.nan
        for p in range(start + length if length else 0):
            pool[table[row, p // page], :, p % page] = rng.normal(size=(HEADS, 128))
    cache = KvCache(jnp.asarray(pool, dtype), pages=jnp.asarray(table), limit=columns * page - 20)
    starts, lengths = (jnp.asarray(x, jnp.int32) for x in zip(*chunks, strict=True))
    positions = starts[:, None] + jnp.arange(width)

    @jax.jit
    def both(q, cache, positions, lengths):
        rows = jnp.arange(len(chunks))
        tiles = sparse_prefill._tiles(q, cache, rows, positions, lengths)
        ends = sparse_prefill._ends(positions, lengths, BLOCK)
        scores = antidiagonals_tpu.block_scores(q, cache, rows, *ends, options, interpret=True)
        joined = sparse_prefill._joined(scores, sparse_prefill.blocks_in(tiles.queries.shape[2]))
        return joined, METHODS["xattention"](tiles, options), tiles.last

    got, want, last = both(jnp.asarray(q, dtype), cache, positions, lengths)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert (np.sum(got, axis=(1, 3)) > 0).tolist() == (last >= 0).tolist()


def test_what_gathers_no_keys():
    """XAttention's scores on GPUs and TPUs, of caches that their kernels read."""

    def chosen(backend: str, group: int = 4, page: int = 128, size: int = 128, method: str = "xattention"):
        q = cast("Any", jax.ShapeDtypeStruct((1, 256, 2, group, size), jnp.bfloat16))
        cell = cast("Any", jax.ShapeDtypeStruct((8, 2, page, size), jnp.bfloat16))
        cache = KvCache(cell, pages=cast("Any", jax.ShapeDtypeStruct((1, 8), jnp.int32)))
        return choose_scores(q, cache, SparsePrefill(method, 0.9), backend)

    for backend in ("pallas_gpu", "pallas_tpu"):
        assert chosen(backend, 16) == Choice(backend)
        assert "'sample' has none" in chosen(backend, method="sample").reason
    assert chosen("xla") == Choice("xla")
    assert "with 17 query heads" in chosen("pallas_gpu", 17).reason
    assert "pages of 64 positions" in chosen("pallas_tpu", page=64).reason
    assert "heads of size 64" in chosen("pallas_tpu", size=64).reason
    assert "bytes of on-chip memory" in chosen("pallas_tpu", 128).reason


@pytest.mark.parametrize(("size", "pages"), [(128, 4), (64, None)])
def test_the_kernel_lowers_to_triton(size, pages):
    shapes: tuple = (6, 128, 2, 3, size), (24, 2, 512, size)
    q, cell = (cast("Any", jax.ShapeDtypeStruct(shape, jnp.bfloat16)) for shape in shapes)
    cache = KvCache(cell, cell, pages=pages and cast("Any", jax.ShapeDtypeStruct((6, pages), jnp.int32)))
    listing = Listing(SparsePrefill("xattention", 1.0), 3, "pallas_gpu")
    integer = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    with traced_for("cuda"), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        run = jax.jit(partial(block_list, options=AttentionOptions(1.0), listing=listing))
        text = (
            run.trace(q, cache, integer(6), integer(6, 128), integer(6)).lower(lowering_platforms=("cuda",)).as_text()
        )
    assert "xla.gpu.triton" in text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas_tpu", marks=pytest.mark.release)])
def test_all_blocks_are_all_there_is(backend):
    """Full attention to the bit in XLA's form; a short list leaves something out."""
    it, options = inputs("normal"), AttentionOptions(SCALE)
    if backend == "pallas_tpu":  # it takes cells of 128 numbers, whole tiles, and chunks that are written
        some = np.array([0, 3, 4])  # an interpreted kernel takes a second for each chunk
        wide = [(0, 0)] * 3 + [(0, 128 - SIZE)]
        cells, queries = (jnp.nan_to_num(x) for x in (jnp.pad(it.cache.k, wide), it.queries[some]))
        cache = KvCache(cells, cells, pages=it.cache.pages[some], limit=SLOTS)
        it = it._replace(
            queries=jnp.pad(queries[:, :256], [(0, 0), *wide]), positions=it.positions[some, :256], cache=cache
        )
        it = it._replace(lengths=jnp.minimum(it.lengths, 256)[some], rows=jnp.arange(len(some), dtype=jnp.int32))

    @partial(jax.jit, static_argnums=(0, 1))  # of arguments: XLA would fold constants, which takes it seconds
    def attend(sparse, most, queries, cache, rows, positions, lengths):
        listed = sparse and block_list(queries, cache, rows, positions, lengths, options, Listing(sparse, most))
        return prefill_attention(queries, cache, rows, positions, options, listed=listed, backend=backend)[0]

    short = SparsePrefill("xattention", 0.3)
    ways = (None, 0), (SparsePrefill("xattention", 1.0), BLOCKS), (short, 3)
    full, whole, part = (np.asarray(attend(*way, *it[2:])) for way in ways)
    close = np.testing.assert_array_equal if backend == "xla" else partial(np.testing.assert_allclose, atol=1e-5)
    for row, length in enumerate(np.asarray(it.lengths)):
        close(whole[row, :length], full[row, :length])
        assert np.isfinite(part[row, :length]).all()
    assert np.abs(part[0] - full[0]).max() > 1e-2
    alone = np.flatnonzero(it.lengths == 1)[0]
    close(part[alone, 0], full[alone, 0])  # the first block and its own are all that it sees


@pytest.mark.slow
def test_chunks_list_what_the_prompt_lists():
    """If they begin at multiples of 256; others have tiles of their own. The last chunk is not full."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 640, HEADS, GROUP, SIZE)).astype(np.float32)
    k = rng.normal(size=(1, HEADS, 640, SIZE)).astype(np.float32)
    listing = Listing(SparsePrefill("xattention", 0.6), 4)
    make = jax.jit(partial(block_list, options=AttentionOptions(SCALE), listing=listing))
    whole = make(q, KvCache(k, k), *places(0, 640)).numbers
    for start, end in ((0, 256), (256, 512), (512, 640)):
        behind = np.where(np.arange(640)[:, None] < end, k, np.nan)
        chunk = np.full((1, 256, *q.shape[2:]), np.nan, np.float32)
        chunk[:, : end - start] = q[:, start:end]
        rows, positions, _ = places(start, start + 256)
        part = make(chunk, KvCache(behind, behind), rows, positions, jnp.asarray([end - start])).numbers
        np.testing.assert_array_equal(part, whole[:, :, start // TILE : -(-end // TILE)])


def places(start: int, end: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.zeros(1, jnp.int32), jnp.asarray(np.arange(start, end, dtype=np.int32)[None]), jnp.asarray([end - start])


@pytest.mark.slow
def test_lists_end_with_the_share():
    """Blocks are listed while those before have less than the share; there is room for so many; none has no number."""
    scores = jnp.asarray([0.1, 0.05, 0.4, 0.0, 0.2, 0.25, 9.0])[None, None, None]
    first, last = jnp.full((1, 1), 5 * BLOCK), jnp.full((1, 1), 6 * BLOCK - 1)
    for threshold, most, expected in (
        (0.3, 7, [0, 5]),
        (0.5, 7, [0, 5, 2]),
        (0.9, 7, [0, 5, 2, 4]),
        (0.9, 3, [0, 5, 2]),
        (1.0, 7, [0, 5, 2, 4, 1, 3]),
    ):
        numbers = listed_blocks(scores, first, last, threshold, most)[0, 0, 0]
        assert numbers.shape == (most,)
        assert sorted(numbers.tolist()) == sorted([*expected, *[-1] * (most - len(expected))])


def test_options():
    assert SparsePrefill.read(None) is None
    for text, shown in (("xattention:0.9", "xattention:0.9:0.25"), ("mean:1:0.5", "mean:1:0.5")):
        assert str(SparsePrefill.read(text)) == shown
        assert SparsePrefill.read(shown) == SparsePrefill.read(SparsePrefill.read(text))
    wrong = {
        "text such as 'xattention:0.9'": ["xattention", "xattention:", "xattention:-1", "", 0.9, True, "mean:1:1:1"],
        "has the methods xattention, sample, mean": ["flex:0.9"],
        "the threshold of sparse_prefill is above 0": ["mean:0", "mean:1.5"],
        "the share of the blocks of sparse_prefill is above 0": ["mean:0.9:0", "mean:0.9:2"],
    }
    for message, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=message):
                SparsePrefill.read(value)
    assert SparsePrefill("mean", 0.9).max_blocks(32768, 32768) == 64
    assert SparsePrefill("mean", 0.9).max_blocks(32768, 1024) == 8
    assert SparsePrefill("mean", 0.9, 0.01).max_blocks(1024, 1024) == LEAST


def test_kernels_without_lists_are_not_chosen(monkeypatch):
    q = jax.ShapeDtypeStruct((1, 256, 2, 4, 128), jnp.bfloat16)
    cell = jax.ShapeDtypeStruct((8, 2, 128, 128), jnp.bfloat16)
    cache = KvCache(cell, cell, pages=jax.ShapeDtypeStruct((1, 8), jnp.int32))
    listed = sparse_prefill.shape_of_list(q, 4)
    assert choose(cache, None, "pallas_tpu", q, listed=listed).name == "pallas_tpu"
    monkeypatch.setattr(prefill_attention_hopper_gpu, "is_hopper", lambda: False)
    refused = choose(cache, None, "pallas_gpu", q, listed=listed)
    assert (refused.name, refused.reason) == ("xla", "lists of blocks")
    monkeypatch.setattr(prefill_attention_hopper_gpu, "is_hopper", lambda: True)
    assert choose(cache, None, "pallas_gpu", q, listed=listed).name == "pallas_gpu"
    assert choose(cache, None, "pallas_gpu", q, capped=True).name == "pallas_gpu"
    capped = choose(cache, None, "pallas_gpu", q, listed=listed, capped=True)
    assert (capped.name, capped.reason) == ("xla", "lists of blocks with capped logits or sinks")
