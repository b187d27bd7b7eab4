"""Cases for every implementation of decode attention, and the float64 oracle they are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.ops.cache_write import cache_write, unfolded

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def quantized(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of what is finite; the scales of the rest are not, nor are values that need not be."""
    dead = ~np.isfinite(x).all(-1)
    most = 127 if dtype == "int8" else 448
    scales = (np.abs(np.where(dead[..., None], 1, x)).max(-1) / most).astype(np.float32)
    values = np.where(dead[..., None], 99 if dtype == "int8" else np.nan, x / scales[..., None])
    values = (np.rint(values) if dtype == "int8" else values).astype(jnp.dtype(dtype))
    return values, np.where(dead, np.where(np.arange(x.shape[-2]) % 2, np.nan, np.inf), scales).astype(np.float32)


def cached(k: np.ndarray, v: np.ndarray, layers: int | None, dtype: Any, stored: str | None) -> dict[str, np.ndarray]:
    """Keys and values as a cache holds them, with their scales if it is quantised; the last of `layers`, if any, of
    which the others are NaN."""
    arrays = {}
    for name, x in {"k": k, "v": v}.items():
        x = np.stack([np.full_like(x, np.nan)] * (layers - 1) + [x]) if layers else x
        if stored:
            arrays[name], arrays[f"{name}_scales"] = quantized(x, stored)
        else:
            arrays[name] = x.astype(dtype)
    return arrays


def behind(cells: jax.Array, table: np.ndarray, firsts: Sequence[int]) -> jax.Array:
    """Of cells [N, K, S, h], those of the rows whose pages are table [B, M] from position firsts[b] on, moved to where
    these begin; NaN follows."""
    cells = np.asarray(cells)
    moved = cells.copy()
    for pages, first in zip(table, firsts, strict=True):
        row = np.moveaxis(cells[pages], 1, 0)  # [K, M, S, h]
        line = row.reshape(row.shape[0], -1, row.shape[-1])
        line = np.concatenate([line[:, first:], np.full_like(line[:, :first], np.nan)], axis=1)
        moved[pages] = np.moveaxis(line.reshape(row.shape), 0, 1)
    return jnp.asarray(moved)


def folded(cells: jax.Array, fold: int) -> jax.Array:
    """[N, 1, S, h] -> [N, 1, S / f, f * h], as rotary keys are kept."""
    count, _, slots, size = cells.shape
    pages, at = (x.reshape(-1).astype(np.int32) for x in np.mgrid[:count, :slots])
    empty = np.full((count, 1, slots // fold, fold * size), np.nan, cells.dtype)
    return jax.jit(cache_write)(empty, np.asarray(cells).reshape(-1, 1, size), pages, at)


# One program instead of one for each operation.
dense = jax.jit(unfolded, static_argnums=1)


def _check_written(written: jax.Array, want: jax.Array, stale: jax.Array) -> None:
    """New cells, the only ones in which `want` and `stale` differ, may be rounded otherwise if they are quantised; all
    other bits are the same."""
    written, want, stale = map(np.asarray, (written, want, stale))
    same = want.view(f"u{want.itemsize}") == stale.view(f"u{want.itemsize}")
    np.testing.assert_array_equal(*(x.view(f"u{x.itemsize}")[same] for x in (written, want)))
    rtol, atol = {"float8_e4m3fn": (1 / 8, 0), "int8": (0, 1)}.get(want.dtype.name, (1e-6, 0))
    np.testing.assert_allclose(*(x.astype(np.float32)[~same] for x in (written, want)), rtol, atol)


@dataclass(frozen=True)
class Case:
    """lengths [B]; slots: of a page; columns: pages of a row in a shuffled table, None: rows are pages.

    layers: layers of a stacked cache, of which the last is read. queries: C; None: a row has one query and no such
    axis. loudness: of queries. stored: keys and values are quantised, "int8" or "float8_e4m3fn". one: keys are values
    too. tree: the new tokens are a random one. writes: their cells are passed in to be written: all, or so many of each
    row, the last ones.
    """

    lengths: tuple[int, ...]
    heads: int = 2
    group: int = 4
    size: int = 64
    slots: int = 256
    queries: int | None = None
    columns: int | None = None
    layers: int | None = None
    dtype: Any = jnp.float32
    loudness: float = 1.0
    stored: str | None = None
    sinks: bool = False
    ring: bool = False
    one: bool = False
    tree: bool = False
    writes: bool | tuple[int, ...] = False
    options: dict[str, Any] = field(default_factory=dict)

    def seen(self, row: int, query: int) -> range:
        """Positions that a row's query sees, but for new tokens that are not its ancestors in the tree."""
        position = self.lengths[row] - (self.queries or 1) + query
        return range(max(position + 1 - (self.options.get("window") or position + 1), 0), position + 1)

    def mask(self, rng: np.random.Generator) -> np.ndarray:
        """[B, C, C]: each new token's ancestors and itself; the parent of the i-th is one before it."""
        masks = np.zeros((len(self.lengths), self.queries, self.queries), bool)
        for tree in masks:
            for i in range(self.queries):
                tree[i] = tree[rng.integers(i)] if i else False
                tree[i, i] = True
        return masks

    def inputs(self, seed: int) -> dict[str, Any]:
        """Arguments of the operation; slots that no query sees hold NaN and infinities."""
        rng = np.random.default_rng(seed)
        rows, queries, columns = len(self.lengths), self.queries or 1, self.columns or 1
        q = self.loudness * rng.normal(size=(rows, queries, self.heads, self.group, self.size))
        q[..., self.options.get("key_size", self.size) :] = 0
        count = rows * columns + 2
        k, v = np.full((2, count, self.heads, self.slots, self.size), np.nan)
        v[..., ::2, :] = np.inf
        table = np.arange(rows)[:, None]
        if self.columns:
            table = rng.permutation(count)[: rows * columns].reshape(rows, columns)
        for row, length in enumerate(self.lengths):
            for position in range(max(self.seen(row, 0).start, 0), length):
                slot = position % (columns * self.slots) if self.ring else position
                at = table[row, slot // self.slots], slice(None), slot % self.slots
                drawn = rng.normal(size=(2, self.heads, self.size))
                k[at], v[at] = drawn.astype(jnp.dtype(self.dtype)).astype(float)
        cells = k, v
        inputs = {"q": (q if self.queries else q[:, 0]).astype(self.dtype)}
        inputs |= cached(k, v, self.layers, self.dtype, self.stored)
        if self.one:
            inputs["v"] = None
        inputs["lengths"] = np.asarray(self.lengths, np.int32)
        if self.sinks:
            inputs["sinks"] = rng.normal(size=(self.heads, self.group)).astype(np.float32)
        if self.layers:
            inputs["layer"] = np.int32(self.layers - 1)
        if self.columns:
            inputs["pages"] = table.astype(np.int32)
        if self.writes:
            self._take_out(inputs, cells)
        if self.tree:
            inputs["mask"] = self.mask(rng)
        return jax.tree.map(jnp.asarray, inputs)  # made by NumPy, so that nothing else is compiled

    def _take_out(self, inputs: dict[str, Any], cells: Sequence[np.ndarray]) -> None:
        """Pass the new tokens' cells, [N, K, S, h] in `cells`, apart from the cache."""
        names = ["k"] if self.one else ["k", "v"]
        shape = len(self.lengths), self.queries or 1, self.heads, self.size
        new = {name: np.full(shape, np.nan) for name in names}
        counts = shape[1] if self.writes is True else self.writes
        first = shape[1] - np.broadcast_to(counts, shape[0])
        for row, query, at in self._new(inputs):
            for name, x in zip(names, cells, strict=False) if query >= first[row] else ():
                new[name][row, query] = x[at]
                for stored in {name, f"{name}_scales"} & set(inputs):
                    stale = 77 if inputs[stored].dtype == np.int8 else np.nan
                    inputs[stored][(-1, *at) if self.layers else at] = stale
        inputs["new"] = [(x if self.queries else x[:, 0]).astype(self.dtype) for x in new.values()]
        if not isinstance(self.writes, bool):
            inputs["written"] = np.asarray(self.writes, np.int32)

    def static(self) -> dict[str, Any]:
        return {"scale": self.size**-0.5, **self.options} | ({"ring": True} if self.ring else {})

    def check(self, run: Callable, seed: int = 0, tolerance: float | None = None) -> tuple[jax.Array, jax.Array]:
        """Hold `run` to the oracle; returns its output and LSE."""
        inputs = whole = self.inputs(seed)
        out, lse, *cache = jax.jit(lambda inputs: run(**inputs, **self.static()))(inputs)
        assert out.dtype == inputs["q"].dtype
        assert lse.dtype == jnp.float32
        if self.writes:
            whole = replace(self, writes=False).inputs(seed)
            names = [name for name in ("k", "v", "k_scales", "v_scales") if whole.get(name) is not None]
            for name, array in zip(names, cache, strict=True):
                _check_written(array, whole[name], inputs[name])
        self.hold(whole, out, lse, tolerance)
        return out, lse

    def hold(self, inputs: dict[str, Any], out: jax.Array, lse: jax.Array, tolerance: float | None = None) -> None:
        """To the oracle. Outputs before `key_size` may be anything finite, and kernels have none."""
        tolerance = tolerance or TOLERANCE[jnp.dtype(self.dtype).name]
        expected, lses = self.oracle(inputs)
        expected, behind = expected[..., self.options.get("key_size", 0) :], out.shape[-1] - self.size
        assert np.all(np.isfinite(np.asarray(out).astype(np.float32)))
        out = out[..., self.options.get("key_size", 0) + behind :]
        for result, want in zip((out, lse), (expected, lses), strict=True):
            np.testing.assert_allclose(np.asarray(result).astype(np.float32), want, rtol=tolerance, atol=tolerance)

    def oracle(self, inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Query by query in float64."""
        values = inputs["k"] if self.one else inputs["v"]
        q, k, v = (np.asarray(x).astype(np.float64) for x in (inputs["q"], inputs["k"], values))
        if self.stored:
            k, v = (x * np.asarray(inputs[name])[..., None] for name, x in {"k_scales": k, "v_scales": v}.items())
        k, v = (x[-1] if self.layers else x for x in (k, v))
        q = q if self.queries else q[:, None]
        out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
        for row, query, at in self._each(inputs):
            logits = np.einsum("kgh,skh->kgs", q[row, query], k[at]) * self.static()["scale"]
            if softcap := self.options.get("softcap"):
                logits = softcap * np.tanh(logits / softcap)
            top = np.max(logits, axis=-1, initial=-1e30)
            sinks = np.asarray(inputs.get("sinks", np.full(top.shape, -np.inf)), np.float64)
            top = np.maximum(top, sinks)
            p = np.exp(logits - top[..., None])
            total = p.sum(-1) + np.exp(sinks - top)
            if total.all():
                out[row, query] = np.einsum("kgs,skh->kgh", p, v[at]) / total[..., None]
                lse[row, query] = np.log(total) + top
        return (out, lse) if self.queries else (out[:, 0], lse[:, 0])

    def _new(self, inputs: dict[str, Any]) -> Iterator[tuple[int, int, tuple]]:
        """Row, query, and where its cell lies in [N, K, S, h], for every new token at a position."""
        table = np.asarray(inputs.get("pages", np.arange(len(self.lengths))[:, None]))
        for row, length in enumerate(self.lengths):
            for query in range(self.queries or 1) if length else ():
                position = length - (self.queries or 1) + query
                slot = position % (table.shape[1] * self.slots) if self.ring else position
                if position >= 0:
                    yield row, query, (table[row, slot // self.slots], slice(None), slot % self.slots)

    def _each(self, inputs: dict[str, Any]) -> Iterator[tuple[int, int, tuple]]:
        """Row, query, and where the keys that it sees lie in [N, K, S, h], for every query of an active row."""
        table = np.asarray(inputs.get("pages", np.arange(len(self.lengths))[:, None]))
        capacity = table.shape[1] * self.slots
        for row, length in enumerate(self.lengths):
            for query in range(self.queries or 1) if length else ():
                positions = np.array(self.seen(row, query), int)
                if self.tree:
                    new = positions - (length - self.queries)
                    positions = positions[(new < 0) | np.asarray(inputs["mask"])[row, query, np.maximum(new, 0)]]
                slots = positions % capacity if self.ring else positions
                yield row, query, (table[row, slots // self.slots], slice(None), slots % self.slots)
