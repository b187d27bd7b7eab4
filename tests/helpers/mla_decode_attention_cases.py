"""Cases for every implementation of decode attention over latents, and the float64 oracle they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.decode_attention_cases import TOLERANCE, dense, folded
from tests.helpers.latent_cases import LatentCase

SCALE = 0.07


@dataclass(frozen=True)
class Case(LatentCase):
    """lengths [B]; queries: C."""

    lengths: tuple[int, ...]
    heads: int = 4
    queries: int = 1

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of the operation; slots that no query sees hold NaN and infinities."""
        rng = np.random.default_rng(seed)
        rows = len(self.lengths)
        q = self.loudness * rng.normal(size=(rows, self.queries, self.heads, self.rank + self.rotary))
        table, cells = self.empty(rng, rows)
        cells = cells[:, None]
        for row, length in enumerate(self.lengths):
            position = np.arange(length)
            at = table[row, position // self.slots], 0, position % self.slots
            cells[at] = rng.normal(size=(length, self.rank + self.rotary))
        result = {
            "q": jnp.asarray(q[..., : self.rank], self.dtype),
            "rotary": jnp.asarray(q[..., self.rank :], self.dtype),
            "latents": jnp.asarray(cells[..., : self.rank], self.dtype),
            "keys": folded(jnp.asarray(cells[..., self.rank :], self.dtype), self.fold),
            "lengths": jnp.asarray(self.lengths, jnp.int32),
        }
        if self.layers:
            for name in ("latents", "keys"):
                cells = np.asarray(result[name])
                poison = [np.full_like(cells, np.nan)] * (self.layers - 1)
                result[name] = jnp.asarray(np.stack([*poison, cells]))
            result["layer"] = jnp.int32(self.layers - 1)
        if self.columns:
            result["pages"] = jnp.asarray(table, jnp.int32)
        return result

    def check(self, run: Callable) -> tuple[jax.Array, jax.Array]:
        """Hold `run` to the oracle; returns its output and LSE."""
        inputs = self.inputs()
        out, lse = jax.jit(lambda inputs: run(**inputs, scale=SCALE))(inputs)
        assert (out.dtype, lse.dtype) == (self.dtype, jnp.float32)
        self.hold(inputs, out, lse)
        return out, lse

    def hold(self, inputs: dict[str, Any], out: jax.Array, lse: jax.Array) -> None:
        """To the oracle."""
        tolerance = TOLERANCE[jnp.dtype(self.dtype).name]
        for result, want in zip((out, lse), self.oracle(inputs), strict=True):
            np.testing.assert_allclose(np.asarray(result).astype(np.float32), want, rtol=tolerance, atol=tolerance)

    def oracle(self, inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Query by query in float64."""
        q, rotary, latents, keys = (
            np.asarray(x).astype(np.float64)
            for x in (
                inputs["q"],
                inputs["rotary"],
                inputs["latents"],
                dense(inputs["keys"], self.fold),
            )
        )
        q = np.concatenate([q, rotary], axis=-1)
        latents, keys = (x[-1, :, 0] if self.layers else x[:, 0] for x in (latents, keys))
        table = np.asarray(inputs.get("pages", np.arange(len(self.lengths))[:, None]))
        out, lse = np.zeros((*q.shape[:3], self.rank)), np.full(q.shape[:3], -np.inf)
        for row, length in enumerate(self.lengths):
            for query in range(self.queries) if length else ():
                position = np.arange(max(length - self.queries + query + 1, 0))
                at = table[row, position // self.slots], position % self.slots
                if position.size:
                    logits = q[row, query] @ np.concatenate([latents[at], keys[at]], axis=-1).T * SCALE
                    top = logits.max(-1, keepdims=True)
                    p = np.exp(logits - top)
                    out[row, query] = p @ latents[at] / p.sum(-1, keepdims=True)
                    lse[row, query] = np.log(p.sum(-1)) + top[:, 0]
        return out, lse
