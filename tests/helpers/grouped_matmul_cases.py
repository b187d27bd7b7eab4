"""Cases for every implementation of grouped products, and the float64 products they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from inferlib.ops.quantized import SCHEMES
from inferlib.pallas_kernels.grouped_matmul_tpu import Blocks
from tests.helpers.packed_experts import dequantized, packed, quantized

SMALL = Blocks(rows=64, columns=128, height=32, tail=16)
ONCE = Blocks(rows=96, columns=128, height=80, tail=16, buffers=3, once=True)


@dataclass(frozen=True)
class Case:
    """sizes of groups; rows of x, NaN beyond them. Weights of groups without rows and of other layers are NaN."""

    sizes: tuple[int, ...]
    rows: int
    blocks: Blocks | None = SMALL
    parts: int = 2
    inner: int = 24
    outer: int = 256
    dtype: str = "float32"
    scheme: str | None = None  # of weights in groups, of which those that are NaN have scales that are
    float4: bool = False

    def check(self, run, seed: int = 0, pack: bool = True) -> None:
        """Hold run(x, w, sizes, layer) -> [P, M, O], compiled, to the oracle. pack: weights in groups, as TPUs do."""
        rng, ends = np.random.default_rng((self.rows, seed)), np.cumsum(self.sizes)
        x = rng.normal(size=(self.rows, self.inner))
        w = np.full((3, len(self.sizes), self.parts, self.inner, self.outer), np.nan)
        x[ends[-1] :] = np.nan
        expected = np.zeros((self.parts, ends[-1], self.outer))
        x, tolerance = (np.asarray(jnp.asarray(x, self.dtype), float), 2e-5 if self.dtype == "float32" else 0.1)
        for group, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            if size:
                w[1, group] = jnp.asarray(rng.normal(size=w.shape[2:]), self.dtype)
                expected[:, end - size : end] = x[end - size : end] @ w[1, group]
        sizes, weights = jnp.asarray(self.sizes, jnp.int32), jnp.asarray(w, self.dtype)
        if self.scheme:
            cached = quantized(weights, (3,), SCHEMES[self.scheme])
            w = np.asarray(dequantized(cached, (3,)), float).reshape(w.shape)
            weights = packed(cached, self.scheme, float4=self.float4).of_experts(stacked=True) if pack else cached
            for group, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
                expected[:, end - size : end] = x[end - size : end] @ w[1, group] if size else 0
        got = run(jnp.asarray(x, self.dtype), weights, sizes, jnp.int32(1))
        assert got.shape == (self.parts, self.rows, self.outer)
        assert got.dtype == self.dtype
        np.testing.assert_allclose(
            np.asarray(got, float)[:, : ends[-1]],
            expected,
            rtol=0 if self.dtype == "float32" else 0.005,
            atol=tolerance,
        )
