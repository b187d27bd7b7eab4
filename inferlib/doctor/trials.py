"""Operations by a kernel, and by XLA in float32: the same inputs for both.

Letters: B rows, C queries of a row, K KV heads, G queries of one, h size of a head; for latents H heads, R numbers of a
latent, r of a rotary key; T tokens, E experts, I inputs, O outputs. What no query may see is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.attention_values import Expansion, HeadTransforms
from inferlib.models.layers.norm import rms_norm
from inferlib.models.layers.rope import apply_rope
from inferlib.ops import choose_experts as experts_op
from inferlib.ops import expert_mlp as mlp_op
from inferlib.ops import grouped_matmul as grouped_op
from inferlib.ops import mla_decode_attention as mla_decode_op
from inferlib.ops import mla_prefill_attention as mla_prefill_op
from inferlib.ops.attention import AttentionOptions
from inferlib.ops.backend import Backend
from inferlib.ops.cache_write import cache_write, chunk_write
from inferlib.ops.decode_attention import decode_attention
from inferlib.ops.fetch_ahead import fetching
from inferlib.ops.group_order import group_order
from inferlib.ops.kv_cache import KvCache, LatentCache, NewCells
from inferlib.ops.matmul import matmul
from inferlib.ops.mla_queries import mla_queries
from inferlib.ops.on_chip import loop_weights
from inferlib.ops.packed import PackedTensor, Packing
from inferlib.ops.prefill_attention import prefill_attention
from inferlib.ops.project_and_attend import project_and_attend
from inferlib.ops.quantized import SCHEMES, QuantizedTensor, Scheme, quantize
from inferlib.ops.residual_norm import reference, residual_norm
from inferlib.ops.segment_sum import TILE, Pieces, Segments, segment_sum
from inferlib.pallas_kernels.generations_tpu import generation
from inferlib.sharding import axes
from inferlib.tuning.kernel_cases.chunk_write import ChunkWrite
from inferlib.tuning.kernel_cases.decode_attention import DecodeAttention
from inferlib.tuning.kernel_cases.expert_mlp import ExpertMlp
from inferlib.tuning.kernel_cases.group_order import GroupOrder
from inferlib.tuning.kernel_cases.grouped_matmul import GroupedMatmul
from inferlib.tuning.kernel_cases.mla_decode_attention import RANK, ROTARY, MlaDecodeAttention
from inferlib.tuning.kernel_cases.mla_prefill_attention import SIZE, MlaPrefillAttention
from inferlib.tuning.kernel_cases.mx_matmul import MxMatmul
from inferlib.tuning.kernel_cases.prefill_attention import PrefillAttention

EPS = 1e-5
# Largest error of a row of results, as a share of the row's length. Inputs and results in bfloat16 are rounded to 2^-9,
# and so are the weights of a softmax; a tile that is wrong is off by about 1.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Trial:
    """A kernel and its oracle, which take the same arrays and give results of the same shapes."""

    kernel: Callable[..., Any]
    oracle: Callable[..., Any]
    arrays: tuple[Any, ...]

    def error(self) -> float:
        """The largest error of a row of any result, as a share of that row's length. NaN in one of the two only, and
        integers that differ, count as infinite."""
        results = jax.jit(self.kernel)(*self.arrays)
        expected = jax.jit(self.oracle)(*jax.tree.map(_exact, self.arrays))
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        return max(float(_error(got, want)) for got, want in pairs)


def _exact(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@jax.jit
def _error(got: jax.Array, want: jax.Array) -> jax.Array:
    if jnp.issubdtype(got.dtype, jnp.integer):
        return jnp.where(jnp.all(got == want), 0.0, jnp.inf)
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    dead = ~jnp.isfinite(want)
    same = jnp.all(jnp.where(dead, jnp.isnan(got) == jnp.isnan(want), jnp.isfinite(got)))
    got, want = jnp.where(dead, 0, got), jnp.where(dead, 0, want)
    whole = jnp.sqrt(jnp.mean(want * want) * want.shape[-1])  # of a row, on average: some rows may be near zero
    length = jnp.maximum(jnp.linalg.norm(want, axis=-1), whole)
    error = jnp.max(jnp.linalg.norm(got - want, axis=-1) / jnp.maximum(length, 1e-30))
    return jnp.where(same, error, jnp.inf)


class Draw:
    """Random arrays, drawn on the device, the same each time."""

    def __init__(self) -> None:
        self._keys = self._split()

    def _split(self) -> Iterator[jax.Array]:
        key = jax.random.key(0)
        while True:
            key, one = jax.random.split(key)
            yield one

    def normal(self, *shape: int, dtype: str = "bfloat16") -> jax.Array:
        return _normal(next(self._keys), shape, dtype)

    def weight(self, scheme: str, *shape: int, contracting: int) -> jax.Array | QuantizedTensor:
        """A weight, quantised unless the scheme is "bfloat16"; contracting: the dimension that products sum over."""
        w = self.normal(*shape, dtype="bfloat16" if scheme == "bfloat16" else "float32")
        return w if scheme == "bfloat16" else _quantize(w, (contracting,), SCHEMES[scheme])


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
_quantize = jax.jit(quantize, static_argnums=(1, 2))


def dequantized_matrix(w: jax.Array | QuantizedTensor, contracting: int) -> jax.Array:
    """A weight in float32, with its inputs in one dimension."""
    if not isinstance(w, QuantizedTensor):
        return w.astype(jnp.float32)
    x = w.dequantized((contracting,), jnp.float32)
    return x.reshape(*x.shape[:contracting], -1, *x.shape[contracting + 1 + w.grouped :])


# ---- attention


def _positions(count: int, slots: int, lengths: Sequence[int], pages: np.ndarray | None) -> np.ndarray:
    """[N, S] bool: the slots that hold a position of a row."""
    live = np.zeros((count, slots), bool)
    for row, length in enumerate(lengths):
        for column, page in enumerate([row] if pages is None else pages[row]):
            live[page] = column * slots + np.arange(slots) < length
    return live


def _cache(
    draw: Draw, case: DecodeAttention | PrefillAttention, lengths: Sequence[int], slots: int, live: np.ndarray | None
) -> KvCache:
    """Keys and values [1, N, K, S, h]; those that are not live are NaN."""
    pages = case.pages
    count = len(lengths) if pages is None else pages.size
    live = _positions(count, slots, lengths, pages) if live is None else live
    arrays, scales = {}, {}
    for name in ("k", "v"):
        x = draw.normal(count, case.heads, slots, case.size)
        if case.stored is None:
            arrays[name] = jnp.where(live[:, None, :, None], x, jnp.nan)[None]
            continue
        stored = _quantize(x, (3,), Scheme(case.stored))
        arrays[name] = stored.values[None]
        scales[f"{name}_scales"] = jnp.where(live[:, None], stored.scales, jnp.nan)[None]
    table = None if pages is None else jnp.asarray(pages)
    return KvCache(**arrays, **scales, layer=jnp.int32(0), pages=table, ring=case.slots is not None)


def decode(case: DecodeAttention, backend: str) -> Trial:
    """Decode attention; with `writes` also the new cells that it writes."""
    draw, rows = Draw(), len(case.lengths)
    slots = case.page or case.slots or -(-max(case.lengths) // 128) * 128
    lengths = [length - case.queries for length in case.lengths] if case.writes else list(case.lengths)
    live = np.ones((rows, slots), bool) if case.slots else None
    cache = _cache(draw, case, lengths, slots, live)
    q = draw.normal(rows, case.queries, case.heads, case.group, case.size)
    new = [draw.normal(rows, case.queries, case.heads, case.size) for _ in range(2)] if case.writes else []
    if backend == "pallas_gpu":  # one query of a row, and one layer's cache
        q, new = q[:, 0], [x[:, 0] for x in new]
        cache = replace(cache, k=cache.k[0], v=cache.v[0], layer=None)  # pyright: ignore[reportOptionalSubscript]
    options = AttentionOptions(case.size**-0.5, case.window)

    def run(q, cache: KvCache, lengths, new, *, backend: str):
        cells = NewCells(new) if new else None
        out, lse, after = decode_attention(q, cache, lengths, options, new=cells, backend=backend)
        return out, lse, *(_newest(after, lengths) if new else ())

    arrays = q, cache, jnp.asarray(case.lengths, jnp.int32), new
    return Trial(partial(run, backend=backend), partial(run, backend="xla"), arrays)


def _newest(cache: KvCache, lengths: jax.Array) -> tuple[jax.Array, ...]:
    """The newest cell of each row, as float32."""
    rows, newest, slots = jnp.arange(lengths.size), lengths - 1, cache.k.shape[-2]
    page = rows if cache.pages is None else cache.pages[rows, newest // slots]
    at = page, slice(None), newest % slots
    cells = [cache.of_layer(x)[at].astype(jnp.float32) for x in cache.arrays]
    if not cache.scaled:
        return tuple(cells)
    return tuple(x * scale[..., None] for x, scale in zip(cells[:2], cells[2:], strict=True))


def prefill(case: PrefillAttention, backend: str) -> Trial:
    draw, end = Draw(), case.start + case.width
    slots = case.page or case.slots or -(-end // 1024) * 1024
    live = np.ones((1, slots), bool) if case.slots else None
    cache = _cache(draw, case, [end], slots, live)
    q = draw.normal(1, case.width, case.heads, case.group, case.size)
    options = AttentionOptions(case.size**-0.5, case.window)
    if backend == "pallas_gpu":
        cache = replace(cache, k=cache.k[0], v=cache.v[0], layer=None)  # pyright: ignore[reportOptionalSubscript]

    def run(q, cache, rows, positions, *, backend: str):
        return prefill_attention(q, cache, rows, positions, options, backend=backend)

    positions = case.start + jnp.arange(case.width, dtype=jnp.int32)[None]
    arrays = q, cache, jnp.zeros(1, jnp.int32), positions
    return Trial(partial(run, backend=backend), partial(run, backend="xla"), arrays)


def write_chunk(case: ChunkWrite, slots: int) -> Trial:
    """slots: positions of a row. The results are the cells of the chunk, and those beside it."""
    draw = Draw()
    cells = [draw.normal(1, 2, case.heads, slots, case.size) for _ in range(2)]
    scales: list[jax.Array] = []
    if case.stored:
        stored = [_quantize(x, (4,), Scheme(case.stored)) for x in cells]
        cells, scales = [x.values for x in stored], [x.scales for x in stored]
    new = [draw.normal(1, case.width, case.heads, case.size) for _ in range(2)]

    def run(cache, new, pages, at, *, backend: str):
        after = chunk_write(cache, new, pages, at, layer=0, backend=backend)
        values, scales = [x.astype(jnp.float32) for x in after[:2]], after[2:]
        return [x * s[..., None] for x, s in zip(values, scales, strict=True)] if scales else values

    arrays = [*cells, *scales], new, jnp.ones(1, jnp.int32), jnp.full(1, case.start, jnp.int32)
    return Trial(partial(run, backend="pallas_tpu"), partial(run, backend="xla"), arrays)


def qkv(case: DecodeAttention) -> Trial:
    """Decode attention on GPUs from the projection on, with RoPE, beside one step after the other in XLA."""
    draw, rows = Draw(), len(case.lengths)
    slots = case.page or -(-max(case.lengths) // 128) * 128
    cache = _cache(draw, case, [length - 1 for length in case.lengths], slots, None)
    cache = replace(cache, k=cache.k[0], v=cache.v[0], layer=None)  # pyright: ignore[reportOptionalSubscript]
    products = draw.normal(rows, case.heads, case.group + 2, case.size)
    angles = draw.normal(rows, case.size // 2, dtype="float32")
    options = AttentionOptions(case.size**-0.5)

    def kernel(products, cache, lengths, cos, sin):
        out, after = project_and_attend(products, cache, lengths, HeadTransforms(rope=(cos, sin)), options)
        return out, *_newest(after, lengths)

    def oracle(products, cache, lengths, cos, sin):
        q, key, value = products[:, :, :-2], products[:, :, -2], products[:, :, -1]
        new = NewCells([apply_rope(key, cos, sin), value])
        out, _, after = decode_attention(apply_rope(q, cos, sin), cache, lengths, options, new=new)
        return out, *_newest(after, lengths)

    arrays = products, cache, jnp.asarray(case.lengths, jnp.int32), jnp.cos(angles), jnp.sin(angles)
    return Trial(kernel, oracle, arrays)


# ---- latent attention


def _latents(draw: Draw, lengths: Sequence[int], slots: int, pages: np.ndarray | None, fold: int) -> LatentCache:
    count = len(lengths) if pages is None else pages.size
    live = _positions(count, slots, lengths, pages)[:, None, :, None]
    latents, keys = (jnp.where(live, draw.normal(count, 1, slots, size), jnp.nan) for size in (RANK, ROTARY))
    if fold > 1:
        at, page = np.tile(np.arange(slots), count), np.repeat(np.arange(count), slots)
        empty = jnp.full((count, 1, slots // fold, fold * ROTARY), jnp.nan, keys.dtype)
        keys = cache_write(empty, keys.reshape(-1, 1, ROTARY), jnp.asarray(page, jnp.int32), jnp.asarray(at, jnp.int32))
    return LatentCache(latents, keys, pages=None if pages is None else jnp.asarray(pages))


def mla_decode(case: MlaDecodeAttention, backend: str) -> Trial:
    draw, rows = Draw(), len(case.lengths)
    slots = case.page or -(-max(case.lengths) // 256) * 256
    cache = _latents(draw, case.lengths, slots, case.pages, fold=2 if backend == "pallas_tpu" else 1)
    q, rotary = (draw.normal(rows, case.queries, case.heads, size) for size in (RANK, ROTARY))
    if backend == "pallas_tpu":
        cache = replace(cache, latents=cache.latents[None], keys=cache.keys[None], layer=jnp.int32(0))
    else:
        q, rotary = q[:, 0], rotary[:, 0]
    scale = (128 + ROTARY) ** -0.5

    def run(q, rotary, cache, lengths, *, backend: str):
        return mla_decode_op.mla_decode_attention(q, rotary, cache, lengths, scale=scale, backend=backend)[:2]

    arrays = q, rotary, cache, jnp.asarray(case.lengths, jnp.int32)
    return Trial(partial(run, backend=backend), partial(run, backend="xla"), arrays)


def mla_prefill(case: MlaPrefillAttention) -> Trial:
    draw, end = Draw(), case.start + case.width
    cache = _latents(draw, [end], case.page or -(-end // 1024) * 1024, case.pages, fold=2)
    cache = replace(cache, latents=cache.latents[None], keys=cache.keys[None], layer=jnp.int32(0))
    q = draw.normal(1, case.width, case.heads, SIZE + ROTARY)
    keys, values = draw.normal(case.heads, SIZE, RANK), draw.normal(case.heads, RANK, SIZE)
    expansion = [(x * RANK**-0.5)[None] for x in (keys, values)]

    def run(q, keys, values, cache, rows, positions, *, backend: str):
        how = dict(scale=(SIZE + ROTARY) ** -0.5, backend=backend)
        return mla_prefill_op.mla_prefill_attention(q, Expansion(keys, values, 0), cache, rows, positions, **how)

    positions = case.start + jnp.arange(case.width, dtype=jnp.int32)[None]
    arrays = q, *expansion, cache, jnp.zeros(1, jnp.int32), positions
    return Trial(partial(run, backend="pallas_tpu"), partial(run, backend="xla"), arrays)


def latent_queries(rows: int, heads: int) -> Trial:
    """A layer's queries and latents on GPUs, beside the same steps in XLA."""
    draw, nope = Draw(), 128
    q, down = draw.normal(rows, heads, nope + ROTARY), draw.normal(rows, RANK + ROTARY)
    weight, k = draw.normal(RANK), draw.normal(heads, nope, RANK)
    angles = draw.normal(rows, ROTARY // 2, dtype="float32")

    def kernel(q, down, weight, k, cos, sin):
        return mla_queries(q, down, weight, k, cos, sin, EPS)

    def oracle(q, down, weight, k, cos, sin):
        product = jnp.einsum("bhn,hnr->bhr", q[..., :nope], k, precision=jax.lax.Precision.HIGHEST)
        latents, keys = rms_norm(down[:, :RANK], weight, EPS), apply_rope(down[:, RANK:], cos, sin)
        return product, apply_rope(q[..., nope:], cos, sin), latents[:, None], keys[:, None]

    return Trial(kernel, oracle, (q, down, weight, k, jnp.cos(angles), jnp.sin(angles)))


# ---- products and experts


def product(case: MxMatmul, backend: str, *, float4: bool = False) -> Trial:
    """x times a weight [I, O] or [I, 2, O]. float4: MXFP4 is packed for a TPU that converts it in hardware."""
    draw, parts = Draw(), (case.parts,) if case.parts > 1 else ()
    x, shape = draw.normal(case.rows, case.inputs), (case.inputs, *parts, case.outputs)
    w = draw.weight(case.scheme, *shape, contracting=0)
    exact, as_read = dequantized_matrix(w, 0), w
    if backend == "pallas_tpu":
        as_read = packed(w, case.scheme, shape, float4=float4 and case.scheme == "mxfp4")

    def kernel(x, w, exact):
        return matmul(x, w, out_dtype=jnp.float32, backend=None if backend == "pallas_tpu" else backend)

    def oracle(x, w, exact):
        return jnp.einsum("ti,i...->t...", x, exact, precision=jax.lax.Precision.HIGHEST)

    return Trial(kernel, oracle, (x, as_read, exact))


def loop(case: MxMatmul) -> Trial:
    """Three trips of a loop, which multiply the rows by a square weight that stays on chip, and norm them."""
    draw, this_chip = Draw(), cast(Any, generation())
    x, w = draw.normal(case.rows, case.inputs), draw.weight(case.scheme, case.inputs, case.inputs, contracting=0)
    backend = Backend(matmul="pallas_tpu", loop_weights="pallas_tpu", generation=this_chip)

    def trips(x: jax.Array, multiply: Callable) -> jax.Array:
        norm = jnp.ones(case.inputs)
        return jax.lax.fori_loop(0, 3, lambda _, y: rms_norm(multiply(y), norm, EPS).astype(x.dtype), x)

    def kernel(x, w, exact):
        there = loop_weights(w, case.rows, backend)
        return trips(x, partial(matmul, w=there, out_dtype=jnp.float32))

    def oracle(x, w, exact):
        return trips(x, lambda y: jnp.einsum("ti,io->to", y, exact, precision=jax.lax.Precision.HIGHEST))

    as_read = packed(w, case.scheme, (case.inputs, case.inputs))
    return Trial(kernel, oracle, (x, as_read, dequantized_matrix(w, 0)))


def fetched(case: MxMatmul) -> Trial:
    """The rows times the second of two square weights, which is on its way to on-chip memory while they are normed."""
    draw = Draw()
    x, w = draw.normal(case.rows, case.inputs), draw.weight(case.scheme, case.inputs, case.inputs, contracting=0)
    norm = jnp.ones(case.inputs)

    def kernel(x, stack, exact):
        arriving, x = fetching(stack, jnp.int32(1), x, interpret=jax.default_backend() == "cpu")
        return matmul(rms_norm(x, norm, EPS), arriving.of_layer(jnp.int32(1)), out_dtype=jnp.float32)

    def oracle(x, stack, exact):
        return jnp.einsum("ti,io->to", rms_norm(x, norm, EPS), exact, precision=jax.lax.Precision.HIGHEST)

    as_read = packed(w, case.scheme, (case.inputs, case.inputs))
    stack = jax.tree.map(lambda array: jnp.stack([jnp.zeros_like(array), array]), as_read)
    return Trial(kernel, oracle, (x, stack, dequantized_matrix(w, 0)))


def packed(
    w: jax.Array | QuantizedTensor, scheme: str, shape: tuple[int, ...], *, at: int = 0, float4: bool = False
) -> PackedTensor:
    """A weight as TPU kernels read it. at: the dimension that products sum over. If it is 0, the second of three
    dimensions is P."""
    names = (axes.EMBED, axes.GATE_UP, axes.MLP) if at == 0 and len(shape) == 3 else (None,) * len(shape)
    packing = Packing(SCHEMES.get(scheme), shape, names, (at,), float4=float4)
    stored = [w] if isinstance(w, jax.Array) else [w.values, w.scales]
    return packing.tensor(*jax.jit(packing.pack)(*stored))


def grouped(case: GroupedMatmul, backend: str) -> Trial:
    """Rows sorted by expert times [E, P, I, O]."""
    draw, sizes = Draw(), np.asarray(case.sizes, np.int32)
    shape = case.experts, case.parts, case.inner, case.outer
    x, w = draw.normal(case.tokens * case.chosen, case.inner), draw.weight(case.scheme, *shape, contracting=2)
    exact, as_read = dequantized_matrix(w, 2), w
    if backend == "pallas_tpu" and isinstance(w, QuantizedTensor) and w.grouped:
        as_read = packed(w, case.scheme, shape, at=2)
    most = int(sizes.max())

    def kernel(x, w, exact, sizes):
        return grouped_op.grouped_matmul(x, w, sizes, most=most, backend=backend)

    def oracle(x, w, exact, sizes):
        return grouped_op.grouped_matmul(x, exact, sizes, most=most)

    return Trial(kernel, oracle, (x, as_read, exact, jnp.asarray(sizes)))


def experts(case: ExpertMlp) -> Trial:
    """The feed-forwards of the experts that tokens choose."""
    draw, shapes = Draw(), ((case.experts, 2, case.dim, case.hidden), (case.experts, case.hidden, case.dim))
    weights = [draw.weight(case.scheme, *shape, contracting=len(shape) - 2) for shape in shapes]
    exact = [dequantized_matrix(w, len(shape) - 2) for w, shape in zip(weights, shapes, strict=True)]
    as_read = [
        packed(w, case.scheme, shape, at=len(shape) - 2) if isinstance(w, QuantizedTensor) and w.grouped else w
        for w, shape in zip(weights, shapes, strict=True)
    ]
    rng = np.random.default_rng(0)
    factors = np.zeros((case.tokens, case.experts), np.float32)
    for row in factors:
        row[rng.permutation(case.experts)[: case.chosen]] = 1 / case.chosen

    def run(x, weights, exact, factors, *, backend: str):
        both = mlp_op.ExpertWeights(*(weights if backend != "xla" else exact))
        return mlp_op.expert_mlp(x, both, factors, lambda gate, up: jax.nn.silu(gate) * up, backend=backend)

    x = draw.normal(case.tokens, case.dim) * case.dim**-0.5
    return Trial(
        partial(run, backend="pallas_tpu"), partial(run, backend="xla"), (x, as_read, exact, jnp.asarray(factors))
    )


def order(case: GroupOrder) -> Trial:
    """Choices sorted by group; exact."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(case.groups)[: case.chosen] for _ in range(case.tokens)]).astype(np.int32)
    kernel = partial(group_order, groups=case.groups, backend="pallas_tpu")
    return Trial(kernel, partial(group_order, groups=case.groups), (jnp.asarray(ids),))


def summed(case: GroupOrder, width: int) -> Trial:
    """Rows of a width sorted by group, one for each choice of each token: the weighted sum for each token."""
    rng, draw = np.random.default_rng(0), Draw()
    ids = np.stack([rng.permutation(case.groups)[: case.chosen] for _ in range(case.tokens)]).astype(np.int32)
    order = np.argsort(ids.reshape(-1), kind="stable")
    places = np.empty_like(order, np.int32)
    places[order] = np.arange(order.size)
    rows, factors = draw.normal(order.size, width), draw.normal(order.size, dtype="float32")
    tiles, tokens = case.tokens // TILE, np.repeat(np.arange(case.tokens, dtype=np.int32), case.chosen)
    counts = np.full(case.tokens, case.chosen, np.int32)
    starts = np.cumsum(counts, dtype=np.int32) - counts

    def kernel(rows, factors, ids, places):
        pieces = Pieces.of(ids, case.groups, rows, order.size, "pallas_tpu")
        assert pieces is not None
        sizes = jnp.bincount(ids.reshape(-1), length=case.groups)
        runs = pieces.runs(jnp.int32(0), ids.reshape(-1), jnp.asarray(tokens), sizes)
        segments = Segments(places, factors, jnp.asarray(starts), jnp.asarray(counts))
        into = jnp.zeros((case.tokens, width), rows.dtype)
        return segment_sum(into, rows, segments, 0, tiles, tiles=tiles, longest=case.chosen, runs=runs)

    def oracle(rows, factors, ids, places):
        weighted = rows[places].astype(jnp.float32) * factors[:, None]
        return jnp.sum(weighted.reshape(case.tokens, case.chosen, width), axis=1)

    return Trial(kernel, oracle, (rows, factors, jnp.asarray(ids), jnp.asarray(places)))


def choice(tokens: int, count: int, chosen: int) -> Trial:
    """The experts of tokens on GPUs; exact."""
    logits = Draw().normal(tokens, count, dtype="float32")
    options = dict(count=chosen, score="softmax", renormalize=True)
    run = partial(experts_op.choose_experts, correction=None, **options)
    return Trial(partial(run, backend="pallas_gpu"), run, (logits,))


def add_norm(tokens: int, width: int) -> Trial:
    """The residual's sum and its norm on GPUs."""
    draw = Draw()

    def kernel(x, branch, weight):
        return residual_norm(x, branch, weight, EPS)[:2]

    return Trial(
        kernel,
        partial(reference, eps=EPS),
        (draw.normal(tokens, width), draw.normal(tokens, width), draw.normal(width)),
    )
