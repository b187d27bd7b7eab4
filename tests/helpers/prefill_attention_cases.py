"""Cases for every implementation of prefill attention, and the float64 oracle they are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inferlib.ops.prefill_attention import BlockList
from tests.helpers.decode_attention_cases import TOLERANCE, cached


def hold_chunks(wants: dict[int, tuple[np.ndarray, np.ndarray]], out: jax.Array, lse: jax.Array) -> None:
    """To the outputs and LSEs that an oracle gives for chunks, up to the last of their queries that it knows."""
    tolerance = TOLERANCE[out.dtype.name]
    out, lse = np.asarray(out).astype(np.float32), np.asarray(lse)
    for chunk, (want_out, want_lse) in wants.items():
        real = len(want_out)
        np.testing.assert_allclose(out[chunk, :real], want_out, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse[chunk, :real], want_lse, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Case:
    """Chunks of `width` tokens that start at `starts`, in rows of a shuffled order; negative starts: absent chunks.

    slots: of a page; columns: pages of a row in a shuffled table, None: rows are pages. layers: layers of a stacked
    cache, of which the last is read. stripe: only every so many positions, from the second on, are in the cache (see
    `inferlib.sharding.stripe`). listed: how many random blocks a tile of 128 queries visits. stored: keys and values
    are quantised, "int8" or "float8_e4m3fn". one: keys are values too.
    """

    starts: tuple[int, ...]
    width: int = 32
    heads: int = 2
    group: int = 2
    size: int = 128
    slots: int = 512
    columns: int | None = None
    layers: int | None = None
    stripe: int = 1
    listed: int | None = None
    dtype: Any = jnp.float32
    loudness: float = 1.0
    stored: str | None = None
    one: bool = False
    sinks: bool = False
    ring: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, seed: int) -> dict[str, Any]:
        """Arguments of the operation; slots that no query sees hold NaN and infinities."""
        rng = np.random.default_rng(seed)
        chunks, columns = len(self.starts), self.columns or 1
        q = self.loudness * rng.normal(size=(chunks, self.width, self.heads, self.group, self.size))
        q[..., self.options.get("key_size", self.size) :] = 0
        starts = np.maximum(self.starts, 0)
        positions = (starts[:, None] + np.arange(self.width) - (self.stripe > 1)) // self.stripe
        rows = rng.permutation(chunks)
        count = chunks * columns + 2
        k, v = np.full((2, count, self.heads, self.slots, self.size), np.nan)
        v[..., ::2, :] = np.inf
        table = np.arange(chunks)[:, None]
        if self.columns:
            table = rng.permutation(count)[: chunks * columns].reshape(chunks, columns)
        capacity = columns * self.slots
        for chunk in np.flatnonzero(np.array(self.starts) >= 0):
            first = max(positions[chunk, 0] + 1 - self.options.get("window", capacity), 0)
            last = positions[chunk, -1] if self.ring else min(positions[chunk, -1], capacity - 1)
            for position in range(first, last + 1):
                slot = position % capacity
                at = table[rows[chunk], slot // self.slots], slice(None), slot % self.slots
                k[at], v[at] = rng.normal(size=(2, self.heads, self.size))
        inputs = {"q": q.astype(self.dtype)} | cached(k, v, self.layers, self.dtype, self.stored)
        if self.one:
            inputs["v"] = None
        inputs["rows"] = np.where(np.array(self.starts) < 0, count, rows).astype(np.int32)
        inputs["positions"] = positions.astype(np.int32)
        if self.sinks:
            inputs["sinks"] = rng.normal(size=(self.heads, self.group)).astype(np.float32)
        if self.layers:
            inputs["layer"] = np.int32(self.layers - 1)
        if self.columns:
            inputs["pages"] = table.astype(np.int32)
        if self.listed:
            tiles, blocks = -(-self.width // 128), self.slots * columns // 128
            numbers = [rng.permutation(blocks)[: self.listed] for _ in range(chunks * self.heads * tiles)]
            numbers = np.array(numbers).reshape(chunks, self.heads, tiles, self.listed)
            numbers[..., -1] = np.where(rng.random(numbers.shape[:-1]) < 0.5, -1, numbers[..., -1])
            inputs["listed"] = BlockList(jnp.asarray(numbers, jnp.int32), 128, 128)
        return jax.tree.map(jnp.asarray, inputs)  # made by NumPy, so that nothing else is compiled

    def static(self) -> dict[str, Any]:
        return {"scale": self.size**-0.5, **self.options} | ({"ring": True} if self.ring else {})

    def check(self, run: Callable, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Hold `run` to the oracle; returns its output and LSE."""
        inputs = self.inputs(seed)
        out, lse = jax.jit(lambda inputs: run(**inputs, **self.static()))(inputs)
        assert out.dtype == inputs["q"].dtype
        assert lse.dtype == jnp.float32
        self.hold(inputs, out, lse)
        return out, lse

    def hold(self, inputs: dict[str, Any], out: jax.Array, lse: jax.Array) -> None:
        """To the oracle; outputs before the values of a cell may be anything finite."""
        first = self.options.get("key_size", 0)
        assert np.isfinite(np.asarray(out[..., :first], np.float32)).all()
        wants = {chunk: (want[..., first:], want_lse) for chunk, (want, want_lse) in self.oracle(inputs).items()}
        hold_chunks(wants, out[..., first:], lse)

    def oracle(self, inputs: dict[str, Any]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Output and LSE of each chunk's queries up to the cache's end, in float64; absent chunks are not in it."""
        names = ("q", "k", "k") if self.one else ("q", "k", "v")
        q, k, v = (np.asarray(inputs[name]).astype(np.float64) for name in names)
        if self.stored:
            k, v = (x * np.asarray(inputs[f"{name}_scales"])[..., None] for name, x in {"k": k, "v": v}.items())
        k, v = (x[-1] if self.layers else x for x in (k, v))
        table = np.asarray(inputs.get("pages", np.arange(len(self.starts))[:, None]))
        capacity, results = table.shape[1] * self.slots, {}
        for chunk, start in enumerate(self.starts):
            if start < 0:
                continue
            positions = np.asarray(inputs["positions"][chunk])
            keys = np.arange(positions[-1] + 1)
            real = self.width if self.ring else int(np.sum(positions < capacity))
            seen = keys <= positions[:real, None]
            if window := self.options.get("window"):
                seen &= keys > positions[:real, None] - window
            seen = np.broadcast_to(seen, (self.heads, *seen.shape))
            if self.listed:
                numbers = np.asarray(inputs["listed"].numbers)[chunk].repeat(128, axis=1)[:, :real]
                seen = seen & np.any(numbers[..., None] == keys // 128, axis=2)
            slots = keys % capacity
            at = table[int(inputs["rows"][chunk]), slots // self.slots], slice(None), slots % self.slots
            every = seen.any((0, 1))[:, None, None]
            results[chunk] = self._attend(q[chunk, :real], *(np.where(every, x[at], 0) for x in (k, v)), seen, inputs)
        return results

    def _attend(self, q, k, v, seen, inputs) -> tuple[np.ndarray, np.ndarray]:
        """q [C, K, G, h], k, v [T, K, h], seen [K, C, T]."""
        logits = np.einsum("ckgh,tkh->kgct", q, k) * self.static()["scale"]
        if softcap := self.options.get("softcap"):
            logits = softcap * np.tanh(logits / softcap)
        logits = np.where(seen[:, None], logits, -np.inf)
        sinks = np.asarray(inputs.get("sinks", np.full((self.heads, self.group), -np.inf)), np.float64)[..., None]
        top = np.maximum(np.maximum(logits.max(-1, initial=-np.inf), sinks), -1e30)
        p = np.exp(logits - top[..., None])
        total = p.sum(-1) + np.exp(sinks - top)
        with np.errstate(divide="ignore"):
            lse = np.log(total) + np.where(total > 0, top, 0)
        out = np.einsum("kgct,tkh->ckgh", p / np.maximum(total, 1e-300)[..., None], v)
        return out, np.moveaxis(lse, 2, 0)
