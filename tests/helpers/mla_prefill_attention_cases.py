"""Cases for every implementation of prefill attention over latents, and the float64 oracle they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.decode_attention_cases import dense, folded
from tests.helpers.latent_cases import LatentCase
from tests.helpers.prefill_attention_cases import hold_chunks

SCALE = 0.07


@dataclass(frozen=True)
class Case(LatentCase):
    """Chunks of `width` tokens that start at `starts`, in rows of a shuffled order; negative starts: absent chunks.

    layers: of weights too, of which the first is read; stripe: only every so many positions are in the cache; limit: no
    position reaches it.
    """

    starts: tuple[int, ...]
    width: int = 32
    heads: int = 3
    nope: int = 128
    value: int = 128
    stripe: int = 1
    limit: int | None = None

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of the operation; slots that no query sees hold NaN and infinities."""
        rng = np.random.default_rng(seed)
        chunks, capacity = len(self.starts), min((self.columns or 1) * self.slots, self.limit or 1 << 30)
        q = self.loudness * rng.normal(size=(chunks, self.width, self.heads, self.nope + self.rotary))
        k = rng.normal(size=(self.heads, self.nope, self.rank)) * self.rank**-0.5
        v = rng.normal(size=(self.heads, self.rank, self.value)) * self.rank**-0.5
        starts = np.maximum(self.starts, 0)
        positions = (starts[:, None] + np.arange(self.width) - (self.stripe > 1)) // self.stripe
        rows = rng.permutation(chunks)
        table, cells = self.empty(rng, chunks)
        count = len(cells)
        for chunk in np.flatnonzero(np.array(self.starts) >= 0):
            position = np.arange(min(positions[chunk, -1] + 1, capacity))
            at = table[rows[chunk], position // self.slots], position % self.slots
            cells[at] = rng.normal(size=(position.size, self.rank + self.rotary))
        result = {
            "q": q,
            "k": k,
            "v": v,
            "latents": cells[:, None, :, : self.rank],
            "keys": folded(jnp.asarray(cells[:, None, :, self.rank :], self.dtype), self.fold),
        }
        result = {name: jnp.asarray(x, self.dtype) for name, x in result.items()}
        if self.layers:
            for name in ("k", "v", "latents", "keys"):
                numbers = np.asarray(result[name])
                poison = [np.full_like(numbers, np.nan)] * (self.layers - 1)
                stack = [numbers, *poison] if name in "kv" else [*poison, numbers]
                result[name] = jnp.asarray(np.stack(stack))
            result |= {"layer": jnp.int32(self.layers - 1), "weight_layer": jnp.int32(0)}
        if self.columns:
            result["pages"] = jnp.asarray(table, jnp.int32)
        result["rows"] = jnp.asarray(np.where(np.array(self.starts) < 0, count, rows), jnp.int32)
        return result | {"positions": jnp.asarray(positions, jnp.int32)}

    def check(self, run: Callable) -> tuple[np.ndarray, np.ndarray]:
        """Hold `run` to the oracle; returns its output and LSE."""
        inputs = self.inputs()
        out, lse = jax.jit(lambda inputs: run(**inputs, scale=SCALE, limit=self.limit))(inputs)
        assert (out.dtype, lse.dtype) == (self.dtype, jnp.float32)
        assert out.shape == (*inputs["q"].shape[:3], self.value)
        self.hold(inputs, out, lse)
        return out, lse

    def hold(self, inputs: dict[str, Any], out: jax.Array, lse: jax.Array) -> None:
        """To the oracle."""
        hold_chunks(self.oracle(inputs), out, lse)

    def oracle(self, inputs: dict[str, Any]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Output and LSE of each chunk's queries up to the cache's end, in float64; absent chunks are not in it."""
        cached = {name: inputs[name] for name in ("q", "k", "v", "latents")} | {
            "keys": dense(inputs["keys"], self.fold)
        }
        cached = {name: np.asarray(x).astype(np.float64) for name, x in cached.items()}
        if self.layers:
            cached |= {name: cached[name][0 if name in "kv" else -1] for name in cached if name != "q"}
        q, k, v, latents, keys = cached.values()
        table = np.asarray(inputs.get("pages", np.arange(len(self.starts))[:, None]))
        capacity, result = min(table.shape[1] * self.slots, self.limit or 1 << 30), {}
        for chunk, start in enumerate(self.starts):
            if start < 0:
                continue
            positions = np.asarray(inputs["positions"][chunk])
            at, real = np.arange(min(positions[-1] + 1, capacity)), int(np.sum(positions < capacity))
            cells = table[int(inputs["rows"][chunk]), at // self.slots], 0, at % self.slots
            queries = np.moveaxis(q[chunk, :real], 1, 0)  # [H, C, n + r]
            local = latents[cells] @ np.swapaxes(k, 1, 2)  # [H, T, n]
            logits = queries[..., : self.nope] @ np.swapaxes(local, 1, 2) + queries[..., self.nope :] @ keys[cells].T
            logits = np.where(at <= positions[:real, None], logits * SCALE, -np.inf)
            top = np.maximum(logits.max(-1, initial=-np.inf), -1e30)
            p = np.exp(logits - top[..., None])
            total = p.sum(-1)
            with np.errstate(divide="ignore"):
                lse = np.log(total) + np.where(total > 0, top, 0)
            out = p / np.maximum(total, 1e-300)[..., None] @ (latents[cells] @ v)
            result[chunk] = np.moveaxis(out, 0, 1), lse.T
        return result
