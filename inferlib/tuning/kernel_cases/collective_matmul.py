"""Products of a layer with their collective, tokens split over up to eight devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from inferlib.pallas_kernels import collective_matmul_tpu


@dataclass(frozen=True)
class CollectiveMatmul:
    """A product with its collective. tokens: of all devices. weights: shape [P, K, N] on a device. scatters: a
    reduce-scatter follows the product; else an all-gather precedes it. The floor counts weights, rows and result of a
    device once."""

    tokens: int
    inner: int
    outer: int
    parts: int = 1
    scatters: bool = False
    devices: int = 8
    axis: str = "x"

    @staticmethod
    def of(rows, parts, inner, outer, itemsize, scatters, devices) -> dict[str, CollectiveMatmul]:
        """The case with these arguments of `blocks`, on eight devices if there are that many."""
        if itemsize != 2:
            raise ValueError("there are cases of bfloat16")
        ring = min(devices, CollectiveMatmul.devices)
        return {f"ring of {ring}": CollectiveMatmul(rows * ring, inner, outer, parts, scatters, ring)}

    @property
    def kernel(self) -> str:
        return "matmul_reduce_scatter" if self.scatters else "all_gather_matmul"

    @property
    def floor_bytes(self) -> int:
        shared, whole = (self.outer, self.inner) if self.scatters else (self.inner, self.parts * self.outer)
        weights = self.parts * self.inner * self.outer
        return 2 * (weights + self.tokens * whole + self.tokens // self.devices * shared)

    @property
    def floor_flops(self) -> int:
        return 2 * self.tokens * self.parts * self.inner * self.outer

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends to its two neighbours."""
        travels = self.outer if self.scatters else self.inner
        return 2 * self.tokens // self.devices * (self.devices - 1) * travels

    def function(self) -> Callable:
        """The function of a device's parts of the arguments."""
        return partial(getattr(collective_matmul_tpu, self.kernel), axis=self.axis, layer=1)

    def on(self, mesh: Mesh | AbstractMesh) -> Callable:
        """The function of whole arguments, by name, on a mesh."""
        specs, out = self.specs()
        part = self.function()
        run = jax.shard_map(part, mesh=mesh, in_specs=tuple(specs.values()), out_specs=out, check_vma=False)
        return lambda **values: run(*(values[key] for key in specs))

    def arguments(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the whole arguments."""
        n = self.devices
        if self.scatters:
            shapes = {"x": (self.tokens, n * self.inner), "w": (2, n * self.inner, self.outer)}
        else:
            shapes = {"x": (self.tokens, self.inner), "w": (2, self.parts, self.inner, n * self.outer)}
        return {name: (shape, "bfloat16") for name, shape in shapes.items()}

    def specs(self) -> tuple[dict[str, P], P]:
        """The partition of the arguments and of the result."""
        if self.scatters:
            return {"x": P(None, "x"), "w": P(None, "x")}, P("x")
        return {"x": P("x"), "w": P(None, None, None, "x")}, P(None, None, "x")

    def scalars(self) -> dict[int, np.ndarray]:
        places = np.arange(self.devices)
        return {0: np.ones(1, int), 1: np.stack([-places % self.devices, places])}


def layer(tokens: int, width: int, heads: int, hidden: int) -> dict[str, CollectiveMatmul]:
    """The four products of a layer. heads: number of heads of size 128 on a device: queries, keys and values."""
    queries = (heads - 2) * 128
    return {
        f"qkv, {tokens}": CollectiveMatmul(tokens, width, 128, heads),
        f"o, {tokens}": CollectiveMatmul(tokens, queries, width, scatters=True),
        f"gate and up, {tokens}": CollectiveMatmul(tokens, width, hidden, 2),
        f"down, {tokens}": CollectiveMatmul(tokens, hidden, width, scatters=True),
    }


CASES = {
    **{f"8b {name}": case for tokens in (1024, 2048) for name, case in layer(tokens, 4096, 6, 1792).items()},
    **{f"70b {name}": case for name, case in layer(4096, 8192, 10, 3584).items()},
}
