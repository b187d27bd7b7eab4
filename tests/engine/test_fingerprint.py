"""Weights are told apart by a checksum that is taken where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inferlib.engine.fingerprint import checksum
from inferlib.sharding import axes
from inferlib.sharding.mesh import Parallelism
from inferlib.sharding.shards import Shards, make_shards

NAMES = (axes.EMBED, axes.MLP)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "uint32"])
@pytest.mark.parametrize("parallel", [None, "tp=2"])
def test_every_number_counts_by_its_place(dtype, parallel):
    shards = Shards() if parallel is None else make_shards(Parallelism.read(parallel))
    sums = jax.jit(checksum, static_argnums=(0, 1))
    base = np.arange(24).reshape(4, 6).astype(jnp.dtype(dtype))

    def of(x: np.ndarray) -> bytes:
        return np.asarray(sums(shards, NAMES, jax.device_put(x, shards.sharding(NAMES)))).tobytes()

    changed, swapped, negative = base.copy(), base.copy(), base.copy()
    changed[3, 5] = 1
    swapped[0, 0], swapped[2, 4] = base[2, 4], base[0, 0]
    negative[0, 0] = np.asarray(-0.0).astype(base.dtype) if "float" in dtype else 99
    assert of(base) == of(base.copy())
    assert len({of(x) for x in (base, changed, swapped, negative, base[::-1].copy(), base * 0)}) == 6
