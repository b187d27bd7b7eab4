"""Kernels that programs share are lowered once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from inferlib.pallas_kernels.lowered_once import call_lowered

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
traced: list[tuple[int, ...]] = []


def doubled(times: int, pair: dict[str, jax.Array]) -> jax.Array:
    traced.append(pair["x"].shape)
    return pair["x"] * 2**times


def program(times: int, add: float):
    """A program that has the function, and something of its own."""
    return jax.jit(lambda x: call_lowered(doubled, (times,), {"x": x}) + add)


def lowered(function, *shapes) -> str:
    return function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_share_what_was_lowered():
    traced.clear()
    first, second = (lowered(program(1, add), X) for add in (1, 2))
    assert len(traced) == 1
    assert all("stablehlo.multiply" in text for text in (first, second))
    lowered(program(2, 1), X)
    lowered(program(1, 1), jax.ShapeDtypeStruct((2, 8), jnp.float32))
    assert traced == [(4, 8), (4, 8), (2, 8)]


def test_it_may_be_within_a_part_of_a_mesh():
    """It is lowered for one device, whatever mesh the program that has it runs on."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    spec = PartitionSpec("tp")
    run = jax.shard_map(program(3, 1), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert "stablehlo.multiply" in lowered(jax.jit(run), X)


def test_an_error_of_the_trace_reaches_the_caller():
    def wrong(x):
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        call_lowered(wrong, (), jnp.zeros(3))
