"""Cases of every kernel with float64 oracles. Tests run them on the stand-in, and `verify` on a chip.

Caches hold NaN and infinities in every slot that no query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import ml_dtypes
import numpy as np

from inferlib.attention_values import AttentionOptions, KvCache, LatentCache
from inferlib.nki_kernels import mx_pack
from inferlib.nki_kernels.call import is_gen4
from inferlib.nki_kernels.decode_linear import rmsnorm_matmul, rmsnorm_mlp
from inferlib.nki_kernels.expert_mlp import expert_mlp
from inferlib.nki_kernels.flash_decode import flash_decode
from inferlib.nki_kernels.flash_prefill import flash_prefill
from inferlib.nki_kernels.mla_decode import mla_decode
from inferlib.nki_kernels.mx_matmul import mx_matmul
from inferlib.nki_kernels.router_topk import router_topk

# The largest error of outputs of unit scale, from rounding of the products with keys, the probabilities and the
# results.
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2, "float8_e4m3": 3e-2, "float8_e4m3fn": 3e-2}
TOLERANCE["float8_e5m2"] = 3e-2


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Settings of attention with their usual values. size: of a head. slots: of a row's cache. page: slots of a page,
    None for a contiguous cache."""

    kv_heads: int = 1
    size: int = 64
    slots: int = 300
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    ring: bool = False
    limit: int | None = None
    page: int | None = None

    @property
    def only_gen4(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    def _paged(self, page: int, rng, k, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, heads, slots, size = k.shape
        each = slots // page
        table = rng.permutation(rows * each + 3)[: rows * each].reshape(rows, each).astype(np.int32)
        paged = []
        for cache in (k, v):
            pages = np.full((rows * each + 3, heads, page, size), np.nan).astype(cache.dtype)
            pages[table] = cache.reshape(rows, heads, each, page, size).swapaxes(1, 2)
            paged.append(pages)
        return *paged, table


@dataclass(frozen=True)
class Decode(_Attention):
    """flash_decode of rows with these lengths."""

    name: str
    lengths: tuple[int, ...]
    tokens: int = 1
    group: int = 4
    gain: float = 1.0

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error of outputs and log-sum-exps, in units of the tolerance."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        rows, scale = len(self.lengths), self.size**-0.5 * self.gain
        heads = (self.kv_heads, self.group)
        kind = dtype if dtype.itemsize > 1 else ml_dtypes.bfloat16
        q = rng.normal(size=(rows, self.tokens, *heads, self.size)).astype(kind)
        k, v = self._cache(rng, dtype)
        sinks = rng.normal(size=heads).astype(np.float32) if self.sinks else None
        want, want_lse = self._oracle(q, k, v, sinks, scale)
        table = None
        if self.page:
            k, v, table = self._paged(self.page, rng, k, v)

        @jax.jit
        def run(q, k, v, lengths, sinks, table):
            cache = KvCache(k, v, pages=table, ring=self.ring, limit=self.limit)
            return flash_decode(q, cache, lengths, AttentionOptions(scale, self.window, self.softcap, sinks), lnc=lnc)

        out, lse = run(q, k, v, np.array(self.lengths, np.int32), sinks, table)
        return max(worst(out, want, TOLERANCE[self.dtype]), worst(lse, want_lse, TOLERANCE[self.dtype]))

    def _seen(self, length: int, token: int) -> list[int]:
        last = length - self.tokens + token
        first = 0 if self.window is None else max(0, last - self.window + 1)
        return [p % self.slots if self.ring else p for p in range(first, last + 1)]

    def _cache(self, rng: np.random.Generator, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        k, v = np.full((2, len(self.lengths), self.kv_heads, self.slots, self.size), np.nan).astype(dtype)
        v[..., ::2, :] = np.inf
        for row, length in enumerate(self.lengths):
            at = sorted({p for i in range(self.tokens) for p in self._seen(length, i)})
            for cache in (k, v):
                cache[row][:, at] = rng.normal(size=(self.kv_heads, len(at), self.size)).astype(dtype)
        return k, v

    def _oracle(self, q, k, v, sinks, scale) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.zeros(q.shape), np.full(q.shape[:4], -np.inf)
        for row, length in enumerate(self.lengths):
            for token in range(max(0, self.tokens - length), self.tokens):
                at = self._seen(length, token)
                out[row, token], lse[row, token] = attention(
                    q[row, token], k[row][:, at], v[row][:, at], scale, self.softcap, sinks
                )
        return out, lse


def attention(q, k, v, scale, softcap, sinks) -> tuple[np.ndarray, np.ndarray]:
    """q [K, G, h], k and v [K, S, h] -> out [K, G, h], lse [K, G], all computed in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("kgh,ksh->kgs", q, k) * scale
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    joined = s if sinks is None else np.concatenate([s, sinks[..., None].astype(np.float64)], axis=-1)
    top = joined.max(-1, keepdims=True)
    total = np.exp(joined - top).sum(-1)
    return np.einsum("kgs,ksh->kgh", np.exp(s - top), v) / total[..., None], top[..., 0] + np.log(total)


@dataclass(frozen=True)
class Prefill(_Attention):
    """flash_prefill of one chunk of `width` tokens from each start, chunk p in row P - p of the cache."""

    name: str
    starts: tuple[int, ...]
    width: int = 20
    group: int = 2

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error of outputs and log-sum-exps, in units of the tolerance."""
        rng = np.random.default_rng(seed)
        dtype, chunks = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)), len(self.starts)
        kind = dtype if dtype.itemsize > 1 else ml_dtypes.bfloat16
        heads, scale = (self.kv_heads, self.group), self.size**-0.5
        q = rng.normal(size=(chunks, self.width, *heads, self.size)).astype(kind)
        sinks = rng.normal(size=heads).astype(np.float32) if self.sinks else None
        k, v = np.full((2, chunks + 1, self.kv_heads, self.slots, self.size), np.nan).astype(dtype)
        v[..., ::2, :] = np.inf
        want, want_lse = np.zeros(q.shape), np.zeros(q.shape[:4])
        rows = np.arange(chunks, 0, -1, dtype=np.int32)
        for chunk, start in enumerate(self.starts):
            reach = start + self.width if self.window is None else self.window
            cached = range(max(0, start + 1 - reach), start + self.width)
            keys, values = rng.normal(size=(2, self.kv_heads, len(cached), self.size)).astype(dtype)
            at = [p % self.slots if self.ring else p for p in cached]
            k[rows[chunk]][:, at], v[rows[chunk]][:, at] = keys, values
            for i in range(self.width):
                seen = slice(max(0, start + i + 1 - reach) - cached[0], start + i + 1 - cached[0])
                want[chunk, i], want_lse[chunk, i] = attention(
                    q[chunk, i], keys[:, seen], values[:, seen], scale, self.softcap, sinks
                )
        positions = np.array(self.starts, np.int32)[:, None] + np.arange(self.width, dtype=np.int32)
        table = None
        if self.page:
            k, v, table = self._paged(self.page, rng, k, v)

        @jax.jit
        def run(q, k, v, rows, positions, sinks, table):
            cache = KvCache(k, v, pages=table, ring=self.ring, limit=self.limit)
            options = AttentionOptions(scale, self.window, self.softcap, sinks)
            return flash_prefill(q, cache, rows, positions, options, lnc=lnc)

        out, lse = run(q, k, v, rows, positions, sinks, table)
        return max(worst(out, want, TOLERANCE[self.dtype]), worst(lse, want_lse, TOLERANCE[self.dtype]))


@dataclass(frozen=True)
class Latents:
    """mla_decode of rows with these lengths, over latents of `rank` and rotary keys of `rotary` numbers."""

    name: str
    lengths: tuple[int, ...]
    tokens: int = 1
    heads: int = 3
    rank: int = 128
    rotary: int = 64
    slots: int = 300
    dtype: str = "float32"
    page: int | None = None
    limit: int | None = None
    gain: float = 1.0
    only_gen4: ClassVar[bool] = False

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error of outputs and log-sum-exps, in units of the tolerance."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        rows, width = len(self.lengths), self.rank + self.rotary
        scale, page = width**-0.5 * self.gain, self.page or self.slots
        q = rng.normal(size=(rows, self.tokens, self.heads, width)).astype(dtype)
        each = self.slots // page
        table = rng.permutation(rows * each + 3)[: rows * each].reshape(rows, each).astype(np.int32)
        table = table if self.page else np.arange(rows, dtype=np.int32)[:, None]
        cells = np.full((rows * each + 3, page, width), np.nan)
        cells[:, ::2] = np.inf
        for row, length in enumerate(self.lengths):
            at = np.arange(length)
            cells[table[row, at // page], at % page] = rng.normal(size=(length, width))
        cells = cells.astype(dtype)
        latents, keys = np.split(cells[:, None], [self.rank], axis=3)

        @jax.jit
        def run(q, latents, keys, lengths, pages):
            cache = LatentCache(latents, keys, pages=pages, limit=self.limit)
            return mla_decode(q[..., : self.rank], q[..., self.rank :], cache, lengths, scale, lnc=lnc)

        got = run(q, latents, keys, np.array(self.lengths, np.int32), table if self.page else None)
        wants = self._oracle(q, cells[table].reshape(rows, -1, width), scale)
        return max(worst(x, want, TOLERANCE[self.dtype]) for x, want in zip(got, wants, strict=True))

    def _oracle(self, q, cells, scale) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.zeros((*q.shape[:3], self.rank)), np.full(q.shape[:3], -np.inf)
        for row, length in enumerate(self.lengths):
            for token in range(max(0, self.tokens - length), self.tokens):
                seen = cells[None, row, : length - self.tokens + token + 1]
                values = seen[..., : self.rank]
                a, b = attention(q[None, row, token], seen, values, scale, None, None)
                out[row, token], lse[row, token] = a[0], b[0]
        return out, lse


@dataclass(frozen=True)
class Mx:
    """mx_matmul of `tokens` x `inner` by `inner` x `outer`; packed: activations come in this element of MX too."""

    name: str
    tokens: int
    inner: int
    outer: int
    element: str
    packed: str | None = None
    only_gen4: ClassVar[bool] = False

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error in units of a bfloat16's rounding, against the product of the quantised values."""
        rng, old = np.random.default_rng(seed), not is_gen4()
        x = rng.normal(size=(self.tokens, self.inner)).astype(ml_dtypes.bfloat16)
        w, scales = mx_pack.quantise(rng.normal(size=(self.inner, self.outer)), self.element)
        w, scales = mx_pack.for_trn2(w, scales) if old else (w, scales)
        turned, packed_x = x.T.astype(np.float32), None
        if self.packed:
            packed_x = mx_pack.quantise(turned, self.packed)
            packed_x = mx_pack.for_trn2(*packed_x) if old else packed_x
            turned = mx_pack.dequantise(*packed_x)
        elif not old:
            turned = mx_pack.dequantise(*mx_pack.quantise(turned, "float8_e4m3fn", headroom=1))
        run = jax.jit(partial(mx_matmul, element=self.element, x_element=self.packed, lnc=lnc))
        if packed_x is None:
            got = run(x, mx_pack.pack(w), scales)
        else:
            got = run(mx_pack.pack(packed_x[0]), mx_pack.pack(w), scales, x_scales=packed_x[1])
        want = turned.astype(np.float64).T @ mx_pack.dequantise(w, scales)
        return worst(got, want, 2.0**-8, floor=0.02 * self.inner**0.5)


@dataclass(frozen=True)
class Linear:
    """rmsnorm_matmul to `outer` columns, or with an activation rmsnorm_mlp of `outer` features."""

    name: str
    tokens: int
    width: int
    outer: int
    dtype: str = "bfloat16"
    activation: str | None = None
    only_gen4: ClassVar[bool] = False

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error in units of the tolerance, outputs being of unit scale."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        x, weight = rng.normal(size=(self.tokens, self.width)).astype(dtype), rng.normal(size=self.width) + 1

        def matrix(inner: int, outer: int) -> np.ndarray:
            return (rng.normal(size=(inner, outer)) / inner**0.5).astype(dtype)

        exact = x.astype(np.float64)
        exact *= weight / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
        weight = weight.astype(np.float32)
        if self.activation is None:
            w = matrix(self.width, self.outer)
            got = jax.jit(partial(rmsnorm_matmul, eps=1e-5, lnc=lnc))(x, weight, w)
            return worst(got, exact @ w.astype(np.float64), TOLERANCE[self.dtype])
        gate, up, down = matrix(self.width, self.outer), matrix(self.width, self.outer), matrix(self.outer, self.width)
        run = jax.jit(partial(rmsnorm_mlp, eps=1e-5, activation=self.activation, lnc=lnc))
        opened = activated(self.activation, exact @ gate.astype(np.float64))
        want = (opened * (exact @ up.astype(np.float64))) @ down.astype(np.float64)
        return worst(run(x, weight, gate, up, down), want, TOLERANCE[self.dtype])


@dataclass(frozen=True)
class Router:
    """router_topk of `chosen` of `experts`."""

    name: str
    tokens: int
    width: int
    experts: int
    chosen: int
    renormalize: bool = True
    bias: bool = False
    dtype: str = "bfloat16"
    only_gen4: ClassVar[bool] = False

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error of the weights in units of the tolerance; infinite if another expert is chosen."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        x = rng.normal(size=(self.tokens, self.width)).astype(dtype)
        w = (rng.normal(size=(self.width, self.experts)) / self.width**0.5).astype(dtype)
        bias = rng.normal(size=self.experts).astype(np.float32) if self.bias else None
        run = jax.jit(partial(router_topk, chosen=self.chosen, renormalize=self.renormalize, lnc=lnc))
        experts, weights = run(x, w, bias)
        scores = x.astype(np.float64) @ w.astype(np.float64) + (0 if bias is None else bias)
        want = np.argsort(-scores, axis=1)[:, : self.chosen]
        if not np.array_equal(experts, want):
            return float("inf")
        best = np.exp(np.take_along_axis(scores, want, axis=1))
        total = best if self.renormalize else np.exp(scores)
        return worst(weights, best / total.sum(axis=1, keepdims=True), TOLERANCE["float32"])


@dataclass(frozen=True)
class Experts:
    """expert_mlp of tokens that each choose `chosen` of `experts`, the first token none of them; experts that no token
    chose hold NaN, and so does that token."""

    name: str
    tokens: int
    width: int
    features: int
    experts: int
    chosen: int
    dtype: str = "bfloat16"
    activation: str = "silu"
    scale_input: bool = False
    only_gen4: ClassVar[bool] = False

    def run(self, lnc: int, seed: int = 0) -> float:
        """The greatest error in units of the tolerance, outputs being of unit scale."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        x = rng.normal(size=(self.tokens, self.width))
        gate_up = rng.normal(size=(self.experts, 2, self.width, self.features)) / self.width**0.5
        down = rng.normal(size=(self.experts, self.features, self.width)) / self.features**0.5
        factors = np.zeros((self.tokens, self.experts), np.float32)
        for token in range(1, self.tokens):
            factors[token, rng.permutation(self.experts - 1)[: self.chosen]] = rng.uniform(0.1, 1, size=self.chosen)
        unread = ~factors.any(axis=0)
        gate_up[unread], down[unread], x[0] = np.nan, np.nan, np.nan
        x, gate_up, down = (a.astype(dtype) for a in (x, gate_up, down))
        static = dict(activation=self.activation, scale_input=self.scale_input, most=self.tokens * self.chosen, lnc=lnc)
        got = jax.jit(partial(expert_mlp, **static))(x, gate_up, down, factors)
        want = np.zeros(x.shape)
        for token, expert in np.argwhere(factors):
            factor, row = factors[token, expert], x[token].astype(np.float64)
            row = row * factor if self.scale_input else row
            gate, up = (row @ w for w in gate_up[expert].astype(np.float64))
            y = activated(self.activation, gate) * up @ down[expert].astype(np.float64)
            want[token] += y if self.scale_input else factor * y
        return worst(got, want, TOLERANCE[self.dtype])


def activated(name: str, x: np.ndarray) -> np.ndarray:
    """silu or gelu_tanh."""
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def worst(got, want: np.ndarray, tolerance: float, floor: float = 1.0) -> float:
    """Greatest |got - want| / (tolerance * (floor + |want|)); infinities must agree, NaN never does."""
    got = np.asarray(got).astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return float("inf")
    got, want = got[finite], want[finite]
    return float((np.abs(got - want) / (tolerance * (floor + np.abs(want)))).max(initial=0))


DECODE = (
    Decode("rows of every length", (0, 1, 2, 64, 128, 129, 299, 300)),
    Decode("a cache of one slot", (1, 0), slots=1),
    Decode("one KV head's queries alone", (5, 300), group=1),
    Decode("many KV heads", (5, 130), kv_heads=3, group=3, slots=130),
    Decode("head size 128", (1, 33, 256), size=128, slots=256),
    Decode("head size 80", (1, 33, 140), size=80, slots=140),
    Decode("head size 256", (1, 33, 140), size=256, slots=140),
    Decode("bfloat16", (0, 1, 50, 300), dtype="bfloat16", sinks=True, softcap=20.0),
    Decode("float16", (0, 1, 50, 300), dtype="float16"),
    Decode("float8_e4m3", (0, 1, 50, 300), dtype="float8_e4m3", kv_heads=2),
    Decode("float8_e5m2", (0, 1, 50, 300), dtype="float8_e5m2", size=128),
    Decode("float8_e4m3fn", (0, 1, 50, 300), dtype="float8_e4m3fn"),
    Decode("two chunks of the online softmax", (8300, 8192, 3), slots=8320, dtype="bfloat16"),
    Decode("window", (0, 1, 140, 141, 300), window=140),
    Decode("ring", (0, 1, 39, 40, 41, 200, 1003), slots=40, window=25, ring=True),
    Decode("ring, window of all slots", (0, 200, 201, 1003), slots=200, window=200, ring=True),
    Decode("softcap", (1, 50, 300), softcap=1.5, gain=8.0),
    Decode("sinks", (0, 1, 16), slots=16, sinks=True),
    Decode("limit", (0, 1, 100, 150), limit=150),
    Decode("large logits", (1, 300), sinks=True, gain=1e3),
    Decode("two tokens", (2, 0, 300), tokens=2, kv_heads=2),
    Decode("eight tokens, fewer positions", (3, 8, 290), tokens=8, window=130),
    Decode("eight tokens in a ring", (8, 150, 1000), tokens=8, slots=160, window=120, ring=True),
    Decode("eight tokens of sixteen heads", (8, 130), tokens=8, group=16, slots=130),
    Decode("pages of 16", (0, 1, 16, 17, 320), slots=320, page=16, kv_heads=2),
    Decode("pages of 8, several tokens", (4, 131), slots=136, page=8, tokens=4),
    Decode("pages of 128", (0, 100, 640), slots=640, page=128, dtype="bfloat16", sinks=True),
    Decode("pages of 4096", (4000, 8192), slots=8192, page=4096, dtype="bfloat16"),
    Decode("many pages, few live", (33, 4096), slots=4096, page=16, dtype="bfloat16"),
    Decode("pages in float8_e4m3", (33, 128), slots=128, page=32, dtype="float8_e4m3"),
)

PREFILL = (
    Prefill("prefill at several starts", (0, 1, 107, 280)),
    Prefill("prefill of one token", (0, 130), width=1, group=1),
    Prefill("prefill of several tiles of queries", (3,), width=100, group=3, kv_heads=2, slots=128),
    Prefill("prefill, head size 128, bfloat16", (0, 200), size=128, dtype="bfloat16", softcap=20.0, sinks=True),
    Prefill("prefill, head size 80", (5,), size=80, slots=130),
    Prefill("prefill, head size 256", (5,), size=256, slots=64),
    Prefill("prefill, float8_e4m3", (0, 100), dtype="float8_e4m3", size=128),
    Prefill("prefill, float8_e4m3fn", (100,), dtype="float8_e4m3fn"),
    Prefill("prefill, window", (0, 30, 250), window=33),
    Prefill("prefill, ring", (0, 40, 41, 70, 1000), slots=60, window=33, ring=True),
    Prefill("prefill, ring of several tiles", (500,), slots=200, window=170, ring=True, sinks=True),
    Prefill("prefill, sinks", (0, 250), sinks=True),
    Prefill("prefill, limit", (0, 100), limit=125),
    Prefill("prefill, two steps of the online softmax", (2080,), slots=2112, dtype="bfloat16", window=1500),
    Prefill("prefill, pages of 128", (0, 120, 300), slots=384, page=128, kv_heads=2),
    Prefill("prefill, pages of several tiles", (500,), slots=768, page=256, dtype="bfloat16", limit=700, sinks=True),
    Prefill("prefill, pages of 16", (0, 100), slots=144, page=16),
    Prefill("prefill, ring of pages", (5, 500), slots=96, page=32, window=70, ring=True),
)
LATENTS = (
    Latents("latents, rows of every length", (0, 1, 2, 64, 128, 129, 299, 300)),
    Latents("latents, DeepSeek-V3", (33, 2300), heads=128, rank=512, slots=2304, dtype="bfloat16"),
    Latents("latents, DeepSeek-V3, drafts in pages", (3, 300), 4, 128, 512, slots=384, page=128, dtype="bfloat16"),
    Latents("latents, several tokens, fewer positions", (0, 1, 3, 290), tokens=4, heads=50),
    Latents("latents, odd sizes", (1, 33, 140), heads=1, rank=28, rotary=8, slots=140, dtype="float16"),
    Latents("latents of three pieces, float32", (40, 150), rank=384, slots=150, limit=150),
    Latents("latents, large logits", (1, 300), gain=1e3),
    Latents("latents, pages of 16", (0, 1, 16, 17, 320), tokens=2, slots=320, page=16),
    Latents("latents, pages of 8, few live", (33, 4000), slots=4096, page=8, dtype="bfloat16"),
)
FP8, E5M2, FP4 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
MX = (
    Mx("mxfp8, whole tiles", 128, 512, 512, FP8),
    Mx("mxfp4, whole tiles", 128, 512, 1024, FP4),
    Mx("mxfp8, one token, K of 32", 1, 32, 40, FP8),
    Mx("mxfp4, odd tokens, tails everywhere", 7, 1056, 1100, FP4),
    Mx("mxfp8 e5m2, tails everywhere", 131, 672, 513, E5M2),
    Mx("mxfp8, more tokens than share the weights", 300, 96, 72, FP8),
    Mx("mxfp4, K of many tiles", 2, 4640, 64, FP4),
    Mx("mxfp8 by mxfp8", 33, 1120, 520, FP8, packed=FP8),
    Mx("mxfp4 by mxfp8 e5m2", 5, 544, 520, FP4, packed=E5M2),
    Mx("mxfp4 by mxfp4", 2, 512, 64, FP4, packed=FP4),
)

LINEAR = (
    Linear("norm and projection", 8, 256, 768),
    Linear("norm and projection, float32, odd sizes", 3, 2 * 45, 130, dtype="float32"),
    Linear("norm and projection, many tiles, 128 tokens", 128, 2304, 520),
    Linear("feed-forward", 8, 256, 1024, activation="silu"),
    Linear("feed-forward, float32", 5, 96, 600, dtype="float32", activation="gelu_tanh"),
    Linear("feed-forward, one token", 1, 576, 1536, activation="silu"),
)
ROUTER = (
    Router("router, 4 of 32", 8, 256, 32, 4),
    Router("router, 8 of 128 with bias, over all", 5, 576, 128, 8, renormalize=False, bias=True),
    Router("router, one of 8, float32", 128, 90, 8, 1, dtype="float32", renormalize=False),
)
EXPERTS = (
    Experts("experts, 2 of 8", 4, 256, 128, 8, 2),
    Experts("experts, all but one chosen, float32", 16, 96, 80, 5, 3, dtype="float32", activation="gelu_tanh"),
    Experts("experts, weights of the input", 3, 192, 576, 6, 1, dtype="float32", scale_input=True),
    Experts("experts, many tiles and columns", 2, 2304, 1152, 4, 2),
    Experts("experts, no token chooses one", 1, 64, 64, 3, 1),
    Experts("experts, 128 tokens", 128, 128, 64, 4, 1, dtype="float16"),
)
ALL = (*DECODE, *PREFILL, *LATENTS, *MX, *LINEAR, *ROUTER, *EXPERTS)
